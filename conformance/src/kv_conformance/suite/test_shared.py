"""SHARE: several instances over one storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_conformance.harness import Deadlines
from kv_conformance.rig import expect
from kv_conformance.run._case import case
from kv_core.contract import JobErrorKind

if TYPE_CHECKING:
    from kv_conformance.rig import Rigs

_PROCESSES: Final = 4
_WRITERS_EACH: Final = 4
_BLOCKS: Final = 6
# What is not found is waited for: not for longer than it takes to be sure.
_DEADLINES: Final = Deadlines(lookup_s=1.0)


@case("SHARE-1")
def test_an_instance_sees_what_another_one_stores(rigs: Rigs) -> None:
    """Within the declared delay, also where it has answered absent before."""
    ours = rigs.open(deadlines=_DEADLINES)
    theirs = rigs.open(storage=ours.opening.storage, deadlines=_DEADLINES)
    keys = rigs.keys(4)
    request = ours.new_request()
    expect(not any(ours.resolve(keys, request)), "a key was found that nobody had stored")
    ours.finish_request(request)
    theirs.stored(keys)
    ours.until_found(keys, ours.limits.visibility_delay_s, clause="SHARE-1")
    ours.expect_loads(keys)
    theirs.finish_request(theirs.request)
    more = rigs.keys(4)
    ours.stored(more)
    theirs.until_found(more, theirs.limits.visibility_delay_s, clause="SHARE-1")
    theirs.expect_loads(more)


@case("SHARE-1", limit_s=120)
def test_an_instance_sees_what_another_process_stores(rigs: Rigs) -> None:
    """In both directions."""
    ours = rigs.open(deadlines=_DEADLINES)
    peer = rigs.peer(storage=ours.opening.storage)
    theirs, own = rigs.keys(4), rigs.keys(4)
    ours.resolve(theirs)
    peer.stored(theirs)
    ours.until_found(theirs, ours.limits.visibility_delay_s, clause="SHARE-1")
    ours.expect_loads(theirs)
    ours.stored(own)
    rigs.budget.until(
        lambda: all(peer.resolve(own)),
        "another process did not find what was stored here",
        ours.limits.visibility_delay_s,
    )
    expect(len(peer.load(own)) == len(own), "another process did not load what was stored here")


@case("SHARE-2", limit_s=120)
def test_many_writers_of_one_key_all_succeed(rigs: Rigs) -> None:
    """Four in each of four processes, all at the same time, a few keys after one another."""
    rig = rigs.open()
    rig.blame_bytes = "SHARE-2"
    peers = [rigs.peer(storage=rig.opening.storage) for _ in range(_PROCESSES)]
    for peer in peers:
        peer.opened()
    keys = rigs.keys(_BLOCKS)
    writes = [key for key in keys for _ in range(_WRITERS_EACH)]
    for peer in peers:
        peer.begin_storing(writes, at_once=_WRITERS_EACH)
    for peer in peers:
        peer.until_reported(len(writes), clause="SHARE-2")
        for error in peer.failures:
            expect(
                error is not None and error.kind is JobErrorKind.DECLINED,
                f"one of {_PROCESSES * _WRITERS_EACH} writers of a key failed: {error}",
            )
    rig.until_found(keys, rig.limits.visibility_delay_s, clause="SHARE-2")
    rig.expect_loads(keys)
    listed = rig.list_keys()
    expect(
        listed == set(keys),
        f"{len(keys)} keys were stored, and the storage lists {len(listed)}",
    )
