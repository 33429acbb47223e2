"""``kv-core demo``, made small: what it leaves, what it says, and when it fails."""

from __future__ import annotations

import json
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.cli import _demo, _runs, main
from kv_core.plugins import TierRegistry
from kv_core.workload.replay import ReplayReport

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the demo small, and return the folder of its temporary files."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(_demo, "_REQUESTS", 12)
    return folder


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace both runs: the reports of the first and the second, and the second's status."""

    def report() -> ReplayReport:
        hits = {"gpu": 0, "cpu": 0, "fs": 5}
        return ReplayReport(trace="t", requests=0, blocks_requested=5, hits=hits)

    replaced: list[Any] = [report(), report(), 0]
    monkeypatch.setattr(_runs, "run_here", lambda *_arguments, **_options: replaced[0])
    monkeypatch.setattr(
        _runs, "run_in_fresh_process", lambda _arguments: (replaced[1].to_json(), replaced[2])
    )
    return replaced


def test_a_small_demo(tmp_path: Path, scratch: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two verified runs with hits on disk in the second, a chart, a report, no scratch left."""
    output = tmp_path / "new" / "output"
    assert main(["demo", "--output", str(output)]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    assert "12 requests of chats" in captured.out
    assert sorted(path.name for path in output.iterdir()) == ["demo.json", "demo.svg"]
    first, second = json.loads((output / "demo.json").read_text())["runs"]
    assert (first["bytes_wrong"], second["bytes_wrong"]) == (0, 0)
    assert first["hits"]["fs"] == 0
    assert second["hits"]["fs"] > 0
    assert list(scratch.iterdir()) == []


def test_kept_blocks_serve_the_next_demo(tmp_path: Path) -> None:
    """With --keep the blocks stay, and a later demo begins with hits on disk."""
    kept, output = tmp_path / "kept", tmp_path / "output"
    for fs_hits in (False, True):
        assert main(["demo", "--output", str(output), "--keep", str(kept)]) == 0
        first, _ = json.loads((output / "demo.json").read_text())["runs"]
        assert (first["hits"]["fs"] > 0) is fs_hits
    assert list(kept.rglob("*.seg"))


@pytest.mark.usefixtures("runs")
def test_paths_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No part of a path is taken for markup, and none is folded."""
    output = tmp_path / "[bold]" / ("long" * 40)
    assert main(["demo", "--output", str(output)]) == 0
    assert f"Chart: {output}/demo.svg\nReport: {output}/demo.json\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (
            {"first": {"bytes_wrong": 3, "bytes_wrong_by_level": {"fs": 3}}},
            ["3 byte(s) of loaded blocks are wrong (3 from fs)"],
        ),
        ({"first": {"requests": 1}}, ["1 of 1 requests did not finish"]),
        ({"status": 1}, ["the run after the restart ended with status 1"]),
        (
            {"second": {"hits": {"gpu": 5, "cpu": 0, "fs": 0}}},
            ["no block was found on disk after the restart"],
        ),
    ],
)
def test_a_demo_that_proves_nothing_fails(
    change: dict[str, Any],
    messages: list[str],
    runs: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wrong bytes, unfinished requests or no hits on disk are status 1; the report is there."""
    for index, name in enumerate(("first", "second")):
        for field, value in change.get(name, {}).items():
            setattr(runs[index], field, value)
    runs[2] = change.get("status", 0)
    assert main(["demo", "--output", str(tmp_path / "output")]) == 1
    assert capsys.readouterr().err.splitlines() == [f"error: {text}" for text in messages]
    assert (tmp_path / "output" / "demo.json").exists()


def test_without_the_tier_nothing_is_left(
    tmp_path: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the command that installs it; no empty output folder stays behind."""
    assert main(["demo", "--output", str(tmp_path / "output")], registry=TierRegistry(())) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: no installed package provides the tier type 'fs'")
    assert "pip install kv-tier-fs" in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "output").exists()
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("output", ["file", "file/output"])
def test_an_output_folder_that_cannot_be_made(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before the demo, naming what is in the way."""
    (tmp_path / "file").write_text("mine")
    assert main(["demo", "--output", str(tmp_path / output)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"error: --output: results cannot be written to '{tmp_path / output}': "
        f"'{tmp_path}/file' is no folder [KVC101]\n"
    )
    assert (tmp_path / "file").read_text() == "mine"
