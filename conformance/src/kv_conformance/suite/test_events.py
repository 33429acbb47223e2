"""EVT: what a tier tells of its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_conformance.harness import Corruption, Fault
from kv_conformance.rig import Broken, expect
from kv_conformance.run._case import case
from kv_core.contract import Capability, OffloadingEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import OffloadKey

_CAPACITY: Final = 12
_RETAINED: Final = 4
_BURST: Final = 120
# Events and removals may follow a little after a report.
_SOON_S: Final = 1.0


class _Replay:
    """Applies the events of a tier to the listing at its opening.

    Attributes:
        stored: Keys of every "stored" so far.
        removed: Keys of every "removed" so far.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._first = rig.list_keys()
        self._now = set(self._first)
        self.stored: set[OffloadKey] = set()
        self.removed: set[OffloadKey] = set()

    def read(self) -> frozenset[OffloadKey]:
        """Take the events and return what should be there now.

        Raises:
            Broken: Something that is no event, or removed before it was ever stored (EVT-2).
        """
        for event in self._events():
            for key in event.keys:
                if event.removed:
                    expect(
                        key in self.stored or key in self._first,
                        "a key was removed by an event before any event had stored it",
                        clause="EVT-2",
                    )
                    self.removed.add(key)
                    self._now.discard(key)
                else:
                    self.stored.add(key)
                    self._now.add(key)
        return frozenset(self._now)

    def _events(self) -> Iterator[OffloadingEvent]:
        name = self._rig.subject_type.spec.type
        for event in self._rig.call("take_events"):
            if not isinstance(event, OffloadingEvent):
                raise Broken(f"take_events returned {event!r}", clause="EVT-1")
            expect(
                event.medium == name,
                f"an event has the medium {event.medium!r}, expected the tier's name {name!r}",
                clause="EVT-1",
            )
            yield event

    def expect_equal(self, when: str, ignored: frozenset[OffloadKey] = frozenset()) -> None:
        """Wait until replay and listing are equal: a removal may take its time."""
        rig = self._rig

        def equal() -> bool:
            rig.step()
            return self.read() - ignored == rig.list_keys() - ignored

        rig.budget.until(
            equal,
            f"{when}, the replay of the events did not equal the listing",
            min(_SOON_S, rig.limits.job_deadline_s),
            clause="EVT-1",
            grace_s=2.0,
        )


def _open(rigs: Rigs, storage: str | None = None, *, faults: bool = False) -> Rig:
    return rigs.open(
        storage=storage,
        capacity_blocks=_CAPACITY,
        retention_blocks=_RETAINED,
        faults=faults,
        num_blocks=64,
    )


@case("EVT-1")
def test_the_replay_of_events_equals_the_listing(rigs: Rigs) -> None:
    """After stores, stores of what is there, evictions, deletions, and a second opening."""
    rig = _open(rigs)
    replay = _Replay(rig)
    keys = rigs.keys(_CAPACITY // 2)
    rig.stored(keys)
    replay.expect_equal("after stores")
    rig.stored(keys)
    replay.expect_equal("after stores of what was there")
    rig.stored(rigs.keys(3 * _CAPACITY))
    replay.expect_equal("after more stores than a small capacity has room for")
    if Capability.DELETE in rig.subject_type.spec.capabilities:
        rig.call("delete", sorted(rig.list_keys())[:3])
        replay.expect_equal("after deletions")
    rig.close()
    rig = _open(rigs, rig.opening.storage)
    replay = _Replay(rig)
    rig.stored(rigs.keys(2 * _CAPACITY))
    replay.expect_equal("after a second opening and more stores")


@case("EVT-1")
def test_a_burst_of_events_is_told_in_full(rigs: Rigs) -> None:
    """However much happens between two polls."""
    rig = _open(rigs)
    replay = _Replay(rig)
    rig.stored(rigs.keys(_BURST))
    replay.expect_equal(f"after {_BURST} stores without a poll for events")


@case("EVT-1")
def test_objects_that_are_retired_leave_by_an_event(rigs: Rigs) -> None:
    """A damaged object that the tier removes; what was lost without the tier is not its event."""
    rig = _open(rigs)
    replay = _Replay(rig)
    lost, damaged, good = rigs.keys(3)
    rig.stored([lost, damaged, good])
    replay.expect_equal("after stores")
    rig.lose(lost)
    rig.corrupt(damaged, Corruption.TRUNCATED)
    rig.load([lost])
    rig.load([damaged])
    replay.expect_equal("after a damaged object was found", frozenset({lost}))
    rig.stored([lost, damaged])
    replay.expect_equal("after both were stored again")


@case("EVT-1")
def test_the_replay_equals_the_listing_when_an_outage_cuts_jobs_short(rigs: Rigs) -> None:
    """Blocks that had reached the storage before their job failed are there, and told."""
    rig = _open(rigs, faults=True)
    replay = _Replay(rig)
    count = min(4, rig.job_keys)
    jobs = [rig.submit_store(rigs.keys(count)) for _ in range(4)]
    rig.inject(Fault.ERROR)
    rig.wait_all(jobs)
    rig.heal()
    replay.expect_equal("after an outage that began in the middle of stores")


@case("EVT-2")
def test_failures_emit_nothing(rigs: Rigs) -> None:
    """Neither stores and loads in an outage, nor loads of what is not there."""
    rig = _open(rigs, faults=True)
    replay = _Replay(rig)
    keys = rigs.keys(3)
    rig.stored(keys)
    replay.read()
    rig.inject(Fault.ERROR)
    lost_in_outage = rigs.keys(4)
    stores = [rig.submit_store([key]) for key in lost_in_outage]
    loads = [rig.submit_load([key]) for key in keys]
    rig.wait_all([*stores, *loads])
    expect(
        not any(rig.results[job_id].success for job_id in [*stores, *loads]),
        "a job succeeded while the storage failed",
        clause="DATA-11",
    )
    replay.read()
    rig.heal()
    rig.load(rigs.keys(1))
    rig.step()
    replay.read()
    told = replay.stored & set(lost_in_outage)
    expect(not told, f"{len(told)} failed store(s) emitted a stored event")
    told = replay.removed & set(keys) & rig.list_keys()
    expect(not told, f"{len(told)} load(s) that failed in an outage emitted a removed event")


@case("EVT-2")
def test_stored_precedes_removed(rigs: Rigs) -> None:
    """Key by key, while blocks are stored, removed and stored again without a pause."""
    rig = _open(rigs)
    replay = _Replay(rig)
    keys = rigs.keys(2 * _CAPACITY)
    deletes = Capability.DELETE in rig.subject_type.spec.capabilities
    for round_number in range(4):
        jobs = [rig.submit_store([key]) for key in keys]
        rig.wait_all(jobs)
        replay.read()
        if deletes:
            rig.call("delete", keys[round_number::4])
            replay.read()
    replay.expect_equal("after blocks had come and gone")


@case("EVT-2")
def test_removing_what_is_not_there_emits_nothing(rigs: Rigs) -> None:
    """Deletions of unknown keys, and loads of them."""
    rig = _open(rigs)
    replay = _Replay(rig)
    unknown = rigs.keys(4)
    if Capability.DELETE in rig.subject_type.spec.capabilities:
        rig.call("delete", unknown[:2])
    for key in unknown:
        rig.load([key])
    rig.stored(rigs.keys(1))
    replay.expect_equal("after deletions and loads of unknown keys")
    expect(not replay.removed, "a removed event was emitted for a key that was never stored")
