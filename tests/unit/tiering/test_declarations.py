"""What a tier declares, and what the engine does about it: one declaration after the other.

``error_backoff_s``, ``visibility_delay_s`` and ``min_retained_blocks`` are not here: they say how
a tier behaves, and the engine has nothing to add.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_core.connector._memory import require_memory, staging_bytes
from kv_core.contract import (
    Capability,
    ContractVersion,
    NullMetrics,
    PrimaryView,
    TierConfig,
    TierContext,
    TierLimits,
    TierSpec,
)
from kv_core.errors import ConfigError, HashSeedError, InsufficientSpaceError, TierOpenError
from kv_core.plugins import check_tier, open_tier
from kv_core.tierkit.testing import example_namespace
from kv_tier_example.hostile import kv_core_register_tier as hostile_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine

    from kv_core.contract import OffloadKey, SecondaryTierManager
    from kv_core.plugins import OpenTier

BLOCK_BYTES: Final = 4096
SHAPE: Final = (2, BLOCK_BYTES)
PATIENCE_S: Final = 20.0


def declare(*capabilities: Capability, factory: Any = None, **limits: Any) -> TierSpec:
    """Declare a tier that may be stored to, with these capabilities and limits."""
    values = {"job_deadline_s": 1.0, "lookup_deadline_s": 1.0, "min_free_bytes": 1, **limits}
    return TierSpec(
        type="acme",
        summary="a tier of the tests",
        contract=ContractVersion(1, 0),
        factory=hostile_spec().factory if factory is None else factory,
        config_model=hostile_spec().config_model,
        limits=lambda _: TierLimits(**values),
        capabilities=frozenset(capabilities),
    )


def make_view() -> PrimaryView:
    """Return two slots of plain memory."""
    return PrimaryView(memoryview(bytearray(2 * BLOCK_BYTES)).cast("B", SHAPE), BLOCK_BYTES)


def start_with(
    spec: TierSpec, *, hash_seed: str | None = "0", read_only: bool = False, **options: Any
) -> OpenTier:
    """Open a tier as an engine does at its start, and close it again."""
    tier = open_tier(
        spec,
        name="disk",
        settings={},
        namespace=example_namespace(BLOCK_BYTES, hash_seed=hash_seed),
        primary=options.pop("primary", None) or make_view(),
        clock=lambda: 1000.0,
        metrics=NullMetrics(),
        read_only=read_only,
    )
    tier.manager.shutdown()
    return tier


# -- limits of jobs and blocks ------------------------------------------------------------------


def test_max_job_keys_is_where_jobs_are_split(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """No store and no load has more keys; with ``None`` there is one job."""
    for most, lengths in ((2, [2, 2, 1]), (None, [5])):
        engine = start(num_blocks=16, max_job_keys=most)
        engine.store("a", *keys[:5])
        assert [len(job.keys) for job in engine.tier.stores] == lengths
        engine.tier.has(*keys[5:10])
        engine.ask("b", *keys[5:10])
        engine.end_step()
        assert [len(job.keys) for job in engine.tier.loads] == lengths


def test_max_block_bytes_is_checked_at_the_start() -> None:
    """A block that is one byte too large is refused before anything is opened."""
    with pytest.raises(ConfigError, match="at most 4095 bytes, but a block has 4096") as caught:
        start_with(declare(max_block_bytes=BLOCK_BYTES - 1))
    assert caught.value.setting == "blocks_per_chunk"
    assert start_with(declare(max_block_bytes=BLOCK_BYTES)).limits.max_block_bytes == BLOCK_BYTES


# -- deadlines ----------------------------------------------------------------------------------


def test_lookup_deadline_s_ends_in_a_miss(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """What is unknown for longer is absent for that request, and an error of the tier."""
    engine = start(lookup_deadline_s=2.0)
    engine.tier.answers[keys[0]] = None
    assert engine.ask("a", keys[0]) == ["retry"]
    engine.clock.advance(2.0)
    assert engine.ask("a", keys[0]) == ["retry"]
    engine.clock.advance(0.001)
    assert engine.ask("a", keys[0]) == ["miss"]
    outcomes = ("engine_queries", "engine_hits", "engine_misses", "engine_errors")
    assert [engine.tier_stat(name) for name in outcomes] == [1, 0, 0, 1]


def test_job_deadline_s_is_how_long_a_drain_may_take(
    start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A tier that does not come back from it by then, and a grace, is left alone."""
    engine = start(job_deadline_s=0.02, quarantine_grace_s=0.01)
    engine.store("a", *keys[:1])
    engine.tier.drain_gate = threading.Event()
    engine.manager.reset_cache()
    assert engine.health() == "detached"
    assert "drain_jobs did not return within 0.03 s" in engine.manager.tier_health()["tier0"][1]
    engine.tier.drain_gate.set()


