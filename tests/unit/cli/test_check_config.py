"""``kv-core check-config``: what is found, what is shown, and what is not."""

from __future__ import annotations

import io
import json
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_core.cli import main
from kv_core.cli._host_advice import HostFacts, host_advice
from kv_core.connector import OffloadingSettings
from kv_core.plugins import TierRegistry, check_tier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECRET: Final = "hunter2"

_PLUGIN = """
import kv_core
from kv_core.contract import *
from pydantic import SecretStr

class Config(TierConfig):
    bucket: str
    token: SecretStr
    max_block_bytes: int | None = None
    staging_bytes: int = 0

def open_it(context):
    raise AssertionError("the tier was opened")

@kv_core.hookimpl
def kv_core_register_tier():
    return TierSpec(type="acme", summary="", contract=ContractVersion(1, 0),
        factory=open_it, config_model=Config,
        limits=lambda config: TierLimits(job_deadline_s=1.0, lookup_deadline_s=1.0,
            max_block_bytes=config.max_block_bytes, staging_bytes=config.staging_bytes),
        capabilities=frozenset({Capability.PERSISTENT, Capability.BOUNDED}))
"""

_UNBOUNDED_PLUGIN = """
import kv_core
from kv_core.contract import *

class Config(TierConfig):
    min_free_bytes: int = 0

@kv_core.hookimpl
def kv_core_register_tier():
    return TierSpec(type="endless", summary="", contract=ContractVersion(1, 0),
        factory=print, config_model=Config,
        limits=lambda config: TierLimits(job_deadline_s=1.0, lookup_deadline_s=1.0,
            min_free_bytes=config.min_free_bytes))
"""

