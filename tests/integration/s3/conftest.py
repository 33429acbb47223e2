"""Real stores that are made to fail, and tiers and engines on them."""

from __future__ import annotations

import os
import random
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final
from urllib.parse import urlsplit

import pytest
from tests.integration.s3._credentials import CredentialServer

import kv_tier_obj
import kv_tier_s3
from kv_conformance.harness import HarnessError
from kv_core.contract import parse_tier_config
from kv_core.tierkit.testing import TierDriver
from kv_core.workload import synthetic_trace
from kv_core.workload.replay import ReplayConfig, ReplayEngine
from kv_tier_s3._harness import Rgw, SeaweedServer
from kv_tier_s3._harness._meddler import Meddler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from kv_core.contract import TierSpec
    from kv_tier_s3._harness import S3Access, S3Server

BUCKET: Final = "kv-faults"
BLOCK: Final = 4096
ENGINES: Final = ("s3fs", "obstore")
SERVERS: Final = ("seaweedfs", "rgw")

# Short, so that every deadline passes while the store does nothing.
DEADLINES: Final = {
    "job_deadline_s": 2.0,
    "lookup_deadline_s": 1.0,
    "error_backoff_s": 0.1,
    "max_attempts": 2,
    "connect_timeout_s": 1.0,
    "read_timeout_s": 1.0,
}
ENGINE_OPTIONS: Final = {
    "promotion_deadline_s": 2.5,
    "store_deadline_s": 3.0,
    "request_lookup_deadline_s": 2.0,
    "degraded_backoff_s": 0.05,
    "degraded_backoff_max_s": 0.3,
    "quarantine_grace_s": 0.2,
    "shutdown_flush_s": 3.0,
}
# For runs in which nothing is wrong, however busy the machine is.
PATIENT: Final = {
    "job_deadline_s": 60.0,
    "lookup_deadline_s": 30.0,
    "connect_timeout_s": 20.0,
    "read_timeout_s": 30.0,
}
PATIENT_ENGINE: Final = {
    "promotion_deadline_s": 60.0,
    "store_deadline_s": 60.0,
    "request_lookup_deadline_s": 60.0,
}

_HERE: Final = Path(__file__).parent
_DRAWN: Final = frozenset(
    f"test_{name}"
    for name in ("answers", "credentials", "faults", "processes", "settings", "start_probe")
)
_serial = count()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with each engine, and those of ``store`` on each server as well."""
    if "store" in metafunc.fixturenames and "engine" not in metafunc.fixturenames:
        # The tier obj has no engines.
        metafunc.parametrize("store", SERVERS, indirect=True)
    elif "store" in metafunc.fixturenames:
        pairs = [(server, engine) for server in SERVERS for engine in ENGINES]
        names = ["-".join(pair) for pair in pairs]
        metafunc.parametrize(("store", "engine"), pairs, indirect=["store"], ids=names)
    elif "engine" in metafunc.fixturenames:
        metafunc.parametrize("engine", ENGINES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the cases to run: the same ones each time, all with ``S3_FAULTS=all`` set.

    Of a test that starts and breaks servers one, of every other two: what is true of one kind of
    error, server and engine and of no other is rare enough to be left to ``make s3-faults``.
    """
    if os.environ.get("S3_FAULTS") == "all":
        return
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.path.parent == _HERE and item.path.stem in _DRAWN:
            name = getattr(item, "originalname", item.name)
            cases.setdefault((item.path, name), []).append(item)
    dropped = []
    for (_, name), found in cases.items():
        count = 1 if "store" in getattr(found[0], "fixturenames", ()) else 2
        draw = random.Random(f"{os.environ.get('S3_FAULTS_SEED', '1')} {name}")
        kept = draw.sample(found, min(count, len(found)))
        dropped += [item for item in found if item not in kept]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


