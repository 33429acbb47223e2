"""Kills the processes of a shared region at random moments, and looks at what is left.

Run ``python tests/integration/region_kills.py --rounds 240 --seed 1``. Each round starts a
scheduler and its workers, kills one of them with SIGKILL in a chosen phase, ends the others, and
starts the engine again under the same name. Half of the victims die at a chosen line of the code
(they kill themselves when they get there), half from outside while they run; what is counted is
the phase that the victim was in. The last line of the output is a JSON object with the counts.

One process is the supervisor and forks all others. They share a board of numbers: each process
writes its own phase and its own flags; only the supervisor writes ``STOP`` and ``GIVE_UP``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kv_core.cpu import PrimaryGeometry, SharedOffloadRegion, _prefault, _region, _region_file
from kv_core.cpu._joining import Poll
from kv_core.errors import RegionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PHASES: Final = ("create", "size", "attach", "pre-fault", "running", "shutdown")
SIZE: Final = PHASES.index("size")
# A process is in a phase from the call of one of these on.
PHASE_OF_FUNCTION: Final = {
    "create": 0,
    "allocate": 1,
    "attach": 2,
    "wait_until_attached": 2,
    "populate": 3,
    "run_scheduler": 4,
    "run_worker": 4,
    "close": 5,
}
TRACED_FOLDERS: Final = (str(Path(_region.__file__).parent), __file__)

ENGINE_ID: Final = "killed"
NAMESPACE: Final = "ab" * 32
NUM_BLOCKS: Final = 16
WORKER_PAGE_BYTES: Final = 6000
SCHEDULER: Final = 0  # process 1 + w is worker w
PATIENCE_S: Final = 60.0
REFUSED: Final = 3  # exit status of a process that ended with a RegionError

# Small pieces, so that there are moments between them.
_CHANGES_IN_CHILDREN: Final = (
    (_prefault, "CHUNK_BYTES", 4096),
    (_region_file, "CHUNK_BYTES", 16384),
)

# Places on the board, in 4-byte numbers: 1 + phase of each process (0 before the first), flags,
# lines per process and phase.
PHASE: Final = 0
WROTE: Final = 16
COMPLETE, ANSWERED, STOP, GIVE_UP = 32, 33, 34, 35
LINES: Final = 64


class Failure(Exception):  # noqa: N818 - a finding, not an error of the program
    """Something that must not happen."""


@dataclass(frozen=True, slots=True)
class Kill:
    """How the victim of a round dies.

    Attributes:
        victim: Process number.
        phase: Index of the phase.
        line: The how manieth line executed in that phase; ``None`` for a kill from outside.
    """

    victim: int
    phase: int
    line: int | None


class Board:
    """Numbers that all processes of a round see."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.numbers = memoryview(self._memory).cast("I")

    def clear(self) -> None:
        """Set all numbers to zero."""
        self.numbers[:] = memoryview(bytes(mmap.PAGESIZE)).cast("I")


class Tracer:
    """Follows a process through the phases, counts its lines, and kills it when told to."""

    def __init__(self, board: Board, process: int, kill: Kill | None) -> None:
        self._numbers = board.numbers
        self._process = process
        self._kill = kill if kill is not None and kill.victim == process else None

    def __call__(self, frame: Any, event: str, argument: object) -> Any:
        """Enter a function."""
        if not frame.f_code.co_filename.startswith(TRACED_FOLDERS):
            return None
        phase = PHASE_OF_FUNCTION.get(frame.f_code.co_name)
        if phase is not None:
            self._numbers[PHASE + self._process] = 1 + phase
        return self._on_line

    def _on_line(self, frame: Any, event: str, argument: object) -> Any:
        if event == "line" and self._numbers[PHASE + self._process]:
            phase = self._numbers[PHASE + self._process] - 1
            place = LINES + self._process * len(PHASES) + phase
            self._numbers[place] += 1
            kill = self._kill
            if kill is not None and phase == kill.phase and self._numbers[place] == kill.line:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._on_line


# -- what the processes do ----------------------------------------------------------------------


def geometry_of(num_workers: int) -> PrimaryGeometry:
    """Return a small geometry whose workers share pages of the kernel."""
    stride = PrimaryGeometry.stride_of(WORKER_PAGE_BYTES, num_workers)
    return PrimaryGeometry(NUM_BLOCKS, num_workers, WORKER_PAGE_BYTES, stride, stride)


def pattern(nonce: bytes, worker: int) -> int:
    """Return the byte that a worker of a generation writes, 1 to 126."""
    return 1 + (nonce[0] + 17 * worker) % 126


