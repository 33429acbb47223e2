"""The root folder: who may read it, whose it is, and that nothing outside of it is ever touched."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Mount = Callable[[str, int], Path]
    Work = Callable[..., Any]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: other users")

NOBODY: Final = 65534
BLOCKS: Final = range(24)
FILE_MODES: Final = {0o600, 0o400}
SECRET: Final = b"somebody else's file"


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """Return a folder that every user can enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return mode and content of everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path.relative_to(folder))] = (status.st_mode, content)
    return found


def test_nobody_else_can_read_anything(root: Path, work: Work) -> None:
    """Files are 0600 (0400 once nothing is added), folders 0700, whatever the umask says."""
    worker = work(umask=0)
    worker("store", blocks=list(BLOCKS))
    live = {path: stat.S_IMODE(path.lstat().st_mode) for path in [root, *root.rglob("*")]}
    worker.end()
    ended = {path: stat.S_IMODE(path.lstat().st_mode) for path in [root, *root.rglob("*")]}
    for modes in (live, ended):
        assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
        assert {mode for path, mode in modes.items() if path.is_file()} <= FILE_MODES


@pytest.mark.privileged
@needs_root
def test_the_folder_of_another_user_is_refused(public_dir: Path, work: Work) -> None:
    """Its owner could put blocks into it; the message says whose it is and what to do."""
    public_dir.chmod(0o700)
    os.chown(public_dir, NOBODY, NOBODY)
    refused = work(public_dir)
    assert refused.opened["raised"] == "TierOpenError"
    assert f"owned by user id {NOBODY}" in refused.opened["message"]
    assert "Change its owner" in refused.opened["message"]
    assert list(public_dir.iterdir()) == []


def test_a_folder_that_all_can_write_to_is_refused(root: Path, work: Work) -> None:
    """Anybody could put blocks into it, whatever the sticky bit says of removing them."""
    root.mkdir()
    for mode in (0o777, 0o1777, 0o702):
        root.chmod(mode)
        refused = work()
        assert refused.opened["raised"] == "TierOpenError"
        assert "every user can write to it" in refused.opened["message"]
        assert list(root.iterdir()) == []
    root.chmod(0o755)
    assert work()("store", blocks=[1])["error"] is None


@pytest.mark.privileged
@needs_root
def test_a_folder_made_read_only_under_a_tier(public_dir: Path, work: Work) -> None:
    """Stores fail, loads go on, and stores go on when the folder can be written again."""
    root = public_dir / "root"
    root.mkdir()
    os.chown(root, NOBODY, NOBODY)
    worker = work(root, user=NOBODY)
    assert worker("store", blocks=list(BLOCKS[:8]))["error"] is None
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o500)
    # A file that is open stays writable, so some may be stored.
    answer = worker("store", blocks=list(BLOCKS[8:]))
    assert answer["error"] in (None, "failed", "declined")
    assert set(worker.check(BLOCKS)) == {*BLOCKS[:8], *answer["stored"]}
    for folder in folders:
        folder.chmod(0o700)
    assert worker("store", blocks=list(BLOCKS))["error"] is None
    assert worker.check(BLOCKS) == list(BLOCKS)


@pytest.mark.privileged
@needs_root
def test_a_file_system_mounted_read_only(mount: Mount, work: Work) -> None:
    """The message says what is the matter, and blocks are there for those who only read."""
    disk = mount("ext4", 16 << 20)
    worker = work(disk / "root")
    worker("store", blocks=list(BLOCKS))
    worker.end()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    refused = work(disk / "root")
    assert refused.opened["raised"] == "TierOpenError"
    assert "EROFS" in refused.opened["message"]
    reader = work(disk / "root", layout="segments", read_only=True)
    assert reader.opened.get("raised") is None
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    assert work(disk / "root").check(BLOCKS) == list(BLOCKS)


def _put_link(path: Path, target: Path, aside: Path) -> None:
    """Replace a file or folder by a link. A tier that is open may make a folder again meanwhile."""
    for attempt in itertools.count():
        with suppress(FileNotFoundError):
            path.rename(aside.with_name(f"{aside.name}-{attempt}"))
        with suppress(FileExistsError):
            path.symlink_to(target)
            return