ACME: Final = {"type": "acme", "bucket": "kv", "token": SECRET}
SOUND: Final = {
    "spec_name": "TieringOffloadingSpec",
    "cpu_bytes_to_use": "1MiB",
    "secondary_tiers": [ACME],
}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TierRegistry:
    """Provide a registry with a bounded tier with a secret, an unbounded and a broken one."""
    (tmp_path / "kv_cli_check_tier.py").write_text(_PLUGIN)
    (tmp_path / "kv_cli_endless_tier.py").write_text(_UNBOUNDED_PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kv_cli_check_tier", raising=False)
    monkeypatch.delitem(sys.modules, "kv_cli_endless_tier", raising=False)
    return TierRegistry(
        [
            metadata.EntryPoint("acme", "kv_cli_check_tier", "kv_core.tiers"),
            metadata.EntryPoint("endless", "kv_cli_endless_tier", "kv_core.tiers"),
            metadata.EntryPoint("broken", "kv_cli_no_such_module", "kv_core.tiers"),
        ]
    )


@pytest.fixture
def check(
    registry: TierRegistry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Return the function that checks a configuration and returns status and report.

    No output of any call may have the secret in it.
    """
    monkeypatch.setenv("PYTHONHASHSEED", "0")

    def run(config: object, *options: str) -> tuple[int, dict[str, Any]]:
        source = config if isinstance(config, str) else json.dumps(config)
        status = main(["check-config", source, *options, "--json"], registry=registry)
        captured = capsys.readouterr()
        assert SECRET not in captured.out + captured.err
        return status, json.loads(captured.out)

    return run


def settings_of(found: list[dict[str, str]]) -> list[str]:
    """Return what errors, warnings or notes are about."""
    return [item["setting"] for item in found]


# -- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", [False, True])
@pytest.mark.parametrize("how", ["argument", "json file", "toml file", "stdin"])
def test_a_configuration_is_found_wherever_it_is(
    how: str,
    transfer: bool,
    tmp_path: Path,
    check: Callable[..., tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an argument, a file of either form whatever its name, or stdin; bare or wrapped."""
    document: dict[str, Any] = {"cpu_bytes_to_use": 8192}
    toml = "cpu_bytes_to_use = 8192\n"
    if transfer:
        document = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": document,
        }
        toml = (
            'kv_connector = "OffloadingConnector"\nkv_role = "kv_both"\n'
            f"[kv_connector_extra_config]\n{toml}"
        )
    source = f"  {json.dumps(document)}"
    if how == "stdin":
        stdin = io.TextIOWrapper(io.BytesIO(source.encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        source = "-"
    elif how != "argument":
        path = tmp_path / "config.txt"
        path.write_text(toml if how == "toml file" else source, encoding="utf-8-sig")
        source = str(path)
    status, report = check(source)
    assert (status, report["errors"], report["warnings"]) == (0, [], [])
    assert report["config"]["cpu_bytes_to_use"] == 8192


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "it is empty"),
        ('{"token": "hunter2"', "begins like JSON, but"),
        ('{"a": 1, "a": "hunter2"}', "'a' is given twice"),
        ('["hunter2"]', "it is JSON, but no object"),
        ("a = hunter2", "is no TOML"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        ('{"kv_connector_extra_config": ["hunter2"]}', "must be an object with the settings"),
    ],
)
def test_what_cannot_be_read_is_one_error(
    text: str | bytes, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file and the reason are named, its text is not repeated (CONF-2)."""
    path = tmp_path / "config"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["check-config", str(path)], registry=TierRegistry(())) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert "[KVC101]" in captured.err
    assert SECRET not in captured.out + captured.err


def test_a_file_that_is_not_there_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    """The name is in the message."""
    assert main(["check-config", "no-such-file"], registry=TierRegistry(())) == 2
    assert "no-such-file" in capsys.readouterr().err


def test_a_wrapper_is_checked_as_far_as_it_matters(
    check: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    """Another connector or role is a warning; settings outside of the extra config an error."""
    status, report = check(
        {
            "kv_connector": "OtherConnector",
            "kv_role": "kv_producer",
            "block_size": 32,
            "kv_connector_extra_config": {"cpu_bytes_to_use": 8192},
        }
    )
    assert status == 2
    assert settings_of(report["warnings"]) == ["kv_connector", "kv_role"]
    (error,) = report["errors"]
    assert "'block_size' stands beside 'kv_connector_extra_config'" in error["message"]


def test_the_one_offloading_connector_of_several_is_found(
    check: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    """A MultiConnector holds configurations of its own."""
    inner = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 8192},
    }
    others = [{"kv_connector": "NixlConnector"}]
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    multi_config = {**multi, "kv_connector_extra_config": {"connectors": [*others, inner]}}
    status, report = check(multi_config)
    assert (status, report["config"]["cpu_bytes_to_use"]) == (0, 8192)


def test_several_offloading_connectors_are_not_guessed_among(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message says to give the one that is meant."""
    connectors = [{"kv_connector": "OffloadingConnector"}] * 2
    config = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    assert main(["check-config", json.dumps(config)], registry=TierRegistry(())) == 2
    assert "has 2 entries" in capsys.readouterr().err


# -- errors -------------------------------------------------------------------------------------


def test_all_errors_are_listed(check: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    """Settings, entries, tiers: each looked at whatever the others are."""
    status, report = check(
        {
            "cpu_bytes_to_use": "1MiB",
            "lease_share": 2,
            "blok_size": 1,
            "secondary_tiers": [
                {"type": "acme", "token": SECRET, "colour": SECRET},
                {"type": "nope", "token": SECRET},
                {"type": "broken", "token": SECRET},
                {"token": SECRET},
            ],
        }
    )
    assert status == 2
    assert [(error["code"], error["setting"]) for error in report["errors"]] == [
        ("KVC101", "lease_share"),
        ("KVC101", "secondary_tiers[3].type"),
        ("KVC101", "blok_size"),
        ("KVC101", "acme.bucket"),
        ("KVC201", None),
        ("KVC203", None),
    ]
    assert "'colour' is not a setting" in report["errors"][3]["message"]
    assert report["config"] is None


@pytest.mark.parametrize(
    ("changes", "options", "part"),
    [
        ({"spec_name": "CPUOffloadingSpec"}, [], "CPUOffloadingSpec has two levels only"),
        ({"spec_name": "MySpec"}, [], "unknown offloading spec 'MySpec'"),
        ({}, ["--block-bytes", "2MiB"], "one block needs 2097152 bytes"),
        (
            {"block_size": 24},
            ["--block-bytes", "4096", "--tokens-per-block", "16"],
            "'block_size' 24 is not a multiple of the GPU block size 16",
        ),
        (
            {"secondary_tiers": [{**ACME, "max_block_bytes": 4096}], "blocks_per_chunk": 2},
            ["--block-bytes", "4096"],
            "takes blocks of at most 4096 bytes, but a block has 8192",
        ),
        (
            {"secondary_tiers": [{"type": "endless"}]},
            [],
            "'endless' has no limit of capacity (capability 'bounded') and no floor of free space",
        ),
    ],
)
def test_what_an_engine_would_refuse_is_an_error(
    changes: dict[str, Any],
    options: list[str],
    part: str,
    check: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    """Also when each setting is fine by itself."""
    status, report = check({**SOUND, **changes}, *options)
    assert status == 2
    (error,) = report["errors"]
    assert part in error["message"]


def test_errors_of_the_text_form_go_to_stderr(
    registry: TierRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each, with its code; nothing is called valid."""
    config = json.dumps({"cpu_bytes_to_use": "1Mb", "lease_share": 2, "token": SECRET})
    assert main(["check-config", config], registry=registry) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: ") and line.endswith("[KVC101]") for line in lines)
    assert "valid" not in captured.out
    assert SECRET not in captured.out + captured.err


@pytest.mark.parametrize(
    "options", [["--block-bytes", "4Kb"], ["--workers", "0"], ["--tokens-per-block", "0"]]
)
def test_impossible_options_are_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The option is named."""
    config = json.dumps({"cpu_bytes_to_use": 8192})
    assert main(["check-config", config, *options], registry=TierRegistry(())) == 2
    assert options[0] in capsys.readouterr().err


# -- what is shown ------------------------------------------------------------------------------


def test_a_sound_configuration_is_shown_whole(
    check: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    """Every setting in effect, every tier with what it declares; no secret (CONF-2)."""
    status, report = check(SOUND)
    assert (status, report["errors"], report["warnings"]) == (0, [], [])
    assert report["config"].keys() == OffloadingSettings.model_fields.keys()
    shown = {"bucket": "kv", "token": "**********", "max_block_bytes": None, "staging_bytes": 0}
    assert report["config"]["secondary_tiers"] == [
        {
            "type": "acme",
            "name": "acme",
            "mode": "read_write",
            "fill_on_promotion": False,
            "settings": shown,
        }
    ]
    (tier,) = report["tiers"]
    assert (tier["type"], tier["distribution"]) == ("acme", "unknown unknown")
    assert tier["capabilities"] == ["bounded", "persistent"]
    assert tier["settings"] == shown
    assert (tier["limits"]["job_deadline_s"], tier["limits"]["max_block_bytes"]) == (1.0, None)


def test_tables_show_the_same(
    registry: TierRegistry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form for people has settings, tiers, sizes, warnings and notes, and no secret."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    options = ["--block-bytes", "1500", "--tokens-per-block", "16", "--workers", "2"]
    assert main(["check-config", json.dumps(SOUND), *options], registry=registry) == 0
    captured = capsys.readouterr()
    for part in (
        "Effective configuration",
        "1048576 (1 MiB)",
        "lease_share",
        "Tier acme",
        "bounded, persistent",
        "**********",
        "limit: job_deadline_s",
        "Primary tier",
        "4096 (4 KiB)",
        "warning: tier 'acme' keeps blocks beyond the process",
        "note: 'engine_reset' is 'cache'",
        "The configuration is valid.",
    ):
        assert part in captured.out
    assert captured.err == ""
    assert SECRET not in captured.out


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        (
            {},
            ["--block-bytes", "1500", "--tokens-per-block", "16", "--workers", "2"],
            (256, 4096, 2**20 + 2 * 4096, 128, 4096),
        ),
        (
            {"block_size": 64, "lease_share": 0.25},
            ["--block-bytes", "1KiB", "--tokens-per-block", "16"],
            (256, 4096, 2**20 + 2 * 4096, 64, 16384),
        ),
        (
            {"blocks_per_chunk": 3},
            ["--block-bytes", "4096"],
            (85, 12288, 85 * 12288 + 2 * 4096, 42, None),
        ),
    ],
)
def test_with_the_shape_of_the_model_the_sizes_are_computed(
    changes: dict[str, Any],
    options: list[str],
    expected: tuple[int | None, ...],
    check: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    """Blocks, bytes of a row, bytes in all, blocks for promotions, tokens."""
    _, report = check({**SOUND, **changes}, *options)
    primary = report["primary"]
    names = ("num_blocks", "row_bytes", "used_bytes", "lease_blocks", "tokens")
    assert tuple(primary[name] for name in names) == expected


@pytest.mark.parametrize(
    ("changes", "options", "missing"),
    [
        ({}, [], "--block-bytes"),
        ({}, ["--block-bytes", "4096"], "--tokens-per-block"),
        ({"block_size": 32}, ["--block-bytes", "4096"], "--tokens-per-block"),
    ],
)
def test_what_cannot_be_computed_is_said(
    changes: dict[str, Any],
    options: list[str],
    missing: str,
    check: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    """With the option that would make it possible."""
    status, report = check({**SOUND, **changes}, *options)
    assert status == 0
    assert settings_of(report["notes"]) == ["engine_reset", missing]
    assert missing in report["notes"][1]["message"]


def test_a_foreign_spec_is_not_imported(
    check: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    """It is noted that it may read the settings differently."""
    status, report = check({**SOUND, "spec_name": "MySpec", "spec_module_path": "no.such.module"})
    assert status == 0
    assert "'MySpec' is not a spec of kv-core" in report["notes"][1]["message"]


# -- warnings -----------------------------------------------------------------------------------


def test_warnings_do_not_change_the_status(
    check: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    """Advice on the configuration and on this machine, together."""
    status, report = check(
        {
            **SOUND,
            "cpu_bytes_to_use": "1000TiB",
            "shm_dir": str(tmp_path / "absent"),
            "promotion_deadline_s": 60,
            "secondary_tiers": [{**ACME, "mode": "read_only", "fill_on_promotion": True}],
        }
    )
    assert (status, report["errors"]) == (0, [])
    assert settings_of(report["warnings"]) == [
        "shm_dir",
        "cpu_bytes_to_use",
        "acme.fill_on_promotion",
        "secondary_tiers",
        "promotion_deadline_s",
    ]


@pytest.mark.parametrize("changes", [{"min_free_bytes": 1}, {"mode": "read_only"}])
def test_a_tier_with_a_floor_or_without_stores_is_fine(
    changes: dict[str, Any], check: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    """Neither can fill its storage."""
    status, report = check({**SOUND, "secondary_tiers": [{"type": "endless", **changes}]})
    assert (status, report["errors"]) == (0, [])


def test_what_tiers_stage_is_added_up(check: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    """Every tier stages for itself, beside the primary tier."""
    entries = [
        {**ACME, "name": "one", "staging_bytes": 4096},
        {**ACME, "name": "two", "staging_bytes": 8192},
    ]
    _, report = check({**SOUND, "secondary_tiers": entries})
    assert report["staging_bytes"] == 12288
    assert [tier["limits"]["staging_bytes"] for tier in report["tiers"]] == [4096, 8192]


def host(
    facts: HostFacts, registry: TierRegistry, needed_bytes: int = 8192, **changes: int
) -> dict[str, str]:
    """Return what a machine says of a configuration with a persistent tier, by setting."""
    settings = OffloadingSettings.from_extra_config({"cpu_bytes_to_use": 8192})
    tier = check_tier(
        "acme", name="acme", settings={"bucket": "", "token": SECRET, **changes}, registry=registry
    )
    found = host_advice(settings, [tier], needed_bytes, facts)
    return {advice.setting: advice.message for advice in found}


def test_a_machine_that_fits_says_nothing(registry: TierRegistry) -> None:
    """Exactly enough is enough."""
    assert host(HostFacts(8192, None, 8192, "0"), registry) == {}
    assert host(HostFacts(None, None, 8192, "0"), registry) == {}


def test_too_little_shared_memory_is_said_with_both_numbers(registry: TierRegistry) -> None:
    """Needed and free, and how to get more."""
    message = host(HostFacts(None, None, 4096, "0"), registry)["shm_dir"]
    assert "needs 8192 bytes (8 KiB) in /dev/shm, but 4096 bytes (4 KiB) are free" in message
    assert "--shm-size" in message


def test_an_unusable_folder_is_said_with_its_reason(registry: TierRegistry) -> None:
    """No free space is guessed for it."""
    message = host(HostFacts(None, "No such file", 0, "0"), registry)["shm_dir"]
    assert "'shm_dir' /dev/shm cannot be used here: No such file" in message


def test_more_than_the_memory_of_the_machine_is_noticed(registry: TierRegistry) -> None:
    """The limit of a container counts as well."""
    message = host(HostFacts(4096, None, 8192, "0"), registry)["cpu_bytes_to_use"]
    assert "more than the 4096 bytes (4 KiB)" in message


def test_what_tiers_stage_counts_as_memory(registry: TierRegistry) -> None:
    """It lies beside the shared memory, not in it."""
    fits = HostFacts(12288, None, 8192, "0")
    assert host(fits, registry, staging_bytes=4096) == {}
    found = host(fits, registry, staging_bytes=4097)
    assert found.keys() == {"cpu_bytes_to_use"}
    assert "8192 bytes (8 KiB), and its tiers stage up to 4097 bytes" in found["cpu_bytes_to_use"]


@pytest.mark.parametrize(
    ("seed", "state"), [(None, "is not set"), ("", "is not set"), ("random", "is 'random'")]
)
def test_a_persistent_tier_needs_a_hash_seed(
    seed: str | None, state: str, registry: TierRegistry
) -> None:
    """The engine would refuse it; the variable is named."""
    message = host(HostFacts(None, None, 8192, seed), registry)["PYTHONHASHSEED"]
    assert f"PYTHONHASHSEED {state} here" in message


def test_the_facts_are_read_from_the_machine(tmp_path: Path) -> None:
    """Memory, free space and the variable."""
    facts = HostFacts.read(tmp_path, {"PYTHONHASHSEED": "7"})
    assert facts.hash_seed == "7"
    assert facts.shm_problem is None
    assert facts.shm_free_bytes > 0
    assert facts.memory_bytes is not None
    assert facts.memory_bytes > 2**20
    assert HostFacts.read(tmp_path / "absent", {}).shm_problem == "No such file or directory"
