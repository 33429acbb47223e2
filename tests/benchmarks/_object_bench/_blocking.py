"""How long calls into a tier hold up the engine's thread, while blocks move at full speed.

A thread can be held up by two things: it waits, for a lock, for the interpreter or for a server,
which is the tier's doing; or it could go on and the machine gives no processor to it, or to the
thread that it waits for, which is not. The kernel counts the second one for each thread, so the
first one is what remains of a call after its own work and that: the delay of the thread itself, and
the longest delay of any other.

Where two threads in a row are kept from a processor, the second one still counts as a wait here,
which on a busy machine happens once in ten thousand calls. So the run is judged in parts: what a
tier does to its caller shows in most of them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import numpy as np

from kv_core.contract import ReqContext, ScheduleEndContext
from kv_core.tierkit.testing import example_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from _fs_bench._memory import Memory, Plan
    from _object_bench._contenders import TierContender

__all__ = ["Blocking", "measure_blocking"]

ResultT = TypeVar("ResultT")

_STEP_S: Final = 0.002
_BATCH: Final = 32
_LOOKUPS: Final = 64
_MOST_JOBS: Final = 4
_PARTS: Final = 5


@dataclass(frozen=True, slots=True)
class Blocking:
    """What the calls of one tier took, in milliseconds.

    Attributes:
        tier: Name of the tier.
        block_bytes: Bytes of a block.
        calls: Number of calls.
        moved_blocks: Blocks stored and loaded meanwhile.
        wall_p999: From call to return, 99.9th percentile.
        wall_max: The longest.
        cpu_p999: Work of the thread itself, likewise.
        cpu_max: The most.
        blocked_p999: Waiting for somebody else of this process, likewise.
        blocked_max: The longest.
        blocked_usual: The longest in each of several parts of the run, the median of these.
        slowest: Name of the call that was blocked longest.
        sees_queue: Whether the kernel tells how long threads wait for a processor. Where it does
            not, that time counts as blocked.
    """

    tier: str
    block_bytes: int
    calls: int
    moved_blocks: int
    wall_p999: float
    wall_max: float
    cpu_p999: float
    cpu_max: float
    blocked_p999: float
    blocked_max: float
    blocked_usual: float
    slowest: str
    sees_queue: bool


@final
class _Stopwatch:
    """Times calls of the thread that makes it, among all that run when it is made."""

    def __init__(self) -> None:
        # This door lets no other thread in meanwhile, or the next call would wait for it to go.
        self._read = ctypes.PyDLL(None).pread
        self._buffer = ctypes.create_string_buffer(80)
        self._files: list[int] = []
        mine = threading.get_native_id()
        with suppress(OSError):
            # Libraries in other languages have threads that Python does not list.
            others = (int(path.name) for path in Path("/proc/self/task").iterdir())
            for thread in (mine, *(other for other in others if other != mine)):
                self._files.append(os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY))
        self.sees_queue = bool(self._files)
        self.names: list[str] = []
        self.taken_ns: list[tuple[int, int, int]] = []

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file)

    def __call__(
        self, function: Callable[..., ResultT], *arguments: Any, name: str = ""
    ) -> ResultT:
        """Call a function and note what it took."""
        before = self._queued_ns()
        worked = time.thread_time_ns()
        start = time.perf_counter_ns()
        result = function(*arguments)
        wall = time.perf_counter_ns() - start
        worked = time.thread_time_ns() - worked
        queued = [end - begin for begin, end in zip(before, self._queued_ns(), strict=True)]
        not_ours = sum(queued[:1]) + max(queued[1:], default=0)
        self.names.append(name or function.__name__)
        self.taken_ns.append((wall, worked, max(0, wall - worked - not_ours)))
        return result

    def _queued_ns(self) -> list[int]:
        queued = []
        for file in self._files:
            self._read(file, self._buffer, ctypes.c_size_t(79), ctypes.c_long(0))
            queued.append(int(self._buffer.value.split()[1]))
        return queued


def measure_blocking(
    contender: TierContender,
    memory: Memory,
    block_bytes: int,
    seconds: float,
    random: np.random.Generator,
) -> Blocking:
    """Drive a tier like an engine whose steps are short, and time every call of it."""
    contender.open(block_bytes)
    try:
        stored = memory.plan(_BATCH, block_bytes, random)
        contender.put(stored.stores(_BATCH))
        # As engines do: else a collection walks over all that was ever imported, a tenth of a
        # second on whatever thread is at it.
        gc.collect()
        gc.freeze()
        with closing(_Stopwatch()) as watch:
            moved = _drive(contender, memory, block_bytes, seconds, random, watch, stored)
    finally:
        gc.unfreeze()
        contender.close()
    wall, worked, blocked = np.array(watch.taken_ns, dtype=float).T / 1e6
    return Blocking(
        contender.name,
        block_bytes,
        len(wall),
        moved,
        *(_tail(wall)),
        *(_tail(worked)),
        *(_tail(blocked)),
        float(np.median([part.max() for part in np.array_split(blocked, _PARTS)])),
        watch.names[int(blocked.argmax())],
        watch.sees_queue,
    )


def _drive(
    contender: TierContender,
    memory: Memory,
    block_bytes: int,
    seconds: float,
    random: np.random.Generator,
    watch: _Stopwatch,
    stored: Plan,
) -> int:
    tier = contender.tier
    flying: dict[int, Any] = {}
    loading = moved = steps = 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or flying:
        steps += 1
        request = ReqContext(f"step-{steps}")
        watch(tier.on_new_request, request)
        asked = [example_key(key) for key in stored.keys] + [
            example_key(-(steps * _LOOKUPS + i) % 2**40) for i in range(_LOOKUPS - _BATCH)
        ]
        watch(tier.lookup_many, asked, request)
        if len(flying) < _MOST_JOBS and time.perf_counter() < end:
            load = loading * 2 <= len(flying)
            plan = stored if load else memory.plan(_BATCH, block_bytes, random)
            batch = (plan.loads if load else plan.stores)(_BATCH)[0]
            job = contender.job(batch, load=load)
            watch(tier.on_new_request, job.req_context)
            watch(tier.submit_load if load else tier.submit_store, job)
            flying[job.job_id] = (job, load)
            loading += load
        watch(tier.on_schedule_end, ScheduleEndContext())
        for result in watch(lambda: list(tier.get_finished_jobs()), name="get_finished_jobs"):
            if not result.success:
                raise RuntimeError(f"{contender.name}: a job failed: {result.error}")
            job, load = flying.pop(result.job_id)
            loading -= load
            moved += len(job.keys)
            watch(tier.on_request_finished, job.req_context)
        watch(tier.has_pending_work)
        watch(lambda: list(tier.take_events()), name="take_events")
        watch(tier.get_stats)
        watch(tier.on_request_finished, request)
        time.sleep(_STEP_S)
    return moved


def _tail(found: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    return float(np.percentile(found, 99.9)), float(found.max())