class SlowTier:
    """Makes a tier, when its gate opens.

    Attributes:
        gate: What the constructor waits for.
        closed: Set by the shutdown of what was made.
        error: What the constructor raises in the end, if anything.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.gate = threading.Event()
        self.closed = threading.Event()
        self.error = error

    def __call__(self, context: TierContext) -> SecondaryTierManager:
        """Make the tier."""
        assert self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        tier: SecondaryTierManager = hostile_spec().factory(context)
        shut_down = tier.shutdown

        def shutdown() -> Any:
            stuck = shut_down()
            self.closed.set()
            return stuck

        tier.shutdown = shutdown  # type: ignore[method-assign]  # to hear of it
        return tier


def opening_threads() -> list[threading.Thread]:
    """Return the threads in which constructors run."""
    return [thread for thread in threading.enumerate() if thread.name == "kv-open-disk"]


def test_open_deadline_s_ends_a_constructor_that_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The start fails with the reason; what is made after all is closed at once."""
    slow = SlowTier()
    with pytest.raises(TierOpenError, match=r"'disk' of type 'acme' was not open after 0\.01 s"):
        start_with(declare(factory=slow, open_deadline_s=0.01))
    assert not slow.closed.is_set()
    (thread,) = opening_threads()
    slow.gate.set()
    assert slow.closed.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert opening_threads() == []
    assert "tier 'disk' has opened after its deadline; it is closed again" in caplog.text


def test_open_deadline_s_leaves_the_memory_to_a_constructor_that_hangs() -> None:
    """It may still touch the slots, so nothing is unmapped under it."""
    slow = SlowTier(RuntimeError("after all, no"))
    memory = bytearray(2 * BLOCK_BYTES)
    primary = PrimaryView(memoryview(memory).cast("B", SHAPE), BLOCK_BYTES)
    with pytest.raises(TierOpenError):
        start_with(declare(factory=slow, open_deadline_s=0.01), primary=primary)
    primary.release()
    with pytest.raises(BufferError):
        memory.clear()
    (thread,) = opening_threads()
    slow.gate.set()
    thread.join(PATIENCE_S)
    memory.clear()
    assert opening_threads() == []


def test_an_interrupt_ends_the_wait_for_a_constructor() -> None:
    """Whoever starts the engine need not wait for the deadline; nothing stays open."""
    slow = SlowTier()

    def interrupt_and_wait(context: TierContext) -> SecondaryTierManager:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        return slow(context)

    with pytest.raises(KeyboardInterrupt):
        start_with(declare(factory=interrupt_and_wait, open_deadline_s=PATIENCE_S))
    (thread,) = opening_threads()
    slow.gate.set()
    assert slow.closed.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert opening_threads() == []


def test_open_deadline_s_is_no_price_for_others() -> None:
    """A constructor that comes back in time leaves no thread behind, whatever it does."""
    slow = SlowTier()
    slow.gate.set()
    assert start_with(declare(factory=slow, open_deadline_s=1e300)).name == "disk"
    slow.error = OSError(5, "Input/output error")
    with pytest.raises(TierOpenError, match="Input/output error"):
        start_with(declare(factory=slow, open_deadline_s=1e300))
    assert opening_threads() == []


# -- memory and space ---------------------------------------------------------------------------