@final
class Servers:
    """The servers of this run, each started when it is first asked for."""

    def __init__(self, folders: Callable[[str], Any]) -> None:
        self._folders = folders
        self._running: dict[str, S3Server] = {}

    def __call__(self, name: str) -> S3Server:
        """Return a running server that has the bucket of the tests."""
        if name not in self._running:
            kind = {"seaweedfs": SeaweedServer, "rgw": Rgw}[name]
            server: S3Server = kind(self._folders(name))
            try:
                server.start()
            except HarnessError as error:
                server.stop()
                pytest.skip(str(error))
            self._running[name] = server
            server.make_bucket(BUCKET)
        return self._running[name]

    def stop(self) -> None:
        """Stop all of them."""
        for server in self._running.values():
            server.thaw()
            server.stop()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Return a function that returns a running server by its name."""
    found = Servers(tmp_path_factory.mktemp)
    yield found
    found.stop()


@pytest.fixture
def store(servers: Servers, request: pytest.FixtureRequest) -> Iterator[S3Server]:
    """Return a server; it is made to run again if the test has left it otherwise."""
    server = servers(getattr(request, "param", "seaweedfs"))
    yield server
    server.thaw()
    try:
        server.access.client(read_timeout=2, retries={"total_max_attempts": 1}).head_bucket(
            Bucket=BUCKET
        )
    except Exception:  # noqa: BLE001 - whatever is wrong with it
        server.restart()


@pytest.fixture
def seaweed(servers: Servers) -> S3Server:
    """Return SeaweedFS."""
    return servers("seaweedfs")


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CredentialServer]:
    """Return a server of credentials that is all that the chain can find."""
    found = CredentialServer()
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_DEFAULT_PROFILE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", found.url)
    yield found
    found.close()


@pytest.fixture
def settings(engine: str) -> Callable[..., dict[str, Any]]:
    """Return a function that makes settings for a way to a server, in a prefix of their own."""
    prefix = f"test-{os.getpid()}-{next(_serial)}"

    def make(access: S3Access, **changes: Any) -> dict[str, Any]:
        found = {**access.settings(BUCKET), "engine": engine, "prefix": prefix, **DEADLINES}
        found.update(changes)
        return {name: value for name, value in found.items() if value is not None}

    return make


def _drivers(spec: TierSpec) -> Iterator[Callable[..., TierDriver]]:
    """Yield a function that opens a tier; all are closed at the end."""
    opened: list[TierDriver] = []

    def run(settings: dict[str, Any], block_bytes: int = BLOCK) -> TierDriver:
        config = parse_tier_config("cold", spec.config_model, settings)
        driver = TierDriver(
            spec.factory, config, num_blocks=64, block_bytes=block_bytes, tier_name="cold"
        )
        opened.append(driver)
        return driver

    yield run
    for driver in opened:
        driver.close()


@pytest.fixture
def open_tier() -> Iterator[Callable[..., TierDriver]]:
    """Return a function that opens the tier ``s3``; all are closed at the end."""
    yield from _drivers(kv_tier_s3.kv_core_register_tier())


@pytest.fixture
def open_obj() -> Iterator[Callable[..., TierDriver]]:
    """Return a function that opens the tier ``obj``; all are closed at the end."""
    yield from _drivers(kv_tier_obj.kv_core_register_tier())


@pytest.fixture
def meddler() -> Iterator[Callable[[S3Access], Meddler]]:
    """Return a function that puts a meddling proxy in front of a server."""
    made: list[Meddler] = []

    def run(access: S3Access) -> Meddler:
        parts = urlsplit(access.endpoint_url)
        proxy = Meddler(str(parts.hostname), int(parts.port or 0))
        made.append(proxy)
        return proxy

    yield run
    for proxy in made:
        proxy.close()


@final
class Outage:
    """Something that happens to a store while an engine runs, and is over later.

    Args:
        begin: Makes it happen.
        end: Ends it; ``None`` for what stays.
        at: Number of finished requests at which it begins.
        until: Number of finished requests at which it ends.
        least_s: Seconds that it lasts at least.
    """

    def __init__(
        self,
        begin: Callable[[], object],
        end: Callable[[], object] | None = None,
        *,
        at: int = 20,
        until: int = 42,
        least_s: float = 0.0,
    ) -> None:
        self._begin = begin
        self._end = end
        self._at = at
        self._until = until
        self._least_s = least_s
        self._began = 0.0
        self._finished = 0
        self.has_begun = self.is_over = False

    def note_finished(self, finished: int) -> None:
        """Take note of the number of finished requests."""
        self._finished = finished

    def look(self) -> None:
        """Begin or end, where it is time to."""
        if not self.has_begun and self._finished >= self._at:
            self.has_begun = True
            self._began = time.monotonic()
            self._begin()
        if self._finished >= self._until and time.monotonic() - self._began >= self._least_s:
            self.end()

    def end(self) -> None:
        """End it, if that has not been done: as late as it is to end at least."""
        if self._end is None or self.is_over:
            return
        time.sleep(max(0.0, self._began + self._least_s - time.monotonic()))
        self.is_over = True
        self._end()
        # The engine leaves a tier alone for so long after failures; the rest of the trace may be
        # served in less on an idle machine.
        time.sleep(ENGINE_OPTIONS["degraded_backoff_max_s"])


@final
class Engine:
    """The tiering engine over a tier, serving a trace. A context manager that shuts it down.

    Args:
        settings: Settings of the tier.
        requests: How many requests to serve.
        is_patient: Whether deadlines are long.
        changes: Settings of the tier that differ from that.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        requests: int = 60,
        is_patient: bool = False,
        **changes: Any,
    ) -> None:
        self._requests = requests
        # What another tier calls otherwise, its settings bring along.
        patience = PATIENT if is_patient and "type" not in settings else {}
        tier = {"type": "s3", **settings, **patience, **changes}
        config = ReplayConfig(
            gpu_blocks=128,
            cpu_bytes=1 << 20,
            block_bytes=BLOCK,
            # Fewer and larger objects: the client libraries cost more than anything else here.
            block_size_factor=4,
            secondary_tiers=[tier],
            engine_options=PATIENT_ENGINE if is_patient else ENGINE_OPTIONS,
        )
        trace = synthetic_trace("mixed", seed=3, num_requests=requests)
        self._engine = ReplayEngine(trace, config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown()

    def serve(self, outage: Outage | None = None) -> Any:
        """Serve the whole trace; require that every request finishes with the right bytes."""
        if outage is None:
            report = self._engine.run()
        else:
            report = self._engine.run(outage.note_finished, outage.look)
            assert outage.has_begun
            # The engine may have gone on without the store, and faster than that comes back.
            outage.end()
        assert report.requests_finished == report.requests == self._requests
        assert report.bytes_wrong == 0
        assert report.jobs_unfinished == 0
        assert sum(report.hits.values()) + report.misses == report.blocks_requested
        return report


@pytest.fixture
def serving() -> type[Engine]:
    """Return the class of an engine over a tier."""
    return Engine


@pytest.fixture
def outage() -> type[Outage]:
    """Return the class of what happens to a store."""
    return Outage
