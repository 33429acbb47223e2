"""Copies that fail: vLLM accepts none of it, and no wrong byte may come of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm_env.engine_mode.conftest import content
from vllm.v1.kv_offload import base

from kv_core.device.copy import TorchCopyBackend, choose_backend
from kv_core.errors import CopyError
from kv_core.vllm import _spec, _worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_env.conftest import Script
    from tests.vllm_env.engine_mode.conftest import Engine

    from kv_core.contract import OffloadKey


SCRIPTED: dict[str, Any] = {"secondary_tiers": [{"type": "scripted"}]}


class Copies:
    """Makes copy back ends that fail when the test says so.

    Attributes:
        failing: Names of the streams that fail: "usual" or "last".
        raising: Whether they refuse a batch, instead of failing it later.
        slow: Whether batches do not end before somebody waits for them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing: set[str] = set()
        self.raising = False
        self.slow = False
        self._usual, self._last = choose_backend, TorchCopyBackend
        original = _worker.CopyBackends
        monkeypatch.setattr(
            _spec,
            "CopyBackends",
            lambda tensors: original(
                tensors,
                usual=lambda gpu, cpu: _Backend(self, "usual", self._usual(gpu, cpu)),
                last_resort=lambda tensors: _Backend(self, "last", self._last(tensors)),
            ),
        )


class _Backend:
    def __init__(self, copies: Copies, role: str, backend: Any) -> None:
        self.name = role
        self._copies, self._backend = copies, backend

    def open_stream(self, name: str) -> Any:
        return _Stream(self._copies, self.name, self._backend.open_stream(name))


class _Stream:
    def __init__(self, copies: Copies, role: str, stream: Any) -> None:
        self._copies, self._role, self._stream = copies, role, stream

    def submit(self, batch: Any) -> Any:
        if self._role not in self._copies.failing:
            ticket = self._stream.submit(batch)
            return _SlowTicket(ticket) if self._copies.slow else ticket
        if self._copies.raising:
            raise OSError("refused")
        return SimpleNamespace(
            done=lambda: True, wait=lambda: None, error=OSError("broken"), elapsed_seconds=0.0
        )

    def close(self) -> None:
        self._stream.close()


class _SlowTicket:
    error = None
    elapsed_seconds = 0.0

    def __init__(self, ticket: Any) -> None:
        self._ticket = ticket
        self._waited = False

    def done(self) -> bool:
        return self._waited

    def wait(self) -> None:
        self._ticket.wait()
        self._waited = True


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Return the switch of the copy back ends of engines that are started after it."""
    return Copies(monkeypatch)


@pytest.mark.parametrize("raising", [False, True])
def test_a_failed_copy_is_made_again(
    copies: Copies, start: Callable[..., Engine], keys: list[OffloadKey], raising: bool
) -> None:
    """The engine sees success either way, and the bytes are right."""
    engine = start()
    copies.failing, copies.raising = {"usual"}, raising
    engine.store("a", *keys[:3])
    assert engine.load("b", *keys[:3]) == [[content(key, 0) for key in keys[:3]]]


def test_a_store_that_fails_twice_is_a_miss(
    copies: Copies, start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """It is completed as a success; the block does not become readable, and can be offered."""
    engine = start()
    copies.failing = {"usual", "last"}
    engine.store("a", *keys[:2])
    assert engine.ask("b", *keys[:2]) == ["MISS", "MISS"]
    copies.failing = set()
    assert engine.store("c", *keys[:2]) == keys[:2]
    assert engine.load("d", *keys[:2]) == [[content(key, 0) for key in keys[:2]]]


def test_a_store_that_fails_on_one_rank_is_a_miss(
    copies: Copies, start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """The page of the other rank is of no use alone; other stores are not concerned."""
    engine = start(ranks=2)
    good = engine.offer("a", keys[:1])
    assert good is not None
    for worker in engine.workers:
        worker.wait({good[0]})
    output = engine.manager.prepare_store(keys[1:3], engine.request("b"))
    assert output is not None
    pages = base.GPULoadStoreSpec([4, 5], [2], [0])
    assert engine.workers[0].submit_store(99, pages, output.store_spec)
    engine.workers[0].wait({99})
    copies.failing = {"usual", "last"}
    assert engine.workers[1].submit_store(99, pages, output.store_spec)
    assert [[result.job_id for result in worker.get_finished()] for worker in engine.workers] == [
        [good[0], 99],
        [good[0], 99],
    ]
    engine.manager.complete_store(set(good[1]), engine.request("a"))
    engine.manager.complete_store(set(keys[1:3]), engine.request("b"))
    assert engine.ask("c", *keys[:3]) == ["HIT", "MISS", "MISS"]


def test_nothing_of_a_failed_store_reaches_a_tier(
    copies: Copies,
    scripts: list[Script],
    start: Callable[..., Engine],
    keys: list[OffloadKey],
) -> None:
    """It would be wrong for every engine that shares the tier."""
    engine = start(**SCRIPTED)
    copies.failing = {"usual", "last"}
    engine.store("a", *keys[:2])
    copies.failing = set()
    engine.store("b", keys[5])
    assert [job.keys for job in scripts[0].jobs.values()] == [(keys[5],)]


def test_a_failed_store_is_repeated_before_its_blocks_are_handed_out(
    copies: Copies, start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """A preemption waits for a store, and then overwrites its GPU blocks."""
    engine = start()
    copies.failing = {"usual"}
    offered = engine.offer("a", keys[:2])
    assert offered is not None
    engine.workers[0].wait({offered[0]})
    engine.gpus[0].fill_(1)
    assert [result.success for result in engine.workers[0].get_finished()] == [True]
    engine.manager.complete_store(set(keys[:2]), engine.request("a"))
    assert engine.load("b", *keys[:2]) == [[content(key, 0) for key in keys[:2]]]


def test_a_refused_store_is_repeated_although_others_are_before_it(
    copies: Copies, start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """Results come in order; a wait for it must not end before its blocks were read."""
    engine = start()
    copies.slow = True
    first = engine.offer("a", keys[:1])
    copies.failing, copies.raising = {"usual"}, True
    second = engine.offer("b", keys[1:3])
    assert first is not None
    assert second is not None
    engine.workers[0].wait({second[0]})
    engine.gpus[0].fill_(1)
    assert {result.job_id for result in engine.workers[0].get_finished()} == {first[0], second[0]}
    engine.manager.complete_store(set(keys[1:3]), engine.request("b"))
    assert engine.load("c", *keys[1:3]) == [[content(key, 0) for key in keys[1:3]]]


def test_a_load_that_fails_twice_ends_the_engine(
    copies: Copies, start: Callable[..., Engine], keys: list[OffloadKey]
) -> None:
    """The request would run on whatever is in its GPU blocks."""
    engine = start()
    engine.store("a", *keys[:2])
    copies.failing = {"usual", "last"}
    with pytest.raises(CopyError, match=r"load of 2 block\(s\)"):
        engine.load("b", *keys[:2])