def test_staging_bytes_are_part_of_the_memory_budget() -> None:
    """Region and staging of all tiers together must fit; the numbers are named."""
    tiers = [
        check_tier(declare(staging_bytes=size), name=name, settings={})
        for name, size in (("a", 3000), ("b", 0), ("c", 500))
    ]
    assert staging_bytes(tiers) == 3500
    require_memory(4096, tiers, limit_bytes=7596)
    with pytest.raises(InsufficientSpaceError) as caught:
        require_memory(4096, tiers, limit_bytes=7595)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (7596, 7595)
    for part in ("4096 bytes (4 KiB) for the primary", "3000 bytes", "tier 'c'", "7595 bytes"):
        assert part in caught.value.message
    assert "tier 'b'" not in caught.value.message


def test_min_free_bytes_is_demanded_of_tiers_without_a_capacity() -> None:
    """Neither a floor nor ``BOUNDED`` is refused; one of them is enough."""
    with pytest.raises(ConfigError, match=r"^tier 'disk' has no limit of capacity") as caught:
        start_with(declare(min_free_bytes=0))
    assert caught.value.setting == "disk.min_free_bytes"
    assert "Use a tier that declares one of the two" in caught.value.message
    assert start_with(declare(min_free_bytes=1)).name == "disk"
    assert start_with(declare(Capability.BOUNDED, min_free_bytes=0)).name == "disk"


def test_min_free_bytes_is_a_setting_where_the_tier_has_one() -> None:
    """Then the message says to set it."""

    class FlooredConfig(TierConfig):
        min_free_bytes: int = 0

    spec = replace(declare(min_free_bytes=0), config_model=FlooredConfig)
    with pytest.raises(ConfigError, match="Set its 'min_free_bytes' to the bytes that must stay"):
        start_with(spec)


def test_min_free_bytes_is_not_needed_where_nothing_is_stored() -> None:
    """A tier that is only read cannot fill its storage."""
    assert start_with(declare(min_free_bytes=0), read_only=True).name == "disk"


# -- capabilities -------------------------------------------------------------------------------


def live(engine: Engine, keys: list[OffloadKey]) -> None:
    """Take an engine through everything that it does with a tier."""
    engine.begin("a")
    engine.store("a", *keys[:2])
    engine.tier.finish_all()
    engine.promote("b", keys[5])
    engine.manager.touch(keys[:2], engine.tier.loads[0].req_context)
    engine.manager.take_events()
    assert engine.stats["hits.cpu"] == 0
    engine.finish("a")
    engine.manager.reset_cache()
    engine.manager.on_reset_flushed()
    engine.manager.reset(1)
    engine.manager.shutdown()


@pytest.mark.parametrize("capabilities", [(), tuple(Capability)])
def test_delete_and_usage_are_never_called(
    capabilities: tuple[Capability, ...], start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Undeclared they raise ``UnsupportedError``, and the engine has no need of them at all."""
    engine = start(capabilities=capabilities)
    live(engine, keys)
    assert "tier0.shutdown" in engine.log
    assert {"tier0.delete", "tier0.usage"}.isdisjoint(engine.log)


@pytest.mark.parametrize(
    ("capability", "call"),
    [(Capability.TOUCH, "tier0.touch"), (Capability.EVENTS, "tier0.take_events")],
)
def test_touch_and_events_are_called_where_declared(
    capability: Capability, call: str, start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """The method behind an undeclared capability may raise, which would look like a failure."""
    declared = start(capabilities=[capability])
    live(declared, keys)
    assert declared.log.count(call) == 1
    undeclared = start(capabilities=set(Capability) - {capability})
    live(undeclared, keys)
    assert call not in undeclared.log


def test_persistent_demands_a_reproducible_hash_seed() -> None:
    """Blocks that no other process could find are not kept; other tiers do not care."""
    with pytest.raises(HashSeedError, match=r"tier 'disk' keeps .*PYTHONHASHSEED"):
        start_with(declare(Capability.PERSISTENT), hash_seed=None)
    assert start_with(declare(Capability.PERSISTENT), hash_seed="0").name == "disk"
    assert start_with(declare(), hash_seed=None).name == "disk"