# -- symbolic links ------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["open", "closed"])
@pytest.mark.parametrize("depth", range(5))
def test_no_symbolic_link_in_the_tree_is_followed(
    root: Path, tmp_path: Path, work: Work, depth: int, moment: str
) -> None:
    """Whatever part of a path becomes a link out of the tree: nothing out there changes."""
    worker = work()
    worker("store", blocks=list(BLOCKS[:12]))
    if moment == "closed":
        worker.end()
    outside = tmp_path / "outside"
    shutil.copytree(root, outside, copy_function=shutil.copy)
    for path in outside.rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            path.write_bytes(SECRET)
    before = tree(outside)
    at_depth = [
        path for path in sorted(root.rglob("*")) if len(path.relative_to(root).parts) == depth + 1
    ]
    for number, path in enumerate(at_depth):
        _put_link(path, outside / path.relative_to(root), tmp_path / f"aside-{number}")
    if moment == "closed":
        worker = work()
    if "raised" in worker.opened:
        assert worker.opened["raised"] == "TierOpenError"
    else:
        worker("store", blocks=list(BLOCKS))
        assert set(worker.check(BLOCKS)) <= set(BLOCKS)
        # Removals and collections meet the links as well.
        worker("store", blocks=list(range(100, 148)))
        worker.end()
    assert tree(outside) == before


def test_the_root_itself_may_be_a_link(tmp_path: Path, work: Work) -> None:
    """An operator moves the folder to a larger disk: the link was meant."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    worker = work(tmp_path / "link")
    assert worker("store", blocks=list(BLOCKS))["error"] is None
    assert worker.check(BLOCKS) == list(BLOCKS)
    assert list((tmp_path / "real").iterdir()) != []


def test_dangling_links_are_not_created_through(root: Path, tmp_path: Path, work: Work) -> None:
    """A link to nowhere in the place of every folder to come makes no file elsewhere."""
    worker = work()
    worker("store", blocks=[0])
    worker.end()
    names = [path.relative_to(root) for path in root.rglob("*") if path.is_dir()]
    shutil.rmtree(root)
    root.mkdir(mode=0o700)
    (tmp_path / "elsewhere").mkdir()
    for name in names:
        if len(name.parts) == 1:
            (root / name).symlink_to(tmp_path / "elsewhere" / "made")
    again = work()
    assert again.opened.get("raised", "TierOpenError") == "TierOpenError"
    assert list((tmp_path / "elsewhere").iterdir()) == []


# -- nothing outside -----------------------------------------------------------------------------

# Calls that change what their path names; of open, only those that create or write.
_CHANGES: Final = (
    "mkdir,mkdirat,rmdir,unlink,unlinkat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,"
    "truncate,chmod,fchmodat,chown,lchown,utimensat,mknod,mknodat"
)
_OPENED: Final = re.compile(r'open(?:at)?\([^"]*"([^"]+)", ([A-Z_|]+)')
# A path, with the folder that it is relative to where the call names one.
_PATHS: Final = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_nothing_outside_of_the_root_is_changed(
    root: Path, tmp_path: Path, work: Work, layout: str
) -> None:
    """A whole life, traced: every path that is changed lies in the root (LIFE-4)."""
    log = tmp_path / "calls"
    trace = ["strace", "-f", "-y", "-qq", "-o", str(log), "-e", f"trace=open,openat,{_CHANGES}"]
    more = {"capacity_bytes": 1 << 20} if layout == "segments" else {}
    worker = work(before=trace, block_bytes=16384, **more)
    for first in range(0, 96, 24):
        assert worker("store", blocks=list(range(first, first + 24)))["error"] is None
    worker.check(range(96))
    if layout == "segments":
        worker("delete", blocks=list(range(90, 96)))
    worker.end()
    changed = set()
    for line in log.read_text().splitlines():
        if " = -1 " in line or "resumed" in line:
            continue
        opened = _OPENED.search(line)
        if opened is not None:
            writes = {"O_WRONLY", "O_RDWR", "O_CREAT"} & set(opened.group(2).split("|"))
            if not writes:
                continue
        for folder, name in _PATHS.findall(line):
            # An absolute name stands for itself.
            changed.add(str(Path(folder or "/") / name))
    outside = {path for path in changed if not Path(path).is_relative_to(root)}
    assert any(Path(path).is_relative_to(root) for path in changed)
    assert outside <= {"/dev/null"}


def test_a_setting_cannot_leave_the_root(root: Path, tmp_path: Path, work: Work) -> None:
    """A model's name with dots and slashes is a folder in the root all the same."""
    worker = work(root / "in", namespace={"model": "../../../../out/../../x\x00y"})
    worker("store", blocks=list(BLOCKS))
    worker.end()
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert [path.name for path in root.iterdir()] == ["in"]
    assert sys.platform == "linux"
