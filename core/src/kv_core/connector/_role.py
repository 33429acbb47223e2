"""What one process of an engine is, as far as the primary tier is concerned."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    import threading

__all__ = ["RegionRole"]

_NONCE_BYTES: Final = 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRole:
    """The part of one process in an engine whose scheduler and workers are separate processes.

    The scheduler creates the primary tier, and every worker attaches to it::

        role = RegionRole.of_scheduler()
        scheduler = TieringOffloadingSpec(config, role=role)
        # in the process of worker 1, which has got the role:
        worker = TieringOffloadingSpec(config, role=role.of_worker(1))

    Attributes:
        nonce: 16 bytes that all processes of one start have in common, drawn anew for each start.
        worker: Rank among the workers; ``None`` is the scheduler.
        deadline_s: Seconds that a worker waits for the scheduler to create the primary tier.
        stop: Ends that wait early; belongs to the worker's process and does not travel.
    """

    nonce: bytes
    worker: int | None = None
    deadline_s: float = 60.0
    stop: threading.Event | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of_scheduler(cls) -> RegionRole:
        """Return the role of the scheduler in a start that begins now."""
        return cls(nonce=secrets.token_bytes(_NONCE_BYTES))

    def of_worker(
        self, worker: int, *, deadline_s: float = 60.0, stop: threading.Event | None = None
    ) -> RegionRole:
        """Return the role of a worker in the same start.

        Args:
            worker: Its rank.
            deadline_s: Seconds to wait for the scheduler.
            stop: Ends the wait as the deadline does, when another thread sets it.
        """
        return replace(self, worker=worker, deadline_s=deadline_s, stop=stop)
