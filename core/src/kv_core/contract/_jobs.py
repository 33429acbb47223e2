"""Jobs: asynchronous batches between the primary tier and one secondary tier."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

from typing_extensions import override

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kv_core.contract._request import ReqContext
    from kv_core.keys import OffloadKey

__all__ = ["JobError", "JobErrorKind", "JobId", "JobMetadata", "JobResult"]

JobId = NewType("JobId", int)
"""Identifies a job for the life of an engine. Never reused."""


@dataclass(frozen=True, slots=True, eq=False)
class JobMetadata:
    """One batch of blocks to move, as the engine hands it to a tier.

    The engine guarantees: the slots are pinned from submit until the tier has reported the job
    (G-2); keys and block ids are distinct, in range, equally long and in the same order (G-3).

    Attributes:
        job_id: Unique for the life of the engine.
        keys: The blocks, distinct.
        block_ids: Slots of the primary tier, ``int32``, shape ``(len(keys),)``, distinct;
            ``block_ids[i]`` belongs to ``keys[i]``.
        is_promotion: ``True`` for loads (tier to primary), ``False`` for stores.
        req_context: The request on whose behalf the blocks move.
        submit_time: Seconds on the context's clock.
    """

    job_id: JobId
    keys: tuple[OffloadKey, ...]
    block_ids: npt.NDArray[np.int32]
    is_promotion: bool
    req_context: ReqContext
    submit_time: float


class JobErrorKind(enum.Enum):
    """Why a job, or a part of it, did not succeed."""

    DECLINED = "declined"
    """The tier is full or throttled. Stores only; does not count against the tier's health."""
    MISSING = "missing"
    """The object of a block is not there."""
    DAMAGED = "damaged"
    """The object of a block is truncated, over-long or has wrong bytes. It was retired."""
    FAILED = "failed"
    """The backend failed; the same call may succeed later."""
    STALLED = "stalled"
    """The deadline passed before the backend answered, or the job was cancelled by a drain."""


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job failed.

    Attributes:
        kind: The kind the engine acts on. When several keys failed differently, the most
            serious kind: FAILED over STALLED over DAMAGED over MISSING over DECLINED.
        message: One line for the log. No secrets.
    """

    kind: JobErrorKind
    message: str

    @override
    def __str__(self) -> str:
        """Return both in one line."""
        return f"{self.kind.value}: {self.message}"


@dataclass(frozen=True, slots=True)
class JobResult:
    """The outcome of a job. Every job has exactly one.

    Attributes:
        job_id: The job.
        success: ``True`` when every key of the job succeeded.
        successful_keys: With ``success=False``, the keys that succeeded all the same, in job
            order; empty when none did. Ignored with ``success=True``. A key of a store that
            was validly present already counts as stored.
        error: Why keys failed; ``None`` on success.
        transfer_time_s: Seconds from the start of the first transfer to the end of the last.
        transfer_bytes: Bytes that actually moved.
    """

    job_id: JobId
    success: bool
    successful_keys: tuple[OffloadKey, ...] = ()
    error: JobError | None = None
    transfer_time_s: float = 0.0
    transfer_bytes: int = 0