def wait_for(board: Board, places: Sequence[int]) -> None:
    """Wait until each of these flags is set, or the supervisor gives up."""
    while not all(board.numbers[place] for place in places):
        if board.numbers[GIVE_UP]:
            raise RegionError("another process is missing")
        time.sleep(0.0005)


def run_scheduler(region: SharedOffloadRegion, board: Board) -> None:
    """Read what the workers wrote, answer in other rows, and go on until told to stop."""
    geometry, nonce = region.geometry, region.trailer.nonce
    wait_for(board, [WROTE + worker for worker in range(geometry.num_workers)])
    with region.create_kv_memoryview() as view:
        rows = np.asarray(view)
        for worker in range(geometry.num_workers):
            first = worker * geometry.worker_page_bytes
            part = rows[0, first : first + geometry.worker_page_bytes]
            if not (part == pattern(nonce, worker)).all():
                raise Failure(f"the scheduler sees wrong bytes of worker {worker}")
            rows[1, first : first + geometry.worker_page_bytes] = pattern(nonce, worker) + 1
        del part, rows
    board.numbers[ANSWERED] = 1
    wait_for(board, [STOP])


def run_worker(region: SharedOffloadRegion, board: Board, worker: int) -> None:
    """Write a row, read the scheduler's answer, and go on until told to stop."""
    nonce = region.trailer.nonce
    view = region.create_next_view(worker, WORKER_PAGE_BYTES)
    if view.any():
        raise Failure(f"worker {worker} finds bytes of another generation")
    view[0] = pattern(nonce, worker)
    board.numbers[WROTE + worker] = 1
    wait_for(board, [ANSWERED])
    if not (view[1] == pattern(nonce, worker) + 1).all():
        raise Failure(f"worker {worker} sees a wrong answer of the scheduler")
    wait_for(board, [STOP])


def be_scheduler(shm_dir: Path, nonce: bytes, num_workers: int, board: Board) -> None:
    """Live the life of a scheduler."""
    region = SharedOffloadRegion(
        ENGINE_ID,
        geometry_of(num_workers),
        namespace_fingerprint=NAMESPACE,
        nonce=nonce,
        shm_dir=shm_dir,
        keep_name=True,
    )
    try:
        region.wait_until_attached(PATIENCE_S)
        board.numbers[COMPLETE] = 1
        run_scheduler(region, board)
    finally:
        region.close()


def be_worker(shm_dir: Path, nonce: bytes, num_workers: int, board: Board, worker: int) -> None:
    """Live the life of a worker."""
    region = SharedOffloadRegion.attach(
        ENGINE_ID,
        geometry_of(num_workers),
        namespace_fingerprint=NAMESPACE,
        nonce=nonce,
        worker=worker,
        shm_dir=shm_dir,
        deadline_s=PATIENCE_S,
    )
    try:
        run_worker(region, board, worker)
    finally:
        region.close()


# -- the supervisor -----------------------------------------------------------------------------


class Generation:
    """One start of the engine: a scheduler and its workers."""

    def __init__(self, shm_dir: Path, nonce: bytes, num_workers: int, board: Board) -> None:
        self.board = board
        self.num_workers = num_workers
        self.processes: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        self._life = partial(be_scheduler, shm_dir, nonce, num_workers, board)
        self._worker_life = partial(be_worker, shm_dir, nonce, num_workers, board)

    def start(self, numbers: Sequence[int], kill: Kill | None = None) -> None:
        """Fork processes, in this order."""
        for number in numbers:
            life = self._life if number == SCHEDULER else partial(self._worker_life, number - 1)
            process_id = os.fork()
            if process_id == 0:
                tracer = Tracer(self.board, number, kill)
                _live(life, tracer, self.board, is_disturbed=kill is not None)
            self.processes[number] = process_id

    def reap(self, number: int, *, patience_s: float = PATIENCE_S) -> int:
        """Wait for the end of a process; return its exit status, negative for a signal."""
        until = time.monotonic() + patience_s
        while number not in self.statuses:
            process_id, status = os.waitpid(self.processes[number], os.WNOHANG)
            if process_id:
                self.statuses[number] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                raise Failure(f"process {number} did not end")
            else:
                time.sleep(0.0002)
        return self.statuses[number]

    def end(self, *, allowed: set[int]) -> None:
        """End and reap all.

        Raises:
            Failure: One did not end with an allowed status.
        """
        self.board.numbers[STOP] = 1
        for number in self.processes:
            if number not in self.statuses and self.reap(number) not in allowed:
                raise Failure(f"process {number} ended with {self.statuses[number]}")

    def kill_all(self) -> None:
        """Kill and reap what is left."""
        for number, process_id in self.processes.items():
            if number not in self.statuses:
                os.kill(process_id, signal.SIGKILL)
                self.reap(number)


