"""The memory that is stored from and loaded into, and the plan of who moves what."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from typing_extensions import Self

__all__ = ["Batch", "Memory", "Plan"]

_CHECK_BYTES: Final = 2**26
_POISON: Final = 0xEE


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """The blocks of one job.

    Attributes:
        keys: Numbers of the keys.
        slots: Slot of each.
    """

    keys: tuple[int, ...]
    slots: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """A permutation of blocks over slots, cut into jobs.

    Attributes:
        keys: Numbers of the keys, in the order in which they are stored.
        sources: Slot that each is stored from.
        targets: Slot that each is loaded into.
    """

    keys: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def stores(self, job_blocks: int) -> list[Batch]:
        """Return store jobs of so many blocks."""
        return self._cut(self.sources, job_blocks)

    def loads(self, job_blocks: int) -> list[Batch]:
        """Return load jobs of the same blocks as the store jobs of that size."""
        return self._cut(self.targets, job_blocks)

    def single_loads(self, places: Sequence[int]) -> list[Batch]:
        """Return load jobs of one block each, given by their places in the plan."""
        return [Batch((self.keys[i],), (self.targets[i],)) for i in places]

    def _cut(self, slots: tuple[int, ...], job_blocks: int) -> list[Batch]:
        starts = range(0, len(self.keys), job_blocks)
        return [
            Batch(self.keys[at : at + job_blocks], slots[at : at + job_blocks]) for at in starts
        ]


@final
class Memory:
    """Shared memory in two halves: random bytes to store, and room to load them into.

    A file in memory like an engine's region, without a name: other processes are handed its
    descriptor.

    Args:
        half_bytes: Bytes of each half, a multiple of all block sizes.
        seed: Seed of the bytes.

    Attributes:
        descriptor: Of the file.
        half_bytes: Bytes of each half.
        mapping: All of it.
    """

    def __init__(self, half_bytes: int, seed: int = 1) -> None:
        self.half_bytes = half_bytes
        self.descriptor = os.memfd_create("kv-core-benchmark")
        try:
            os.ftruncate(self.descriptor, 2 * half_bytes)
            self.mapping = mmap.mmap(self.descriptor, 2 * half_bytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._next_key = 0
        words = self._bytes().view(np.uint64)
        step = _CHECK_BYTES // words.itemsize
        random = np.random.default_rng(seed)
        half_words = half_bytes // words.itemsize
        for at in range(0, half_words, step):
            part = words[at : min(at + step, half_words)]
            part[:] = random.integers(2**64, size=len(part), dtype=np.uint64)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        # After an error, its traceback still holds views of the memory.
        with suppress(BufferError):
            self.mapping.close()

    def num_slots(self, block_bytes: int) -> int:
        """Return how many blocks both halves hold."""
        return 2 * self.half_bytes // block_bytes

    def view(self, block_bytes: int) -> memoryview:
        """Return the memory as rows of one block each. An export: release it."""
        return memoryview(self.mapping).cast("B", (self.num_slots(block_bytes), block_bytes))

    def plan(self, num_blocks: int, block_bytes: int, random: np.random.Generator) -> Plan:
        """Return new keys for so many blocks, in slots scattered over both halves."""
        half = self.half_bytes // block_bytes
        first = self._next_key
        self._next_key += num_blocks
        return Plan(
            tuple(range(first, first + num_blocks)),
            tuple(random.permutation(half)[:num_blocks].tolist()),
            tuple((half + random.permutation(half)[:num_blocks]).tolist()),
        )

    def poison(self) -> None:
        """Overwrite what was loaded."""
        self._bytes()[self.half_bytes :] = _POISON

    def wrong_blocks(self, plan: Plan, block_bytes: int) -> int:
        """Compare what was loaded with what was stored, byte by byte."""
        rows = self._bytes().view(np.uint64).reshape(-1, block_bytes // 8)
        step = max(1, _CHECK_BYTES // block_bytes)
        wrong = 0
        for at in range(0, len(plan.keys), step):
            sources, targets = plan.sources[at : at + step], plan.targets[at : at + step]
            wrong += int((rows[list(sources)] != rows[list(targets)]).any(axis=1).sum())
        return wrong

    def _bytes(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.mapping, dtype=np.uint8)
