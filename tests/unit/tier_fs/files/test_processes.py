"""Several processes: concurrent writers, kill -9, leftovers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    from kv_core.contract import OffloadKey
    from kv_core.tierkit.testing import TierDriver

    Drive = Callable[..., TierDriver]
    Child = Callable[[str], subprocess.Popen[str]]
    FilesBelow = Callable[[Path], list[str]]


def said(process: subprocess.Popen[str]) -> str:
    """Return the next line a child says, or what it died of."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        _, errors = process.communicate()
        pytest.fail(f"the child ended: {errors}")
    return line


def let_go(process: subprocess.Popen[str]) -> None:
    """Let a child pass its gate."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def writers_dir(root: Path) -> Path:
    """Return the folder of the writers below a root."""
    (folder,) = root.glob("*/writers")
    return folder


def test_many_writers_of_one_key_all_succeed(
    drive: Drive, child: Child, keys: list[OffloadKey], tmp_path: Path, files_below: FilesBelow
) -> None:
    """16 stores of one key over 4 processes: one file, right bytes (SHARE-2, LMCache#2517)."""
    root = tmp_path / "root"
    program = f"""
with drive({str(root)!r}, io_threads=5) as driver:
    driver.fill(0, keys[0])
    for slot in range(4):
        driver.fill(slot, keys[0])
    gate("ready")
    jobs = [driver.submit([keys[0]], [slot], load=False) for slot in range(4)]
    print(sum(driver.wait(job).success for job in jobs), flush=True)
"""
    children = [child(program) for _ in range(4)]
    assert [said(process) for process in children] == ["ready"] * 4
    for process in children:
        let_go(process)
    assert [said(process) for process in children] == ["4"] * 4
    assert [process.wait(20) for process in children] == [0] * 4
    assert sum(name.endswith(".bin") for name in files_below(root)) == 1
    assert len(files_below(root)) == 2
    driver = drive()
    assert driver.load(keys[:1]).success
    assert driver.loaded(keys[:1]) == keys[:1]


KILL_POINTS = {
    "half written": """
real = os.pwritev
def stop(descriptor, buffers, offset):
    moved = real(descriptor, [buffers[0][:2048]], offset)
    gate("there")
    return moved
""",
    "written": """
real_rename = os.rename
def stop_rename(source, target, **folders):
    gate("there")
    real_rename(source, target, **folders)
""",
    "published": """
real_rename = os.rename
def stop_rename(source, target, **folders):
    real_rename(source, target, **folders)
    gate("there")
""",
}


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_killed_writer_leaves_blocks_whole_or_gone(
    drive: Drive, child: Child, keys: list[OffloadKey], tmp_path: Path, point: str
) -> None:
    """After kill -9 in the middle of a store every block is whole or gone (PERS-2, PERS-3)."""
    root = tmp_path / "root"
    process = child(
        f"""
driver = drive({str(root)!r}, direct_io=False)
driver.store(keys[:2])
{KILL_POINTS[point]}
if "stop" in dir():
    os.pwritev = stop
else:
    os.rename = stop_rename
driver.submit_store([*keys[:2], keys[2]])
driver.wait(99)
"""
    )
    assert said(process) == "there"
    process.kill()
    process.wait(20)
    left = [path for path in writers_dir(root).rglob("*") if path.is_file()]
    assert len(left) == (1 if point == "published" else 2)
    driver = drive()
    assert driver.resolve(keys[:3]) == [True, True, point == "published"]
    assert driver.load(keys[:2]).success
    assert driver.loaded(keys[:2]) == keys[:2]
    # Lock and folder of the living tier, and nothing of the dead one.
    assert len(list(writers_dir(root).iterdir())) == 2
    assert driver.store(keys).success


def test_temporary_files_of_the_living_are_kept(
    drive: Drive, child: Child, keys: list[OffloadKey], tmp_path: Path
) -> None:
    """Opening a tier does not disturb the store of another process (PERS-3)."""
    root = tmp_path / "root"
    process = child(
        f"""
driver = drive({str(root)!r}, direct_io=False)
{KILL_POINTS["half written"]}
os.pwritev = stop
job = driver.submit_store(keys[:1])
print(driver.wait(job).success, flush=True)
driver.close()
"""
    )
    assert said(process) == "there"
    driver = drive()
    assert len(list(writers_dir(root).glob("*/*.tmp"))) == 1
    assert driver.resolve(keys[:1]) == [False]
    # Every part of the rest stops at the gate as well.
    while True:
        let_go(process)
        word = said(process)
        if word != "there":
            break
    assert word == "True"
    assert process.wait(20) == 0
    assert driver.load(keys[:1]).success
    assert driver.loaded(keys[:1]) == keys[:1]


def test_a_fresh_process_finds_the_blocks(
    drive: Drive, child: Child, keys: list[OffloadKey], tmp_path: Path
) -> None:
    """The same namespace in another process means the same files (NS-2, LMCache#1139)."""
    drive().store(keys)
    process = child(
        f"""
with drive({str(tmp_path / "root")!r}) as driver:
    print(sum(driver.resolve(keys)), flush=True)
    driver.load(keys)
    print(len(driver.loaded(keys)), flush=True)
"""
    )
    assert [said(process), said(process)] == ["8", "8"]
