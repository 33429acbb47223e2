"""The chart: well-formed, to scale, and complete."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from kv_core.cli._chart import write_chart
from kv_core.workload.replay import ReplayReport

if TYPE_CHECKING:
    from pathlib import Path

_SVG = "{http://www.w3.org/2000/svg}"


def make_report(hits: dict[str, int], misses: int, times: dict[str, float]) -> dict[str, Any]:
    """Make a report with what the chart shows."""
    return ReplayReport(
        trace="t",
        requests=1,
        blocks_requested=sum(hits.values()) + misses,
        hits=hits,
        misses=misses,
        time_seconds=times,
    ).to_json()


FIRST = make_report({"gpu": 50, "cpu": 0, "fs": 0}, 50, {"scheduling": 1.0, "other": 1.0})
SECOND = make_report({"gpu": 50, "cpu": 10, "fs": 40}, 0, {"other": 1.0})


class Chart:
    """A chart that was read back."""

    def __init__(self, path: Path) -> None:
        self.root = ET.fromstring(path.read_bytes())  # noqa: S314 - our own file

    def texts(self) -> list[str]:
        """Return all visible text, from top to bottom."""
        return [text.text or "" for text in self.root.iter(f"{_SVG}text")]

    def parts(self) -> list[tuple[str, float, float, str]]:
        """Return the parts of bars: label, x, width, colour."""
        return [
            (label.text or "", float(rect.attrib["x"]), float(rect.attrib["width"]),
             rect.attrib["fill"])
            for rect in self.root.iter(f"{_SVG}rect")
            if (label := rect.find(f"{_SVG}title")) is not None
        ]  # fmt: skip


@pytest.fixture
def chart(tmp_path: Path) -> Chart:
    """Return the chart of two runs."""
    path = tmp_path / "chart.svg"
    write_chart(path, [FIRST, SECOND], ["first run", "after restart"])
    return Chart(path)


def test_it_is_an_svg_of_its_size(chart: Chart) -> None:
    """The root has a size, and nothing is drawn outside of it."""
    assert chart.root.tag == f"{_SVG}svg"
    width, height = int(chart.root.attrib["width"]), int(chart.root.attrib["height"])
    assert chart.root.attrib["viewBox"] == f"0 0 {width} {height}"
    for element in chart.root:
        assert float(element.attrib.get("y", 0)) < height
        assert float(element.attrib.get("x", 0)) < width


def test_both_runs_and_all_levels_are_named(chart: Chart) -> None:
    """Headings, titles of the runs in both halves, and a legend with numbers."""
    texts = chart.texts()
    assert texts[0] == "Where prompt blocks came from"
    assert [texts.count(title) for title in ("first run", "after restart")] == [2, 2]
    for label in ("gpu 50.0%", "fs 0.0%", "fs 40.0%", "computed 50.0%", "scheduling 1.00"):
        assert label in texts


def test_shares_fill_the_bar(chart: Chart) -> None:
    """The parts of a bar of shares lie side by side and add up to its width."""
    parts = chart.parts()
    for run in (parts[:4], parts[4:8]):
        assert run[0][1] == 20
        for (_, x, width, _), (_, following, _, _) in itertools.pairwise(run):
            assert following == pytest.approx(x + width, abs=0.2)
        assert sum(width for _, _, width, _ in run) == pytest.approx(720, abs=0.5)
    assert {label: width for label, _, width, _ in parts[4:8]}["fs 40.0%"] == pytest.approx(288)


def test_times_have_one_scale(chart: Chart) -> None:
    """The longest run fills the bar; a second is as long in the other one."""
    widths = [(label, width) for label, _, width, _ in chart.parts()[8:]]
    assert widths == [("scheduling 1.00", 360), ("other 1.00", 360), ("other 1.00", 360)]


def test_a_name_has_one_colour(chart: Chart) -> None:
    """Levels keep their colour from run to run and differ from each other."""
    colours: dict[str, set[str]] = {}
    for label, _, _, colour in chart.parts()[:8]:
        colours.setdefault(label.split()[0], set()).add(colour)
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == 4


def test_names_of_tiers_need_no_escaping_by_hand(tmp_path: Path) -> None:
    """What is special in XML is written as what it is."""
    path = tmp_path / "chart.svg"
    report = make_report({"gpu": 0, "cpu": 0, "a<b&c": 1}, 0, {})
    write_chart(path, [report], ['"one" & <only>'])
    texts = Chart(path).texts()
    assert "a<b&c 100.0%" in texts
    assert '"one" & <only>' in texts


def test_a_run_of_nothing_has_a_chart(tmp_path: Path) -> None:
    """No blocks and no time are no division by zero."""
    path = tmp_path / "chart.svg"
    write_chart(path, [make_report({}, 0, {})], ["empty"])
    assert Chart(path).parts() == []


def test_many_tiers_wrap_the_legend(tmp_path: Path) -> None:
    """A long legend takes more lines and stays within the width."""
    path = tmp_path / "chart.svg"
    hits = {f"tier-with-a-long-name-{number}": 1 for number in range(12)}
    write_chart(path, [make_report(hits, 0, {})], ["many"])
    chart = Chart(path)
    labels = [text for text in chart.root.iter(f"{_SVG}text") if "long-name" in (text.text or "")]
    assert len(labels) == 12
    assert len({text.attrib["y"] for text in labels}) > 1
    for text in labels:
        assert int(text.attrib["x"]) + 7 * len(text.text or "") <= 760
