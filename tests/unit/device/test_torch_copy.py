"""The torch back end, with CPU tensors."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from kv_core.device import tensor_address
from kv_core.device.copy import CopyBatch, TorchCopyBackend
from kv_core.errors import EngineStateError

pytestmark = pytest.mark.torch

try:
    torch: Any = importlib.import_module("torch")
except ImportError:
    # Collected all the same: a run that deselects the marker must not stumble here.
    torch = None


@pytest.fixture(autouse=True)
def _needs_torch() -> None:
    pytest.importorskip("torch")


def _batch(source: int, destination: int, size: int) -> CopyBatch:
    return CopyBatch(*(np.array([value], dtype=np.int64) for value in (source, destination, size)))


def test_ranges_are_found_in_their_tensors() -> None:
    """A batch copies between any two tensors of the back end and has ended on return."""
    first = torch.arange(32, dtype=torch.int8).reshape(4, 8)
    second = torch.zeros(4, 8, dtype=torch.int8)
    stream = TorchCopyBackend([first, second]).open_stream("test")
    ticket = stream.submit(_batch(tensor_address(first) + 8, tensor_address(second) + 24, 8))
    assert ticket.done()
    assert ticket.error is None
    assert ticket.elapsed_seconds > 0
    assert second[3].tolist() == list(range(8, 16))
    assert int(second[:3].abs().sum()) == 0


@pytest.mark.parametrize("offset", [-1, 1], ids=["before", "behind"])
def test_ranges_outside_of_the_tensors_are_refused(offset: int) -> None:
    """A range that sticks out on either side is refused as a whole, before any copy."""
    memory = np.zeros(64, dtype=np.int8)
    tensor, other = torch.from_numpy(memory[16:32]).reshape(2, 8), torch.ones(2, 8).to(torch.int8)
    stream = TorchCopyBackend([tensor, other]).open_stream("test")
    outside = tensor_address(tensor) + (offset if offset < 0 else 16 - 8 + offset)
    with pytest.raises(ValueError, match="none of the registered tensors"):
        stream.submit(_batch(tensor_address(other), outside, 8))
    assert not memory.any()


def test_layers_of_a_region_may_interleave() -> None:
    """Strided views of one memory cover the same addresses; every range is found all the same."""
    rows = np.zeros((4, 32), dtype=np.int8)
    layers = [torch.from_numpy(rows[:, :8]), torch.from_numpy(rows[:, 8:16])]
    whole_row, page = torch.from_numpy(rows[1:2]), torch.full((1, 8), 5, dtype=torch.int8)
    stream = TorchCopyBackend([*layers, whole_row, page]).open_stream("test")
    for layer in layers:
        last_row = tensor_address(layer) + 3 * 32
        stream.submit(_batch(tensor_address(page), last_row, 8))
    assert rows[3].tolist() == [5] * 16 + [0] * 16
    assert not rows[:3].any()


def test_a_closed_stream_refuses_batches() -> None:
    """Closing twice is fine."""
    tensor = torch.zeros(2, 8, dtype=torch.int8)
    stream = TorchCopyBackend([tensor]).open_stream("test")
    stream.close()
    stream.close()
    with pytest.raises(EngineStateError, match="closed"):
        stream.submit(_batch(tensor_address(tensor), tensor_address(tensor) + 8, 8))
