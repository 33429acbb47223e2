"""A paged pool of GPU blocks with prefix reuse, as inference engines have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from kv_core.errors import ConfigError
from kv_core.keys import make_offload_key
from kv_core.workload.replay._free_queue import FreeQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kv_core.keys import OffloadKey

__all__ = ["NULL_BLOCK", "GpuBlockPool"]

NULL_BLOCK: Final = 0
"""Never allocated: a zero in a block table means "no block"."""


@final
class GpuBlockPool:
    """Block ids, their users, and which of them hold which prefix block.

    A block that nobody uses keeps its content and can be found by hash until it is handed out
    again, least recently freed first. Implements ``kv_core.simple.GpuBlockPoolView``; all blocks
    are of one KV cache group.

    Attributes:
        num_blocks: Blocks that can be handed out; the null block is not among them.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make a pool whose blocks are all free.

        Args:
            num_blocks: Blocks, with the null block.

        Raises:
            ConfigError: There is no memory for the books of so many.
        """
        self.num_blocks = num_blocks - 1
        try:
            self._free = FreeQueue(num_blocks)
            self._users = [0] * num_blocks
        except (MemoryError, OverflowError) as error:
            raise ConfigError(
                f"the books of a GPU pool of {num_blocks} blocks do not fit into memory. Give it "
                "fewer blocks (--gpu-blocks)",
                setting="gpu_blocks",
            ) from error
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
                self._free.remove(block_id)
            self._users[block_id] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Hand out blocks with meaningless content, or ``None`` when too few are free."""
        if count > len(self._free):
            return None
        block_ids = []
        for _ in range(count):
            block_id = self._free.pop()
            block_hash = self._hash_by_block.pop(block_id, None)
            if block_hash is not None:
                del self._block_by_hash[block_hash]
            self._users[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def release(self, block_ids: Sequence[int], *, to_front: bool = False) -> None:
        """Stop using blocks, the tail of the prefix first: it is the first to be handed out.

        Args:
            block_ids: Blocks, in prefix order.
            to_front: Let them be handed out before all other free blocks.
        """
        freed = []
        for block_id in reversed(block_ids):
            self._users[block_id] -= 1
            if self._users[block_id] == 0:
                freed.append(block_id)
        if to_front:
            self._free.extend_front(freed)
        else:
            for block_id in freed:
                self._free.append(block_id)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make the content of a block findable. The first block with a hash keeps it."""
        if block_hash not in self._block_by_hash and block_id not in self._hash_by_block:
            self._block_by_hash[block_hash] = block_id
            self._hash_by_block[block_id] = block_hash

    def first_free(self) -> int | None:
        """Return the block that is handed out next; ``None`` when none is free."""
        return self._free.first()

    def next_free(self, block_id: int) -> int | None:
        """Return the block that is handed out after a free one; ``None`` after the last."""
        return self._free.after(block_id)

    def is_free(self, block_id: int) -> bool:
        """Say whether nobody uses a block."""
        return block_id in self._free

    def block_key(self, block_id: int) -> OffloadKey | None:
        """Return what can be found in a block, or ``None``."""
        block_hash = self._hash_by_block.get(block_id)
        return None if block_hash is None else make_offload_key(block_hash, 0)
