"""Opens the storage: folders, the description of the namespace, the writer, the first I/O."""

from __future__ import annotations

import errno
import json
import mmap
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kv_core.contract import Namespace, make_offload_key
from kv_core.errors import BlockDamagedError, NamespaceError, TierOpenError
from kv_tier_fs._folders import FILE_MODE, make_folder, make_folders
from kv_tier_fs.files._trailer import FORMAT_VERSION
from kv_tier_fs.files._writers import Writer, reclaim_dead_writers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_core.contract import PrimaryView
    from kv_tier_fs.files._block_file import BlockFiles
    from kv_tier_fs.files._layout import FileLayout

__all__ = ["open_storage", "probe_io"]

_PAGE_BYTES: Final = 4096
_MOST_PROBED_ALIGNMENTS: Final = 8
_FORMAT: Final = "kv-tier-fs"
_LAYOUT: Final = "files"


def open_storage(root_dir: Path, layout: FileLayout, namespace: Namespace) -> Writer:
    """Make the folders, check the namespace, clean up after dead writers, become a writer.

    Raises:
        TierOpenError: The root folder cannot be used, or holds something else.
    """
    with _explained(root_dir):
        _make_root(root_dir)
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
            _settle_description(layout, namespace, writer)
        except BaseException:
            writer.close()
            raise
    return writer


def _make_root(root_dir: Path) -> None:
    if root_dir.exists() and not root_dir.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root_dir))
    missing = root_dir
    while not missing.parent.exists():
        missing = missing.parent
    make_folders(root_dir, below=missing)


@contextmanager
def _explained(root_dir: Path) -> Iterator[None]:
    """Turn errors of the operating system into what was found and what to do."""
    try:
        yield
    except TierOpenError:
        raise
    except OSError as error:
        reason = f"{error.strerror} (errno {error.errno}, {errno.errorcode.get(error.errno or 0)})"
        found = f"root_dir {root_dir} cannot be used: {reason} at {error.filename}"
        advice = "Choose a folder that this process can make and write"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            found = f"root_dir {root_dir} is on a full file system: {reason}"
            advice = "Free some space, or choose another folder"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            found = (
                f"root_dir {root_dir} is not writable for user id {os.geteuid()}: {reason} at "
                f"{error.filename}"
            )
            advice = "Change its owner or mode, or choose another folder"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            found = f"root_dir {root_dir} is not a directory: {reason} at {error.filename}"
            advice = "Name a folder, or a path where one can be made"
        raise TierOpenError(f"{found}. {advice}") from error


# -- the description of the namespace -------------------------------------------------------------


def _settle_description(layout: FileLayout, namespace: Namespace, writer: Writer) -> None:
    """Check the description that is there, or publish ours."""
    path = layout.config_path
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        _publish_description(path, namespace, writer)
        return
    except UnicodeDecodeError as error:
        raise _unreadable(path) from error
    try:
        found: dict[str, Any] = json.loads(text)
        version, name = found["format_version"], found["layout"]
        stored = Namespace.from_description(found["namespace"])
    except (ValueError, KeyError, TypeError, NamespaceError) as error:
        raise _unreadable(path) from error
    if (version, name) != (FORMAT_VERSION, _LAYOUT):
        raise TierOpenError(
            f"{path} describes layout {name!r}, version {version!r}; this tier writes layout "
            f"{_LAYOUT!r}, version {FORMAT_VERSION}. Use another root_dir, or remove the folder"
        )
    # Names for people may differ; everything that decides about bytes may not.
    if stored.fingerprint != namespace.fingerprint:
        ours, theirs = namespace.describe(), stored.describe()
        fields = ", ".join(field for field in ours if ours[field] != theirs[field])
        raise TierOpenError(
            f"{path} describes another namespace under the same name; these fields differ: "
            f"{fields}. Use another root_dir, or remove the folder"
        )


def _unreadable(path: Path) -> TierOpenError:
    return TierOpenError(
        f"{path} is not a description written by this tier. Remove the folder {path.parent} and "
        "the folders of its blocks next to it, or use another root_dir"
    )


def _publish_description(path: Path, namespace: Namespace, writer: Writer) -> None:
    description = {
        "format": _FORMAT,
        "format_version": FORMAT_VERSION,
        "layout": _LAYOUT,
        "fingerprint": namespace.fingerprint,
        "namespace": namespace.describe(),
    }
    temporary = Path(writer.temporary_path())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(temporary, flags, FILE_MODE), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), FILE_MODE)
        json.dump(description, file, indent=2)
        file.write("\n")
        file.flush()
        # Blocks may be lost with the power; an empty description would refuse all later opens.
        os.fsync(file.fileno())
    # Of several who publish at once, the last wins; they all say the same.
    temporary.rename(path)


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
            with _explained(root_dir):
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
