"""An instance of the segment layout without its tier: every part, and no thread."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any, Final, final

import pytest

from kv_core.tierkit.testing import ManualClock, block_bytes_of, example_key, example_namespace
from kv_tier_fs.segments._collect import Collector
from kv_tier_fs.segments._direct import DirectIO
from kv_tier_fs.segments._folder import NamespaceFolder
from kv_tier_fs.segments._follow import Follower
from kv_tier_fs.segments._index import BlockIndex
from kv_tier_fs.segments._membership import Membership
from kv_tier_fs.segments._reader import SegmentFiles, SegmentReader
from kv_tier_fs.segments._segment import Segment, Segments
from kv_tier_fs.segments._space import Limits, Space
from kv_tier_fs.segments._writer import SegmentWriter, WriterPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kv_core.contract import Namespace, OffloadKey

_BLOCK_BYTES: Final = 4096


@final
class Instance:
    """What one process has of a namespace. Blocks hold the bytes that belong to their keys.

    Args:
        root: Root folder.
        num_slots: Slots of a segment.
        block_bytes: Payload bytes of a block.
        namespace: Namespace, or ``None`` for the usual one.
        limits: Changes of the limits.
    """

    def __init__(
        self,
        root: Path,
        *,
        num_slots: int = 4,
        block_bytes: int = _BLOCK_BYTES,
        namespace: Namespace | None = None,
        **limits: Any,
    ) -> None:
        self.root = root
        self.block_bytes = block_bytes
        self.clock = ManualClock()
        self.folder = NamespaceFolder(root, namespace or example_namespace(block_bytes))
        self.folder.open(read_only=False, timeout_s=5)
        self.membership = Membership(root, self.folder.path)
        self.segments = Segments()
        self.index = BlockIndex()
        self.removed: list[Segment] = []
        direct = DirectIO(block_bytes, wanted=False)
        self.space = Space(
            self.folder,
            self.segments,
            self.index,
            block_bytes,
            Limits(
                **{
                    "capacity_bytes": None,
                    "root_capacity_bytes": None,
                    "min_free_bytes": 1,
                    "namespace_ttl_s": None,
                    "lock_timeout_s": 0.05,
                    **limits,
                }
            ),
            self.clock,
            self.membership,
            self.removed.append,
        )
        self.membership.join(1)
        self.own = self.folder.become_writer(5)
        place = WriterPlace(
            root,
            self.own.path,
            self.own.writer,
            self.folder.fingerprint,
            block_bytes,
            lambda: num_slots,
            sync=False,
        )
        self.writer = SegmentWriter(
            place, self.segments, self.space, direct, lambda: None, lambda task: task()
        )
        self.files = SegmentFiles(root, direct, most_open=8)
        reader = SegmentReader(self.files, direct, block_bytes, lambda _: None)
        self.reader = reader
        self.collector = Collector(
            self.folder, self.space, self.index, reader, self.writer, block_bytes
        )
        self.follower = Follower(
            self.folder,
            block_bytes,
            self.segments,
            self.index,
            self.removed.append,
            own=self.own.writer,
            trust_times=True,
        )
        self._memory = memoryview(mmap.mmap(-1, 64 * block_bytes))

    def keys(self, *numbers: int) -> list[OffloadKey]:
        """Return keys by number."""
        return [example_key(number) for number in numbers]

    def store(self, *numbers: int) -> dict[int, BaseException]:
        """Store blocks and enter them in the index; return what went wrong, by number."""
        keys = self.keys(*numbers)
        views = self._views(len(keys))
        for key, view in zip(keys, views, strict=True):
            view[:] = block_bytes_of(key, self.block_bytes)
        stored, failures = self.writer.store(keys, views)
        for part in stored:
            chosen = keys[part.start : part.start + len(part.slots)]
            self.index.put(part.segment, chosen, part.slots, part.checksums)
        self.index.apply_all()
        return {numbers[index]: error for index, error in failures.items()}

    def load(self, *numbers: int) -> list[int]:
        """Load blocks; return the numbers of those that hold the right bytes."""
        right = []
        self.index.apply_all()
        self.index.count_use()
        for number in numbers:
            (key,) = self.keys(number)
            place = self.index.locate(key)
            (view,) = self._views(1)
            view[:] = bytes(self.block_bytes)
            if place is None or self.reader.load([place], [key], [view]):
                continue
            assert bytes(view) == block_bytes_of(key, self.block_bytes)
            right.append(number)
        return right

    def present(self, *numbers: int) -> list[int]:
        """Return the numbers of those blocks that the index has. No use."""
        self.index.apply_all()
        return [n for n in numbers if self.index.places(example_key(n))]

    def follow(self) -> None:
        """Look what others have done, and enter it."""
        self.follower.tell()
        self.index.apply_all()

    def open_index(self) -> None:
        """Fill the index from what is there, as an opening does."""
        self.space.tidy()
        self.follower.look(self.index.load)
        self.index.end_load()

    def _views(self, count: int) -> Sequence[memoryview]:
        size = self.block_bytes
        return [self._memory[start : start + size] for start in range(0, count * size, size)]

    def disk_bytes(self) -> int:
        """Return what all segments below the root take, as ``du`` counts it."""
        files = [path for path in self.root.rglob("*") if path.suffix in {".seg", ".idx"}]
        return sum(max(s.st_size, 512 * s.st_blocks) for s in map(os.stat, files))

    def die(self) -> None:
        """End without a word: only the kernel cleans up."""
        self.own._lock.release()
        self.membership.leave()
        self.files.close()
        for filling in (self.writer._current,):
            if filling is not None:
                os.close(filling.file._descriptor)
                os.close(filling.file._index._descriptor)
        self.writer._removals.close()
        self.writer._current = None
        self._is_dead = True

    _is_dead = False

    def close(self) -> None:
        """End in order."""
        if not self._is_dead:
            self.writer.close()
            self.files.close()
            self.membership.leave()
            self.own.close()
            self._is_dead = True


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Callable[..., Instance]]:
    """Return a function that opens an instance below one root; all are closed in the end."""
    instances: list[Instance] = []

    def open_one(**settings: Any) -> Instance:
        made = Instance(tmp_path / "root", **settings)
        instances.append(made)
        return made

    yield open_one
    for made in instances:
        made.close()
