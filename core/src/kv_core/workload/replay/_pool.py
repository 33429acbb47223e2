"""A paged pool of GPU blocks with prefix reuse, as inference engines have it."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["NULL_BLOCK", "GpuBlockPool"]

NULL_BLOCK: Final = 0
"""Never allocated: a zero in a block table means "no block"."""


@final
class GpuBlockPool:
    """Block ids, their users, and which of them hold which prefix block.

    A block that nobody uses keeps its content and can be found by hash until it is handed out
    again, least recently freed first.

    Attributes:
        num_blocks: Blocks that can be handed out; the null block is not among them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks - 1
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._users = [0] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, with or without reusable content."""
        return len(self._free)

    def match_prefix(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks that hold the longest leading run of these hashes."""
        found = []
        for block_hash in block_hashes:
            block_id = self._block_by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Use blocks that hold reusable content."""
        for block_id in block_ids:
            if self._users[block_id] == 0:
                del self._free[block_id]
            self._users[block_id] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Hand out blocks with meaningless content, or ``None`` when too few are free."""
        if count > len(self._free):
            return None
        block_ids = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            block_hash = self._hash_by_block.pop(block_id, None)
            if block_hash is not None:
                del self._block_by_hash[block_hash]
            self._users[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Stop using blocks, the tail of the prefix first: it is the first to be handed out."""
        for block_id in reversed(block_ids):
            self._users[block_id] -= 1
            if self._users[block_id] == 0:
                self._free[block_id] = None

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make the content of a block findable. The first block with a hash keeps it."""
        if block_hash not in self._block_by_hash and block_id not in self._hash_by_block:
            self._block_by_hash[block_hash] = block_id
            self._hash_by_block[block_id] = block_hash
