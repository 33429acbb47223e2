"""Direct I/O where it works, and the page cache where it does not.

Some file systems refuse direct I/O at ``open``, some at the first transfer, some for the
addresses or the sizes of one machine only. What does not work is given up for good, separately
for reads and for writes, with one warning that says why.

**Who owns what.** Any thread may call anything. Both attributes of :class:`DirectIO` only ever
change from true to false; a thread that misses the change finds out by itself.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["DirectIO", "transfer"]

logger = logging.getLogger(__name__)

_MOST_BUFFERS: Final = 1024
"""Buffers that one call takes: ``IOV_MAX`` on Linux."""


@final
class DirectIO:
    """Whether to bypass the page cache.

    Args:
        block_bytes: Size of the blocks, for the warning.
        wanted: Whether to try.

    Attributes:
        reads: Whether reads bypass the page cache.
        writes: Whether writes do.
    """

    __slots__ = ("_block_bytes", "reads", "writes")

    def __init__(self, block_bytes: int, *, wanted: bool) -> None:
        self._block_bytes = block_bytes
        self.reads = wanted
        self.writes = wanted

    def open(self, opener: Callable[[int], int], *, writing: bool) -> int:
        """Open a file with ``O_DIRECT``, or without where that is refused.

        Args:
            opener: Opens it with the given additional flags.
            writing: Whether for writes, else for reads.

        Raises:
            OSError: It cannot be opened either way.
        """
        if not (self.writes if writing else self.reads):
            return opener(0)
        try:
            return opener(os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            refusal = error
        descriptor = opener(0)
        self.give_up(refusal, writing=writing)
        return descriptor

    def give_up(self, error: OSError, *, writing: bool) -> None:
        """Use the page cache from now on, and say so once."""
        if writing:
            known, self.writes = not self.writes, False
        else:
            known, self.reads = not self.reads, False
        if not known:
            logger.warning(
                "direct I/O does not work for %s blocks of %d bytes here (errno %s, %s): using "
                "the page cache. Set direct_io to false to do without this attempt.",
                "writing" if writing else "reading",
                self._block_bytes,
                error.errno,
                errno.errorcode.get(error.errno or 0, "unknown"),
            )


def transfer(
    direct: DirectIO,
    descriptor: int,
    buffers: Sequence[memoryview],
    offset: int,
    *,
    writing: bool,
) -> int:
    """Move buffers to or from consecutive bytes of a file, until all are through.

    Args:
        direct: Told when direct I/O turns out not to work.
        descriptor: The file.
        buffers: Flat views of bytes, none of them empty.
        offset: Where in the file the first one belongs.
        writing: Whether to write, else to read.

    Returns:
        Bytes moved: less than all only where the file, or the room for it, ended.

    Raises:
        OSError: A part could not be moved.
    """
    call = os.pwritev if writing else os.preadv
    total = sum(map(len, buffers))
    moved = 0
    tried_buffered = False
    while moved < total:
        rest = _rest(buffers, moved)
        try:
            step = call(descriptor, rest[:_MOST_BUFFERS], offset + moved)
        except OSError as error:
            # Another thread may have made the descriptor a buffered one while this one waited.
            if error.errno != errno.EINVAL or tried_buffered:
                raise
            # At an odd offset, after a short transfer, that says nothing about the rest.
            if not moved and _is_direct(descriptor):
                direct.give_up(error, writing=writing)
            _make_buffered(descriptor)
            tried_buffered = True
            continue
        finally:
            if rest is not buffers:
                for view in rest:
                    view.release()
        if not step:
            break
        moved += step
    return moved


def _rest(buffers: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """Return what is left of the buffers after ``done`` bytes; new views where that is a part."""
    if not done:
        return buffers
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _make_buffered(descriptor: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
