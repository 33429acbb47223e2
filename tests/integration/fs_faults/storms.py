"""Many writers of one root folder at once, killed at random moments or left alone for long.

Run ``python tests/integration/fs_faults/storms.py kills --rounds 300 --seed 1`` or ``... crowd
--seconds 180``. The last line of the output is a JSON object with the counts.

``kills``: each round starts a few processes that store, load and delete at random, and kills one of
them with SIGKILL: half of the victims right before, in the middle of or right after the n-th
system call of one kind that changes the storage (they kill themselves), half from outside. Then
the tier is opened anew, and everything is looked at: no wrong byte, nothing lost that was reported
stored (in the storage that has room for all), no more bytes than the bound, accounts that equal
the disk, nothing left of the dead.

``crowd``: four processes write to two namespaces of one root at once, with a bound for each and
one for the root, and nobody is killed.

One process is the supervisor and forks all others; it has no threads and opens no tier. They share
a board of numbers. Of each block the board says whether it must be there; a process writes that
down for the blocks that only it stores and deletes, and for shared blocks once one is stored.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import kv_tier_fs.files._tier
import kv_tier_fs.segments._tier  # noqa: F401 - children do not import it each
from kv_core.contract import Capability
from kv_core.plugins import check_tier
from kv_core.tierkit.testing import TierDriver, example_key, example_namespace
from kv_tier_fs import kv_core_register_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

MIB: Final = 1 << 20
BLOCKS: Final = 480
"""Blocks that a storm knows. Of every four, three belong to one writer each, and one to all."""
MOST_WRITERS: Final = 3
JOB_BLOCKS: Final = 12
PATIENCE_S: Final = 60.0
ACCOUNTS_S: Final = 10.0
WRONG: Final = 3  # exit status of a process that found something that must not be

# Places on the board, in bytes.
STOP, OPEN = 0, 16
STATES: Final = 64
UNKNOWN, STORED = 0, 1

# What changes the storage, as the tier calls it. Opening counts where it creates.
CALLS: Final = (
    "pwritev",
    "pwrite",
    "open",
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "ftruncate",
    "fchmod",
    "utime",
)
TORN: Final = frozenset({"pwritev", "pwrite"})


class Failure(Exception):  # noqa: N818 - a finding, not an error of the program
    """Something that must not happen."""


@final
@dataclass(frozen=True, slots=True)
class Storage:
    """A root folder and how tiers are opened on it.

    Attributes:
        root: The folder.
        layout: The layout.
        block_bytes: Bytes of a block.
        settings: Further settings.
        bound_bytes: What the tier is to keep to, or ``None``; then nothing may be lost.
        model: Name of the model, and so of the namespace.
    """

    root: Path
    layout: str
    block_bytes: int
    settings: dict[str, Any]
    bound_bytes: int | None = None
    model: str = "example/model"

    def open(self) -> tuple[TierDriver, frozenset[Capability]]:
        """Open the tier."""
        settings = {
            "root_dir": str(self.root),
            "layout": self.layout,
            "min_free_bytes": MIB,
            "io_threads": 4,
            **self.settings,
        }
        if self.bound_bytes is not None:
            settings["capacity_bytes"] = self.bound_bytes
        checked = check_tier(kv_core_register_tier(), name="fs", settings=settings)
        driver = TierDriver(
            checked.spec.factory,
            checked.config,
            block_bytes=self.block_bytes,
            num_blocks=2 * JOB_BLOCKS,
            namespace=example_namespace(self.block_bytes, model=self.model),
            tier_name="fs",
        )
        return driver, checked.spec.capabilities

    def disk_bytes(self) -> int:
        """Return what the blocks of the namespace take on the disk."""
        fingerprint = example_namespace(self.block_bytes, model=self.model).fingerprint
        return sum(map(disk_bytes, self.root.glob(f"*_{fingerprint[:12]}*")))


def disk_bytes(folder: Path) -> int:
    """Return what the files of blocks below a folder take on the disk."""
    total = 0
    for path in folder.rglob("*"):
        if path.suffix in (".seg", ".idx", ".bin", ".tmp"):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                # The end of a file takes a whole page, but not everywhere before it is written.
                total += max(status.st_blocks * 512, status.st_size)
    return total


@contextlib.contextmanager
def space_lock(root: Path) -> Iterator[None]:
    """Keep everybody from making and removing segments: a look at the files takes a while."""
    try:
        descriptor = os.open(root / "space.lock", os.O_RDWR)
    except FileNotFoundError:
        # Nobody has opened the root yet, or the layout has no such lock.
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Board:
    """Numbers that all processes see."""

    def __init__(self) -> None:
        self.numbers = mmap.mmap(-1, STATES + BLOCKS)


# -- how a victim dies ----------------------------------------------------------------------------


@final
class KillSwitch:
    """Counts the calls of a process that change the storage, and kills it at one of them.

    Args:
        place: Module and call to die at, as in ``_direct.pwritev``; ``None``: only count.
        number: The how manieth call there.
        moment: ``before``, ``torn`` (half of the bytes) or ``after``.

    Attributes:
        counts: Calls so far, by place.
    """

    def __init__(self, place: str | None = None, number: int = 0, moment: str = "before") -> None:
        self._place = place
        self._number = number
        self._moment = moment
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def install(self) -> None:
        """Stand between this process and its system calls."""
        for name in CALLS:
            setattr(os, name, self._watch(name, getattr(os, name)))

    def _watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return call(*arguments, **options)
            place = f"{_caller()}.{name}"
            with self._lock:
                self.counts[place] += 1
                is_last = place == self._place and self.counts[place] == self._number
            if not is_last:
                return call(*arguments, **options)
            if self._moment == "torn":
                arguments = (arguments[0], *_half(arguments[1], name), *arguments[2:])
            if self._moment != "before":
                call(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        return watched


def _caller() -> str:
    """Return the module of the tier that makes a call, and whether it does so to collect."""
    collects = "collect" in threading.current_thread().name
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("kv_tier_fs"):
            return ("collector/" if collects else "") + module.rpartition(".")[2]
        frame = frame.f_back
    return "elsewhere"


def _half(data: Any, name: str) -> tuple[Any]:
    if name == "pwrite":
        return (data[: len(data) // 2],)
    # Whole pages, or direct I/O would refuse it.
    total = sum(map(len, data)) // 2 // 4096 * 4096
    parts = []
    for buffer in data:
        parts.append(buffer[: max(0, total)])
        total -= len(buffer)
    return ([part for part in parts if len(part)],)


# -- what the processes do ------------------------------------------------------------------------


@final
class Writer:
    """Stores, loads and deletes at random, and checks every byte that comes back."""

    def __init__(self, storage: Storage, number: int, board: Board, seed: int) -> None:
        self._driver, capabilities = storage.open()
        self._deletes = Capability.DELETE in capabilities
        self._states = memoryview(board.numbers)[STATES:]
        self._number = number
        self._random = random.Random(seed)
        self._keys = [example_key(block) for block in range(BLOCKS)]
        self._own = [block for block in range(BLOCKS) if block % (MOST_WRITERS + 1) == number]
        self._shared = range(MOST_WRITERS, BLOCKS, MOST_WRITERS + 1)
        board.numbers[OPEN + number] = 1

    def step(self) -> None:
        """Do one thing, or a store and a load beside each other."""
        choice = self._random.random()
        if self._deletes and choice < 0.1:
            self._delete(self._some(self._own, 4))
            return
        jobs: list[Callable[[], None]] = []
        if choice < 0.7:
            jobs.append(self._store([*self._some(self._own, 9), *self._some(self._shared, 3)]))
        if choice > 0.4:
            jobs.append(self._load(self._some(range(BLOCKS), JOB_BLOCKS)))
        for finish in jobs:
            finish()

    def close(self) -> None:
        """Shut the tier down."""
        self._states.release()
        self._driver.close()

    def _some(self, blocks: Sequence[int], most: int) -> list[int]:
        return self._random.sample(blocks, self._random.randint(1, min(most, len(blocks))))

    def _store(self, blocks: list[int]) -> Callable[[], None]:
        keys = [self._keys[block] for block in blocks]
        job = self._driver.submit_store(keys)

        def finish() -> None:
            result = self._driver.wait(job)
            stored = set(keys if result.success else result.successful_keys)
            for block, key in zip(blocks, keys, strict=True):
                if key in stored:
                    self._states[block] = STORED

        return finish

    def _load(self, blocks: list[int]) -> Callable[[], None]:
        keys = [self._keys[block] for block in blocks]
        first = self._driver.primary.num_blocks - len(keys)
        job = self._driver.submit_load(keys)

        def finish() -> None:
            result = self._driver.wait(job)
            loaded = set(keys if result.success else result.successful_keys)
            for index, key in enumerate(keys):
                if key in loaded and not self._driver.holds(first + index, key):
                    raise Failure(f"block {blocks[index]} has wrong bytes")

        return finish

    def _delete(self, blocks: list[int]) -> None:
        for block in blocks:
            self._states[block] = UNKNOWN
        self._driver.tier.delete([self._keys[block] for block in blocks])
        self._driver.step()


def write(
    storage: Storage, number: int, board: Board, seed: int, *, steps: int, seconds: float
) -> None:
    """Be a writer, for so many steps and seconds at most, or until told to stop."""
    end = time.monotonic() + seconds
    writer = Writer(storage, number, board, seed)
    for _ in range(steps):
        if board.numbers[STOP] or time.monotonic() > end:
            break
        writer.step()
    writer.close()


def inspect(storage: Storage, board: Board) -> None:
    """Open the tier after a storm and look at everything.

    Raises:
        Failure: Something is not as it must be.
    """
    driver, capabilities = storage.open()
    keys = [example_key(block) for block in range(BLOCKS)]
    found = driver.resolve(keys)
    there = [block for block in range(BLOCKS) if found[block]]
    if storage.bound_bytes is None:
        lost = [
            block
            for block in range(BLOCKS)
            if board.numbers[STATES + block] == STORED and not found[block]
        ]
        if lost:
            raise Failure(f"blocks {lost} were reported stored and are gone")
    for start in range(0, len(there), JOB_BLOCKS):
        some = there[start : start + JOB_BLOCKS]
        result = driver.load([keys[block] for block in some])
        if not result.success:
            raise Failure(f"blocks that were found cannot be loaded: {result.error}")
        right = driver.loaded([keys[block] for block in some])
        wrong = [block for block in some if keys[block] not in right]
        if wrong:
            raise Failure(f"blocks {wrong} have wrong bytes")
    # Whatever is cleaned up beside the opening is done when a store has gone through.
    driver.store(keys[:1])
    if Capability.USAGE in capabilities:
        expect_right_accounts(storage, driver)
    driver.close()
    leftovers = find_leftovers(storage.root)
    if leftovers:
        raise Failure(f"left over: {leftovers}")


def expect_right_accounts(storage: Storage, driver: TierDriver) -> None:
    """Require that the tier soon counts what the disk has, and that this is within the bound.

    Raises:
        Failure: It does not.
    """
    end = time.monotonic() + ACCOUNTS_S
    while (counted := driver.tier.usage().bytes) != (disk := storage.disk_bytes()):
        if time.monotonic() > end:
            raise Failure(f"the tier counts {counted} bytes, the disk has {disk}")
        driver.step()
        time.sleep(0.01)
    if storage.bound_bytes is not None and disk > storage.bound_bytes:
        raise Failure(f"the disk has {disk} bytes, {storage.bound_bytes} are allowed")
    keys = [example_key(block) for block in range(BLOCKS)]
    blocks, found = driver.tier.usage().blocks, sum(driver.resolve(keys))
    if blocks != found:
        raise Failure(f"the tier counts {blocks} blocks, and finds {found}")


def find_leftovers(root: Path) -> list[str]:
    """Return what lies in a root folder that nobody has open, and belongs to no block."""
    names = {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
    left = []
    for name in sorted(names):
        if name.suffix == ".seg" and name.with_suffix(".idx") not in names:
            left.append(str(name))
        elif name.suffix == ".idx" and name.stem != "00000000":
            if name.with_suffix(".seg") not in names:
                left.append(str(name))
        elif name.suffix == ".tmp" or (name.suffix == ".lock" and name.parent.name == "writers"):
            left.append(str(name))
    return left


# -- the supervisor -------------------------------------------------------------------------------


@final
class Children:
    """Processes that were forked, and how they ended."""

    def __init__(self) -> None:
        self.running: dict[int, str] = {}

    def start(self, name: str, life: Callable[[], None], switch: KillSwitch | None = None) -> int:
        """Fork a process."""
        sys.stdout.flush()
        sys.stderr.flush()
        process_id = os.fork()
        if process_id == 0:
            _live(life, switch)
        self.running[process_id] = name
        return process_id

    def poll(self, process_id: int) -> int | None:
        """Return the exit status of a process, negative for a signal; ``None`` while it runs."""
        done, status = os.waitpid(process_id, os.WNOHANG)
        if not done:
            return None
        del self.running[process_id]
        return os.waitstatus_to_exitcode(status)

    def wait(self, process_id: int) -> int:
        """Wait for the end of a process; return its exit status."""
        end = time.monotonic() + PATIENCE_S
        while (status := self.poll(process_id)) is None:
            if time.monotonic() > end:
                raise Failure(f"{self.running[process_id]} does not end")
            time.sleep(0.0005)
        return status

    def expect_end(self) -> None:
        """Wait for all, and require that all is well with them."""
        for process_id, name in list(self.running.items()):
            if (status := self.wait(process_id)) != 0:
                raise Failure(f"{name} ended with {status}")

    def kill(self) -> None:
        """Kill what is left."""
        for process_id in list(self.running):
            os.kill(process_id, signal.SIGKILL)
            self.wait(process_id)


def _live(life: Callable[[], None], switch: KillSwitch | None) -> None:
    """Be a child process, to its end."""
    status = 1
    try:
        if switch is not None:
            switch.install()
        life()
        status = 0
    except Failure:
        status = WRONG
        traceback.print_exc()
    except BaseException:  # noqa: BLE001 - the traceback is the message, and the child ends here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


@final
class Kills:
    """Rounds over two storages: one with room for everything, and one with too little."""

    def __init__(self, folder: Path, layout: str, seed: int) -> None:
        self._random = random.Random(seed)
        self._storages = [Storage(folder / "roomy", layout, 4096, {})]
        bound = 2 * MIB if layout == "segments" else None
        self._storages.append(Storage(folder / "tight", layout, 16384, {}, bound))
        self._boards = [Board() for _ in self._storages]
        # How often a writer makes a call there, by storage and place.
        self._places: dict[tuple[int, str], int] = {}
        self.kills: Counter[str] = Counter()
        self.aimed: Counter[tuple[int, str]] = Counter()
        self.outside = 0
        self.rounds = 0

    def measure(self) -> None:
        """Let a writer live undisturbed, and keep which calls it makes, and how often."""
        for index, (storage, board) in enumerate(zip(self._storages, self._boards, strict=True)):
            told, tell = os.pipe()

            def count(storage: Storage = storage, board: Board = board, tell: int = tell) -> None:
                switch = KillSwitch()
                switch.install()
                write(storage, 0, board, 1, steps=60, seconds=20)
                with open(tell, "w") as pipe:
                    json.dump(switch.counts, pipe)

            children = Children()
            children.start("the measured writer", count)
            os.close(tell)
            with open(told) as pipe:
                counts: dict[str, int] = json.load(pipe)
            children.expect_end()
            for place, times in counts.items():
                self._places[index, place] = times

    def round(self) -> bool:
        """Kill one writer and look at what is left; return whether it was met."""
        self.rounds += 1
        choose = self._random
        index, place, switch = choose.choice((0, 1)), "outside", None
        if choose.random() < 0.6:
            index, place = aim = min(sorted(self._places), key=self.aimed.__getitem__)
            self.aimed[aim] += 1
            moments = ["before", "after", *(["torn"] * 2 if place.split(".")[1] in TORN else [])]
            # Rather early: there may be less to do than when it was counted.
            number = min(1 + int(choose.expovariate(1 / 8)), max(1, self._places[aim] // 2))
            switch = KillSwitch(place, number, choose.choice(moments))
        storage, board = self._storages[index], self._boards[index]
        board.numbers[:STATES] = bytes(STATES)
        if choose.random() < 0.5:
            # What is there already is not stored again.
            shutil.rmtree(storage.root, ignore_errors=True)
            board.numbers[:] = bytes(len(board.numbers))
        others = choose.randint(0, MOST_WRITERS - 1)
        children = Children()
        try:
            steps = 40
            victim = self._start(children, storage, board, 0, steps, switch)
            for number in range(1, 1 + others):
                self._start(children, storage, board, number, steps, None)
            met = self._meet(children, board, victim, is_outside=switch is None)
            children.expect_end()
            children.start("the inspector", lambda: inspect(storage, board))
            children.expect_end()
        except Failure as failure:
            moment = "" if switch is None else f" ({vars(switch)['_moment']})"
            raise Failure(f"after a kill at {place}{moment} in {storage.root}: {failure}") from None
        finally:
            children.kill()
        if met:
            self.kills[place] += 1
            self.outside += switch is None
        return met

    def _start(
        self,
        children: Children,
        storage: Storage,
        board: Board,
        number: int,
        steps: int,
        switch: KillSwitch | None,
    ) -> int:
        seed = self._random.getrandbits(32)
        return children.start(
            f"writer {number}",
            lambda: write(storage, number, board, seed, steps=steps, seconds=20),
            switch,
        )

    def _meet(self, children: Children, board: Board, victim: int, *, is_outside: bool) -> bool:
        """Wait for the death of the victim, or bring it about."""
        if is_outside:
            # Sometimes while it opens.
            delay = self._random.expovariate(1 / 0.08)
            end = time.monotonic() + PATIENCE_S
            while self._random.random() > 0.0005 and not board.numbers[OPEN]:
                if time.monotonic() > end:
                    raise Failure("the victim does not open the tier")
                time.sleep(0.0002)
            time.sleep(delay)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        status = children.wait(victim)
        if status not in (0, -signal.SIGKILL):
            raise Failure(f"the victim ended with {status}")
        return status == -signal.SIGKILL


def run_kills(folder: Path, layout: str, rounds: int, seed: int) -> dict[str, Any]:
    """Kill so many writers, and return the counts."""
    storm = Kills(folder, layout, seed)
    storm.measure()
    done = 0
    while done < rounds:
        if storm.rounds > 4 * rounds + 40:
            raise Failure("victims are met too seldom")
        try:
            done += storm.round()
        except Failure:
            sys.stderr.write(f"in round {storm.rounds} of seed {seed}:\n")
            raise
    return {
        "kills": done,
        "from_outside": storm.outside,
        "places": dict(sorted(storm.kills.items())),
    }


def run_crowd(folder: Path, layout: str, seconds: float, seed: int) -> dict[str, Any]:
    """Let four processes write to two namespaces, and return the counts."""
    bound = 4 * MIB if layout == "segments" else None
    common = {"root_capacity_bytes": 6 * MIB} if layout == "segments" else {}
    storages = [
        Storage(
            folder / "crowd", layout, block_bytes, common, bound, model=f"example/{block_bytes}"
        )
        for block_bytes in (16384, 20480)
    ]
    boards = [Board() for _ in storages]
    children = Children()
    most_bytes = looks = 0
    try:
        for number in range(4):
            storage, board = storages[number % 2], boards[number % 2]
            children.start(
                f"writer {number}",
                lambda storage=storage, board=board, number=number: write(  # type: ignore[misc]
                    storage, number // 2, board, seed + number, steps=1 << 30, seconds=seconds
                ),
            )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with space_lock(folder / "crowd"):
                most_bytes = max(most_bytes, disk_bytes(folder))
            looks += 1
            time.sleep(0.005)
        children.expect_end()
        for storage, board in zip(storages, boards, strict=True):
            children.start("the inspector", lambda s=storage, b=board: inspect(s, b))  # type: ignore[misc]
            children.expect_end()
    finally:
        children.kill()
    # Room is made for segments. An index of removals grows beside them, and is counted with the
    # next: a page for each writer.
    if layout == "segments" and most_bytes > 6 * MIB + 4 * mmap.PAGESIZE:
        raise Failure(f"the root held {most_bytes} bytes, {6 * MIB} were allowed")
    return {"seconds": seconds, "looks": looks, "most_bytes": most_bytes}


@contextlib.contextmanager
def _folder(where: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fs-storm-", dir=where) as name:
        yield Path(name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a storm and print what was met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("storm", choices=("kills", "crowd"))
    parser.add_argument("--layout", choices=("segments", "files"), default="segments")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=None, help="where to make the root folder")
    options = parser.parse_args(arguments)
    with _folder(options.dir) as folder:
        if options.storm == "kills":
            summary = run_kills(folder, options.layout, options.rounds, options.seed)
        else:
            summary = run_crowd(folder, options.layout, options.seconds, options.seed)
    sys.stdout.write(json.dumps({"layout": options.layout, **summary}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
