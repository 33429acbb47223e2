"""A real vLLM engine as a process that tests drive, and prompts for it."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

HERE: Final = Path(__file__).parent
BLOCK_TOKENS: Final = 32
# Keys and values of 32 tokens in the four layers of the tiny model, in float32.
BLOCK_BYTES: Final = 64 << 10
_START_S: Final = 240.0
_REPLY_S: Final = 180.0
_STOP_S: Final = 30.0
_STATS_PERIOD_S: Final = 0.3
_PATIENCE_S: Final = 60.0
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the place to be checked


class EngineDiedError(AssertionError):
    """The engine process ended, or did not answer in time."""


class EngineError(AssertionError):
    """A command failed inside the engine process."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the engine answered to a batch of prompts.

    Attributes:
        tokens: The tokens of each answer.
        cached: How many tokens of each prompt came from a cache, the engine's own or ours.
        seconds: How long the batch took.
        processor_seconds: How long the engine's process computed for it, over all its threads.
        margin: How far the best token was ahead of the second at the closest; NaN if not asked.
    """

    tokens: list[list[int]]
    cached: list[int]
    seconds: float
    processor_seconds: float
    margin: float = field(default=float("nan"), compare=False)


@final
class Engine:
    """One engine process. A context manager that ends it.

    Args:
        python: An interpreter with vLLM.
        folder: For the process's log; must exist.
        models: Where models are kept.
        model: The kind of model.
        connector: vLLM's ``KVTransferConfig`` as a dictionary, or none.
        options: vLLM's engine arguments beyond the usual.
        environment: More environment variables.
        processes: Whether the engine core runs in a process of its own, as in production. It
            then steps by itself, and commands that take single steps are not to be had.
    """

    def __init__(
        self,
        *,
        python: Path,
        folder: Path,
        models: Path,
        model: str = "tiny",
        connector: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        processes: bool = False,
    ) -> None:
        self._engine_id = f"test-{uuid.uuid4()}"
        self.log = Path(tempfile.mkstemp(prefix="engine-", suffix=".log", dir=folder)[1])
        command_out, command_in = os.pipe()
        reply_out, reply_in = os.pipe()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [python, "-m", "engine_process", str(command_out), str(reply_in)],
                cwd=folder,
                env=_environment(processes=processes) | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[command_out, reply_in],
                start_new_session=True,
            )
        os.close(command_out)
        os.close(reply_in)
        self._commands = os.fdopen(command_in, "wb", buffering=0)
        self._replies = os.fdopen(reply_out, "rb", buffering=0)
        self._rest = b""
        try:
            self.info: dict[str, Any] = self.do(
                "start",
                deadline_s=_START_S,
                model=model,
                models=str(models),
                connector=connector and {"engine_id": self._engine_id, **connector},
                options=dict(options or {}),
            )
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.process.poll() is None:
            self.stop()
        self.kill()

    def do(self, command: str, *, deadline_s: float = _REPLY_S, **arguments: Any) -> Any:
        """Carry out a command and return its value.

        Raises:
            EngineError: It failed.
            EngineDiedError: The process ended or did not answer in time.
        """
        self.begin(command, **arguments)
        return self.end(deadline_s=deadline_s)

    def begin(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting for its reply: see :meth:`end`."""
        line = json.dumps({"do": command, **arguments}).encode() + b"\n"
        with suppress(BrokenPipeError):
            self._commands.write(line)

    def end(self, *, deadline_s: float = _REPLY_S) -> Any:
        """Wait for the reply to :meth:`begin` and return its value."""
        reply = json.loads(self._read_line(deadline_s))
        if "error" in reply:
            raise EngineError(
                f"{reply['error']['type']}: {reply['error']['message']}\n{self.tail()}"
            )
        return reply["value"]

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 16, margins: bool = False
    ) -> Answers:
        """Answer prompts, all at once."""
        self.begin_generate(prompts, max_tokens=max_tokens, margins=margins)
        return self.end_generate()

    def begin_generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 16, margins: bool = False
    ) -> None:
        """Begin to answer prompts: see :meth:`end_generate`."""
        self.begin(
            "generate",
            prompts=[list(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            margins=margins,
        )

    def end_generate(self, *, deadline_s: float = _REPLY_S) -> Answers:
        """Wait for what :meth:`begin_generate` began."""
        reply = self.end(deadline_s=deadline_s)
        return Answers(
            tokens=[answer["tokens"] for answer in reply["answers"]],
            cached=[answer["cached"] for answer in reply["answers"]],
            seconds=reply["seconds"],
            processor_seconds=reply["processor_seconds"],
            margin=reply.get("margin", float("nan")),
        )

    def metrics(self, like: str = "kv_") -> dict[str, float]:
        """Return vLLM's metrics whose names contain ``like``."""
        found: dict[str, float] = self.do("metrics")
        return {name: value for name, value in found.items() if like in name}

    def reset(self, *, running: bool = False, connector: bool = False) -> bool:
        """Forget the engine's own cache, and on request that of the connector."""
        return bool(self.do("reset", running=running, connector=connector))

    def settle(self) -> None:
        """Step until the connector has nothing left to do: all stores have arrived."""
        self.do("settle")

    def stop(self) -> None:
        """Shut down as an operator would."""
        self.do("stop", deadline_s=_STOP_S)
        try:
            status = self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            raise EngineDiedError(self._postmortem("does not end")) from None
        assert status == 0, self.tail()

    def kill(self) -> None:
        """End the process and all its children, without a chance to clean up."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._commands.close()
        self._replies.close()
        # In the tier mode the region is vLLM's, which outlives a process that is killed.
        for left in _SHARED_MEMORY.glob(f"vllm_offload_{self._engine_id}*"):
            left.unlink()

    def tail(self, lines: int = 40) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _read_line(self, deadline_s: float) -> bytes:
        end = time.monotonic() + deadline_s
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        while b"\n" not in self._rest:
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise EngineDiedError(self._postmortem(f"did not answer in {deadline_s:g} s"))
            data = os.read(self._replies.fileno(), 1 << 16)
            if not data:
                raise EngineDiedError(self._postmortem("ended"))
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _postmortem(self, what: str) -> str:
        if self.process.poll() is None:
            # The stacks of all its threads go to the log.
            self.process.send_signal(signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        return f"the engine process {what}. The end of its log:\n{self.tail(80)}"


def _environment(*, processes: bool) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return kept | {
        "PYTHONPATH": str(HERE),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0",
        # A tiny model gains nothing from threads, and engines beside each other lose much.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # Compiling a function takes longer than all the answers that it is called for.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder where models are kept."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def start(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory, models: Path
) -> Iterator[Callable[..., Engine]]:
    """Return a function that starts an engine; those that still run at the end are killed."""
    engines: list[Engine] = []
    folder = tmp_path_factory.mktemp("engines")

    def run(**arguments: Any) -> Engine:
        engine = Engine(python=vllm_python, folder=folder, models=models, **arguments)
        engines.append(engine)
        return engine

    yield run
    for engine in engines:
        engine.kill()


@final
class Reference:
    """Answers of engines without any connector: what every other engine must answer too.

    An engine is started for each kind of model that is asked for, once, and answers are kept.
    """

    def __init__(self, python: Path, folder: Path, models: Path) -> None:
        self._make = partial(Engine, python=python, folder=folder, models=models)
        self._engines: dict[str, Engine] = {}
        self._known: dict[str, Answers] = {}

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 16, model: str = "tiny"
    ) -> Answers:
        """Return the right answers, and how clear they are."""
        name = json.dumps([model, max_tokens, [list(prompt) for prompt in prompts]])
        if name not in self._known:
            if model not in self._engines:
                self._engines[model] = self._make(model=model)
            self._engines[model].reset()
            self._known[name] = self._engines[model].generate(
                prompts, max_tokens=max_tokens, margins=True
            )
        return self._known[name]

    def close(self) -> None:
        """End the engines."""
        for engine in self._engines.values():
            engine.kill()


@pytest.fixture(scope="session")
def reference(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory, models: Path
) -> Iterator[Reference]:
    """Return the answers of an engine without a cache below it."""
    answers = Reference(vllm_python, tmp_path_factory.mktemp("reference"), models)
    yield answers
    answers.close()


@final
class Prompts:
    """Makes prompts; the same ones in every run, and different ones for each name."""

    def __call__(self, name: str, *lengths: int, stem: Sequence[int] = ()) -> list[list[int]]:
        """Return one prompt for each length, all of which begin with ``stem``."""
        dice = random.Random(name)
        return [
            [*stem, *(dice.randrange(2, 512) for _ in range(length - len(stem)))]
            for length in lengths
        ]


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    """Return the maker of prompts."""
    return Prompts()


@final
@dataclass(frozen=True, slots=True)
class Moved:
    """What was moved, from vLLM's metrics, in blocks of one engine block each.

    Attributes:
        stored: From the engine to the CPU tier.
        loaded: From the CPU tier to the engine.
        cascaded: From the CPU tier to the tier below.
        promoted: From the tier below to the CPU tier.
        tier_hits: Lookups that the tier below answered with yes.
        failed_stores: Jobs to the tier below that failed.
        failed_loads: Jobs from the tier below that failed.
        errors: Blocks that the tier below did not deliver because of an error.
        declined: Blocks that the tier below did not take.
        preemptions: Requests that lost their place in the engine.
    """

    stored: float
    loaded: float
    cascaded: float
    promoted: float
    tier_hits: float
    failed_stores: float
    failed_loads: float
    errors: float
    declined: float
    preemptions: float

    def __sub__(self, earlier: Moved) -> Moved:
        """Return what was moved since."""
        return Moved(
            *(getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self))
        )


@final
@dataclass(frozen=True, slots=True)
class Cache:
    """A configuration of vLLM's connector: which of our doors, above which tier.

    Attributes:
        mode: ``tier``: vLLM's own manager above our tier; ``engine``: our manager, CPU tier and
            workers; ``vllm``: nothing of ours, which shows what the tests themselves are worth.
        tier: The type of the tier.
        folder: Where the tier and the test keep their files.
        options: vLLM's engine arguments that belong to it.
        layout: How blocks lie in the folder of our file system tier.
    """

    mode: str
    tier: str
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "files"

    @property
    def store(self) -> Path:
        """The folder of a tier that has one."""
        return self.folder / "store"

    @property
    def sabotage(self) -> Path:
        """The file that says what a worker that can be sabotaged does."""
        return self.folder / "sabotage"

    def connector(
        self,
        *,
        blocks: int,
        block_bytes: int = BLOCK_BYTES,
        store: Path | None = None,
        sabotaged: bool = False,
        tier_settings: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        """Return vLLM's ``KVTransferConfig``.

        Args:
            blocks: Capacity of the CPU tier.
            block_bytes: Bytes of all ranks in one block.
            store: Another folder for the tier's files.
            sabotaged: Whether the worker can be made to do its loads wrong.
            tier_settings: More settings of the tier.
            settings: More of ``kv_connector_extra_config``.
        """
        tier: dict[str, Any] = {"type": f"kv:{self.tier}" if self.mode == "tier" else self.tier}
        if self.tier == "fs":
            tier["root_dir"] = str(store or self.store)
            if self.mode != "vllm":
                tier |= {"min_free_bytes": "1MiB", "layout": self.layout}
        extra: dict[str, Any] = {
            "cpu_bytes_to_use": blocks * block_bytes,
            "secondary_tiers": [tier | dict(tier_settings or {})],
        }
        if self.mode != "engine":
            # vLLM's own spec refuses the CPU.
            extra["spec_name"] = "CPUTieringOffloadingSpec"
            extra["spec_module_path"] = "engine_process.workers"
        elif sabotaged:
            extra["spec_name"] = "SabotagedKVCoreOffloadingSpec"
            extra["spec_module_path"] = "engine_process.sabotaged_engine_mode"
        else:
            extra["spec_name"] = "KVCoreOffloadingSpec"
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra | settings,
        }

    def moved(self, engine: Engine) -> Moved:
        """Read the metrics of an engine.

        They are collected four times a second at most, in steps. So time passes first, and then
        the engine answers a prompt that is shorter than a block.
        """
        time.sleep(_STATS_PERIOD_S)
        engine.generate([[7, 7, 7]], max_tokens=2)
        samples = engine.metrics("")

        def total(name: str) -> float:
            return sum(
                value
                for sample, value in samples.items()
                if sample.partition("{")[0] == name and not sample.endswith("{0:primary}")
            )

        def of_tier(name: str) -> float:
            begin = f"vllm:kv_core_tier_value{{{name},"
            return sum(value for sample, value in samples.items() if sample.startswith(begin))

        return Moved(
            stored=total("vllm:kv_offload_store_bytes_total") / BLOCK_BYTES,
            loaded=total("vllm:kv_offload_load_bytes_total") / BLOCK_BYTES,
            cascaded=total("vllm:kv_offload_tiering_write_bytes_total") / BLOCK_BYTES,
            promoted=total("vllm:kv_offload_tiering_read_bytes_total") / BLOCK_BYTES,
            tier_hits=total("vllm:kv_offload_tiering_chunk_hits_total"),
            failed_stores=total("vllm:kv_offload_tiering_cascade_job_failures_total"),
            failed_loads=total("vllm:kv_offload_tiering_promotion_job_failures_total"),
            errors=total("vllm:kv_core_tier_lookup_errors_total") + of_tier("lookup_errors"),
            declined=total("vllm:kv_core_tier_declined_blocks_total"),
            preemptions=total("vllm:num_preemptions_total"),
        )

    def wait_until(
        self,
        engine: Engine,
        condition: Callable[[Moved], bool],
        *,
        between: Callable[[], object] | None = None,
    ) -> None:
        """Wait until the metrics of an engine say something.

        Args:
            engine: The engine.
            condition: What to wait for.
            between: Called between two looks at the metrics.
        """
        end = time.monotonic() + _PATIENCE_S
        while not condition(moved := self.moved(engine)):
            assert time.monotonic() < end, f"did not happen in {_PATIENCE_S:g} s: {moved}"
            if between is not None:
                between()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for something that is to be seen from outside of the engine."""
        end = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"did not happen in {_PATIENCE_S:g} s"
            time.sleep(0.005)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of this folder."""
    config.addinivalue_line(
        "markers",
        "caches(*names): the configurations that a test runs with, MODE-TIER or MODE-TIER-async, "
        "where the tier 'segments' is 'fs' with that layout; with KV_CORE_VLLM_MATRIX=1 also "
        "those named by matrix=",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test that uses a cache the configurations that it names."""
    if "cache" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("caches")
    assert marker is not None, f"{metafunc.definition.nodeid} does not name its caches"
    names = list(marker.args)
    if os.environ.get("KV_CORE_VLLM_MATRIX") == "1":
        names += marker.kwargs.get("matrix", ())
    metafunc.parametrize("cache_name", names, scope="module")


@pytest.fixture(scope="module")
def cache(cache_name: str, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Return the configuration of the connector."""
    mode, tier, *scheduling = cache_name.split("-")
    options = {"async_scheduling": True} if scheduling == ["async"] else {}
    layout = "segments" if tier == "segments" else "files"
    made = Cache(
        mode,
        "fs" if tier == "segments" else tier,
        tmp_path_factory.mktemp(cache_name),
        options,
        layout,
    )
    made.sabotage.write_text("none")
    return made
