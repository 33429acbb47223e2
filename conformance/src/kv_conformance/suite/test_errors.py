"""JOB-9: why a job failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_conformance.harness import Corruption, Fault
from kv_conformance.rig import expect
from kv_conformance.run._case import case
from kv_core.contract import JobErrorKind

if TYPE_CHECKING:
    from kv_conformance.rig import Rigs
    from kv_core.contract import JobResult

_OBJECT: Final = frozenset({JobErrorKind.MISSING, JobErrorKind.DAMAGED})
_DECLINED: Final = frozenset({JobErrorKind.DECLINED})
_BACKEND: Final = frozenset({JobErrorKind.FAILED, JobErrorKind.STALLED})


def _expect_kind(result: JobResult, allowed: frozenset[JobErrorKind], what: str) -> None:
    """Expect that a job, if it failed, says so with one of these kinds."""
    if result.success:
        return
    error = result.error
    expect(error is not None, f"{what} failed without an error: nobody knows why")
    if error is not None:
        kinds = " or ".join(sorted(f"'{kind.value}'" for kind in allowed))
        expect(
            error.kind in allowed,
            f"{what} failed as '{error.kind.value}' ({error.message}), expected {kinds}",
        )


@case("JOB-9")
def test_a_load_of_what_was_never_stored_is_missing(rigs: Rigs) -> None:
    """There is no such object, and nothing is wrong with the backend."""
    rig = rigs.open()
    rig.stored(rigs.keys(1))
    _expect_kind(rig.load([rigs.key()]).result, _OBJECT, "a load of a key that was never stored")


@case("JOB-9")
def test_a_load_of_a_lost_object_is_missing(rigs: Rigs) -> None:
    """An object that somebody else removed is no outage."""
    rig = rigs.open()
    [key] = rigs.keys(1)
    rig.stored([key])
    rig.lose(key)
    _expect_kind(rig.load([key]).result, _OBJECT, "a load of a lost object")


@case("JOB-9")
def test_a_load_of_a_spoilt_object_is_damaged(rigs: Rigs) -> None:
    """An object that is too short, empty or too long is no outage either."""
    rig = rigs.open()
    for how in (Corruption.TRUNCATED, Corruption.EMPTY, Corruption.OVERLONG):
        key = rigs.key()
        rig.stored([key])
        rig.corrupt(key, how)
        _expect_kind(rig.load([key]).result, _OBJECT, f"a load of a {how.value} object")


@case("JOB-9")
def test_a_store_without_room_is_declined(rigs: Rigs) -> None:
    """A full storage is not a broken one."""
    if Fault.FULL not in rigs.harness.faults:
        return
    rig = rigs.open(faults=True)
    rig.inject(Fault.FULL)
    result = rig.store(rigs.keys(1))
    _expect_kind(result, _DECLINED, "a store on a full storage")


@case("JOB-9")
def test_an_outage_is_a_failure_of_the_backend(rigs: Rigs) -> None:
    """What failed because nothing works counts against the tier."""
    rig = rigs.open(faults=True)
    [key] = rigs.keys(1)
    rig.stored([key])
    rig.inject(Fault.ERROR)
    _expect_kind(rig.load([key]).result, _BACKEND, "a load while everything fails")
    result = rig.store(rigs.keys(1))
    for _ in range(8):
        # A tier may decline for reasons of its own, but not everything.
        if result.success or result.error is None or result.error.kind not in _DECLINED:
            break
        result = rig.store(rigs.keys(1))
    _expect_kind(result, _BACKEND, "every store while everything fails")
