"""Stores and loads of all contenders over all block and job sizes, taking turns."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from _fs_bench._raw import THREADS, RawDisk, fio_bytes_per_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from _fs_bench._contenders import Contender
    from _fs_bench._memory import Memory, Plan

__all__ = [
    "BUDGET_JOB",
    "RAW",
    "Scale",
    "Speeds",
    "measure_fio",
    "measure_throughput",
    "settle",
]

BUDGET_JOB: Final = 32
"""Blocks of a job for which there are budgets."""

RAW: Final = "raw"

_SMALL_BYTES: Final = 2**16
_OTHER_REPEATS: Final = 2
_PILOTS: Final = 2


@dataclass(frozen=True, slots=True)
class Scale:
    """How much work a run does.

    Attributes:
        block_sizes: Bytes of a block.
        job_sizes: Blocks of a job.
        sample_bytes: What one sample moves.
        small_bytes: The same for blocks up to 64 KiB.
        single_bytes: What one sample of single loads moves.
        repeats: Samples of each line.
    """

    block_sizes: tuple[int, ...]
    job_sizes: tuple[int, ...]
    sample_bytes: int
    small_bytes: int
    single_bytes: int
    repeats: int

    def num_blocks(self, block_bytes: int) -> int:
        """Return the blocks of one sample: enough for one job of each size."""
        num_bytes = self.small_bytes if block_bytes <= _SMALL_BYTES else self.sample_bytes
        return max(num_bytes // block_bytes, *self.job_sizes, 1)


Line = tuple[str, str, int, int]
"""Contender, ``store``, ``load`` or ``single``, block bytes, blocks of a job."""


def raw_line(threads: int, kind: str, block_bytes: int) -> Line:
    """Return the line of the disk itself."""
    return f"{RAW} {threads}", kind, block_bytes, 1 if kind == "single" else BUDGET_JOB


class Speeds:
    """Samples of each line, in bytes per second."""

    def __init__(self) -> None:
        self._samples: defaultdict[Line, list[float]] = defaultdict(list)
        self._threads: dict[tuple[str, int], int] = {}

    def add(self, line: Line, num_bytes: int, seconds: float) -> None:
        """Note a sample."""
        self._samples[line].append(num_bytes / seconds)

    def median(self, line: Line) -> float | None:
        """Return the median of a line, or None if it was not measured."""
        samples = self._samples.get(line)
        return statistics.median(samples) if samples else None

    def ratio(self, line: Line, other: Line) -> float | None:
        """Return the median of one line over that of another."""
        mine, base = self.median(line), self.median(other)
        return None if mine is None or base is None else mine / base

    def lines(self) -> Iterator[tuple[Line, float]]:
        """Yield each line with its median."""
        for line, samples in self._samples.items():
            yield line, statistics.median(samples)

    def table(self) -> list[dict[str, str | int | float]]:
        """Return the medians, raw ones as the best of all numbers of threads."""
        lines: list[dict[str, str | int | float]] = []
        seen = set()
        for (name, kind, block_bytes, job_blocks), median in self.lines():
            is_raw = name.startswith(RAW)
            shown = RAW if is_raw else name
            if (shown, kind, block_bytes, job_blocks) in seen:
                continue
            seen.add((shown, kind, block_bytes, job_blocks))
            speed = self.raw(kind, block_bytes) if is_raw else median
            lines.append(
                {
                    "name": shown,
                    "kind": kind,
                    "block_bytes": block_bytes,
                    "job_blocks": job_blocks,
                    "gb_per_s": round(speed / 1e9, 3),
                }
            )
        return sorted(lines, key=lambda line: (str(line["name"]) != RAW, str(line["name"])))

    def choose_threads(self, kind: str, block_bytes: int, threads: int) -> None:
        """Say with how many threads the disk is fastest."""
        self._threads[kind, block_bytes] = threads

    def raw(self, kind: str, block_bytes: int) -> float:
        """Return the median of the raw line with the best number of threads."""
        return statistics.median(self._samples[self._raw_line(kind, block_bytes)])

    def of_raw(self, name: str, kind: str, block_bytes: int) -> float | None:
        """Return the median of the ratios to raw speed, each to a sample of about the same moment.

        The best number of threads has been found out before. The best of several medians would be
        the luckiest of them.
        """
        mine = self._samples.get((name, kind, block_bytes, BUDGET_JOB))
        if not mine:
            return None
        raw = self._samples[self._raw_line(kind, block_bytes)]
        return statistics.median(found / base for found, base in zip(mine, raw, strict=True))

    def _raw_line(self, kind: str, block_bytes: int) -> Line:
        return raw_line(self._threads[kind, block_bytes], kind, block_bytes)


def measure_throughput(
    folder: Path,
    memory: Memory,
    contenders: Sequence[Contender],
    scale: Scale,
    random: np.random.Generator,
    *,
    direct: bool,
    say: Callable[[str], None],
) -> Speeds:
    """Measure everything, block size by block size; within a repeat all take turns.

    The first contender with jobs of every size, the others with those that there are budgets for.
    The disk has its turn right before or after the first one's: its speed changes from minute to
    minute.

    Raises:
        RuntimeError: A loaded block is not what was stored.
    """
    speeds = Speeds()
    for block_bytes in scale.block_sizes:
        say(f"blocks of {block_bytes // 1024} KiB")
        for contender in contenders:
            _warm_up(contender, folder, memory, block_bytes, random)
        raw = partial(_measure_raw, folder, memory, block_bytes, scale, random, direct=direct)
        best = _find_best_threads(speeds, folder, block_bytes, raw)
        for repeat in range(scale.repeats):
            tiers = [
                [partial(_measure_tier, speeds, contender, folder, memory, block_bytes, job, scale)]
                for contender in contenders
                for job in scale.job_sizes
                # The first is the one that the run is about; other sizes of jobs have no budget.
                if job == BUDGET_JOB or (contender is contenders[0] and repeat < _OTHER_REPEATS)
            ]
            judged = scale.job_sizes.index(BUDGET_JOB) if repeat < _OTHER_REPEATS else 0
            disk = [partial(_note_raw, speeds, block_bytes, threads, raw) for threads in best]
            disk_first = bool(random.integers(2))
            tiers[judged] = [*disk, *tiers[judged]] if disk_first else [*tiers[judged], *disk]
            for place in random.permutation(len(tiers)).tolist():
                for turn in tiers[place]:
                    turn(random)
                    settle(folder)
    return speeds


Raw: TypeAlias = "Callable[[int], dict[str, tuple[int, float]]]"
"""Returns the bytes and seconds of each kind of transfer, for a number of threads."""


def _find_best_threads(speeds: Speeds, folder: Path, block_bytes: int, raw: Raw) -> set[int]:
    """Find out with how many threads the disk is fastest, for each kind of transfer."""
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for _ in range(_PILOTS):
        for threads in THREADS:
            for kind, (num_bytes, seconds) in raw(threads).items():
                speed = num_bytes / seconds
                found[kind][threads] = max(speed, found[kind].get(threads, 0.0))
            settle(folder)
    best = {kind: max(by_threads, key=by_threads.__getitem__) for kind, by_threads in found.items()}
    for kind, threads in best.items():
        speeds.choose_threads(kind, block_bytes, threads)
    return set(best.values())


def _note_raw(
    speeds: Speeds, block_bytes: int, threads: int, raw: Raw, random: np.random.Generator
) -> None:
    del random
    for kind, measured in raw(threads).items():
        speeds.add(raw_line(threads, kind, block_bytes), *measured)


def _measure_raw(
    folder: Path,
    memory: Memory,
    block_bytes: int,
    scale: Scale,
    random: np.random.Generator,
    threads: int,
    *,
    direct: bool,
) -> dict[str, tuple[int, float]]:
    plan = memory.plan(scale.num_blocks(block_bytes), block_bytes, random)
    num_bytes = len(plan.keys) * block_bytes
    singles = _single_places(plan, block_bytes, scale, random)
    disk = RawDisk(folder, memory, plan, block_bytes, direct=direct)
    try:
        return {
            "store": (num_bytes, disk.store(threads)),
            "load": (num_bytes, disk.load()),
            "single": (len(singles) * block_bytes, disk.load_single(singles, threads)),
        }
    finally:
        disk.close()


def _warm_up(
    contender: Contender,
    folder: Path,
    memory: Memory,
    block_bytes: int,
    random: np.random.Generator,
) -> None:
    """Move one job: what is imported at the first use is not to be in the first sample."""
    plan = memory.plan(BUDGET_JOB, block_bytes, random)
    contender.open(folder / "tier", block_bytes)
    try:
        contender.store(plan.stores(BUDGET_JOB))
        contender.load(plan.loads(BUDGET_JOB))
    finally:
        contender.close()


def _measure_tier(
    speeds: Speeds,
    contender: Contender,
    folder: Path,
    memory: Memory,
    block_bytes: int,
    job_blocks: int,
    scale: Scale,
    random: np.random.Generator,
) -> None:
    plan = memory.plan(scale.num_blocks(block_bytes), block_bytes, random)
    num_bytes = len(plan.keys) * block_bytes
    contender.open(folder / "tier", block_bytes)
    try:
        seconds = contender.store(plan.stores(job_blocks))
        speeds.add((contender.name, "store", block_bytes, job_blocks), num_bytes, seconds)
        memory.poison()
        seconds = contender.load(plan.loads(job_blocks))
        speeds.add((contender.name, "load", block_bytes, job_blocks), num_bytes, seconds)
        wrong = memory.wrong_blocks(plan, block_bytes)
        if job_blocks == BUDGET_JOB:
            places = _single_places(plan, block_bytes, scale, random)
            loads = plan.single_loads(places)
            seconds = contender.load(loads)
            speeds.add(
                (contender.name, "single", block_bytes, 1), len(loads) * block_bytes, seconds
            )
            wrong += memory.wrong_blocks(plan, block_bytes)
    finally:
        contender.close()
    if wrong:
        raise RuntimeError(
            f"{contender.name}: {wrong} of {len(plan.keys)} blocks of {block_bytes} bytes came "
            "back with other bytes than were stored"
        )


def _single_places(
    plan: Plan, block_bytes: int, scale: Scale, random: np.random.Generator
) -> list[int]:
    count = min(len(plan.keys), max(1, scale.single_bytes // block_bytes))
    places: list[int] = random.permutation(len(plan.keys))[:count].tolist()
    return places


def settle(folder: Path) -> None:
    """Commit what removals left to be done, so that it does not land in the next sample."""
    path = folder / "settle"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        path.unlink()


def measure_fio(
    folder: Path, block_sizes: Sequence[int], num_bytes: int
) -> dict[int, dict[str, float]]:
    """Return what fio says for each block size; empty where it is not installed."""
    speeds = {}
    for block_bytes in block_sizes:
        found = fio_bytes_per_s(folder, block_bytes, num_bytes)
        if found is not None:
            speeds[block_bytes] = found
    return speeds
