"""The file system that fails on demand, mounted for real."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from kv_conformance.faults import fuse
from kv_conformance.faults.fuse import FaultyFolder
from kv_conformance.harness import Fault, HarnessError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts"),
]

WAIT_S: Final = 20.0
MIB: Final = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FaultyFolder]:
    """Return a mounted folder with one file of 4096 bytes in it."""
    with FaultyFolder(tmp_path / "backing", tmp_path / "mounted") as mounted:
        (mounted.backing / "file").write_bytes(bytes(range(256)) * 16)
        yield mounted


def is_mounted(path: Path) -> bool:
    """Say whether something is mounted, without asking it."""
    return f" {path} " in Path("/proc/self/mountinfo").read_text()


def names(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def errno_of(call: Callable[[], object]) -> str | None:
    """Return the name of the error that a call ends with, or ``None``."""
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return None


def until(condition: Callable[[], bool]) -> bool:
    """Wait for another process; say whether the condition came true."""
    end = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not condition():
        if time.monotonic() > end:
            return False
        pause.wait(0.005)
    return True


# -- without a fault ------------------------------------------------------------------------------


def test_both_views_show_the_same_files_at_once(folder: FaultyFolder) -> None:
    """What is written on one side is read on the other, although it was looked at before."""
    behind, before = folder.backing / "file", folder.mountpoint / "file"
    assert before.stat().st_size == 4096
    behind.write_bytes(b"changed behind")
    assert before.stat().st_size == 14
    assert before.read_bytes() == b"changed behind"
    before.write_bytes(b"changed in front")
    assert behind.read_bytes() == b"changed in front"
    behind.unlink()
    assert not before.exists()
    behind.touch()
    assert before.exists()


def test_modes_and_inodes_are_kept(folder: FaultyFolder) -> None:
    """A file has the mode it was made with, and one identity on both sides."""
    path = folder.mountpoint / "new"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640))
    path.parent.joinpath("sub").mkdir(mode=0o710)
    behind = (folder.backing / "new").stat()
    assert stat.S_IMODE(behind.st_mode) == 0o640
    assert stat.S_IMODE((folder.backing / "sub").stat().st_mode) == 0o710
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (behind.st_ino, behind.st_mtime_ns)
    path.chmod(0o600)
    assert stat.S_IMODE((folder.backing / "new").stat().st_mode) == 0o600


def test_direct_io_works(folder: FaultyFolder) -> None:
    """Opens with O_DIRECT succeed; aligned pages and more than one request go both ways."""
    count = 3 * MIB
    with mmap.mmap(-1, count) as pages:
        pages.write(os.urandom(count))
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        descriptor = os.open(folder.mountpoint / "large", flags, 0o600)
        assert os.pwritev(descriptor, [pages], 0) == count
        assert (folder.backing / "large").read_bytes() == pages[:]
        with mmap.mmap(-1, count) as found:
            assert os.preadv(descriptor, [found], 0) == count
            assert found[:] == pages[:]
        os.close(descriptor)


def test_names_can_be_changed(folder: FaultyFolder) -> None:
    """Rename, link, unlink, symlink and the listing of a folder work."""
    root = folder.mountpoint
    (root / "sub").mkdir()
    (root / "file").rename(root / "sub" / "moved")
    os.link(root / "sub" / "moved", root / "second")
    (root / "link").symlink_to("second")
    assert names(root) == ["link", "second", "sub"]
    assert (folder.backing / "second").stat().st_nlink == 2
    assert (root / "link").read_bytes() == (root / "second").read_bytes()
    (root / "sub" / "moved").unlink()
    (root / "sub").rmdir()
    assert names(folder.backing) == ["link", "second"]


def test_a_rename_over_an_open_file_leaves_no_gap(folder: FaultyFolder) -> None:
    """The open file keeps its bytes, the name has the new ones, and no third file appears."""
    root = folder.mountpoint
    (root / "new").write_bytes(b"new")
    with open(root / "file", "rb", buffering=0) as old:
        (root / "new").rename(root / "file")
        assert names(folder.backing) == ["file"]
        assert (root / "file").read_bytes() == b"new"
        assert old.read(4) == bytes(range(4))


def test_times_lengths_and_syncs_work(folder: FaultyFolder) -> None:
    """Utimens in nanoseconds, truncate by name and descriptor, fsync and statfs work."""
    path, behind = folder.mountpoint / "file", folder.backing / "file"
    os.utime(path, ns=(1_000_000_001, 2_000_000_002))
    assert behind.stat().st_mtime_ns == 2_000_000_002
    os.utime(path)
    assert abs(behind.stat().st_mtime - time.time()) < 60
    os.truncate(path, 100)
    assert behind.stat().st_size == 100
    with open(path, "r+b") as file:
        file.truncate(50)
        os.fsync(file.fileno())
        assert os.fstat(file.fileno()).st_size == 50
    assert os.statvfs(path).f_blocks == os.statvfs(behind).f_blocks


def test_locks_hold_on_both_sides(folder: FaultyFolder) -> None:
    """A flock taken through the mount is seen in the folder, and ends when the file is closed."""
    with open(folder.mountpoint / "file", "rb") as before, open(folder.backing / "file") as behind:
        fcntl.flock(before, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(behind, fcntl.LOCK_EX | fcntl.LOCK_NB)
        before.close()
        assert until(
            lambda: errno_of(lambda: fcntl.flock(behind, fcntl.LOCK_EX | fcntl.LOCK_NB)) is None
        )


# -- faults ---------------------------------------------------------------------------------------


def test_an_error_fails_everything(folder: FaultyFolder) -> None:
    """EIO, for open files as well, and nothing of it is left after healing."""
    path = folder.mountpoint / "file"
    descriptor = os.open(path, os.O_RDWR)
    calls: dict[str, Callable[[], object]] = {
        "stat": path.stat,
        "open": lambda: os.open(path, os.O_RDONLY),
        "create": lambda: os.open(folder.mountpoint / "new", os.O_CREAT | os.O_WRONLY),
        "read": lambda: os.pread(descriptor, 10, 0),
        "write": lambda: os.pwrite(descriptor, b"x", 0),
        "rename": lambda: path.rename(folder.mountpoint / "other"),
        "unlink": path.unlink,
        "list": lambda: names(folder.mountpoint),
        "mkdir": (folder.mountpoint / "sub").mkdir,
        "statfs": lambda: os.statvfs(path),
    }
    folder.inject(Fault.ERROR)
    assert {name: errno_of(call) for name, call in calls.items()} == dict.fromkeys(calls, "EIO")
    folder.heal()
    assert os.pread(descriptor, 2, 0) == b"\x00\x01"
    os.close(descriptor)
    assert names(folder.backing) == ["file"]


def test_closing_succeeds_whatever_the_fault(folder: FaultyFolder) -> None:
    """A process that ends can always close its files."""
    for fault in (Fault.ERROR, Fault.STALL):
        descriptor = os.open(folder.mountpoint / "file", os.O_RDWR)
        folder.inject(fault)
        os.close(descriptor)
        folder.heal()


def test_a_full_folder_takes_no_bytes(folder: FaultyFolder) -> None:
    """ENOSPC for writes and new folders; names can be made and removed, files can be read."""
    folder.inject(Fault.FULL)
    descriptor = os.open(folder.mountpoint / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    assert errno_of(lambda: os.pwrite(descriptor, b"x", 0)) == "ENOSPC"
    os.close(descriptor)
    assert errno_of((folder.mountpoint / "sub").mkdir) == "ENOSPC"
    assert (folder.mountpoint / "file").read_bytes() == bytes(range(256)) * 16
    (folder.mountpoint / "new").unlink()
    assert names(folder.backing) == ["file"]


def test_short_counts_reach_the_caller(folder: FaultyFolder) -> None:
    """Reads and writes move half the bytes, of the first MiB; one byte is still one byte."""
    large = folder.mountpoint / "large"
    large.write_bytes(bytes(2 * MIB))
    folder.inject(Fault.SHORT)
    for flags in (os.O_RDWR, os.O_RDWR | os.O_DIRECT):
        with mmap.mmap(-1, 2 * MIB) as pages:
            descriptor = os.open(large, flags)
            view = memoryview(pages)
            for asked, moved in ((1, 1), (4096, 2048), (MIB, MIB // 2), (2 * MIB, MIB // 2)):
                assert os.pwritev(descriptor, [view[:asked]], 0) == moved
                assert os.preadv(descriptor, [view[:asked]], 0) == moved
            view.release()
            os.close(descriptor)
    folder.heal()
    assert large.read_bytes() == bytes(2 * MIB)


def test_a_stall_holds_every_operation_until_healed(folder: FaultyFolder) -> None:
    """More operations than libfuse has threads hang, and all of them end well afterwards."""
    path = folder.mountpoint / "file"
    descriptor = os.open(path, os.O_RDWR)
    calls: list[Callable[[], object]] = [
        path.stat,
        lambda: os.close(os.open(path, os.O_RDONLY)),
        lambda: os.pread(descriptor, 10, 0),
        lambda: os.pwrite(descriptor, b"x", 0),
        lambda: names(folder.mountpoint),
        lambda: (folder.mountpoint / "sub").mkdir(exist_ok=True),
    ] * 4
    ended: list[str | None] = []
    folder.inject(Fault.STALL)
    threads = [
        threading.Thread(target=lambda call=call: ended.append(errno_of(call)), daemon=True)
        for call in calls
    ]
    for thread in threads:
        thread.start()
    threads[0].join(0.1)
    assert ended == []
    folder.heal()
    for thread in threads:
        thread.join(WAIT_S)
    assert ended == [None] * len(calls)
    os.close(descriptor)


# -- the end --------------------------------------------------------------------------------------


def test_closing_unmounts_and_ends_what_is_stalled(tmp_path: Path) -> None:
    """Held operations go on, nothing stays mounted, and it can be closed again."""
    folder = FaultyFolder(tmp_path / "backing", tmp_path / "mounted")
    (folder.backing / "file").touch()
    ended: list[str | None] = []
    path = folder.mountpoint / "file"
    folder.inject(Fault.STALL)
    thread = threading.Thread(target=lambda: ended.append(errno_of(path.stat)), daemon=True)
    thread.start()
    folder.close()
    thread.join(WAIT_S)
    assert len(ended) == 1
    assert not is_mounted(folder.mountpoint)
    assert names(folder.mountpoint) == []
    folder.close()
    with pytest.raises(HarnessError, match="has been closed"):
        folder.inject(Fault.ERROR)


OWNER = """
import ctypes, os, sys, threading
from pathlib import Path
from kv_conformance.faults.fuse import FaultyFolder
from kv_conformance.harness import Fault

