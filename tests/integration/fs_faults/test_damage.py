"""Files that are deleted, cut, extended, flipped, swapped or replaced behind the tier's back.

Whatever is done to the files of a namespace: a block comes back right or not at all, what was not
touched stays, and a new store repairs what is gone. Tried on a tier that is open, and on one that
is opened afterwards.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Work = Callable[..., Any]
    Damage = Callable[[Path, random.Random], None]

BLOCK: Final = 4096
BLOCKS: Final = range(48)
# One file of payloads holds so many blocks, so that there are several.
PER_SEGMENT: Final = 8
SETTINGS: Final = {"error_backoff_s": 0.01, "io_threads": 4, "block_bytes": BLOCK}


def settings_of(layout: str) -> dict[str, Any]:
    """Return settings with which a storage has several files of each kind."""
    if layout == "files":
        return dict(SETTINGS)
    # A segment is a 32nd of the capacity.
    return {**SETTINGS, "capacity_bytes": 32 * PER_SEGMENT * BLOCK}


def files_of(root: Path) -> dict[str, list[Path]]:
    """Return all files by what they are for; locks are left alone."""
    found: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix in (".seg", ".idx", ".bin"):
            found.setdefault(path.suffix, []).append(path)
    return found


def unlink(path: Path, _: random.Random) -> None:
    """Remove a file."""
    path.unlink()


def cut(path: Path, draw: random.Random) -> None:
    """Cut a file off somewhere."""
    os.truncate(path, draw.randrange(max(1, path.stat().st_size)))


def empty(path: Path, _: random.Random) -> None:
    """Cut all of a file off."""
    os.truncate(path, 0)


def extend(path: Path, draw: random.Random) -> None:
    """Add bytes that mean nothing."""
    with open(path, "ab") as file:
        file.write(draw.randbytes(draw.choice((1, 64, 5000))))


def repeat(path: Path, _: random.Random) -> None:
    """Add the end of a file once more: whole frames in the wrong place."""
    content = path.read_bytes()
    with open(path, "ab") as file:
        file.write(content[-min(len(content), 5000) :])


def flip_one(path: Path, draw: random.Random) -> None:
    """Change one bit."""
    with open(path, "r+b") as file:
        offset = draw.randrange(os.fstat(file.fileno()).st_size)
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << draw.randrange(8)]), offset)


def flip_many(path: Path, draw: random.Random) -> None:
    """Overwrite a page with noise."""
    with open(path, "r+b") as file:
        offset = draw.randrange(os.fstat(file.fileno()).st_size)
        os.pwrite(file.fileno(), draw.randbytes(4096), offset)


def zero(path: Path, _: random.Random) -> None:
    """Overwrite all with zeros, as after a crash of some file systems."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.write(bytes(size))


def become_folder(path: Path, _: random.Random) -> None:
    """Put a folder in the place of a file."""
    path.unlink()
    path.mkdir()


def become_pipe(path: Path, _: random.Random) -> None:
    """Put a pipe in the place of a file: to open one may wait for ever."""
    path.unlink()
    os.mkfifo(path)


def become_newer(path: Path, _: random.Random) -> None:
    """Set the version behind the magic word to one of the future, where there is one."""
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        at = size - 4096 + 8 if path.suffix == ".bin" else 8
        if path.suffix != ".seg":
            os.pwrite(file.fileno(), struct.pack("<I", 99), at)


DAMAGES: Final = (
    unlink,
    cut,
    empty,
    extend,
    repeat,
    flip_one,
    flip_many,
    zero,
    become_folder,
    become_pipe,
    become_newer,
)


def on_disk(layout: str, root: Path) -> int:
    """Return how many files of blocks there are."""
    return len(files_of(root)[".bin" if layout == "files" else ".seg"])


def expect_repair(worker: Any) -> None:
    """Store everything, and require that everything is there."""
    for start in range(0, len(BLOCKS), 16):
        answer = worker("store", blocks=list(BLOCKS[start : start + 16]))
        assert answer["error"] is None, answer
    # What was found damaged on the way is stored by the next.
    missing = sorted(set(BLOCKS) - set(worker.check(BLOCKS)))
    assert worker("store", blocks=missing)["error"] is None
    assert worker.check(BLOCKS) == list(BLOCKS)


def expect_reopened(worker: Any, *, hit: int) -> None:
    """Require of a tier opened after the repair that it has all but what it could not know of.

    Who has an index in memory does not look at its file again.
    """
    assert len(worker.check(BLOCKS)) >= len(BLOCKS) - hit
    expect_repair(worker)


