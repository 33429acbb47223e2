"""What only root can arrange: other users and small file systems."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kv_core.contract import JobErrorKind
from kv_core.errors import TierOpenError
from kv_core.tierkit import FreeSpace
from kv_core.tierkit.testing import example_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_core.tierkit.testing import TierDriver

    Drive = Callable[..., TierDriver]

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts and other users"),
]

NOBODY = 65534


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """Return a folder that every user can enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def small_dir(tmp_path: Path) -> Iterator[Path]:
    """Return an empty file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def as_nobody(program: str) -> str:
    """Run a program as another user and return what it says."""
    # Imports come first: the other user may have no access to the interpreter's folders.
    prelude = f"""
import os
from pathlib import Path
import kv_tier_fs.files._tier
from kv_core.contract import parse_tier_config
from kv_core.errors import TierOpenError
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_fs import kv_core_register_tier
keys = [example_key(number) for number in range(4)]
def drive(root_dir):
    spec = kv_core_register_tier()
    settings = {{"root_dir": root_dir, "layout": "files"}}
    config = parse_tier_config("fs", spec.config_model, settings)
    return TierDriver(spec.factory, config, block_bytes=4096, tier_name="fs")
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""
    done = subprocess.run(
        [sys.executable, "-c", prelude + program],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_root_that_cannot_be_written_is_explained(public_dir: Path) -> None:
    """A folder without permission to write is refused at open, naming user and errno."""
    os.chown(public_dir, NOBODY, NOBODY)
    public_dir.chmod(0o500)
    said = as_nobody(
        f"""
try:
    drive({str(public_dir)!r})
except TierOpenError as error:
    print(error)
"""
    )
    assert f"root_dir {public_dir} is not writable for user id {NOBODY}" in said
    assert "EACCES" in said
    assert "Change its owner or mode" in said
    assert list(public_dir.iterdir()) == []


def test_unreadable_blocks_are_errors_not_misses(drive: Drive, public_dir: Path) -> None:
    """A store refused by permissions is a failure of the backend, and so is a lookup."""
    os.chown(public_dir, NOBODY, NOBODY)
    said = as_nobody(
        f"""
with drive({str(public_dir)!r}) as driver:
    driver.store(keys[:2])
    (blocks,) = Path({str(public_dir)!r}).glob("*_r0")
    blocks.chmod(0)
    print(driver.store(keys[2:3]).error.kind.value)
    print(driver.load(keys[:1]).error.kind.value)
    driver.tier.on_request_finished(driver.request)
    print(driver.resolve(keys[3:4]), driver.tier.get_stats()["lookup_errors"])
    blocks.chmod(0o700)
"""
    )
    assert said.split("\n")[:3] == ["failed", "failed", "[False] 1.0"]


def test_a_full_file_system_declines_and_recovers(
    drive: Drive, small_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC declines blocks, leaves no temporary file, and ends with the shortage (DATA-11)."""
    # The floor sees nothing coming, as when others fill the disk between a look and a write.
    monkeypatch.setattr(FreeSpace, "take", lambda *_: None)
    driver = drive(small_dir / "root", block_bytes=65536, num_blocks=32)
    many = [example_key(number) for number in range(32)]
    result = driver.store(many)
    assert result.error is not None
    assert result.error.kind is JobErrorKind.DECLINED
    assert "No space left on device" in result.error.message
    assert 4 < len(result.successful_keys) < 16
    stored = list(result.successful_keys)
    assert list(small_dir.rglob("*.tmp")) == []
    assert driver.resolve(many) == [key in stored for key in many]
    assert driver.load(stored).success
    assert driver.loaded(stored) == stored
    for path in small_dir.rglob("*.bin"):
        path.unlink()
    assert driver.store(many[:8]).success
    driver.close()


def test_a_floor_is_kept_on_a_real_file_system(drive: Drive, small_dir: Path) -> None:
    """Stores end at the floor, not at the end of the disk, and begin again above it."""
    floor_bytes = 1 << 19
    driver = drive(
        small_dir / "root",
        block_bytes=65536,
        num_blocks=32,
        min_free_bytes=floor_bytes,
        io_threads=2,
    )
    many = [example_key(number) for number in range(32)]
    result = driver.store(many)
    assert result.error is not None
    assert result.error.kind is JobErrorKind.DECLINED
    assert "less than 'min_free_bytes' (512 KiB)" in result.error.message
    stored = list(result.successful_keys)
    status = os.statvfs(small_dir)
    free_bytes = status.f_bavail * status.f_frsize
    # One store thread is at most one file below; folders and the like are a few pages.
    assert floor_bytes - 2 * 69632 < free_bytes < floor_bytes
    assert driver.load(stored).success
    assert driver.loaded(stored) == stored
    for path in small_dir.rglob("*.bin"):
        path.unlink()
    assert driver.store(many[:4]).success
    driver.close()


def test_a_file_system_that_is_full_at_open_is_explained(drive: Drive, small_dir: Path) -> None:
    """A tier that could not store a single block says so at once."""
    (small_dir / "filler").write_bytes(bytes((1 << 20) - 16384))
    with pytest.raises(TierOpenError, match=r"is on a full file system: No space left.*Free some"):
        drive(small_dir / "root", block_bytes=65536)
    assert [
        path for path in (small_dir / "root").rglob("*") if path.suffix in {".tmp", ".lock"}
    ] == []
