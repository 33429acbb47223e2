"""``kv-core tiers``: the listing, with broken tiers in it."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Union

import pytest
from pydantic import SecretStr

from kv_core.cli import main
from kv_core.cli._tiers import _type_name
from kv_core.plugins import TierRegistry

if TYPE_CHECKING:
    from pathlib import Path

_PLUGIN = """
from pathlib import Path
from typing import Literal
import kv_core
from kv_core.contract import *
from pydantic import Field, SecretStr

class Config(TierConfig):
    root: Path = Field(description="Folder of the blocks.")
    depth: int = Field(default=2, alias="tree_depth")
    token: SecretStr = SecretStr("hunter2")
    mode_of_sync: Literal["none", "data"] = "data"
    tags: list[str] = Field(default_factory=list)

@kv_core.hookimpl
def kv_core_register_tier():
    return TierSpec(type="acme", summary="Keeps [blocks] on an Acme.",
        contract=ContractVersion(1, 0), factory=lambda context: None, config_model=Config,
        limits=lambda config: TierLimits(job_deadline_s=1.0, lookup_deadline_s=1.0),
        capabilities=frozenset({Capability.USAGE, Capability.BOUNDED}))
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TierRegistry:
    """Provide a registry with a sound and a broken tier."""
    (tmp_path / "kv_cli_test_tier.py").write_text(_PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kv_cli_test_tier", raising=False)
    return TierRegistry(
        [
            metadata.EntryPoint("acme", "kv_cli_test_tier", "kv_core.tiers"),
            metadata.EntryPoint("broken", "kv_cli_no_such_module", "kv_core.tiers"),
        ]
    )


def test_json_lists_declarations_and_settings(
    registry: TierRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    """The listing for programs is complete, and secrets are hidden (CONF-2)."""
    assert main(["tiers", "--json"], registry=registry) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["contract"] == "1.0"
    acme = listing["tiers"][0]
    settings = [
        (s["name"], s["type"], s["required"], s["default"], s["description"])
        for s in acme.pop("settings")
    ]
    assert acme == {
        "type": "acme",
        "distribution": "unknown",
        "version": "unknown",
        "contract": "1.0",
        "capabilities": ["bounded", "usage"],
        "summary": "Keeps [blocks] on an Acme.",
        "error": None,
    }
    assert settings == [
        ("root", "Path", True, None, "Folder of the blocks."),
        ("tree_depth", "int", False, 2, ""),
        ("token", "SecretStr", False, "**********", ""),
        ("mode_of_sync", "'none' | 'data'", False, "data", ""),
        ("tags", "list[str]", False, None, ""),
    ]


def test_a_broken_tier_is_listed_with_its_error(
    registry: TierRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tier that cannot be used is shown with the reason; the listing succeeds."""
    assert main(["tiers", "--json"], registry=registry) == 0
    broken = json.loads(capsys.readouterr().out)["tiers"][1]
    assert (broken["type"], broken["contract"], broken["error"]["code"]) == (
        "broken",
        None,
        "KVC203",
    )
    assert "kv_cli_no_such_module" in broken["error"]["message"]


def test_tables_show_the_same(
    registry: TierRegistry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing for people has every tier, setting and error, and no secret."""
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["tiers"], registry=registry) == 0
    text = capsys.readouterr().out
    for part in (
        "Keeps [blocks] on an Acme.",
        "bounded, usage",
        "required",
        "tree_depth",
        "Folder of the blocks.",
        "[KVC203]",
    ):
        assert part in text
    assert "hunter2" not in text


def test_nothing_installed_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty listing is a hint."""
    assert main(["tiers"], registry=TierRegistry(())) == 0
    assert "pip install kv-tier-fs" in capsys.readouterr().out
    assert main(["tiers", "--json"], registry=TierRegistry(())) == 0
    assert json.loads(capsys.readouterr().out)["tiers"] == []


@pytest.mark.parametrize(
    ("annotation", "name"),
    [
        (int, "int"),
        (None, "None"),
        (str | None, "str | None"),
        (Optional[str], "str | None"),  # noqa: UP045 - authors write it this way, too
        (Union[int, SecretStr], "int | SecretStr"),  # noqa: UP007 - as above
        (dict[str, list[int]], "dict[str, list[int]]"),
        (Annotated[int, "positive"], "int"),
        (Literal["a", 1], "'a' | 1"),
        (Any, "Any"),
    ],
)
def test_types_are_written_as_users_read_them(annotation: object, name: str) -> None:
    """No module names, no typing constructs."""
    assert _type_name(annotation) == name
