"""What only root can arrange: small and read-only file systems, other users."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from kv_core.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Refusal = Callable[..., str]
    Run = Callable[..., tuple[int, str, str]]

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts and other users"),
]

CHAT: Final = ("synthetic:chat", "--limit=5")
NOBODY: Final = 65534


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that mounts a small memory file system and returns its folder."""
    mounted: list[Path] = []

    def run(size: str) -> Path:
        folder = tmp_path / f"mount{len(mounted)}"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        mounted.append(folder)
        return folder

    yield run
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


def test_too_little_shared_memory(
    refusal: Refusal, mount: Callable[[str], Path], trace_file: Path
) -> None:
    """The message has the bytes that are needed and those that are available."""
    folder = mount("1m")
    message = refusal(str(trace_file), f"--shm-dir={folder}", "--cpu-bytes=2MiB")
    # A page for the trailer, and one for the marks of the rows.
    needed = 2 * 2**20 + 2 * 4096
    assert f"needs {needed} bytes in {folder}, but only {2**20} are available" in message
    assert "lower 'cpu_bytes_to_use' (--cpu-bytes)" in message


def test_a_read_only_root(refusal: Refusal, mount: Callable[[str], Path], trace_file: Path) -> None:
    """A file system that takes nothing is refused before the replay."""
    folder = mount("1m")
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    message = refusal(str(trace_file), f"--tier=fs:root_dir={folder}/blocks")
    assert f"root_dir {folder}/blocks is not writable" in message
    assert "EROFS" in message


def test_a_read_only_place_for_the_report(
    refusal: Refusal, mount: Callable[[str], Path], trace_file: Path
) -> None:
    """Known before the replay, also to root."""
    folder = mount("1m")
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    assert "it is not writable" in refusal(str(trace_file), f"--json={folder}/report.json")


def test_a_root_of_another_user(capfd: pytest.CaptureFixture[str]) -> None:
    """Permissions are refused naming the user; nothing stays in the folder."""
    # Outside of pytest's folders, which no other user can enter.
    public = Path(tempfile.mkdtemp())
    public.chmod(0o755)
    arguments = ["replay", *CHAT, "--quiet", "--shm-dir"]
    try:
        # As root first: the other user may not be able to import anything.
        assert main([*arguments, str(public), f"--tier=fs:root_dir={public}/mine"]) == 0
        shm_dir = public / "shm"
        shm_dir.mkdir()
        shm_dir.chmod(0o777)
        before = sorted(public.rglob("*"))
        os.seteuid(NOBODY)
        try:
            status = main([*arguments, str(shm_dir), f"--tier=fs:root_dir={public}/theirs"])
        finally:
            os.seteuid(0)
        assert status == 2
        assert sorted(public.rglob("*")) == before
    finally:
        shutil.rmtree(public)
    captured = capfd.readouterr()
    assert captured.out == ""
    message = f"error: root_dir {public}/theirs is not writable for user id {NOBODY}: "
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1


def test_a_disk_that_is_full_at_once(
    run_replay: Run, mount: Callable[[str], Path], shm_dir: Path
) -> None:
    """A root without room for one block is refused, and holds no block afterwards."""
    folder = mount("4k")
    status, out, err = run_replay(*CHAT, f"--tier=fs:root_dir={folder}/blocks")
    assert (status, out) == (2, "")
    assert f"root_dir {folder}/blocks is on a full file system" in err
    assert "ENOSPC" in err
    assert err.count("\n") == 1
    assert list(folder.rglob("*.seg")) == list(folder.rglob("probe")) == []
    assert list(shm_dir.iterdir()) == []


def test_a_disk_that_fills_up(
    run_replay: Run, mount: Callable[[str], Path], tmp_path: Path
) -> None:
    """Stores fail, bytes stay right, every request finishes, and the failures are shown."""
    folder, file = mount("1m"), tmp_path / "report.json"
    arguments = ["synthetic:chat", "--limit=40", "--gpu-blocks=100", "--cpu-bytes=400KiB"]
    arguments += [f"--tier=fs:root_dir={folder}/blocks", f"--json={file}"]
    status, out, err = run_replay(*arguments)
    assert (status, err) == (0, "")
    report = json.loads(file.read_text())
    assert report["requests_finished"] == 40
    assert report["bytes_wrong"] == 0
    assert report["stats"]["tier.fs.store_failures"] > 0
    assert "replay: tier 'fs' had " in out
    assert "store failures" in out
    assert list(folder.rglob("*.tmp")) == []
