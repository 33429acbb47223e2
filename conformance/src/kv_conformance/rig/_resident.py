"""How much memory a process takes, and took at its worst.

Two witnesses, because each is blind to something. ``tracemalloc`` sees every allocation of Python
and numpy, however short its life. The kernel sees native libraries and anonymous mappings, but only
at the moments when it is asked. Shared memory of files is left out: a mapped file is no copy,
whether it lies on a disk or in ``/dev/shm``.

**Who owns what.** The suite's thread starts and stops the sampler, and reads its peak when the
sampler has ended; the sampler's thread owns the peak until then.
"""

from __future__ import annotations

import gc
import re
import threading
import tracemalloc
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SLACK_BYTES", "MemoryUse", "MemoryWatch", "memory_now", "tracing"]

SLACK_BYTES: Final = 12 << 20
"""What a tier may take beyond ``staging_bytes``: for stacks, arenas and what allocators keep.

Less than one block of the tests that measure, so that a copy of a single block is seen.
"""

_SAMPLE_S: Final = 0.002
_STATUS: Final = Path("/proc/self/status")
_MAPPINGS: Final = Path("/proc/self/smaps")
_ANONYMOUS: Final = re.compile(rb"^RssAnon:\s+(\d+) kB", re.MULTILINE)
_SHARED: Final = re.compile(rb"^RssShmem:\s+(\d+) kB", re.MULTILINE)
# How Linux names memory that is shared and has no file, such as a buffer made by mmap(-1, ...).
_NAMELESS: Final = re.compile(
    rb"^\S+ \S+ \S+ \S+ \S+ +/dev/zero \(deleted\)\n(?:.*\n)*?Rss:\s+(\d+) kB", re.MULTILINE
)


@final
@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of this process, in bytes.

    Attributes:
        traced: Allocated by Python and numpy.
        resident: Anonymous pages, private or shared; 0 where the system does not tell.
    """

    traced: int
    resident: int

    def beyond(self, *others: MemoryUse) -> int:
        """Return the bytes beyond the largest of others, by the witness that saw more."""
        return max(
            self.traced - max(other.traced for other in others),
            self.resident - max(other.resident for other in others),
        )


def memory_now() -> MemoryUse:
    """Return what the process takes at this moment."""
    # Asked first, and without letting another thread run.
    traced, _ = tracemalloc.get_traced_memory()
    return MemoryUse(traced, _resident(nameless=True))


def _resident(*, nameless: bool) -> int:
    """Return anonymous bytes; those that are shared only if ``nameless``: they take a while."""
    try:
        status = _STATUS.read_bytes()
    except OSError:
        return 0
    anonymous = _ANONYMOUS.search(status)
    if anonymous is None:
        return 0
    pages_kib = int(anonymous[1])
    if nameless:
        pages_kib += sum(int(rss) for rss in _NAMELESS.findall(_MAPPINGS.read_bytes()))
    return pages_kib << 10


def _shared() -> int:
    try:
        found = _SHARED.search(_STATUS.read_bytes())
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


@contextmanager
def tracing() -> Iterator[None]:
    """Trace allocations, unless somebody does so already."""
    if tracemalloc.is_tracing():
        yield
        return
    tracemalloc.start(1)
    try:
        yield
    finally:
        tracemalloc.stop()


@final
class MemoryWatch:
    """Finds the peak of the memory between its begin and its end. Use it within :func:`tracing`.

    Attributes:
        before: When it began.
        peak: The most of each witness meanwhile, once it has ended.
        after: When it ended.
    """

    before: MemoryUse
    peak: MemoryUse
    after: MemoryUse

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="memory-sampler", daemon=True)

    def __enter__(self) -> MemoryWatch:
        gc.collect()
        self.before = memory_now()
        self._worst = self.before.resident
        self._nameless_base = _shared()
        tracemalloc.reset_peak()
        self._sampler.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        _, traced = tracemalloc.get_traced_memory()
        self._ended.set()
        self._sampler.join()
        gc.collect()
        self.after = memory_now()
        self.peak = MemoryUse(traced, self._worst)

    @property
    def extra_bytes(self) -> int:
        """The peak beyond what was there before or is there still: what a tier keeps is no copy."""
        return self.peak.beyond(self.before, self.after)

    def _sample(self) -> None:
        least = _resident(nameless=False)
        nameless = self.before.resident - least
        while not self._ended.wait(_SAMPLE_S):
            # The list of mappings takes milliseconds: only when shared memory has grown.
            if _shared() > self._nameless_base + SLACK_BYTES:
                now = _resident(nameless=True)
            else:
                now = _resident(nameless=False) + nameless
            self._worst = max(self._worst, now)
