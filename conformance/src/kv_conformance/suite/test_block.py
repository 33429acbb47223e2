"""BLOCK: the calling thread schedules every request of the engine, and must not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_conformance.harness import SHORT_DEADLINES, Fault
from kv_conformance.rig import expect, watch_calls
from kv_conformance.run._case import case
from kv_core.contract import Capability

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_conformance.rig import CallFinding, Rig, Rigs
    from kv_core.contract import OffloadKey

_TIMES: Final = 12
_QUEUED: Final = 2048
_LARGE_JOB: Final = 128


def _step_with_everything(rig: Rig, rigs: Rigs, stored: Sequence[OffloadKey]) -> None:
    """Call every method that a step of an engine may call."""
    request = rig.new_request()
    rig.ask(stored[0], request)
    rig.ask_many([*stored[1:], *rigs.keys(4)], request)
    rig.submit_store(rigs.keys(1), request=request)
    rig.submit_load(stored[:1], request=request)
    if Capability.TOUCH in rigs.spec.capabilities:
        rig.tier.touch(stored, request)
    if Capability.USAGE in rigs.spec.capabilities:
        rig.tier.usage()
    rig.call("has_pending_work")
    rig.step()
    rig.finish_request(request)
    rig.call("take_events")
    rig.stats()


def _expect_no_waiting(findings: Sequence[CallFinding]) -> None:
    expect(not findings, "; ".join(finding.message for finding in findings))


@case("BLOCK-1")
def test_no_call_waits_while_the_storage_is_healthy(rigs: Rigs) -> None:
    """No file, socket or process is opened on the calling thread, and no call waits."""
    rig = rigs.open(num_blocks=128)
    stored = rigs.keys(4)
    rig.stored(stored)
    # What happens only once, an import say, happens now.
    _step_with_everything(rig, rigs, stored)

    def exercise() -> None:
        for _ in range(_TIMES):
            _step_with_everything(rig, rigs, stored)
        # Their requests have ended.
        rig.wait_all(rig.jobs_in_flight, clause="JOB-6")

    _expect_no_waiting(watch_calls(rig, exercise))


@case("BLOCK-1")
def test_no_call_waits_while_the_storage_stalls(rigs: Rigs) -> None:
    """Nothing in the storage ends, and every call returns all the same."""
    rig = rigs.open(num_blocks=128, faults=True)
    stored = rigs.keys(4)
    rig.stored(stored)
    _step_with_everything(rig, rigs, stored)
    rig.inject(Fault.STALL)

    def exercise() -> None:
        for _ in range(_TIMES):
            _step_with_everything(rig, rigs, stored)

    _expect_no_waiting(watch_calls(rig, exercise))


@case("BLOCK-1")
def test_the_end_of_a_request_does_not_wait_for_its_jobs(rigs: Rigs) -> None:
    """Nor does the beginning of the next one, with a backlog of stalled jobs behind it."""
    rig = rigs.open(num_blocks=128, faults=True)
    rig.inject(Fault.STALL)

    def exercise() -> None:
        for _ in range(_TIMES):
            request = rig.new_request()
            rig.submit_store(rigs.keys(min(2, rig.job_keys)), request=request)
            rig.ask(rigs.key(), request)
            rig.finish_request(request)

    _expect_no_waiting(watch_calls(rig, exercise))


@case("BLOCK-1")
def test_a_submit_waits_for_no_place_in_a_queue(rigs: Rigs) -> None:
    """Long prompts, more blocks than anybody makes room for, in a storage where nothing ends."""
    rig = rigs.open(num_blocks=_QUEUED, block_bytes=512, faults=True, deadlines=SHORT_DEADLINES)
    rig.inject(Fault.STALL)
    size = min(rig.limits.max_job_keys or _LARGE_JOB, _LARGE_JOB)

    def exercise() -> None:
        for _ in range(_QUEUED // size):
            # What is in the slots does not matter: nobody loads it.
            rig.submit_store(rigs.keys(size), fill=False)

    _expect_no_waiting(watch_calls(rig, exercise))


@case("BLOCK-1")
def test_deleting_does_not_wait(rigs: Rigs) -> None:
    """Where the tier declares DELETE: removal happens elsewhere, also in a stalled storage."""
    if Capability.DELETE not in rigs.spec.capabilities:
        return
    rig = rigs.open(num_blocks=64, faults=True)
    stored = rigs.keys(_TIMES)
    rig.stored(stored)
    rig.inject(Fault.STALL)

    def exercise() -> None:
        for key in stored:
            rig.tier.delete([key])

    _expect_no_waiting(watch_calls(rig, exercise))
