"""WITHDRAW: tiers that can withdraw running I/O owe every deadline without exception."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_conformance.harness import SHORT_DEADLINES, Fault
from kv_conformance.rig import expect
from kv_conformance.run._case import case

if TYPE_CHECKING:
    from kv_conformance.rig import Rigs


@case("WITHDRAW-1")
def test_every_job_ends_in_time_while_the_storage_stalls(rigs: Rigs) -> None:
    """Those that run and those that wait; none of them moves a byte when the stall is over."""
    rig = rigs.open(num_blocks=64, deadlines=SHORT_DEADLINES, faults=True)
    keys = rigs.keys(4)
    rig.stored(keys)
    rig.inject(Fault.STALL)
    jobs = [rig.submit_load([key]) for key in keys]
    jobs += [rig.submit_store([key]) for key in rigs.keys(12)]
    jobs.append(rig.submit_store(rigs.keys(rig.job_keys)))
    rig.wait_all(jobs, clause="WITHDRAW-1")
    succeeded = [job_id for job_id in jobs if rig.results[job_id].success]
    expect(not succeeded, "a job was reported as a success while the storage stalled")
    expect(not rig.drain(), "a drain left jobs behind that can be withdrawn")
    rig.heal()
    # Every slot is poisoned by now: a withdrawn job that goes on would be seen.
    again = rigs.keys(4)
    rig.stored(again, clause="WITHDRAW-1")
    rig.expect_loads(again)
