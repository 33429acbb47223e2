"""The interface that every copy back end implements: host memory, CUDA, Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["CopyBackend", "CopyBatch", "CopyStream", "CopyTicket"]


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Byte ranges to copy. Ranges of one batch do not overlap.

    Attributes:
        sources: Addresses, ``int64``, shape ``(n,)``.
        destinations: Addresses, ``int64``, shape ``(n,)``.
        sizes: Bytes, ``int64``, shape ``(n,)``, each positive.
    """

    sources: npt.NDArray[np.int64]
    destinations: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole batch."""
        return int(self.sizes.sum())


class CopyTicket(Protocol):
    """One batch under way."""

    def done(self) -> bool:
        """Say whether the batch has ended, well or badly. Does not block."""

    def wait(self) -> None:
        """Block until the batch has ended."""

    @property
    def error(self) -> BaseException | None:
        """Why the batch failed; ``None`` before its end and after success."""

    @property
    def elapsed_seconds(self) -> float:
        """From the start of the copy to its end. Meaningful once done."""


class CopyStream(Protocol):
    """An ordered queue of batches: each starts after the one before has ended."""

    def submit(self, batch: CopyBatch) -> CopyTicket:
        """Queue a batch and return at once.

        The batch's arrays keep their content until its ticket is done, so that a device may read
        them late. The calling thread's current stream is the one that the batch is ordered after.

        Raises:
            Exception: The batch was refused. None of it is under way, now or later.
        """

    def close(self) -> None:
        """Finish queued batches and release the stream. Idempotent."""


class CopyBackend(Protocol):
    """Opens streams. One back end serves a worker; each direction has a stream of its own.

    Both directions are ordered after the engine's own work on the same memory: a store after
    the writers of its source, a load after earlier readers and writers of its destination. A
    back end over device memory sees to that in :meth:`CopyStream.submit`; in host memory the
    engine's work has ended when it returns.
    """

    @property
    def name(self) -> str:
        """Short name, for logs and reports."""

    def open_stream(self, name: str) -> CopyStream:
        """Open a stream; the name shows in thread names and profiles."""
