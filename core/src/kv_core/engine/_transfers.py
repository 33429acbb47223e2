"""The worker-side interface: who copies between two media, and how it is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_core.engine._load_store_specs import LoadStoreSpec

__all__ = ["OffloadingHandler", "TransferResult", "TransferSpec", "TransferType"]

TransferSpec: TypeAlias = "tuple[LoadStoreSpec, LoadStoreSpec]"
"""Source and destination of one transfer."""

TransferType: TypeAlias = "tuple[str, str]"
"""Names of the source and destination media, for example ``("GPU", "CPU")``."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The outcome of one transfer.

    Attributes:
        job_id: As given to ``transfer_async``.
        success: Whether every byte was copied.
        transfer_size: Bytes copied.
        transfer_time: Seconds from the start of the copy to its end.
        transfer_type: Source and destination media.
    """

    job_id: int
    success: bool
    transfer_size: int
    transfer_time: float
    transfer_type: TransferType


class OffloadingHandler(ABC):
    """Copies between one source medium and one destination medium, asynchronously."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Begin a copy and return at once.

        Transfers of one handler run in the order of submission.

        Returns:
            ``False`` when the transfer could not be begun; no result follows then.
        """

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the last call. Does not block."""

    @abstractmethod
    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until these transfers have ended. Unknown or finished ids are fine."""

    @abstractmethod
    def shutdown(self) -> None:
        """Finish transfers in flight and release everything. Idempotent."""