folder = FaultyFolder(Path(sys.argv[1], "backing"), Path(sys.argv[1], "mounted"))
path = folder.mountpoint / "file"
path.touch()
descriptor = os.open(path, os.O_RDONLY)

def stall(*, other_thread):
    folder.inject(Fault.STALL)
    if other_thread:
        threading.Thread(target=path.stat, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.readline() if other_thread else path.stat()

def idle():
    print("ready", flush=True)
    sys.stdin.readline()

def forked():
    if os.fork():
        idle()
    else:
        sys.stdin.readline()

"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Return a function that starts a process with a mounted folder; it is killed at the end."""
    processes: list[subprocess.Popen[str]] = []

    def run(statement: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER + statement, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "statement", ["idle()", "forked()", "stall(other_thread=True)", "stall(other_thread=False)"]
)
def test_nothing_stays_mounted_when_the_owner_is_killed(
    statement: str, owner: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Also when a thread of it hangs in the stall, or a fork of it lives on."""
    process = owner(statement)
    assert is_mounted(tmp_path / "mounted")
    process.kill()
    assert process.wait(WAIT_S) == -signal.SIGKILL
    assert until(lambda: not is_mounted(tmp_path / "mounted"))


def test_nothing_stays_mounted_after_a_crash(
    owner: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """A segmentation fault, while another thread hangs in the stall, unmounts as well."""
    process = owner("stall(other_thread=True); ctypes.string_at(0)")
    process.communicate("\n", timeout=WAIT_S)
    assert process.returncode == -signal.SIGSEGV
    assert until(lambda: not is_mounted(tmp_path / "mounted"))


# -- what can be missing --------------------------------------------------------------------------


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mfusepy, the message says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(HarnessError, match=r"mfusepy is missing: pip install 'kv-conformance\["):
        FaultyFolder(tmp_path / "backing", tmp_path / "mounted")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libfuse, the message says what to install."""
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    with pytest.raises(HarnessError, match=r"libfuse3 was not found: .* apt-get install fuse3"):
        fuse.require_fuse()


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fusermount3, the message says what to install."""
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(HarnessError, match=r"fusermount3 was not found.*apt-get install fuse3"):
        fuse.require_fuse()


def test_a_missing_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /dev/fuse, as in most containers, the message says how to start one."""
    monkeypatch.setattr(fuse, "_DEVICE", Path("/nonexistent/fuse"))
    with pytest.raises(HarnessError, match=r"cannot be opened .* --device /dev/fuse"):
        fuse.require_fuse()


@pytest.mark.parametrize("inside", [True, False])
def test_impossible_mount_points_are_refused(folder: FaultyFolder, inside: bool) -> None:
    """A mount point inside of the folder, or with something mounted already, is refused."""
    mountpoint = folder.backing / "inside" if inside else folder.mountpoint
    with pytest.raises(HarnessError, match="cannot be the second view"):
        FaultyFolder(folder.backing, mountpoint)


def test_a_process_that_cannot_mount_says_why(tmp_path: Path) -> None:
    """What the process behind the mount wrote to its standard error is in the message."""
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "mfusepy.py").write_text("raise SystemExit('no luck today')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path / "shim"))
        with pytest.raises(HarnessError, match=r"expected 'ready'.*It said: no luck today"):
            FaultyFolder(tmp_path / "backing", tmp_path / "mounted")
