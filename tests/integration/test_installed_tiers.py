"""What ``kv-core tiers`` says of the tiers of this repository."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kv_core.cli import main

if TYPE_CHECKING:
    import pytest


def test_every_setting_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """An operator reads what each setting means without opening the code."""
    assert main(["tiers", "--json"]) == 0
    tiers = {tier["type"]: tier for tier in json.loads(capsys.readouterr().out)["tiers"]}
    assert {"example", "fs", "hostile"} <= tiers.keys()
    for name in ("example", "fs", "hostile"):
        assert tiers[name]["error"] is None
        for setting in tiers[name]["settings"]:
            assert setting["description"], (name, setting["name"])
            assert "\n" not in setting["description"]
    (root_dir,) = (s for s in tiers["fs"]["settings"] if s["name"] == "root_dir")
    assert root_dir["required"] is True
