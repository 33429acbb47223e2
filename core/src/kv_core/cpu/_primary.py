"""The primary tier: the ledger plus what secondary tiers need of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
from typing_extensions import override

from kv_core.cpu._blocks import BEING_WRITTEN
from kv_core.cpu._manager import CPUOffloadingManager
from kv_core.errors import ConfigError, EngineStateError, RegionError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import numpy.typing as npt

    from kv_core.contract import OffloadKey

__all__ = ["CPUPrimaryTierOffloadingManager", "PreparedWrite"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedWrite:
    """Slots that are reserved for a promotion.

    Attributes:
        block_ids: Slots, in the order of the keys.
        generations: Generation of each slot; hand it back with the completion.
        evicted_keys: Blocks that had to leave.
    """

    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    evicted_keys: tuple[OffloadKey, ...] = ()


@final
class CPUPrimaryTierOffloadingManager(CPUOffloadingManager):
    """A CPU ledger whose slots secondary tiers read (cascades) and write (promotions).

    Tiers hold slots by id: a reset may take the keys away while their jobs run, and a slot then
    stays out of use until its job has ended, however long that takes.

    Attributes:
        block_bytes: Payload bytes of one slot.
    """

    def __init__(
        self,
        num_blocks: int,
        view: memoryview,
        block_bytes: int,
        policy: str = "lru",
        *,
        enable_events: bool = False,
        medium: str = "CPU",
        slot_freed: Callable[[int], None] | None = None,
        on_shutdown: Callable[[], None] | None = None,
    ) -> None:
        """Make an empty ledger over a mapping.

        Args:
            num_blocks: Slots in total.
            view: The slots, shape ``(num_blocks, row_stride)``, format ``B``. Owned from here
                on: :meth:`shutdown` releases it.
            block_bytes: Payload bytes of one slot, at most ``row_stride``.
            policy: Name of the eviction policy.
            enable_events: Whether to record events.
            medium: Name of the medium in events.
            slot_freed: Called with a slot whose content has just become meaningless.
            on_shutdown: Called once after the view is released, to close the region.

        Raises:
            ConfigError: The view does not have that shape, or there is no such policy.
        """
        super().__init__(
            num_blocks,
            policy,
            enable_events=enable_events,
            medium=medium,
            slot_freed=slot_freed,
        )
        shape = view.shape or ()
        if len(shape) != 2 or shape[0] != num_blocks or view.format != "B":
            raise ConfigError(
                f"the primary view must have shape ({num_blocks}, row_stride) and format 'B', "
                f"found shape {shape} and format {view.format!r}",
                setting="cpu_bytes_to_use",
            )
        if not 0 < block_bytes <= shape[1]:
            raise ConfigError(
                f"block_bytes must be between 1 and the row stride {shape[1]}, found {block_bytes}",
                setting="cpu_bytes_to_use",
            )
        self.block_bytes = block_bytes
        self._view = view
        self._on_shutdown = on_shutdown
        # Slots whose promotion was given up, with their keys; a success may still be adopted.
        self._abandoned: dict[int, OffloadKey] = {}

    # -- what is there --------------------------------------------------------------------------

    def get_kv_memoryview(self) -> memoryview:
        """Return the slots, shape ``(num_blocks, row_stride)``, format ``B``."""
        return self._view

    def is_ready(self, key: OffloadKey) -> bool:
        """Say whether a block is present and readable. Promises nothing, unlike ``lookup``."""
        block_id = self._slot_of(key)
        return block_id is not None and self._table.ref_counts[block_id] >= 0

    def block_id_of(self, key: OffloadKey) -> int | None:
        """Return the slot of a key that is present or being written, else ``None``."""
        return self._slot_of(key)

    def generation_of(self, block_id: int) -> int:
        """Return how often a slot was allocated so far."""
        return self._table.generations[block_id]

    def generations_of(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """Return how often each of some slots was allocated so far."""
        return tuple(map(self._table.generations.__getitem__, block_ids))

    def num_free_or_evictable(self) -> int:
        """Return how many slots a reservation could get if nothing were protected."""
        return self._table.num_free + self._num_evictable

    # -- cascades -------------------------------------------------------------------------------

    def prepare_read(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.int32]:
        """Pin ready blocks for a cascade. Not a use: copying down says nothing about demand.

        Returns:
            Slots, ``int32``, in the order of the keys. Each is matched by one
            :meth:`complete_read`.

        Raises:
            EngineStateError: A key is not present and ready. Nothing was pinned.
        """
        return np.array(self.pin(keys), dtype=np.int32)

    def pin(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Pin ready blocks, as :meth:`prepare_read` does, and return their slots as a list."""
        block_ids = self._pin(keys)
        slot_holds = self._table.slot_holds
        for block_id in block_ids:
            slot_holds[block_id] += 1
        return block_ids

    def complete_read(self, block_ids: Iterable[int]) -> None:
        """Take back the pins of :meth:`prepare_read`, also after a reset."""
        ref_counts, slot_holds, orphans = (
            self._table.ref_counts,
            self._table.slot_holds,
            self._orphans,
        )
        held: list[int] = block_ids.tolist() if isinstance(block_ids, np.ndarray) else [*block_ids]
        unpinned: list[int] = []
        for block_id in held:
            if slot_holds[block_id] < 1 or ref_counts[block_id] < 1:
                _logger.warning("ignored the end of a read of slot %d: it is not read", block_id)
                continue
            slot_holds[block_id] -= 1
            if block_id in orphans:
                ref_counts[block_id] -= 1
                self._free_if_unheld(block_id)
            else:
                unpinned.append(block_id)
        self._unpin(unpinned)

    # -- promotions -----------------------------------------------------------------------------

    def prepare_write(
        self, keys: Sequence[OffloadKey], protected: Collection[OffloadKey] = ()
    ) -> PreparedWrite | None:
        """Reserve slots for blocks that a tier will write. All or nothing.

        Args:
            keys: Distinct blocks that are not present, in prefix order.
            protected: Keys that must not be evicted, besides the hits of this step.

        Returns:
            ``None`` when there is no room, and then nothing has changed.

        Raises:
            EngineStateError: A key is present or given twice. Nothing was reserved.
        """
        slot_of = self._slot_of
        for key in keys:
            if slot_of(key) is not None:
                raise EngineStateError(
                    f"block {key.hex()} is present or being written already; look it up before a "
                    "promotion. Nothing was reserved."
                )
        if len(keys) > 1 and len(set(keys)) != len(keys):
            raise EngineStateError(
                f"{len(keys)} keys of a promotion hold only {len(set(keys))} distinct ones. "
                "Nothing was reserved."
            )
        evicted = self._make_room(keys, protected)
        if evicted is None:
            return None
        block_ids = self._insert(keys)
        slot_holds, generations = self._table.slot_holds, self._table.generations
        for block_id in block_ids:
            slot_holds[block_id] = 1
        return PreparedWrite(
            tuple(block_ids), tuple(map(generations.__getitem__, block_ids)), evicted
        )

    def reserve(
        self, key: OffloadKey, evicted: Callable[[tuple[OffloadKey, ...]], None]
    ) -> int | None:
        """Reserve a slot for one block, as :meth:`prepare_write` does, at a fraction of its cost.

        Lookups find blocks one by one, and a promotion may have thousands.

        Args:
            key: A block that is not present: the caller has just looked.
            evicted: Told of blocks that had to leave.

        Returns:
            The slot; ``None`` when there is no room, and then nothing has changed.
        """
        if not self._table.num_free or key in self._unflushed_keys:
            victims = self._make_room((key,))
            if victims is None:
                return None
            if victims:
                evicted(victims)
        block_id = self._table.allocate_one()
        self._num_writing += 1
        self._policy.insert(key, block_id)
        self._table.slot_holds[block_id] = 1
        return block_id

    def complete_writes(
        self,
        keys: Sequence[OffloadKey],
        block_ids: Sequence[int],
        generations: Sequence[int],
        succeeded: Collection[OffloadKey],
    ) -> list[OffloadKey]:
        """Note the end of the writes of one job, as :meth:`complete_write` does for each.

        Args:
            keys: The blocks.
            block_ids: Their slots.
            generations: Generation of each slot.
            succeeded: Those of the keys that were written; constant-time ``in``.

        Returns:
            The blocks that have become readable, in order.
        """
        table, slot_of, orphans = self._table, self._slot_of, self._orphans
        ref_counts, slot_holds = table.ref_counts, table.slot_holds
        current = table.generations
        ready: list[OffloadKey] = []
        recorded = 0
        for key, block_id, generation in zip(keys, block_ids, generations, strict=True):
            if (
                key in succeeded
                and slot_of(key) == block_id
                and current[block_id] == generation
                and ref_counts[block_id] == BEING_WRITTEN
                and slot_holds[block_id] == 1
                and block_id not in orphans
            ):
                slot_holds[block_id] = 0
                ref_counts[block_id] = 0
                self._num_writing -= 1
                ready.append(key)
                continue
            # Events have the order in which things happen.
            self._record(ready[recorded:], removed=False)
            if self.complete_write(key, block_id, generation, key in succeeded):
                ready.append(key)
            recorded = len(ready)
        self._record(ready[recorded:], removed=False)
        return ready

    def complete_write(
        self, key: OffloadKey, block_id: int, generation: int, success: bool
    ) -> bool:
        """Note the end of a promotion's write. Never raises.

        A reservation that still has its key becomes a readable block, or is freed. One whose key
        a reset took away is only freed. One that was abandoned is adopted after a success,
        unless the key has come back or a reset has passed. Anything else is late, duplicate or
        unknown, and is ignored.

        Returns:
            Whether the block has become readable.
        """
        if not self._is_being_promoted(block_id, generation):
            _logger.debug(
                "ignored the end of a write of slot %d, generation %d", block_id, generation
            )
            return False
        table = self._table
        if block_id in self._orphans:
            adopted = (
                self._abandoned.pop(block_id, None) == key
                and success
                and self._slot_of(key) is None
            )
            table.slot_holds[block_id] = 0
            if not adopted:
                self._free_if_unheld(block_id)
                return False
            self._orphans.discard(block_id)
            self._policy.insert(key, block_id)
        elif self._slot_of(key) != block_id:
            _logger.debug("ignored the end of a write of slot %d: it has another key", block_id)
            return False
        else:
            table.slot_holds[block_id] = 0
            self._num_writing -= 1
            if not success:
                self._policy.remove(key)
                self._free((block_id,))
                return False
        table.ref_counts[block_id] = 0
        self._record((key,), removed=False)
        return True

    def abandon_write(self, key: OffloadKey, block_id: int, generation: int) -> bool:
        """Give up waiting for a promotion: its key is absent at once, its slot stays out of use.

        The slot counts as orphaned until :meth:`complete_write` tells that nothing writes to it
        any more; see there for what a late success may do.

        Returns:
            ``False`` when there is no such reservation, and then nothing has changed.
        """
        if not self._is_being_promoted(block_id, generation) or self._slot_of(key) != block_id:
            return False
        self._policy.remove(key)
        self._num_writing -= 1
        self._orphans.add(block_id)
        self._abandoned[block_id] = key
        return True

    # -- life cycle -----------------------------------------------------------------------------

    @override
    def reset_cache(self) -> None:
        super().reset_cache()
        self._abandoned.clear()

    @override
    def shutdown(self) -> None:
        """Release the view, then close the region.

        Raises:
            RegionError: Somebody still holds an export of the view. Can be called again.
        """
        try:
            self._view.release()
        except BufferError as error:
            raise RegionError(
                f"the view of the primary tier cannot be released: {error}. Shut the tiers down "
                "first, and drop every array made of it."
            ) from error
        if self._on_shutdown is not None:
            # Forgotten only when it succeeded: a region that is still in use can be closed later.
            self._on_shutdown()
            self._on_shutdown = None

    def _is_being_promoted(self, block_id: int, generation: int) -> bool:
        table = self._table
        return (
            0 <= block_id < self.num_blocks
            and table.generations[block_id] == generation
            and table.ref_counts[block_id] == BEING_WRITTEN
            and table.slot_holds[block_id] == 1
        )

    def _free_if_unheld(self, block_id: int) -> None:
        """Free an orphaned slot once neither a tier nor the GPU holds it."""
        if not self._table.slot_holds[block_id] and block_id not in self._unflushed_orphans:
            self._orphans.discard(block_id)
            self._free((block_id,))
