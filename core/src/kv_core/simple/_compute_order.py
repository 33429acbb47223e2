"""Orders copies after the engine's work, although another thread submits them.

Both directions need it: a store reads what the forward pass has written, and a load overwrites
what earlier work still reads (vllm#45704, vllm#47282). A copy back end orders a batch after the
current stream of the thread that submits it. That is the engine's compute stream on the engine's
thread only; so the engine's thread marks how far its stream has got, and the copy thread makes a
stream of its own wait for the mark and submits from there.

The order of CUDA streams has not been run on real hardware; the tests use streams they make.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_core.device import KVTensor, StreamApi

__all__ = ["ComputeOrder", "HostComputeOrder", "StreamComputeOrder", "compute_order_of"]


class ComputeOrder(Protocol):
    """Knows the engine's compute stream."""

    def mark(self) -> AbstractContextManager[None]:
        """Remember the work that the engine has submitted so far. Called on its own thread.

        Returns:
            A context for the copy thread, to be entered once: batches that are submitted within
            it begin after that work.
        """


@final
class HostComputeOrder:
    """Host memory: the engine's work has ended when it returns."""

    def mark(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()


@final
class StreamComputeOrder:
    """Device memory, with streams and events."""

    def __init__(self, api: StreamApi, device: Any) -> None:
        """Open the stream from which the copy thread submits.

        Args:
            api: Makes streams and events, as ``torch.cuda`` does.
            device: The device, as the API names it.
        """
        self._api = api
        self._device = device
        # No priority is asked for, which is the lowest: copies give way to the forward pass.
        self._submit_stream = api.Stream(device=device)

    def mark(self) -> AbstractContextManager[None]:
        """Record an event behind the work submitted so far."""
        event = self._api.Event(enable_timing=False)
        event.record(self._api.current_stream(self._device))
        return self._after(event)

    @contextmanager
    def _after(self, event: Any) -> Iterator[None]:
        self._submit_stream.wait_event(event)
        with self._api.stream(self._submit_stream):
            yield


def compute_order_of(tensor: KVTensor) -> ComputeOrder:
    """Return the order for the memory that a tensor lies in."""
    device: Any = None if isinstance(tensor, np.ndarray) else getattr(tensor, "device", None)
    if device is None or device.type != "cuda":
        return HostComputeOrder()
    import torch

    return StreamComputeOrder(torch.cuda, device)
