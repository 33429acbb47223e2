"""Opens the storage: folders, the description of the namespace, the writer, the first I/O."""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kv_core.contract import make_offload_key
from kv_core.errors import BlockDamagedError, TierOpenError
from kv_tier_fs._description import Description
from kv_tier_fs._folders import make_folder
from kv_tier_fs._root import check_root, explained, make_root
from kv_tier_fs.files._trailer import FORMAT_VERSION
from kv_tier_fs.files._writers import Writer, reclaim_dead_writers

if TYPE_CHECKING:
    from kv_core.contract import Namespace, PrimaryView
    from kv_tier_fs.files._block_file import BlockFiles
    from kv_tier_fs.files._layout import FileLayout

__all__ = ["open_storage", "probe_io"]

_PAGE_BYTES: Final = 4096
_MOST_PROBED_ALIGNMENTS: Final = 8
_LAYOUT: Final = "files"


def open_storage(root_dir: Path, layout: FileLayout, namespace: Namespace) -> Writer:
    """Make the folders, check the namespace, clean up after dead writers, become a writer.

    Raises:
        TierOpenError: The root folder cannot be used, or holds something else.
    """
    with explained(root_dir):
        make_root(root_dir)
        check_root(root_dir)
        for folder in (layout.namespace_dir, layout.blocks_dir, layout.writers_dir):
            make_folder(folder)
            if folder.is_symlink():
                raise TierOpenError(
                    f"{folder} is a symbolic link, which this tier follows for root_dir itself "
                    "only. Remove the link, or make root_dir one"
                )
        reclaim_dead_writers(layout.writers_dir)
        writer = Writer(layout.writers_dir)
        try:
            description = Description(layout.config_path, _LAYOUT, FORMAT_VERSION)
            if not description.check(namespace):
                description.publish(namespace, Path(writer.temporary_path()))
        except BaseException:
            writer.close()
            raise
    return writer


# -- the first I/O --------------------------------------------------------------------------------


def probe_io(root_dir: Path, files: BlockFiles, writer: Writer, primary: PrimaryView) -> None:
    """Write and read real slots, so that direct I/O that does not work shows now.

    One block for every alignment that slot addresses have; the first operation that fails makes
    ``files`` fall back.

    Raises:
        TierOpenError: Not even one block can be written and read.
    """
    key = make_offload_key(b"probe", 0)
    alignments: set[int] = set()
    for block_id in range(min(primary.num_blocks, _PAGE_BYTES)):
        alignment = primary.address(block_id) % _PAGE_BYTES
        if alignment in alignments:
            continue
        alignments.add(alignment)
        path = writer.temporary_path()
        slot = primary.block(block_id)
        try:
            with explained(root_dir):
                files.create(path, key, slot)
                _probe_read(files, path, alignment)
        finally:
            slot.release()
            with suppress(FileNotFoundError):
                Path(path).unlink()
        if len(alignments) == _MOST_PROBED_ALIGNMENTS or not (
            files.direct_read or files.direct_write
        ):
            return


def _probe_read(files: BlockFiles, path: str, alignment: int) -> None:
    key = make_offload_key(b"probe", 0)
    payload_bytes = files.trailers.payload_bytes
    with (
        mmap.mmap(-1, payload_bytes + _PAGE_BYTES) as scratch,
        memoryview(scratch) as pages,
        # Slots must not be written before a load asks for it; this memory is aligned like one.
        pages[alignment:][:payload_bytes] as slot,
        files.open(path) as file,
        # The slot may have changed while it was written: only the I/O matters here.
        suppress(BlockDamagedError),
    ):
        file.read(key, slot)