def _live(life: Callable[[], None], tracer: Tracer, board: Board, *, is_disturbed: bool) -> None:
    """Be a child process, to its end."""
    status = 1
    try:
        for module, name, value in _CHANGES_IN_CHILDREN:
            setattr(module, name, value)
        # No wait of a survivor outlasts the round.
        impatient = partial(
            Poll, clock=lambda: time.monotonic() * (1e6 if board.numbers[GIVE_UP] else 1.0)
        )
        vars(_region)["Poll"] = impatient
        sys.settrace(tracer)
        life()
        sys.settrace(None)
        status = 0
    except RegionError:
        status = REFUSED
        if not is_disturbed:
            traceback.print_exc()
    except BaseException:  # noqa: BLE001 - the traceback is the message, and the child ends here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


class Campaign:
    """Rounds over one folder."""

    def __init__(self, shm_dir: Path, seed: int) -> None:
        self.shm_dir = shm_dir
        self.counts: Counter[tuple[str, str]] = Counter()
        self.outside = 0
        self.leftovers = 0
        self._random = random.Random(seed)
        self._lines: dict[int, Sequence[int]] = {}

    def _nonce(self) -> bytes:
        return self._random.randbytes(16)

    def met(self) -> list[int]:
        """Return how many victims each phase has had."""
        return [self.counts[phase, "scheduler"] + self.counts[phase, "worker"] for phase in PHASES]

    def measure(self, num_workers: int) -> None:
        """Let engines live undisturbed, and keep how many lines each phase has at least."""
        end = LINES + (1 + num_workers) * len(PHASES)
        seen = []
        for _ in range(3):
            board = Board()
            self._live_whole(Generation(self.shm_dir, self._nonce(), num_workers, board))
            seen.append(board.numbers[LINES:end].tolist())
        self._lines[num_workers] = [min(lines) for lines in zip(*seen, strict=True)]

    def next_target(self) -> tuple[int, str]:
        """Return the phase and the role that have had too few victims.

        The first two phases are the scheduler's alone, and weigh as much as two.
        """
        targets = [
            (phase, role)
            for phase in range(len(PHASES))
            for role in ("scheduler", "worker")
            if role == "scheduler" or phase > SIZE
        ]
        return min(
            targets, key=lambda t: self.counts[PHASES[t[0]], t[1]] / (2 if t[0] <= SIZE else 1)
        )

    def round(self, phase: int, role: str) -> bool:
        """Kill one process, then start the engine anew.

        Args:
            phase: Index of the phase that is aimed at.
            role: Who is to die.

        Returns:
            Whether the victim was met; in few rounds it is faster.
        """
        choose = self._random
        num_workers = choose.choice((1, 2, 3))
        victim = SCHEDULER if role == "scheduler" else 1 + choose.randrange(num_workers)
        lines = self._lines[num_workers][victim * len(PHASES) + phase]
        # The first phases end before anybody outside can act.
        by_line = choose.random() < (0.9 if phase <= SIZE else 0.5)
        line = choose.randint(1, max(1, lines)) if by_line else None
        kill = Kill(victim, phase, line)
        board = Board()
        generation = Generation(self.shm_dir, self._nonce(), num_workers, board)
        order = list(range(1 + num_workers))
        choose.shuffle(order)
        try:
            generation.start(order, kill)
            was_killed = self._await_death(generation, kill)
            self._aftermath(generation, victim if was_killed else None)
        finally:
            generation.kill_all()
        if was_killed:
            self.counts[PHASES[board.numbers[PHASE + victim] - 1], role] += 1
            self.outside += line is None
        return was_killed

    def _await_death(self, generation: Generation, kill: Kill) -> bool:
        numbers = generation.board.numbers
        victim = generation.processes[kill.victim]
        until = time.monotonic() + PATIENCE_S
        moment = self._random.random() * 0.003
        while time.monotonic() < until:
            if numbers[ANSWERED] and kill.phase == PHASES.index("shutdown"):
                numbers[STOP] = 1
            process_id, status = os.waitpid(victim, os.WNOHANG)
            if process_id:
                generation.statuses[kill.victim] = os.waitstatus_to_exitcode(status)
                return generation.statuses[kill.victim] == -signal.SIGKILL
            if numbers[PHASE + kill.victim] > kill.phase and kill.line is None:
                time.sleep(moment if kill.phase > SIZE else 0)
                os.kill(victim, signal.SIGKILL)
                return generation.reap(kill.victim) == -signal.SIGKILL
            if numbers[ANSWERED] and kill.phase < PHASES.index("running"):
                return False
            if kill.line is not None and numbers[ANSWERED]:
                # Past its work: a process that waits for the end runs the same lines again.
                time.sleep(0.0005)
        raise Failure(f"{kill} did not happen")

    def _aftermath(self, old: Generation, victim: int | None) -> None:
        """End what the kill left alive, before or after the next start, and check what is left."""
        had_no_name = bool(old.board.numbers[COMPLETE])
        path = self.shm_dir / _region.region_name(ENGINE_ID)
        if victim == SCHEDULER and self._random.random() < 0.5:
            # Workers of the old generation live on while the new one starts.
            new = Generation(self.shm_dir, self._nonce(), old.num_workers, Board())
            try:
                new.start([SCHEDULER])
                until = time.monotonic() + PATIENCE_S
                while new.board.numbers[PHASE] <= PHASES.index("attach"):
                    if time.monotonic() > until:
                        raise Failure("the next scheduler did not start beside old workers")
                    time.sleep(0.0005)
                inode = path.stat().st_ino
                self._end_survivors(old)
                if path.stat().st_ino != inode:
                    raise Failure("the name of a successor was removed")
                new.start(range(1, 1 + new.num_workers))
                self._live_whole(new, started=True)
            finally:
                new.kill_all()
            return
        self._end_survivors(old)
        left = self._names()
        if left not in ([], [path.name]):
            raise Failure(f"foreign files are left: {left}")
        if left and (had_no_name or victim != SCHEDULER):
            raise Failure(f"a name is left although its region was complete or closed: {left}")
        self.leftovers += bool(left)
        self._live_whole(
            Generation(self.shm_dir, self._nonce(), self._random.choice((1, 2, 3)), Board())
        )

    def _end_survivors(self, generation: Generation) -> None:
        if self._random.random() < 0.5 and generation.statuses.get(SCHEDULER) is not None:
            generation.kill_all()
        else:
            generation.board.numbers[GIVE_UP] = 1
            generation.end(allowed={0, REFUSED})

    def _live_whole(self, generation: Generation, *, started: bool = False) -> None:
        """Let an engine start, work and stop, and require that nothing is left of it."""
        try:
            if not started:
                # Workers may be there first, and see what the dead left behind.
                order = list(range(1 + generation.num_workers))
                self._random.shuffle(order)
                generation.start(order)
            until = time.monotonic() + PATIENCE_S
            while not generation.board.numbers[ANSWERED]:
                if time.monotonic() > until:
                    raise Failure("the next start did not come up")
                time.sleep(0.0005)
            generation.end(allowed={0})
        finally:
            generation.kill_all()
        if names := self._names():
            raise Failure(f"an engine that was stopped leaves {names}")
        used_bytes = self.used_bytes()
        if used_bytes:
            raise Failure(f"{used_bytes} bytes of memory are still taken without any file")

    def used_bytes(self) -> int:
        """Return what the folder's file system holds; 0 if others use it as well."""
        if not self.shm_dir.is_mount():
            return 0
        status = os.statvfs(self.shm_dir)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.shm_dir.iterdir())


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """Make a folder on a memory file system: one of its own where that is allowed."""
    with tempfile.TemporaryDirectory(prefix="region-kills-", dir="/dev/shm") as name:
        options = ["-t", "tmpfs", "-o", "size=16m", "tmpfs", name]
        is_mounted = subprocess.run(["mount", *options], capture_output=True, check=False)
        try:
            yield Path(name)
        finally:
            if is_mounted.returncode == 0:
                subprocess.run(["umount", name], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds and print what was met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with memory_folder() as shm_dir:
        campaign = Campaign(shm_dir, options.seed)
        for num_workers in (1, 2, 3):
            campaign.measure(num_workers)
        done = tries = 0
        while done < options.rounds or 10 * min(campaign.met()) < done:
            tries += 1
            if tries > 3 * options.rounds:
                raise Failure("victims are met too seldom")
            try:
                done += campaign.round(*campaign.next_target())
            except Failure:
                sys.stderr.write(f"in try {tries} of seed {options.seed}:\n")
                raise
        is_measured = shm_dir.is_mount()
    table = {
        phase: {role: campaign.counts[phase, role] for role in ("scheduler", "worker")}
        for phase in PHASES
    }
    for phase, roles in table.items():
        sys.stdout.write(
            f"{phase:<10} {roles['scheduler']:4} scheduler {roles['worker']:4} worker\n"
        )
    summary = {
        "kills": done,
        "from_outside": campaign.outside,
        "leftovers_reclaimed": campaign.leftovers,
        "memory_measured": is_measured,
        "phases": table,
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
