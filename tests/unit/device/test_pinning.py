"""The primary tier is pinned in chunks that end with a row, as a whole or not at all."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv_core.device.copy import PinnedRows, _pinning, host_registrar_of

if TYPE_CHECKING:
    from collections.abc import Callable

ADDRESS = 0x10000
ROW = 4096


class Registrar:
    """Keeps what is pinned; refuses from the n-th registration on when it is told to."""

    def __init__(self, refuse_from: int | None = None) -> None:
        self.pinned: dict[int, int] = {}
        self.calls: list[str] = []
        self._refuse_from = refuse_from

    def register(self, address: int, num_bytes: int) -> str | None:
        """Pin a range, or say that it is too much."""
        self.calls.append(f"register {address:#x} {num_bytes}")
        if self._refuse_from is not None and len(self.pinned) >= self._refuse_from:
            return "too much"
        assert address not in self.pinned
        self.pinned[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        """Unpin a range that was pinned."""
        self.calls.append(f"unregister {address:#x}")
        del self.pinned[address]


@pytest.fixture
def pin() -> Callable[..., PinnedRows]:
    """Return a function that pins ten rows, three to a chunk."""

    def pin(registrar: Registrar, chunk_bytes: int = 3 * ROW + 1, rows: int = 10) -> PinnedRows:
        return PinnedRows(registrar, ADDRESS, rows, ROW, chunk_bytes=chunk_bytes)

    return pin


def test_chunks_end_with_a_row_and_cover_all(pin: Callable[..., PinnedRows]) -> None:
    """vllm#51080: large regions are registered piece by piece, and no row lies in two pieces."""
    registrar = Registrar()
    assert pin(registrar).is_pinned
    assert registrar.pinned == {
        ADDRESS: 3 * ROW,
        ADDRESS + 3 * ROW: 3 * ROW,
        ADDRESS + 6 * ROW: 3 * ROW,
        ADDRESS + 9 * ROW: ROW,
    }


def test_a_row_longer_than_a_chunk_is_a_chunk(pin: Callable[..., PinnedRows]) -> None:
    """Rows are never split."""
    registrar = Registrar()
    pin(registrar, chunk_bytes=100, rows=2)
    assert registrar.pinned == {ADDRESS: ROW, ADDRESS + ROW: ROW}


def test_a_refused_chunk_rolls_back_the_others(
    pin: Callable[..., PinnedRows], caplog: pytest.LogCaptureFixture
) -> None:
    """Unpinned as a whole, with one warning that says which rows, why and what to look at."""
    registrar = Registrar(refuse_from=2)
    rows = pin(registrar)
    assert not rows.is_pinned
    assert registrar.pinned == {}
    assert registrar.calls[-2:] == [
        f"unregister {ADDRESS + 3 * ROW:#x}",
        f"unregister {ADDRESS:#x}",
    ]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert "rows 6 to 8 of 10 (12288 bytes) were refused (too much)" in message
    assert "ulimit -l" in message


def test_nothing_is_tried_after_a_refusal(pin: Callable[..., PinnedRows]) -> None:
    """A driver that refuses one chunk is not asked for the rest."""
    registrar = Registrar(refuse_from=0)
    pin(registrar)
    assert registrar.calls == [f"register {ADDRESS:#x} {3 * ROW}"]


def test_release_unpins_once(pin: Callable[..., PinnedRows]) -> None:
    """Each chunk is given back exactly once, the last one first."""
    registrar = Registrar()
    rows = pin(registrar)
    rows.release()
    rows.release()
    assert registrar.pinned == {}
    assert not rows.is_pinned
    assert [call for call in registrar.calls if call.startswith("unregister")] == [
        f"unregister {ADDRESS + first * ROW:#x}" for first in (9, 6, 3, 0)
    ]


def test_host_memory_needs_no_pinning() -> None:
    """There is no device that copies from it."""
    assert host_registrar_of(np.zeros((2, 8), dtype=np.int8)) is None


@pytest.mark.torch
def test_a_cpu_tensor_needs_no_pinning() -> None:
    """Only CUDA tensors do."""
    torch = pytest.importorskip("torch")
    assert host_registrar_of(torch.zeros((2, 8), dtype=torch.int8)) is None


@pytest.mark.torch
def test_without_the_driver_the_runtime_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD devices are CUDA devices to torch, and have no CUDA driver."""
    torch: Any = pytest.importorskip("torch")
    calls: list[tuple[str, int]] = []

    def refuse_large(address: int, num_bytes: int, flags: int) -> int:
        calls.append(("register", address))
        return 0 if num_bytes <= ROW else 2

    runtime = SimpleNamespace(
        cudaHostRegister=refuse_large,
        cudaHostUnregister=lambda address: calls.append(("unregister", address)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    tensor: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))

    def no_driver() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(_pinning, "CudaDriver", no_driver)
    registrar = host_registrar_of(tensor)
    assert registrar is not None
    assert registrar.register(ADDRESS, ROW) is None
    assert registrar.register(ADDRESS + ROW, 2 * ROW) == "error 2 of the runtime"
    registrar.unregister(ADDRESS)
    assert calls == [
        ("register", ADDRESS),
        ("register", ADDRESS + ROW),
        ("unregister", ADDRESS),
    ]
