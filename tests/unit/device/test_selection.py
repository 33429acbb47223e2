"""Which way a batch is copied, and which back end a worker gets."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_core.device.copy import (
    CopyBatch,
    CopyRoute,
    CudaCopyBackend,
    HostCopyBackend,
    MemoryKind,
    TorchCopyBackend,
    _selection,
    choose_backend,
    choose_route,
)
from kv_core.errors import CopyError

DEVICE, PINNED, PAGEABLE = MemoryKind.DEVICE, MemoryKind.PINNED, MemoryKind.PAGEABLE
KIB = 1024


def _batch(
    count: int = 16, page_bytes: int = 4 * KIB, source: int = 0x7000_0000, destination: int = 0x9000
) -> CopyBatch:
    steps = np.arange(count, dtype=np.int64) * 64 * KIB
    return CopyBatch(
        source + steps, destination + steps, np.full(count, page_bytes, dtype=np.int64)
    )


def _route(
    batch: CopyBatch,
    source: MemoryKind = PINNED,
    destination: MemoryKind = DEVICE,
    *,
    has_kernel: bool = True,
    has_batch_copy: bool = True,
) -> CopyRoute:
    return choose_route(
        batch, source, destination, has_kernel=has_kernel, has_batch_copy=has_batch_copy
    )


@pytest.mark.parametrize("page_bytes", [8, 4 * KIB, 28 * KIB - 8])
def test_loads_of_many_small_pages_take_the_kernel(page_bytes: int) -> None:
    """Copy engines would begin anew for each of them."""
    assert _route(_batch(page_bytes=page_bytes)) is CopyRoute.KERNEL


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(_batch(page_bytes=28 * KIB), id="large pages"),
        pytest.param(_batch(count=15), id="few pages"),
        pytest.param(_batch(source=0x7000_0004), id="unaligned sources"),
        pytest.param(_batch(destination=0x9001), id="unaligned destinations"),
        pytest.param(_batch(page_bytes=4 * KIB + 2), id="sizes of no whole words"),
    ],
)
def test_other_loads_take_the_copy_engines(batch: CopyBatch) -> None:
    """Each condition of the kernel is one."""
    assert _route(batch) is CopyRoute.BATCH


def test_one_large_page_is_enough_to_keep_the_kernel_out() -> None:
    """The largest page counts, not the first."""
    batch = _batch(count=40)
    batch.sizes[33] = 2**20
    assert _route(batch) is CopyRoute.BATCH


def test_one_unaligned_page_is_enough_to_keep_the_kernel_out() -> None:
    """A kernel that read past a word would touch other bytes."""
    batch = _batch(count=40)
    batch.sources[39] += 4
    assert _route(batch) is CopyRoute.BATCH


def test_stores_leave_the_processors_to_the_forward_pass() -> None:
    """Stores always take the copy engines."""
    assert _route(_batch(), DEVICE, PINNED) is CopyRoute.BATCH


@pytest.mark.parametrize(("source", "destination"), [(PAGEABLE, DEVICE), (DEVICE, PAGEABLE)])
def test_memory_that_is_not_pinned_takes_plain_calls(
    source: MemoryKind, destination: MemoryKind
) -> None:
    """Neither a kernel nor a copy engine reaches it by itself."""
    assert _route(_batch(), source, destination) is CopyRoute.SINGLE


def test_without_the_kernel_loads_take_the_copy_engines() -> None:
    """Triton may be missing, or without a compiler."""
    assert _route(_batch(), has_kernel=False) is CopyRoute.BATCH


def test_without_the_batch_call_copies_are_made_one_by_one() -> None:
    """Drivers before CUDA 12.8; the kernel needs no such call."""
    assert _route(_batch(), DEVICE, PINNED, has_batch_copy=False) is CopyRoute.SINGLE
    assert _route(_batch(), has_batch_copy=False) is CopyRoute.KERNEL


def _rows() -> Any:
    return np.zeros((2, 64), dtype=np.int8)


def test_arrays_get_the_host_back_end() -> None:
    """There is no device."""
    assert isinstance(choose_backend([_rows()], [_rows()]), HostCopyBackend)


@pytest.mark.torch
def test_cpu_tensors_get_the_host_back_end() -> None:
    """Their memory is the host's."""
    torch: Any = pytest.importorskip("torch")
    assert isinstance(choose_backend([torch.from_numpy(_rows())], [_rows()]), HostCopyBackend)


@pytest.fixture
def cuda_tensor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a tensor that passes for one on a CUDA device."""
    torch: Any = pytest.importorskip("torch")
    device = SimpleNamespace(type="cuda", index=0)
    monkeypatch.setattr(_selection, "_device_of", lambda _tensors: device)
    return torch.from_numpy(_rows())


@pytest.mark.torch
def test_a_cuda_device_gets_its_driver(monkeypatch: pytest.MonkeyPatch, cuda_tensor: Any) -> None:
    """Nothing is compiled and no stream made before one is opened."""
    monkeypatch.setattr(_selection, "CudaDriver", lambda: SimpleNamespace(has_batch_copy=True))
    assert isinstance(choose_backend([cuda_tensor], [_rows()]), CudaCopyBackend)


@pytest.mark.torch
@pytest.mark.parametrize(
    "error",
    [
        OSError("libcuda.so.1: cannot open shared object file"),
        CopyError("cuDriverGetVersion failed", error_name="CUDA_ERROR_STUB_LIBRARY"),
        AttributeError("undefined symbol: cuMemcpyAsync"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_without_its_driver_a_cuda_device_gets_torch(
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cuda_tensor: Any,
) -> None:
    """Copies work all the same, and one warning says why they are slower."""

    def refuse() -> None:
        raise error

    monkeypatch.setattr(_selection, "CudaDriver", refuse)
    assert isinstance(choose_backend([cuda_tensor], [_rows()]), TorchCopyBackend)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(error) in record.getMessage()
