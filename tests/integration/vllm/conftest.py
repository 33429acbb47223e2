"""Real vLLM engines as processes that tests drive, and prompts for them."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import pytest

from kv_tier_s3._harness import SeaweedServer

from ._caches import Cache, Moved
from ._engine import Answers, Engine
from ._processes import Fresh, Zygote
from ._prompts import Prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kv_tier_s3._harness import S3Server

    from ._processes import Launcher

__all__ = ["Answers", "Cache", "Engine", "Moved", "Prompts", "Reference"]

_BUCKET: Final = "kv-vllm"
# Names of tiers in the names of caches: the tier's type, and settings of ours.
_TIERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "fs": ("fs", {"layout": "files"}),
    "segments": ("fs", {"layout": "segments"}),
    "example": ("example", {}),
    "fsspec": ("fsspec", {}),
    "memory": ("fsspec", {"url": "memory://kv"}),
    "s3": ("s3", {"engine": "s3fs"}),
    "obstore": ("s3", {"engine": "obstore"}),
    "obj": ("obj", {}),
}
_IN_A_BUCKET: Final = ("s3", "obj")
_FORGETFUL: Final = ("example", "memory")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder where models are kept."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def zygote(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Return what starts processes that need not import vLLM any more."""
    with Zygote(vllm_python, tmp_path_factory.mktemp("zygote")) as zygote:
        yield zygote


@pytest.fixture(scope="module")
def start(
    vllm_python: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory, models: Path
) -> Iterator[Callable[..., Engine]]:
    """Return a function that starts an engine; those that still run at the end are killed.

    One that is ``fresh`` begins as a new interpreter, as in production.
    """
    engines: list[Engine] = []
    folder = tmp_path_factory.mktemp("engines")

    def run(*, fresh: bool = False, **arguments: Any) -> Engine:
        launch: Launcher = Fresh(vllm_python) if fresh else zygote
        engine = Engine(launch=launch, folder=folder, models=models, **arguments)
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

    def __init__(self, launch: Launcher, folder: Path, models: Path) -> None:
        self._make = partial(Engine, launch=launch, folder=folder, models=models)
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
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory, models: Path
) -> Iterator[Reference]:
    """Return the answers of an engine without a cache below it."""
    answers = Reference(zygote, tmp_path_factory.mktemp("reference"), models)
    yield answers
    answers.close()


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    """Return the maker of prompts."""
    return Prompts()


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of this folder."""
    config.addinivalue_line(
        "markers",
        "caches(*names): the configurations that a test runs with, MODE-TIER or MODE-TIER-async, "
        f"where TIER is one of {', '.join(_TIERS)}; with KV_CORE_VLLM_MATRIX=1 also those named "
        "by matrix=",
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


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Return an object store with a bucket for all tests, each of which has a prefix in it."""
    with SeaweedServer(tmp_path_factory.mktemp("object-store")) as server:
        server.make_bucket(_BUCKET)
        yield server


@pytest.fixture(scope="module")
def cache(
    cache_name: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Cache:
    """Return the configuration of the connector."""
    mode, kind, *scheduling = cache_name.split("-")
    tier, settings = _TIERS[kind]
    folder = tmp_path_factory.mktemp(cache_name)
    if tier in _IN_A_BUCKET:
        server: S3Server = request.getfixturevalue("object_store")
        settings = server.access.settings(_BUCKET) | {"prefix": folder.name} | settings
    made = Cache(
        mode,
        tier,
        folder,
        options={"async_scheduling": True} if scheduling == ["async"] else {},
        settings=settings,
        is_lasting=kind not in _FORGETFUL,
    )
    made.sabotage.write_text("none")
    return made
