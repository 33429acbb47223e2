"""Routing of transfers to handlers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from kv_core.device import OffloadingWorker
from kv_core.engine import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
)
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_core.engine import TransferSpec


class RecordingHandler(OffloadingHandler):
    """Notes its calls; begins transfers as told."""

    def __init__(self, answer: bool | Exception = True) -> None:
        self.answer = answer
        self.begun: list[int] = []
        self.waited: list[tuple[int, ...]] = []
        self.shutdowns = 0

    @override
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        self.begun.append(job_id)
        return self.answer

    @override
    def get_finished(self) -> list[TransferResult]:
        results = [TransferResult(job_id, True, 1, 0.0, ("a", "b")) for job_id in self.begun]
        self.begun = []
        return results

    @override
    def wait(self, job_ids: Iterable[int]) -> None:
        self.waited.append(tuple(job_ids))

    @override
    def shutdown(self) -> None:
        self.shutdowns += 1


STORE = (GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([0]))
LOAD = (STORE[1], STORE[0])


def _worker(
    store: OffloadingHandler | None = None, load: OffloadingHandler | None = None
) -> OffloadingWorker:
    worker = OffloadingWorker()
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, store or RecordingHandler())
    worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, load or RecordingHandler())
    return worker


def test_transfers_go_to_the_handler_of_their_media() -> None:
    """The direction alone decides."""
    store, load = RecordingHandler(), RecordingHandler()
    worker = _worker(store, load)
    assert worker.transfer_async(1, STORE)
    assert worker.transfer_async(2, LOAD)
    assert (store.begun, load.begun) == ([1], [2])


def test_a_second_handler_of_a_route_is_refused() -> None:
    """The first stays in charge."""
    first = RecordingHandler()
    worker = _worker(store=first)
    with pytest.raises(EngineStateError, match="GPU to CPU has a handler already"):
        worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, RecordingHandler())
    worker.transfer_async(1, STORE)
    assert first.begun == [1]


def test_an_unknown_route_is_an_error_that_names_the_known_ones() -> None:
    """Nothing would ever report such a transfer."""
    worker = _worker()
    with pytest.raises(EngineStateError, match=r"CPU to CPU \(registered: GPU to CPU, CPU to GPU"):
        worker.transfer_async(1, (STORE[1], STORE[1]))
    with pytest.raises(EngineStateError, match="registered: none"):
        OffloadingWorker().transfer_async(1, STORE)


def test_an_exception_in_a_submit_is_a_failed_submit(caplog: pytest.LogCaptureFixture) -> None:
    """The step goes on, the exception is logged, and later transfers are unharmed."""
    broken = RecordingHandler(RuntimeError("no stream"))
    worker = _worker(store=broken)
    with caplog.at_level(logging.ERROR, logger="kv_core"):
        assert not worker.transfer_async(7, STORE)
    assert "transfer 7 (GPU to CPU) could not be begun" in caplog.text
    assert "no stream" in caplog.text
    assert worker.transfer_async(8, LOAD)
    assert [result.job_id for result in worker.get_finished()] == [8]


def test_a_refusal_is_passed_on() -> None:
    """A handler may say no without raising."""
    assert not _worker(store=RecordingHandler(answer=False)).transfer_async(1, STORE)


def test_results_of_all_routes_come_together_once() -> None:
    """Every transfer is reported by one call and by no later one."""
    worker = _worker()
    worker.transfer_async(1, STORE)
    worker.transfer_async(2, LOAD)
    assert sorted(result.job_id for result in worker.get_finished()) == [1, 2]
    assert worker.get_finished() == []


def test_wait_asks_every_handler_with_all_ids() -> None:
    """Ids are not split by route, and an iterator is not used up by the first handler."""
    store, load = RecordingHandler(), RecordingHandler()
    _worker(store, load).wait(iter([3, 4]))
    assert (store.waited, load.waited) == ([(3, 4)], [(3, 4)])


def test_shutdown_reaches_every_handler() -> None:
    """Both directions end."""
    store, load = RecordingHandler(), RecordingHandler()
    _worker(store, load).shutdown()
    assert (store.shutdowns, load.shutdowns) == (1, 1)


def test_a_handler_that_cannot_be_shut_down_does_not_keep_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is still let go of, and the exception is logged."""
    store, load = RecordingHandler(), RecordingHandler()

    def fail() -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(store, "shutdown", fail)
    with caplog.at_level(logging.ERROR, logger="kv_core"):
        _worker(store, load).shutdown()
    assert load.shutdowns == 1
    assert "the handler GPU to CPU could not be shut down" in caplog.text
