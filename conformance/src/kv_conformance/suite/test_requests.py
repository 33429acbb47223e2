"""REQ: requests begin and end."""

from __future__ import annotations

import gc
import math
import time
import tracemalloc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kv_conformance.harness import Deadlines
from kv_conformance.rig import expect
from kv_conformance.run._case import case
from kv_core.contract import OffloadPolicy, ReqContext, RequestOffloadingContext

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import OffloadKey

_REQUESTS_OF_A_ROUND: Final = 500
_REQUESTS_AT_A_TIME: Final = 100
_FEWEST_ROUNDS: Final = 20
# A tier may keep what was asked until the deadline of the lookup, so the test must outlast it.
_DEADLINES: Final = Deadlines(lookup_s=0.5)
_LOOKUP_DEADLINES: Final = 3
# Less than the smallest thing that can be kept for a request: its id, in a set, takes 80.
_BYTES_OF_A_REQUEST: Final = 16
_JOBS_OF_A_ROUND: Final = 100
# A log of jobs may have a bound of some thousand entries.
_FEWEST_ROUNDS_OF_JOBS: Final = 40
# Less than the smallest thing that can be kept for a job, and more than chance.
_BYTES_OF_A_JOB: Final = 60


@case("REQ-1")
def test_every_new_request_is_answered_with_a_policy(rigs: Rigs) -> None:
    """Whatever its id is and whatever its client sent along."""
    rig = rigs.open()
    params: tuple[Mapping[str, Any], ...] = (
        {},
        {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_host": None},
        {"tier": {"nested": [1.5, "two", {}]}, "class": "batch", "a key": ""},
    )
    for number, sent in enumerate(params):
        for req_id in (f"cmpl-{number}", f"../{number}\x00 \u00e9\n", f"{number}" * 400):
            answer: object = rig.announce(ReqContext(req_id, sent))
            expect(
                isinstance(answer, RequestOffloadingContext)
                and isinstance(answer.policy, OffloadPolicy),
                f"on_new_request of a request with kv_transfer_params {dict(sent)} returned "
                f"{answer!r}, expected a RequestOffloadingContext with an OffloadPolicy",
            )


@case("REQ-2")
def test_a_request_may_end_twice_and_before_it_begins(rigs: Rigs) -> None:
    """Known, ended and unknown requests alike; the tier works on."""
    rig = rigs.open()
    key, absent = rigs.keys(2)
    rig.stored([key])
    known, never = rig.new_request(), ReqContext("never announced")
    rig.resolve([key, absent], known)
    rig.finish_request(known)
    rig.finish_request(known)
    rig.finish_request(never)
    rig.announce(never)
    rig.ask_many([key, absent], never)
    rig.finish_request(never)
    rig.finish_request(never)
    expect(
        rig.resolve([key, absent], rig.new_request()) == [True, False],
        "after a request had ended twice, another one got wrong answers",
    )


@case("REQ-2")
def test_an_id_that_comes_back_is_a_new_request(rigs: Rigs) -> None:
    """Nothing is left of the request that had the id before: its lookups count anew."""
    rig = rigs.open()
    key, absent = rigs.keys(2)
    rig.stored([key])
    request = ReqContext("comes back")
    counts = []
    for _life in range(2):
        rig.announce(request)
        before = rig.stats().get("lookup_queries", 0.0)
        expect(
            rig.resolve([key, absent], request) == [True, False],
            "a request whose id another one had before got wrong answers",
        )
        counts.append(rig.stats().get("lookup_queries", 0.0) - before)
        rig.finish_request(request)
    expect(
        counts[0] == counts[1],
        f"a request resolved two keys and counted {counts[0]:g} queries; after its end, a new one "
        f"of the same id counted {counts[1]:g}",
    )


@case("REQ-2")
def test_ended_requests_leave_nothing_behind(rigs: Rigs) -> None:
    """Memory comes to rest while requests come and go, with answers and without.

    Judged by Python's own allocations. Caches and logs may fill up; only what still grows after
    thousands of requests is a leak.
    """
    rig = rigs.open(deadlines=_DEADLINES)
    stored = rigs.keys(2)
    rig.stored(stored)
    earliest_end = time.monotonic() + _LOOKUP_DEADLINES * min(rig.limits.lookup_deadline_s, 5.0)
    rounds, grown = 0, math.inf
    with _tracing():
        while grown >= _BYTES_OF_A_REQUEST:
            expect(
                rounds < _FEWEST_ROUNDS or time.monotonic() < earliest_end,
                f"after {rounds * _REQUESTS_OF_A_ROUND} ended requests, each further one still "
                f"leaves {grown:.0f} bytes behind",
            )
            before = _traced_bytes()
            _come_and_go(rigs, rig, stored)
            grown = (_traced_bytes() - before) / _REQUESTS_OF_A_ROUND
            rounds += 1


@case("REQ-2", limit_s=120)
def test_jobs_leave_nothing_behind(rigs: Rigs) -> None:
    """Memory comes to rest while the same blocks are stored and loaded, found and not found."""
    rig = rigs.open(num_blocks=_JOBS_OF_A_ROUND, block_bytes=512)
    stored, absent = rigs.keys(2)
    # What is made once is made now.
    _store_and_load(rig, stored, absent)
    rounds, grown = 0, math.inf
    with _tracing():
        while grown >= _BYTES_OF_A_JOB:
            expect(
                rounds < _FEWEST_ROUNDS_OF_JOBS,
                f"after {rounds * _JOBS_OF_A_ROUND} reported jobs of the same few blocks, each "
                f"further one still leaves {grown:.0f} bytes behind",
            )
            before = _traced_bytes()
            _store_and_load(rig, stored, absent)
            grown = (_traced_bytes() - before) / _JOBS_OF_A_ROUND
            rounds += 1


def _store_and_load(rig: Rig, stored: OffloadKey, absent: OffloadKey) -> None:
    """Carry a round of jobs out, for one request, which ends."""
    request = rig.new_request()
    jobs = []
    for _ in range(_JOBS_OF_A_ROUND // 4):
        jobs += [rig.submit_store([stored], request=request)]
        jobs += [rig.submit_load([key], request=request) for key in (stored, absent, stored)]
    rig.wait_all(jobs)
    rig.finish_request(request)
    rig.call("take_events")
    rig.forget_results()


def _come_and_go(rigs: Rigs, rig: Rig, stored: Sequence[OffloadKey]) -> None:
    """Let requests begin, ask and end: some with all answers, some with none."""
    for _group in range(_REQUESTS_OF_A_ROUND // _REQUESTS_AT_A_TIME):
        # A few new ones each time, or all answers would be known from the second round on.
        keys = [*stored, *rigs.keys(2)]
        requests = [rig.new_request(origin="suite") for _ in range(_REQUESTS_AT_A_TIME)]
        for request in requests:
            rig.ask_many(keys, request)
        # Before the tier can have asked its storage.
        for request in requests[::2]:
            rig.finish_request(request)
        for request in requests[1::2]:
            rig.resolve(keys, request)
            rig.finish_request(request)


@contextmanager
def _tracing() -> Iterator[None]:
    """Let Python note its allocations, unless somebody does already."""
    if tracemalloc.is_tracing():
        yield
        return
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def _traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
