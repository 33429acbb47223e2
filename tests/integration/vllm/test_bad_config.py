"""A configuration that cannot work: the engine does not start, and says in one sentence why.

Real engines are started, one after another in one process, and each start fails. What is asked of
each: the error names the setting, says what is wrong with it, and nothing stays behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.integration.vllm.conftest import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - the place to be checked
ENGINE_MODE: Final = {"spec_name": "KVCoreOffloadingSpec"}
TIER_MODE: Final = {
    "spec_name": "CPUTieringOffloadingSpec",
    "spec_module_path": "engine_process.workers",
}
ROOM: Final = {"cpu_bytes_to_use": 4 << 20}
# Nothing listens there.
NO_STORE: Final[dict[str, Any]] = {
    "bucket": "kv",
    "endpoint_url": "http://127.0.0.1:1",
    "access_key_id": "AKIDNOBODY",
    "secret_access_key": "not-to-be-shown",
    "max_attempts": 1,
}
NO_STORE_WORDS: Final = ("bucket 'kv' at http://127.0.0.1:1 cannot be used", "'endpoint_url'")


def _files_in_use(engine: Engine) -> set[str]:
    """Return the named files in shared memory that a process has open or mapped.

    What has no name any more is gone with the process.
    """
    proc = Path("/proc", str(engine.process.pid))
    mapped = [line.split(maxsplit=5)[-1] for line in (proc / "maps").read_text().splitlines()]
    opened = [str(entry.readlink()) for entry in (proc / "fd").iterdir() if entry.is_symlink()]
    return {path for path in (*mapped, *opened) if path.startswith(SHARED_MEMORY)} - {
        path for path in (*mapped, *opened) if path.endswith(" (deleted)")
    }


@pytest.fixture(scope="module")
def process(start: Callable[..., Engine]) -> Iterator[Engine]:
    """Return an engine process without a connector; more engines are started in it."""
    with start() as engine:
        yield engine
        engine.kill()


@pytest.fixture(scope="module")
def refusal(process: Engine, models: Path) -> Callable[[dict[str, Any]], str]:
    """Return a function that starts an engine that must not start, and returns its error."""

    def start_and_fail(extra_config: dict[str, Any]) -> str:
        before = _files_in_use(process)
        with pytest.raises(AssertionError) as failure:
            process.do(
                "start",
                model="tiny",
                models=str(models),
                connector={
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": extra_config,
                },
                options={},
            )
        assert _files_in_use(process) <= before
        # Behind the first line there is the log.
        return str(failure.value).splitlines()[0]

    return start_and_fail


def fs(folder: object, **settings: Any) -> list[dict[str, Any]]:
    """Return the entry of a file system tier of ours."""
    return [{"type": "kv:fs", "root_dir": str(folder), **settings}]


# -- the engine mode ------------------------------------------------------------------------------

ENGINE_CASES: Final[dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    "unknown tier type": (
        ROOM | {"secondary_tiers": [{"type": "fsx", "root_dir": "/tmp/x"}]},  # noqa: S108
        ("'fsx'", "installed", "fs"),
    ),
    "tier package that is not installed": (
        ROOM | {"secondary_tiers": [{"type": "acme", "bucket": "b"}]},
        ("'acme'", "pip install"),
    ),
    "tier without a type": (
        ROOM | {"secondary_tiers": [{"root_dir": "/tmp/x"}]},  # noqa: S108
        ("'secondary_tiers[0].type' is missing",),
    ),
    "tiers that are no list": (
        ROOM | {"secondary_tiers": {"type": "fs"}},
        ("secondary_tiers", "list"),
    ),
    "memory that is not said": ({}, ("'cpu_bytes_to_use' is missing",)),
    "memory that is no size": (
        {"cpu_bytes_to_use": "lots"},
        ("cpu_bytes_to_use", "'lots'"),
    ),
    "memory for less than a block": (
        {"cpu_bytes_to_use": 1024},
        ("cpu_bytes_to_use", "1024", "65536"),
    ),
    "misspelt setting": (
        ROOM | {"eviction_polcy": "arc"},
        ("'eviction_polcy'", "did you mean 'eviction_policy'?"),
    ),
    "setting of a tier that is missing": (
        ROOM | {"secondary_tiers": [{"type": "fs"}]},
        ("'root_dir' is required but missing",),
    ),
    "setting of a tier that is unknown": (
        ROOM | {"secondary_tiers": [{"type": "fs", "root_dir": "/tmp/x", "rootdir": 1}]},  # noqa: S108
        ("'rootdir' is not a setting",),
    ),
    "bucket that is missing": (
        ROOM | {"secondary_tiers": [{"type": "s3"}]},
        ("'bucket' is required but missing",),
    ),
    "object store that cannot be reached": (
        ROOM | {"secondary_tiers": [{"type": "s3", **NO_STORE}]},
        NO_STORE_WORDS,
    ),
}


@pytest.mark.parametrize("case", ENGINE_CASES)
def test_the_engine_mode_names_the_setting(
    case: str, refusal: Callable[[dict[str, Any]], str]
) -> None:
    """Wrong, missing, too small, misspelt, not installed: one sentence with the key in it."""
    extra_config, words = ENGINE_CASES[case]
    error = refusal(ENGINE_MODE | extra_config)
    assert [word for word in words if word not in error] == [], error
    assert NO_STORE["secret_access_key"] not in error


def test_the_engine_mode_names_a_storage_that_cannot_be_reached(
    refusal: Callable[[dict[str, Any]], str], tmp_path: Path
) -> None:
    """A folder below a file cannot be made, and the error says which."""
    (tmp_path / "file").touch()
    entry = [{"type": "fs", "root_dir": str(tmp_path / "file" / "root")}]
    error = refusal(ENGINE_MODE | ROOM | {"secondary_tiers": entry})
    assert f"root_dir {tmp_path / 'file' / 'root'} is not a directory" in error


# -- the tier mode --------------------------------------------------------------------------------

TIER_CASES: Final[dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    "tier package that is not installed": (
        ROOM | {"secondary_tiers": [{"type": "kv:acme"}]},
        ("'kv:acme'", "kv:fs"),
    ),
    "memory that is not said": ({"secondary_tiers": []}, ("cpu_bytes_to_use",)),
    "setting of a tier that is missing": (
        ROOM | {"secondary_tiers": [{"type": "kv:fs"}]},
        ("'root_dir' is required but missing",),
    ),
    "setting of a tier that is unknown": (
        ROOM | {"secondary_tiers": fs("/tmp/x", rootdir=1)},  # noqa: S108
        ("'rootdir' is not a setting",),
    ),
    "setting that only the engine mode has": (
        ROOM | {"secondary_tiers": fs("/tmp/x", fill_on_promotion=True)},  # noqa: S108
        ("'fill_on_promotion'", "KVCoreOffloadingSpec"),
    ),
    "object store that cannot be reached": (
        ROOM | {"secondary_tiers": [{"type": "kv:s3", **NO_STORE}]},
        NO_STORE_WORDS,
    ),
}


@pytest.mark.parametrize("case", TIER_CASES)
def test_the_tier_mode_names_the_setting(
    case: str, refusal: Callable[[dict[str, Any]], str]
) -> None:
    """What vLLM checks is said in its words, what the tier checks in ours; both name the key."""
    extra_config, words = TIER_CASES[case]
    error = refusal(TIER_MODE | extra_config)
    assert [word for word in words if word not in error] == [], error
    assert NO_STORE["secret_access_key"] not in error


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (1024, "cannot mmap an empty file"),
        ("4MiB", "invalid literal for int() with base 10: '4MiB'"),
    ],
)
def test_what_vllm_says_of_its_own_settings(
    memory: object, words: str, refusal: Callable[[dict[str, Any]], str]
) -> None:
    """In the tier mode the primary tier is vLLM's, and so are these: the docs explain them."""
    extra_config = {"cpu_bytes_to_use": memory, "secondary_tiers": fs("/tmp/x")}  # noqa: S108
    assert words in refusal(TIER_MODE | extra_config)


def test_the_tier_mode_names_a_storage_that_cannot_be_reached(
    refusal: Callable[[dict[str, Any]], str], tmp_path: Path
) -> None:
    """As in the engine mode."""
    (tmp_path / "file").touch()
    root = tmp_path / "file" / "root"
    error = refusal(TIER_MODE | ROOM | {"secondary_tiers": fs(root)})
    assert f"root_dir {root} is not a directory" in error
