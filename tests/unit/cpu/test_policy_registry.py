"""Policies by name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from kv_core.contract import ReqContext, ScheduleEndContext
from kv_core.cpu import CPUOffloadingManager
from kv_core.cpu.policies import (
    ARCCachePolicy,
    LRUCachePolicy,
    create_policy,
    installed_policies,
)
from kv_core.errors import BrokenPluginError, ConfigError, EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kv_core.contract import OffloadKey

GOOD_MODULE = """
from kv_core.cpu.policies import LRUCachePolicy

class NotAPolicy:
    pass

class Exits(LRUCachePolicy):
    def __init__(self, num_blocks, ref_counts):
        raise SystemExit("no licence")

class EvictsAnything(LRUCachePolicy):
    def evict(self, count, protected):
        return [self._blocks.popitem(last=False) for _ in range(count)]

class EvictsTooLittle(LRUCachePolicy):
    def evict(self, count, protected):
        return super().evict(count, protected)[1:]

Recent = LRUCachePolicy
"""


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, dict[str, str]], None]:
    """Return a function that installs a distribution with cache policies."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "acme_policies.py").write_text(GOOD_MODULE)
    monkeypatch.delitem(sys.modules, "acme_policies", raising=False)

    def run(distribution: str, policies: dict[str, str]) -> None:
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        lines = [f"{name} = {value}" for name, value in policies.items()]
        (info / "entry_points.txt").write_text("\n".join(["[kv_core.cache_policies]", *lines, ""]))

    return run


@pytest.mark.parametrize(("name", "expected"), [("lru", LRUCachePolicy), ("arc", ARCCachePolicy)])
def test_lru_and_arc_are_built_in(name: str, expected: type) -> None:
    """The two policies need no plugin."""
    assert type(create_policy(name, 4, [0] * 4)) is expected


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The error says what was found, what is known, and which setting is meant."""
    with pytest.raises(ConfigError, match=r"'fifo'; known are arc, lru") as caught:
        create_policy("fifo", 4, [0] * 4)
    assert caught.value.setting == "eviction_policy"


def test_an_installed_policy_is_found(install: Callable[[str, dict[str, str]], None]) -> None:
    """A package adds a policy by an entry point."""
    install("acme", {"acme_recent": "acme_policies:Recent"})
    assert installed_policies() == ("acme_recent", "arc", "lru")
    assert len(create_policy("acme_recent", 4, [0] * 4)) == 0


def test_a_broken_plugin_hides_no_other(install: Callable[[str, dict[str, str]], None]) -> None:
    """Only the policy that is asked for is loaded, and a broken one names its package."""
    install("broken", {"bad": "no_such_module:Policy"})
    install("acme", {"good": "acme_policies:Recent"})
    assert isinstance(create_policy("good", 4, [0] * 4), LRUCachePolicy)
    with pytest.raises(BrokenPluginError, match=r"'bad' of broken 1\.0") as caught:
        create_policy("bad", 4, [0] * 4)
    assert (caught.value.plugin, caught.value.distribution) == ("bad", "broken 1.0")


def test_a_class_that_is_no_policy_is_refused(
    install: Callable[[str, dict[str, str]], None],
) -> None:
    """What an entry point names is checked."""
    install("acme", {"odd": "acme_policies:NotAPolicy"})
    with pytest.raises(BrokenPluginError, match="not a subclass"):
        create_policy("odd", 4, [0] * 4)


def test_a_policy_that_cannot_be_made_is_broken(
    install: Callable[[str, dict[str, str]], None],
) -> None:
    """Whatever a constructor of foreign code raises, the package is named."""
    install("acme", {"exits": "acme_policies:Exits"})
    with pytest.raises(BrokenPluginError, match=r"acme 1\.0.*SystemExit: no licence"):
        create_policy("exits", 4, [0] * 4)


@pytest.mark.parametrize("policy", ["EvictsAnything", "EvictsTooLittle"])
def test_a_policy_cannot_give_a_slot_away_that_is_in_use(
    install: Callable[[str, dict[str, str]], None],
    policy: str,
    keys: list[OffloadKey],
    store: Callable[[CPUOffloadingManager, Sequence[OffloadKey], str], list[int]],
) -> None:
    """Wrong victims of an installed policy are an error, never two owners of one slot."""
    install("acme", {"odd": f"acme_policies:{policy}"})
    manager = CPUOffloadingManager(2, "odd")
    store(manager, keys[:2], "a")
    manager.prepare_load(keys[1:2], ReqContext("a"))
    manager.on_schedule_end(ScheduleEndContext())
    with pytest.raises(EngineStateError, match="eviction policy 'odd'"):
        manager.prepare_store(keys[2:3], ReqContext("b"))


def test_a_contested_name_is_refused(install: Callable[[str, dict[str, str]], None]) -> None:
    """Two packages that claim one name are both named."""
    install("one", {"same": "acme_policies:Recent"})
    install("two", {"same": "acme_policies:NotAPolicy"})
    with pytest.raises(ConfigError, match=r"acme_policies:NotAPolicy, acme_policies:Recent"):
        create_policy("same", 4, [0] * 4)


def test_a_plugin_cannot_replace_a_built_in(
    install: Callable[[str, dict[str, str]], None],
) -> None:
    """``lru`` always means the built-in policy."""
    install("acme", {"lru": "acme_policies:NotAPolicy"})
    assert isinstance(create_policy("lru", 4, [0] * 4), LRUCachePolicy)


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_the_getter_answers_as_the_policy_does(name: str, keys: list[OffloadKey]) -> None:
    """The function handed out once stays right while keys come and go."""
    policy = create_policy(name, 4, [0] * 4)
    slot_of = policy.getter()
    policy.insert(keys[0], 0)
    policy.insert(keys[1], 1)
    policy.touch(keys[:1])
    policy.evict(1, ())
    policy.remove(keys[0])
    policy.insert(keys[2], 0)
    assert [slot_of(key) for key in keys[:3]] == [policy.get(key) for key in keys[:3]]
    assert [slot_of(key) for key in keys[:3]] == [None, None, 0]
