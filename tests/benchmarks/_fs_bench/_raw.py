"""What the disk does without any tier: O_DIRECT calls from a few threads, and what fio says."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from _fs_bench._memory import Memory, Plan

__all__ = ["THREADS", "RawDisk", "fio_bytes_per_s", "takes_direct_io"]

THREADS: Final = (1, 4, 8, 16)
_BATCH_BLOCKS: Final = 32
_FIO_SECONDS: Final = 2


def takes_direct_io(folder: Path) -> bool:
    """Say whether files of a folder can be written past the page cache."""
    path = folder / "direct"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, 4096) as page:
            os.write(descriptor, page)
    except OSError:
        return False
    finally:
        os.close(descriptor)
        path.unlink()
    return True


class RawDisk:
    """The blocks of a plan in preallocated files, one for each of some threads.

    Each thread moves batches of 32 scattered blocks, or fewer where there are too few batches
    for all threads, with one system call each. Making and allocating the files is not timed.
    """

    def __init__(
        self, folder: Path, memory: Memory, plan: Plan, block_bytes: int, *, direct: bool
    ) -> None:
        self._folder = folder
        self._memory = memory
        self._plan = plan
        self._block_bytes = block_bytes
        self._flags = os.O_RDWR | (os.O_DIRECT if direct else 0)
        self._files: list[int] = []
        self._shares: list[range] = []

    def store(self, num_threads: int) -> float:
        """Write all blocks to fresh files; return the seconds."""
        self.close()
        blocks = len(self._plan.keys)
        share = -(-blocks // num_threads)
        self._shares = [range(at, min(at + share, blocks)) for at in range(0, blocks, share)]
        for number, part in enumerate(self._shares):
            path = self._folder / f"{number}.raw"
            descriptor = os.open(path, self._flags | os.O_CREAT | os.O_EXCL, 0o600)
            self._files.append(descriptor)
            os.posix_fallocate(descriptor, 0, len(part) * self._block_bytes)
        return self._run(os.pwritev, self._plan.sources, self._batches())

    def load(self) -> float:
        """Read all blocks, in order, with as many threads as wrote them."""
        return self._run(os.preadv, self._plan.targets, self._batches())

    def load_single(self, order: Sequence[int], num_threads: int) -> float:
        """Read single blocks, given by their places in the plan."""
        share = len(self._shares[0])
        places = [(place // share, place % share, [place]) for place in order]
        work = [places[at::num_threads] for at in range(num_threads)]
        return self._run(os.preadv, self._plan.targets, work)

    def close(self) -> None:
        """Remove the files."""
        for number, descriptor in enumerate(self._files):
            os.close(descriptor)
            (self._folder / f"{number}.raw").unlink()
        self._files.clear()

    def _batches(self) -> list[list[tuple[int, int, list[int]]]]:
        """Return, for each thread, batches of (file, first block in it, places in the plan)."""
        return [
            [
                (number, at - part.start, list(range(at, min(at + _BATCH_BLOCKS, part.stop))))
                for at in range(part.start, part.stop, _BATCH_BLOCKS)
            ]
            for number, part in enumerate(self._shares)
        ]

    def _run(
        self,
        call: Callable[[int, list[memoryview], int], int],
        slots: Sequence[int],
        work: list[list[tuple[int, int, list[int]]]],
    ) -> float:
        size = self._block_bytes
        flat = memoryview(self._memory.mapping)
        # Sliced beforehand: only the calls are timed.
        calls = [
            [
                (
                    self._files[number],
                    [flat[slots[place] * size : (slots[place] + 1) * size] for place in places],
                    first * size,
                )
                for number, first, places in part
            ]
            for part in work
        ]
        begin = threading.Event()
        short = itertools.count()

        def move(mine: list[tuple[int, list[memoryview], int]]) -> None:
            begin.wait()
            for descriptor, buffers, offset in mine:
                if call(descriptor, buffers, offset) != len(buffers) * size:
                    next(short)

        threads = [threading.Thread(target=move, args=(part,)) for part in calls]
        for thread in threads:
            thread.start()
        start = time.perf_counter()
        begin.set()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        for part in calls:
            for _, buffers, _ in part:
                for buffer in buffers:
                    buffer.release()
        flat.release()
        if next(short):
            raise OSError("the disk moved less than it was asked for")
        return seconds


def fio_bytes_per_s(folder: Path, block_bytes: int, num_bytes: int) -> dict[str, float] | None:
    """Return what fio writes and reads in sequence, 4 jobs, direct; None where it is missing."""
    program = shutil.which("fio")
    if program is None:
        return None
    speeds = {}
    for kind in ("write", "read"):
        command = [
            program,
            "--name=kv",
            f"--directory={folder}",
            f"--rw={kind}",
            f"--bs={block_bytes}",
            "--numjobs=4",
            f"--size={num_bytes // 4}",
            "--ioengine=psync",
            "--direct=1",
            "--time_based",
            f"--runtime={_FIO_SECONDS}",
            "--group_reporting",
            "--output-format=json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return None
        speeds[kind] = float(json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"])
    for path in folder.glob("kv.*"):
        path.unlink()
    return speeds
