"""Whether the harness does what it says: a fault without an effect would test nothing.

What is wrong here is the harness and not the tier, so the outcome is an error.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kv_conformance.harness import SHORT_DEADLINES, Corruption, Fault, HarnessError
from kv_conformance.run import case

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import JobId


@case("DATA-10")
def test_the_harness_sees_and_removes_objects(rigs: Rigs) -> None:
    """It lists what is stored, what it removes is gone, and it knows what is not there."""
    rig = rigs.open()
    keys = rigs.keys(2)
    rig.stored(keys)
    if not rig.list_keys().issuperset(keys):
        raise HarnessError(
            f"list_keys() returned {len(rig.list_keys())} keys after two were stored, and not "
            "these two: it must list the objects of the subject's storage"
        )
    rig.lose(keys[0])
    if keys[0] in rig.list_keys():
        raise HarnessError("lose() did not remove the object: list_keys() still has its key")
    absent = rigs.key()
    _expect_key_error(lambda: rig.lose(absent), "lose()")
    _expect_key_error(lambda: rig.corrupt(absent, Corruption.EMPTY), "corrupt()")


def _expect_key_error(call: Callable[[], None], name: str) -> None:
    try:
        call()
    except KeyError:
        return
    raise HarnessError(f"{name} of a key that has no object must raise KeyError, and did not")


@case("DATA-11")
def test_an_error_of_the_storage_has_an_effect(rigs: Rigs) -> None:
    """While everything is to fail, something does: a store, a load or a lookup."""
    rig = rigs.open(faults=True)
    [key] = rigs.keys(1)
    rig.stored([key])
    before = rig.stats().get("lookup_errors", 0.0)
    rig.inject(Fault.ERROR)
    succeed = rig.store(rigs.keys(1)).success and rig.load([key]).result.success
    rig.resolve([rigs.key()], rig.new_request())
    if succeed and rig.stats().get("lookup_errors", 0.0) == before:
        raise HarnessError(
            "inject(Fault.ERROR) has no effect: a store, a load and a lookup went well while "
            "everything should have failed. It must act between the tier and its storage"
        )
    rig.heal()
    if not rig.store(rigs.keys(1)).success:
        # Stores may fail; a second look tells an unlucky one from a fault that stays.
        rig.stored(rigs.keys(1))


@case("JOB-5")
def test_a_stall_of_the_storage_has_an_effect(rigs: Rigs) -> None:
    """While nothing is to end, something does not: a store, a load or a lookup."""
    rig = rigs.open(faults=True, deadlines=SHORT_DEADLINES)
    [key] = rigs.keys(1)
    rig.stored([key])
    rig.inject(Fault.STALL)
    jobs = [rig.submit_store(rigs.keys(1)), rig.submit_load([key])]
    fresh, request, pause = rigs.key(), rig.new_request(), threading.Event()
    # Long enough for a tier whose storage answers; later than that, something hangs.
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        answer = rig.ask(fresh, request)
        rig.step()
        if answer is not None and all(_went_well(rig, job) for job in jobs):
            raise HarnessError(
                "inject(Fault.STALL) has no effect: a store, a load and a lookup ended while "
                "nothing should have. It must act between the tier and its storage"
            )
        pause.wait(0.001)


def _went_well(rig: Rig, job: JobId) -> bool:
    return job in rig.results and rig.results[job].success
