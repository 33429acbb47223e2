"""The demo as a stranger runs it: in a process, in an empty folder, on defaults."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Command = Callable[..., tuple[int, str, str]]


@pytest.mark.usefixtures("shared_memory_is_clean")
def test_the_demo(command: Command, tmp_path: Path, scratch: Path) -> None:
    """Blocks survive the process: tables, a chart and a report say so, and nothing is left."""
    status, out, err = command("demo")
    assert (status, err) == (0, "")

    for word in ("first run", "after restart", "gpu", "cpu", "fs", "computed", "fs to cpu"):
        assert word in out
    assert "Chart: demo-output/demo.svg\nReport: demo-output/demo.json\n" in out

    output = tmp_path / "demo-output"
    assert sorted(path.name for path in output.iterdir()) == ["demo.json", "demo.svg"]
    first, second = json.loads((output / "demo.json").read_text())["runs"]
    for run in (first, second):
        assert run["requests_finished"] == run["requests"] == 300
        assert run["bytes_wrong"] == 0
        assert sum(run["hits"].values()) + run["misses"] == run["blocks_requested"]
        loaded = run["hits"]["cpu"] + run["hits"]["fs"]
        assert run["blocks_verified"] == loaded + run["blocks_reloaded"]
        assert run["hits"]["gpu"] > 0
        assert run["hits"]["cpu"] > 0
        assert run["loads_failed"] == 0
    # The first run finds on disk what CPU memory was too small for, the second far more.
    assert first["hits"]["fs"] < second["hits"]["fs"]
    assert second["misses"] < first["misses"] / 2

    chart = ET.fromstring((output / "demo.svg").read_bytes())  # noqa: S314 - our own file
    texts = [element.text for element in chart.iter("{http://www.w3.org/2000/svg}text")]
    assert [texts.count(title) for title in ("first run", "after restart")] == [2, 2]

    assert list(scratch.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"demo-output", "scratch"}
