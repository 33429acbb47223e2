"""``kv-core check-config`` of what docs/vllm.md tells users of vLLM to write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_core.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = Path(__file__).parents[3] / "docs" / "vllm.md"


def transfer_configs() -> Iterator[dict[str, Any]]:
    """Yield every whole configuration of the page."""
    for block in re.findall(r"--kv-transfer-config '(\{.*?\})'\n", PAGE.read_text(), re.DOTALL):
        yield json.loads(block)


def entries_of_tiers() -> Iterator[dict[str, Any]]:
    """Yield every entry of a tier that stands on the page by itself."""
    for block in re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL):
        found = json.loads(block)
        yield from found if isinstance(found, list) else [found]


def check(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Return the status of the command and its report."""
    status = main(["check-config", json.dumps(config), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_configuration_of_the_engine_mode_is_valid(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the page has it, with what vLLM reads beside it."""
    [config] = [
        config
        for config in transfer_configs()
        if config["kv_connector_extra_config"]["spec_name"] == "KVCoreOffloadingSpec"
    ]
    config["kv_connector_extra_config"] |= {"model_id": "x", "self_describing_kv_events": True}
    status, report = check(config, capsys)
    assert (status, report["errors"]) == (0, [])
    assert [tier["type"] for tier in report["tiers"]] == ["fs"]


@pytest.mark.parametrize(
    "entry",
    [entry for entry in entries_of_tiers() if entry["type"] in ("fs", "example")],
    ids=lambda entry: entry.get("name", entry["type"]),
)
def test_the_entries_of_tiers_are_valid(
    entry: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each one that needs no other package than these tests have."""
    config = {
        "spec_name": "KVCoreOffloadingSpec",
        "cpu_bytes_to_use": "64MiB",
        "secondary_tiers": [entry],
    }
    status, report = check(config, capsys)
    assert (status, report["errors"]) == (0, [])


def test_the_page_has_both_modes() -> None:
    """Or the tests above would look at nothing."""
    specs = [config["kv_connector_extra_config"]["spec_name"] for config in transfer_configs()]
    assert specs == ["KVCoreOffloadingSpec", "TieringOffloadingSpec"]
    assert len(list(entries_of_tiers())) >= 4


def test_a_misspelt_setting_is_found_behind_the_spec_of_vllm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is let through is what vLLM reads, and nothing else."""
    status, report = check(
        {"spec_name": "KVCoreOffloadingSpec", "cpu_bytes_to_use": "1GiB", "modelid": "x"}, capsys
    )
    assert status == 2
    assert ["'modelid' is not a setting" in error["message"] for error in report["errors"]] == [
        True
    ]
