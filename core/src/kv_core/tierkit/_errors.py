"""The one table that translates what a tier raises into what a job reports."""

from __future__ import annotations

import errno
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from kv_core.contract import JobErrorKind
from kv_core.errors import BlockDamagedError, BlockDeclinedError, BlockMissingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.contract import Clock

__all__ = [
    "RETIRING_KINDS",
    "SERIOUSNESS",
    "BlockFailure",
    "Occasionally",
    "describe_error",
    "load_error_kind",
    "store_error_kind",
    "without_frames",
]

SERIOUSNESS: Final = (
    JobErrorKind.DECLINED,
    JobErrorKind.MISSING,
    JobErrorKind.DAMAGED,
    JobErrorKind.STALLED,
    JobErrorKind.FAILED,
)
"""Kinds from least to most serious: a job reports the most serious of its keys."""

RETIRING_KINDS: Final = frozenset({JobErrorKind.MISSING, JobErrorKind.DAMAGED})
"""Failed loads after which the object must not be found again."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_MESSAGE_CHARS: Final = 300


@final
@dataclass(frozen=True, slots=True)
class BlockFailure:
    """How the transfer of one block failed.

    Attributes:
        kind: What went wrong.
        message: One line for the log.
        ticket: Drawn before the object was read, 0 when it was not read; see
            :class:`~kv_core.tierkit.AsyncLookup`.
        retired: A failed load only: whether the bad object was removed, so that a probe tells
            the truth again.
    """

    kind: JobErrorKind
    message: str
    ticket: int
    retired: bool = False


def load_error_kind(error: BaseException) -> JobErrorKind:
    """Return the kind of a failed load of one block."""
    if isinstance(error, BlockMissingError):
        return JobErrorKind.MISSING
    if isinstance(error, BlockDamagedError):
        return JobErrorKind.DAMAGED
    return JobErrorKind.FAILED


def store_error_kind(error: BaseException) -> JobErrorKind:
    """Return the kind of a failed store of one block. A full backend is no broken backend."""
    if isinstance(error, BlockDeclinedError):
        return JobErrorKind.DECLINED
    if isinstance(error, OSError) and error.errno in _FULL:
        return JobErrorKind.DECLINED
    return JobErrorKind.FAILED


def moved_bytes(hook: str, returned: Any) -> int | None:
    """Return what a hook that moves a block has returned.

    Raises:
        TypeError: It is no number of bytes. A hook that returns the bytes instead of writing them
            would otherwise pass for a good one.
    """
    if returned is None:
        return None
    try:
        return operator.index(returned)
    except TypeError:
        raise TypeError(
            f"{hook} returned a {type(returned).__name__}, expected None or the number of bytes "
            "moved; the bytes of a block belong into the buffer"
        ) from None


def without_frames(error: BaseException) -> BaseException:
    """Drop the tracebacks of an error and of what led to it.

    The frames of a hook that raised may hold arrays over shared memory, which must not outlive
    the job.
    """
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            todo += (link.__cause__, link.__context__)
    return error


def describe_error(error: BaseException, hide: Callable[[str], str] = str) -> str:
    """Return one line for the log: the type and the text, shortened. Never raises.

    Args:
        error: What to describe.
        hide: Masks what must not be repeated.
    """
    try:
        text = " ".join(hide(str(error)).split())
    except Exception:  # noqa: BLE001 - the engine's thread writes logs, too: no text may stop it
        text = "(an error without a readable text)"
    if len(text) > _MESSAGE_CHARS:
        text = text[: _MESSAGE_CHARS - 3] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@final
class Occasionally:
    """Says when a warning that could come by the thousand is due again.

    Thread-safe in so far as two threads may both be told yes.

    Args:
        clock: Monotonic seconds.
        every_s: Least seconds between two warnings.
    """

    def __init__(self, clock: Clock, every_s: float = 60.0) -> None:
        self._clock = clock
        self._every_s = every_s
        self._due_at = float("-inf")

    def due(self) -> bool:
        """Say whether to warn now; if so, the next warning is due ``every_s`` later."""
        now = self._clock()
        if now < self._due_at:
            return False
        self._due_at = now + self._every_s
        return True
