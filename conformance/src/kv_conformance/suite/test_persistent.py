"""PERS: what survives the end of a process, expected or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_conformance.harness import SHORT_DEADLINES
from kv_conformance.rig import expect
from kv_conformance.run._case import case
from kv_core.contract import JobErrorKind

if TYPE_CHECKING:
    from kv_conformance.rig import Peer, Rig, Rigs
    from kv_core.contract import OffloadKey

_LARGE_BYTES: Final = 1 << 20
# When the process is killed: after so many reports, with so many stores in flight.
_KILLS: Final = ((0, 1), (1, 4), (3, 2), (6, 4))
# How long after an opening leftovers may still lie there, beyond a job's deadline.
_RECLAIM_GRACE_S: Final = 3.0


def _large_block(rigs: Rigs) -> int:
    """Return the size of a block that takes a while to write."""
    return min(_LARGE_BYTES, rigs.limits().max_block_bytes or _LARGE_BYTES)


@case("PERS-1")
def test_a_reopened_tier_finds_its_blocks(rigs: Rigs) -> None:
    """After an orderly end, and again after another."""
    rig = rigs.open()
    keys = rigs.keys(6)
    rig.stored(keys)
    for _ in range(2):
        rig.close()
        rig = rigs.open(storage=rig.opening.storage)
        found = rig.resolve(keys)
        expect(all(found), f"{found.count(False)} of {len(keys)} keys were not found again")
        rig.expect_loads(keys)


@case("PERS-1")
def test_a_reopened_tier_loads_without_a_lookup(rigs: Rigs) -> None:
    """The first thing that it is asked for is a load, and the block is not lost by that."""
    rig = rigs.open()
    keys = rigs.keys(4)
    rig.stored(keys)
    rig.close()
    rig = rigs.open(storage=rig.opening.storage)
    rig.expect_loads(keys, clause="PERS-1")
    expect(all(rig.resolve(keys)), "keys were loaded and then not found by a reopened tier")


@case("PERS-1")
def test_a_block_that_was_replaced_is_found_again(rigs: Rigs) -> None:
    """A lost block that was stored anew, and blocks that were stored after a reopening."""
    rig = rigs.open()
    old = rigs.keys(3)
    rig.stored(old)
    rig.lose(old[0])
    rig.load(old)
    rig.stored(old[:1])
    rig.close()
    rig = rigs.open(storage=rig.opening.storage)
    new = rigs.keys(3)
    rig.stored(new)
    rig.close()
    rig = rigs.open(storage=rig.opening.storage)
    expect(all(rig.resolve([*old, *new])), "a key was not found again")
    rig.expect_loads([*old, *new])


@case("PERS-2", limit_s=120)
def test_a_killed_process_leaves_blocks_whole_or_gone(rigs: Rigs) -> None:
    """Killed in the middle of its stores, at several moments, one process after the other."""
    block_bytes = _large_block(rigs)
    storage = rigs.storage()
    for reports, at_once in _KILLS:
        keys = rigs.keys(reports + 8)
        peer = rigs.peer(storage=storage, block_bytes=block_bytes, num_blocks=8)
        peer.begin_storing(keys, at_once=at_once)
        peer.until_reported(reports)
        peer.kill()
        rig = rigs.open(storage=storage, block_bytes=block_bytes, num_blocks=8)
        rig.blame_bytes = "PERS-2"
        _expect_whole_or_gone(rig, keys)
        rig.stored(keys, clause="PERS-2")
        rig.expect_loads(keys)
        rig.close()


def _expect_whole_or_gone(rig: Rig, keys: list[OffloadKey]) -> None:
    for key, found in zip(keys, rig.resolve(keys), strict=True):
        if found:
            loaded = rig.load([key])
            expect(
                loaded.keys,
                "a block that a killed process was storing is found but cannot be loaded: "
                f"{loaded.result.error}",
            )


@case("PERS-3", limit_s=120)
def test_leftovers_of_dead_writers_are_reclaimed_and_live_ones_kept(rigs: Rigs) -> None:
    """By the next opening, while another process is in the middle of its stores."""
    block_bytes = _large_block(rigs)
    storage = rigs.storage()

    def peer() -> Peer:
        return rigs.peer(storage=storage, block_bytes=block_bytes, num_blocks=8)

    dead, live = peer(), peer()
    witness = rigs.open(storage=storage, block_bytes=block_bytes, num_blocks=8)
    live.opened()
    dead.begin_storing(rigs.keys(12), at_once=4)
    dead.until_reported(1)
    dead.kill()
    left = witness.count_leftovers()
    keys = rigs.keys(24)
    live.begin_storing(keys, at_once=4)
    for count in (1, 4, 8):
        live.until_reported(count)
        last = rigs.open(
            storage=storage, block_bytes=block_bytes, num_blocks=8, deadlines=SHORT_DEADLINES
        )
    live.until_reported(len(keys))
    failures = _failures(live)
    expect(not failures, f"stores of a live writer failed when others opened: {failures[:1]}")
    witness.expect_loads(keys[:8])

    def reclaimed() -> bool:
        last.step()
        return not last.count_leftovers()

    rigs.budget.until(
        reclaimed,
        f"leftovers of a dead writer ({left} of them) were not reclaimed by an opening",
        last.limits.job_deadline_s,
        grace_s=_RECLAIM_GRACE_S,
    )


def _failures(peer: Peer) -> list[str]:
    """Return what failed in a peer, but for what the tier declined for the moment."""
    return [
        error.message if error is not None else "no error given"
        for error in peer.failures
        if error is None or error.kind is not JobErrorKind.DECLINED
    ]
