"""Nothing grows: thousands of rounds with bad tiers leave the manager as small as hundreds."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.contract import OffloadPolicy, ReqContext, RequestOffloadingContext, make_offload_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import Engine

WARM_UP = 300
ROUNDS = 2000
CONTAINERS = (dict, set, frozenset, list, deque, tuple)


def container_sizes(root: object) -> dict[str, int]:
    """Return the number of entries in all containers of an engine, by the path of attributes.

    Follows attributes of the engine's own objects, through containers, to any depth; containers
    at one path are summed up.
    """
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [("", root)]
    while todo:
        path, thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (str, bytes, type)):
            continue
        seen.add(id(thing))
        if isinstance(thing, CONTAINERS):
            sizes[path] = sizes.get(path, 0) + len(thing)
            values = [*thing, *thing.values()] if isinstance(thing, dict) else [*thing]
            todo += [(f"{path}[]", value) for value in values]
        elif type(thing).__module__.startswith("kv_core."):
            names = set(getattr(thing, "__dict__", ()))
            for base in type(thing).__mro__:
                names.update(getattr(base, "__slots__", ()))
            todo += [
                (f"{path}.{name}", getattr(thing, name)) for name in names if hasattr(thing, name)
            ]
    return sizes


def _round(engine: Engine, number: int, behaviour: str) -> None:
    """Let one request ask, store, load and end, over a tier that behaves in one way."""
    req_id = f"r{number}"
    keys = [
        make_offload_key(hashlib.sha256(b"%d/%d" % (number, index)).digest(), 0)
        for index in range(4)
    ]
    tier = engine.tier
    engine.begin(req_id)
    answer = None if behaviour == "unknown" else True
    tier.answers = {keys[0]: answer, keys[1]: answer}
    engine.ask(req_id, *keys[:3])
    engine.end_step()
    engine.ask(f"other{number}", keys[0])
    if engine.offer(req_id, keys[2], keys[3]) is not None:
        engine.offer(f"other{number}", keys[3])
        engine.manager.complete_store(keys[2:], ReqContext(req_id), success=number % 3 > 0)
    if behaviour == "late":
        engine.clock.advance(100.0)
        engine.end_step()
    if behaviour == "failing":
        for job_id in tuple(tier.open_jobs):
            tier.finish(tier.jobs[job_id], good=())
    elif behaviour != "lost":
        tier.finish_all()
    engine.ask(req_id, *keys)
    engine.end_step()
    engine.manager.take_lost_keys()
    engine.finish(req_id)
    engine.finish(f"other{number}")
    engine.end_step()
    list(engine.manager.take_events())
    engine.clock.advance(7.0)


@pytest.mark.parametrize("behaviour", ["good", "lost", "failing", "raising", "unknown", "late"])
def test_no_container_grows(
    start: Callable[..., Engine], behaviour: str, caplog: pytest.LogCaptureFixture
) -> None:
    """LMCache#1495: flat over 2,000 requests, whatever their tier does."""
    caplog.set_level(logging.CRITICAL)
    engine = start(num_blocks=16, enable_events=True, lookup_deadline_s=5.0)
    engine.tier.policy = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
    if behaviour == "raising":
        engine.tier.raising = {"submit_load", "submit_store", "on_request_finished", "lookup"}
    for number in range(WARM_UP):
        _round(engine, number, behaviour)
    before = container_sizes(engine.manager)
    for number in range(WARM_UP, WARM_UP + ROUNDS):
        _round(engine, number, behaviour)
        # The tests' own tier keeps everything.
        engine.tier.jobs = {job_id: engine.tier.jobs[job_id] for job_id in engine.tier.open_jobs}
        engine.tier.lookups.clear()
    after = container_sizes(engine.manager)
    # As many as the primary has slots may be in another state than before; not 2,000.
    grown = {path: size for path, size in after.items() if size > before.get(path, 0) + 16}
    assert grown == {}
    assert engine.stats["share_blocks_used"] <= 8
    assert engine.stats["requests_waiting"] == 0


def test_the_measure_sees_growth(engine: Engine) -> None:
    """A container deep inside the manager that grows is found, with its path."""
    before = container_sizes(engine.manager)
    hidden: Any = engine.manager._cascades
    hidden._missed.update({bytes([index]): set() for index in range(100)})
    after = container_sizes(engine.manager)
    assert [path for path in after if after[path] > before.get(path, 0) + 16] == [
        "._cascades._missed"
    ]


def test_idle_engines_do_not_spin(start: Callable[..., Engine]) -> None:
    """After all of that, lost jobs included, there is no reason to step."""
    engine = start(num_blocks=16)
    for number in range(50):
        _round(engine, number, "lost")
    engine.clock.advance(100.0)
    engine.end_step()
    assert engine.manager.num_jobs_in_flight > 0
    assert not engine.manager.has_pending_work()
