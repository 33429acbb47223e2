"""Layout ``files`` as the commands see it."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, final

from typing_extensions import override

from kv_core.errors import BlockDamagedError
from kv_tier_fs._cli._stores import Damage, Report, Store, Victim, is_locked
from kv_tier_fs.files._block_file import BlockFiles
from kv_tier_fs.files._layout import FileLayout
from kv_tier_fs.files._trailer import TRAILER_BYTES, TrailerFormat, key_in_trailer
from kv_tier_fs.files._writers import reclaim_dead_writers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_tier_fs._config import Layout

__all__ = ["FileStore"]

_BLOCK_SUFFIX: Final = ".bin"
_PAGE_BYTES: Final = 4096


@final
class FileStore(Store):
    """The block files of one namespace, of all its ranks."""

    layout: ClassVar[Layout] = "files"

    def __init__(self, root: Path, folder: Path) -> None:
        super().__init__(root, folder, folder / "config.json")
        ranks = re.compile(rf"{re.escape(folder.name)}_r[0-9]+")
        self._block_folders = sorted(
            path
            for path in root.iterdir()
            if ranks.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        )
        self._writers = folder / "writers"

    @override
    def report(self) -> Report:
        blocks = payload_bytes = disk_bytes = 0
        oldest: float | None = None
        latest: float | None = None
        for _, status in self._files():
            blocks += 1
            payload_bytes += max(0, status.st_size - TRAILER_BYTES)
            disk_bytes += _disk_bytes(status)
            oldest = min(status.st_mtime, oldest or status.st_mtime)
            latest = max(status.st_mtime, latest or status.st_mtime)
        alive = [is_locked(self.root, path) for path in self._writers.glob("*.lock")]
        return Report(
            blocks=blocks,
            payload_bytes=payload_bytes,
            disk_bytes=disk_bytes,
            files=blocks,
            live_writers=alive.count(True),
            dead_writers=alive.count(False),
            oldest_write_s=oldest,
            latest_write_s=latest,
        )

    @override
    def is_open(self) -> bool:
        return any(is_locked(self.root, path) for path in self._writers.glob("*.lock"))

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield every block file with its status; what vanishes meanwhile is left out."""
        pending = [str(folder) for folder in self._block_folders]
        while pending:
            with suppress(FileNotFoundError), os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif entry.name.endswith(_BLOCK_SUFFIX):
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            if stat.S_ISREG(status.st_mode):
                                yield entry.path, status

    @override
    def check(self, advance: Callable[[int], None]) -> Iterator[Damage]:
        if self.namespace is None:
            yield Damage(self.folder, None, self.problem or "no description")
            return
        size = self.namespace.block_bytes
        trailers = TrailerFormat(self.namespace.fingerprint, size)
        files = BlockFiles(trailers, root_dir=str(self.root), direct_io=size % _PAGE_BYTES == 0)
        layout = FileLayout(self.root, self.namespace)
        with mmap.mmap(-1, size) as memory, memoryview(memory) as payload:
            for path, status in self._files():
                try:
                    problem = _problem_of(files, layout, path, payload)
                except FileNotFoundError:
                    # Collected since it was listed.
                    continue
                finally:
                    advance(max(0, status.st_size - TRAILER_BYTES))
                if problem is not None:
                    yield Damage(Path(path), None, problem, _retirement(path, status))

    @override
    def disk_bytes(self) -> int:
        return sum(_disk_bytes(status) for _, status in self._files())

    @override
    def latest_touch_s(self) -> float:
        # No use is recorded; a folder bears the time of the last file that came or went.
        folders = [path for path in (self.folder, *self._block_folders) if path.exists()]
        times = [status.st_mtime for _, status in self._files()]
        return max(times + [path.stat().st_mtime for path in folders])

    @override
    def reclaim(self) -> None:
        if self._writers.is_dir():
            reclaim_dead_writers(self._writers)

    @override
    def victims(self) -> Iterator[Victim]:
        for path, status in self._files():
            yield Victim(status.st_mtime, _disk_bytes(status), _retirement(path, status))

    @override
    def remove(self) -> None:
        for folder in self._block_folders:
            shutil.rmtree(folder)
        shutil.rmtree(self._writers, ignore_errors=True)
        with suppress(FileNotFoundError):
            (self.folder / "config.json").unlink()
        with suppress(OSError):
            # Unless the other layout has something there.
            self.folder.rmdir()


def _disk_bytes(status: os.stat_result) -> int:
    return max(status.st_size, status.st_blocks * 512)


def _problem_of(
    files: BlockFiles, layout: FileLayout, path: str, payload: memoryview
) -> str | None:
    """Read a file and check all of it.

    Raises:
        FileNotFoundError: It is gone.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TRAILER_BYTES))
            key = key_in_trailer(file.read(TRAILER_BYTES))
        if key is None:
            return "no trailer where one belongs"
        # Below the folders of the ranks, all names are alike.
        if Path(layout.block_path(key)).parts[-3:] != Path(path).parts[-3:]:
            return f"the file of block {key.hex()} under another block's name"
        with files.open(path) as block:
            block.read(key, payload)
    except FileNotFoundError:
        raise
    except (OSError, BlockDamagedError) as error:
        return str(error)
    return None


def _retirement(path: str, seen: os.stat_result) -> Callable[[], None]:
    def retire() -> None:
        with suppress(FileNotFoundError):
            now = os.lstat(path)
            # What has been stored anew since is as good as any.
            if (now.st_ino, now.st_mtime_ns) == (seen.st_ino, seen.st_mtime_ns):
                os.unlink(path)  # noqa: PTH108 - plain strings, per block

    return retire