@pytest.mark.slice(12)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("suffix", [".bin", ".seg", ".idx"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("moment", ["open", "closed"])
def test_damage_costs_what_it_hits(
    root: Path, damage: Damage, suffix: str, moment: str, seed: int, start_worker: Any
) -> None:
    """No wrong byte, no other block lost than those of the file, and a store repairs."""
    layout = "files" if suffix == ".bin" else "segments"
    if (damage, layout) == (become_folder, "files"):
        # The name of the block is taken for good, which costs that one block.
        damage = become_pipe
    settings = {"root_dir": str(root), "layout": layout, **settings_of(layout)}
    draw = random.Random(f"{seed} {suffix} {damage.__name__} {moment}")
    worker = start_worker(settings)
    for start in range(0, len(BLOCKS), PER_SEGMENT):
        assert worker("store", blocks=list(BLOCKS[start : start + PER_SEGMENT]))["error"] is None
    assert on_disk(layout, root) >= len(BLOCKS) // PER_SEGMENT
    if moment == "closed":
        worker.end()
    # The index of removals and segments without a block have nothing to lose.
    victims = [path for path in files_of(root)[suffix] if path.stem != "00000000"]
    damage(draw.choice(victims), draw)
    if moment == "closed":
        worker = start_worker(settings)
    there = worker.check(BLOCKS)
    # One file holds one block or PER_SEGMENT of them; an index speaks for one segment.
    assert len(there) >= len(BLOCKS) - (1 if layout == "files" else PER_SEGMENT)
    # What failed to load once is not found again (LOOK-4).
    assert worker("find", blocks=list(BLOCKS))["found"] == there
    expect_repair(worker)
    worker.end()
    expect_reopened(start_worker(settings), hit=1 if layout == "files" else PER_SEGMENT)


@pytest.mark.parametrize("suffix", [".bin", ".seg", ".idx"])
@pytest.mark.parametrize("moment", ["open", "closed"])
def test_swapped_files_are_found_out(
    root: Path, suffix: str, moment: str, start_worker: Any
) -> None:
    """Files that have changed names are whole, and still not what was stored (DATA-7)."""
    layout = "files" if suffix == ".bin" else "segments"
    settings = {"root_dir": str(root), "layout": layout, **settings_of(layout)}
    worker = start_worker(settings)
    for start in range(0, len(BLOCKS), PER_SEGMENT):
        worker("store", blocks=list(BLOCKS[start : start + PER_SEGMENT]))
    if moment == "closed":
        worker.end()
    first, second = [path for path in files_of(root)[suffix] if path.stem != "00000000"][:2]
    spare = first.with_suffix(".spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    if moment == "closed":
        worker = start_worker(settings)
    there = worker.check(BLOCKS)
    hit = 2 * (1 if layout == "files" else PER_SEGMENT)
    assert len(there) >= len(BLOCKS) - hit
    expect_repair(worker)
    worker.end()
    expect_reopened(start_worker(settings), hit=hit)


def test_files_of_another_namespace_are_not_taken(
    root: Path, tmp_path: Path, layout: str, work: Work
) -> None:
    """Blocks of other weights, copied into place whole, have the right length only (NS-1)."""
    other = tmp_path / "other"
    foreign = work(other, **settings_of(layout), namespace={"model_fingerprint": "f" * 16})
    foreign("store", blocks=list(BLOCKS[:16]))
    foreign.end()
    ours = work(**settings_of(layout))
    ours("store", blocks=list(BLOCKS[16:32]))
    ours.end()
    # Each folder of theirs goes where the folder of the same kind is with us.
    for theirs in sorted(other.iterdir()):
        if theirs.is_dir():
            [mine] = [
                path
                for path in root.iterdir()
                if path.is_dir() and path.name.count("_r0") == theirs.name.count("_r0")
            ]
            for source in theirs.rglob("*"):
                target = mine / source.relative_to(theirs)
                if source.is_file() and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, target)
    again = work(**settings_of(layout))
    assert again.check(BLOCKS) == list(BLOCKS[16:32])
    expect_repair(again)


def test_a_whole_folder_that_vanishes_is_a_miss(root: Path, layout: str, work: Work) -> None:
    """Somebody cleans up under a running engine: everything is absent, and stores go on."""
    worker = work(**settings_of(layout))
    worker("store", blocks=list(BLOCKS[:32]))
    for path in root.iterdir():
        if path.is_dir():
            # What the tier makes meanwhile is in the way of the removal of a folder.
            shutil.rmtree(path, ignore_errors=True)
    assert worker.check(BLOCKS) in ([], list(BLOCKS[:32]))
    for _ in range(4):
        # The first store may find that there is no folder any more.
        worker("store", blocks=list(BLOCKS[32:]))
    assert worker("store", blocks=list(BLOCKS[32:]))["error"] is None
    assert set(worker.check(BLOCKS)) >= set(BLOCKS[32:])
    worker.end()
    assert set(work(**settings_of(layout)).check(BLOCKS)) >= set(BLOCKS[32:])
