"""File system tiers in processes of their own, and the storage that is made to fail them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final, get_args

import pytest

from kv_core.plugins import check_tier
from kv_tier_fs import kv_core_register_tier
from kv_tier_fs._config import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

    from kv_core.contract import Capability

LAYOUTS: Final = get_args(Layout)
WORKER: Final = Path(__file__).with_name("worker.py")
ANSWER_S: Final = 60.0


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        "slice(count): so many of the cases are enough, unless FS_FAULTS=all is in the environment",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the cases of sliced tests: the same ones each time (or others, by FS_FAULTS_SEED)."""
    if os.environ.get("FS_FAULTS") == "all":
        return
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slice") is not None:
            name = getattr(item, "originalname", item.name)
            cases.setdefault((item.path, name), []).append(item)
    dropped = []
    for (_, name), found in cases.items():
        marker = found[0].get_closest_marker("slice")
        count = 0 if marker is None else marker.args[0]
        draw = random.Random(f"{os.environ.get('FS_FAULTS_SEED', '1')} {name}")
        kept = draw.sample(found, min(count, len(found)))
        dropped += [item for item in found if item not in kept]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


@final
class Worker:
    """A process with one tier. A context manager that ends it.

    Args:
        settings: Settings of the tier.
        before: Command to run the process under.
        options: Other fields of the order: ``block_bytes``, ``num_blocks``, ``namespace``,
            ``umask``, ``user``.

    Attributes:
        opened: The first answer: ``ready``, or ``raised`` and ``message``.
    """

    def __init__(
        self, settings: dict[str, Any], *, before: Sequence[str] = (), **options: Any
    ) -> None:
        order = json.dumps({"settings": settings, **options})
        self._process = subprocess.Popen(
            [*before, sys.executable, str(WORKER), order],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            bufsize=0,
            start_new_session=True,
        )
        self._pending = b""
        self.opened = self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Process id of the interpreter, also where it runs under another command."""
        return int(self.opened["ready"])

    def tell(self, command: str, **arguments: Any) -> None:
        """Send a command whose answer is asked for later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")

    def answer(self) -> dict[str, Any]:
        """Return the answer to the oldest command without one."""
        found = self._answer()
        assert "raised" not in found, found
        return found

    def __call__(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self.tell(command, **arguments)
        return self.answer()

    def check(self, blocks: Sequence[int]) -> list[int]:
        """Look blocks up, load what was found, and return what came back.

        Raises:
            AssertionError: Wrong bytes came back.
        """
        found = self("find", blocks=list(blocks))["found"]
        loaded: list[int] = []
        for start in range(0, len(found), 32):
            answer = self("load", blocks=found[start : start + 32])
            assert answer["wrong"] == []
            loaded += answer["loaded"]
        return sorted(loaded)

    def wait_for(self, blocks: Sequence[int]) -> None:
        """Ask until the blocks are found: an error stands for "absent" for a while.

        Raises:
            AssertionError: They are not found.
        """
        assert until(lambda: self("find", blocks=list(blocks))["found"] == list(blocks))

    def end(self) -> None:
        """Shut the tier down and wait for the end of the process."""
        self("close")
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(ANSWER_S) == 0
        self.kill()

    def kill(self) -> None:
        """End the process and what it runs under, whatever they do. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        until = time.monotonic() + ANSWER_S
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._process.stdout], [], [], until - time.monotonic())
            data = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                raise AssertionError("the worker is gone" if ready else "the worker says nothing")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """Return the name of each layout in turn."""
    name: str = request.param
    return name


@pytest.fixture
def capabilities(layout: str) -> frozenset[Capability]:
    """Return what the layout declares."""
    settings = {"root_dir": "/nowhere", "layout": layout}
    return check_tier(kv_core_register_tier(), name="fs", settings=settings).spec.capabilities


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the path of a root folder that is not there yet."""
    return tmp_path / "root"


@pytest.fixture
def start_worker(mount: object) -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a worker; arguments are settings or those of Worker.

    Workers are killed at the end of the test, before anything is unmounted.
    """
    workers: list[Worker] = []
    options = {"before", "block_bytes", "num_blocks", "namespace", "umask", "user"}

    def run(arguments: dict[str, Any]) -> Worker:
        settings = {key: value for key, value in arguments.items() if key not in options}
        rest = {key: value for key, value in arguments.items() if key in options}
        worker = Worker(settings, **rest)
        workers.append(worker)
        return worker

    yield run
    for worker in workers:
        worker.kill()


@pytest.fixture
def work(
    root: Path, layout: str, start_worker: Callable[[dict[str, Any]], Worker]
) -> Callable[..., Worker]:
    """Return a function that starts a worker of each layout, on one root unless told otherwise."""

    def run(root_dir: Path = root, **arguments: Any) -> Worker:
        return start_worker({"root_dir": str(root_dir), "layout": layout, **arguments})

    return run


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str, int], Path]]:
    """Return a function that mounts a new ``tmpfs`` or ``ext4`` of so many bytes.

    All are unmounted at the end.
    """
    mounted: list[Path] = []

    def run(kind: str, size_bytes: int) -> Path:
        folder = tmp_path / f"{kind}-{len(mounted)}"
        folder.mkdir()
        if kind == "tmpfs":
            source, options = "tmpfs", f"size={size_bytes}"
        else:
            image = folder.with_suffix(".image")
            with open(image, "wb") as file:
                file.truncate(size_bytes)
            format_it = ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)]
            subprocess.run(format_it, check=True, capture_output=True)
            source, options = str(image), "loop"
        subprocess.run(["mount", "-t", kind, "-o", options, source, folder], check=True)
        mounted.append(folder)
        folder.chmod(0o700)
        return folder

    yield run
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
    """Wait for another process; say whether the condition came true."""
    end = time.monotonic() + limit_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > end:
            return False
        pause.wait(0.005)
    return True


@final
class Injection:
    """System calls of a running process that fail, while this context manager is entered.

    Args:
        pid: The process.
        injections: What strace is to inject, for example ``"pwritev:error=EIO:when=2+"``.
    """

    def __init__(self, pid: int, *injections: str) -> None:
        calls = ",".join(injection.partition(":")[0] for injection in injections)
        self._command = ["strace", "-f", "-p", str(pid), "-e", f"trace={calls}"]
        for injection in injections:
            self._command += ["-e", f"inject={injection}"]
        self._lines: list[str] = []
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        attached = threading.Event()

        def read() -> None:
            assert self._process.stderr is not None
            for line in self._process.stderr:
                self._lines.append(line)
                if "attached" in line:
                    attached.set()

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        assert attached.wait(ANSWER_S), self._lines
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(ANSWER_S)
        assert self._reader is not None
        self._reader.join(ANSWER_S)
        assert self._process.stderr is not None
        self._process.stderr.close()

    @property
    def injected(self) -> int:
        """How many calls have been made to fail. Known once the context is left."""
        return sum("(INJECTED" in line for line in self._lines)


@pytest.fixture
def inject() -> type[Injection]:
    """Return the class that makes system calls of a process fail."""
    return Injection
