"""Starts and ends of our engine under vLLM's connector."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm_env.engine_mode.conftest import ROW_BYTES

from kv_core.errors import ConfigError, KVCoreError, RegionError, UnknownTierError
from kv_core.vllm import _spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_env.conftest import Script
    from tests.vllm_env.engine_mode.conftest import Engine

    from kv_core.contract import OffloadKey


SCRIPTED: dict[str, Any] = {"secondary_tiers": [{"type": "scripted"}]}


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"cpu_bytes_to_use": None}, ConfigError, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": "much"}, ConfigError, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 5000}, ConfigError, "cpu_bytes_to_use"),
        ({"evict": "lru"}, ConfigError, "evict"),
        ({"eviction_policy": "fifo"}, ConfigError, "eviction_policy"),
        ({"canonical_layout": True}, ConfigError, "canonical_layout"),
        ({"blocks_per_chunk": 3}, ConfigError, "blocks_per_chunk"),
        ({"secondary_tiers": {"type": "fs"}}, ConfigError, "secondary_tiers"),
        ({"secondary_tiers": [{"type": "nosuch"}]}, UnknownTierError, "nosuch"),
        ({"secondary_tiers": [{"type": "fs"}]}, ConfigError, "root_dir"),
        ({"engine_reset": "all"}, ConfigError, "engine_reset"),
    ],
)
def test_a_wrong_setting_ends_the_start_and_is_named(
    start: Callable[..., Engine], settings: dict[str, Any], error: type[KVCoreError], named: str
) -> None:
    """In the first process that looks at it, before memory is taken."""
    with pytest.raises(error, match=named):
        start(**settings)


def test_settings_of_the_connector_are_not_ours(start: Callable[..., Engine]) -> None:
    """They stand beside ours in one mapping, and are read by vLLM or for the namespace."""
    start(self_describing_kv_events=True, model_id="tests", canonical_layout=False)


def test_the_size_may_come_from_an_option_of_vllm(start: Callable[..., Engine]) -> None:
    """``--kv-offloading-size`` puts a number with a fraction there."""
    start(cpu_bytes_to_use=8 * ROW_BYTES + 0.5)


def test_a_worker_that_is_missing_is_named(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler does not start without it, and leaves nothing behind."""
    monkeypatch.setattr(_spec, "_WORKER_DEADLINE_S", 0.2)
    original = _spec.KVCoreOffloadingSpec.get_worker

    def only_first(self: Any, kv_caches: Any) -> Any:
        if self.config.parallel.rank == 0:
            return original(self, kv_caches)
        return SimpleNamespace(shutdown=lambda: None)

    monkeypatch.setattr(_spec.KVCoreOffloadingSpec, "get_worker", only_first)
    with pytest.raises(RegionError, match="of 2 workers, 1 have not attached"):
        start(ranks=2)


def test_a_worker_can_be_shut_down_before_there_is_a_scheduler(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose start fails ends its workers, whose thread still waits."""
    made: list[Any] = []
    original = _spec.KVCoreOffloadingSpec.get_worker

    def remember(self: Any, kv_caches: Any) -> Any:
        made.append(original(self, kv_caches))
        return made[-1]

    monkeypatch.setattr(_spec.KVCoreOffloadingSpec, "get_worker", remember)

    def fail(self: Any) -> Any:
        raise OSError("no scheduler")

    monkeypatch.setattr(_spec.KVCoreOffloadingSpec, "get_manager", fail)
    with pytest.raises(OSError, match="no scheduler"):
        start()
    made[0].shutdown()
    made[0].shutdown()


def test_the_name_is_gone_once_everyone_has_attached(start: Callable[..., Engine]) -> None:
    """Whatever kills the engine after its start, nothing is left of it."""
    engine = start()
    assert list(Path(engine.config.extra_config["shm_dir"]).iterdir()) == []


def test_what_a_killed_start_left_is_removed(start: Callable[..., Engine], tmp_path: Path) -> None:
    """Between the creation and the last attachment the region has a name that nobody comes for."""
    shm_dir = tmp_path / "shm"
    left = shm_dir / "kv_core_vllm-some-older-id_0123456789ab"
    left.write_bytes(bytes(4096))
    start()
    assert not left.exists()


def test_shutdown_hands_stores_to_the_tiers(
    scripts: list[Script], start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """What was confirmed in CPU memory is flushed, and everything is closed; once is enough."""
    engine = start(**SCRIPTED)
    engine.store("a", *keys[:2])
    engine.close()
    engine.close()
    assert scripts[0].is_shut_down
    assert scripts[0].jobs == {}
