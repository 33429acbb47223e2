"""An LRU of blocks, and caches of segments with rules to choose from, both simulated."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, final

import numpy as np
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["Counter", "Outcome", "Rule", "replay_lru", "replay_segments"]

_NOWHERE: Final = -1
_LONGEST_PROMPT: Final = 4096


@dataclass(frozen=True, slots=True)
class Rule:
    """Which segment goes, and what is copied out of it first.

    Attributes:
        victim: ``loss``: where what would be lost was used longest ago. ``mean``: where the mean
            use was longest ago. ``oldest``: which was made first. ``untouched``: of which no block
            was used for longest.
        copied: ``used``: blocks that were used since they came to the segment, those used last
            first. ``recent``: those used last, whether used since or not. ``none``.
        share: Most of the slots of a segment that are copied.
    """

    victim: Literal["loss", "mean", "oldest", "untouched"]
    copied: Literal["used", "recent", "none"]
    share: float

    @override
    def __str__(self) -> str:
        copied = "nothing copied" if self.copied == "none" else f"{self.share:.0%} {self.copied}"
        return f"victim by {self.victim}, {copied}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cache reached.

    Attributes:
        hit_rate: Share of the references that were hits.
        prefix_rate: Share of the references that were hits before their request's first miss.
        amplification: Blocks written over blocks stored.
    """

    hit_rate: float
    prefix_rate: float
    amplification: float


@final
@dataclass(slots=True)
class Counter:
    """Counts the hits of requests."""

    references: int = 0
    hits: int = 0
    prefix_hits: int = 0

    def add(self, found: Sequence[bool]) -> None:
        """Count one request."""
        self.references += len(found)
        self.hits += sum(found)
        first_miss = found.index(False) if False in found else len(found)
        self.prefix_hits += first_miss

    def outcome(self, amplification: float) -> Outcome:
        """Return the rates."""
        return Outcome(
            self.hits / self.references, self.prefix_hits / self.references, amplification
        )


def replay_lru(requests: Sequence[Sequence[int]], capacity: int) -> Outcome:
    """Replay requests over an exact LRU of so many blocks.

    The blocks of a request are used from its end to its beginning: a prefix outlives what it is
    the prefix of, which is the better LRU of the two.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    counter = Counter()
    for request in requests:
        counter.add([block in cache for block in request])
        for block in reversed(request):
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return counter.outcome(1.0)


@final
@dataclass(slots=True)
class _Segment:
    blocks: list[int] = field(default_factory=list)
    touched: int = 0


@final
class _SegmentCache:
    """Blocks appended to segments of equal size, a bounded number of them.

    When no further segment fits and the current one is nearly full, a victim is chosen, its best
    blocks are copied to what is left of the current segment, and it goes.
    """

    def __init__(self, num_blocks: int, num_slots: int, num_segments: int, rule: Rule) -> None:
        self._num_slots = num_slots
        self._num_segments = num_segments
        self._rule = rule
        self._most_copied = int(num_slots * rule.share)
        self._where = np.full(num_blocks, _NOWHERE)
        self._used_at = np.zeros(num_blocks, dtype=np.int64)
        self._came_at = np.zeros(num_blocks, dtype=np.int64)
        self._segments = {0: _Segment()}
        self._current = 0
        self.stored = 0
        self.copied = 0

    def __contains__(self, block: int) -> bool:
        return bool(self._where[block] != _NOWHERE)

    def use(self, block: int, request: int, order: int) -> None:
        """Use a block, or store it when it is missing."""
        if block in self:
            self._segments[int(self._where[block])].touched = request
        else:
            self._append(block, request)
            self.stored += 1
        self._used_at[block] = request * _LONGEST_PROMPT + order

    def _append(self, block: int, request: int) -> None:
        if len(self._segments[self._current].blocks) == self._num_slots:
            if len(self._segments) == self._num_segments:
                self._collect(request)
            self._current = max(self._segments) + 1
            self._segments[self._current] = _Segment()
        self._enter(block, request)
        left = self._num_slots - len(self._segments[self._current].blocks)
        if len(self._segments) == self._num_segments and 0 < left <= self._most_copied:
            self._collect(request)

    def _enter(self, block: int, request: int) -> None:
        segment = self._segments[self._current]
        segment.blocks.append(block)
        segment.touched = request
        self._where[block] = self._current
        self._came_at[block] = request

    def _collect(self, request: int) -> None:
        number = min((n for n in self._segments if n != self._current), key=self._score)
        live = self._live(number)
        kept = self._worth_copying(live)
        self._where[live] = _NOWHERE
        for block in kept:
            self._enter(block, request)
        self.copied += len(kept)
        del self._segments[number]

    def _live(self, number: int) -> npt.NDArray[np.int64]:
        blocks = np.array(self._segments[number].blocks, dtype=np.int64)
        live: npt.NDArray[np.int64] = blocks[self._where[blocks] == number]
        return live

    def _score(self, number: int) -> tuple[float, int]:
        """Return what is smallest for the victim."""
        rule = self._rule.victim
        if rule == "oldest":
            return number, 0
        if rule == "untouched":
            return self._segments[number].touched, number
        uses = self._used_at[self._live(number)]
        if rule == "mean":
            return (float(uses.mean()) if len(uses) else -1.0), number
        place = len(uses) - 1 - self._most_copied
        return (float(np.partition(uses, place)[place]) if place >= 0 else -1.0), number

    def _worth_copying(self, live: npt.NDArray[np.int64]) -> list[int]:
        if self._rule.copied == "none":
            return []
        if self._rule.copied == "used":
            live = live[self._used_at[live] // _LONGEST_PROMPT > self._came_at[live]]
        room = self._num_slots - len(self._segments[self._current].blocks)
        latest = np.argsort(-self._used_at[live], kind="stable")
        kept: list[int] = live[latest[: min(self._most_copied, room)]].tolist()
        return kept


def replay_segments(
    requests: Sequence[Sequence[int]],
    num_blocks: int,
    capacity: int,
    num_segments: int,
    rule: Rule,
) -> Outcome:
    """Replay requests over segments.

    Args:
        requests: Numbers of the blocks of each request.
        num_blocks: Distinct blocks.
        capacity: Blocks that all segments hold, a multiple of their number.
        num_segments: Segments.
        rule: What goes, and what is copied.
    """
    cache = _SegmentCache(num_blocks, capacity // num_segments, num_segments, rule)
    counter = Counter()
    for number, request in enumerate(requests, start=1):
        counter.add([block in cache for block in request])
        for order, block in enumerate(request):
            # Later blocks of a prompt are used less.
            cache.use(block, number, max(0, _LONGEST_PROMPT - 1 - order))
    return counter.outcome((cache.stored + cache.copied) / cache.stored)
