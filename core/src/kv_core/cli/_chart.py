"""Draws runs of a replay as an SVG: one bar of block shares and one of time for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree as ET

from kv_core.cli._report_tables import level_shares

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_chart"]

_WIDTH: Final = 760
_MARGIN: Final = 20
_BAR_HEIGHT: Final = 26
_LINE_HEIGHT: Final = 18
_COLOURS: Final = (
    "#2f6f9f", "#5aa469", "#e0a030", "#8e6bbf", "#c8574d", "#6c7a89", "#3fb0ac", "#b5838d",
)  # fmt: skip
_COMPUTED: Final = "#d9d9d9"


def write_chart(path: Path, reports: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> None:
    """Write the chart.

    Args:
        path: The SVG file; its folder must exist.
        reports: Runs as :meth:`ReplayReport.to_json` gives them.
        titles: Heading of each run.
    """
    drawing = _Drawing()
    drawing.text("Where prompt blocks came from", bold=True)
    shares = [level_shares(report) for report in reports]
    colours = _assign_colours(name for share in shares for name in share)
    colours["computed"] = _COMPUTED
    for share, title in zip(shares, titles, strict=True):
        drawing.bar(title, share, colours, "{:.1%}")
    drawing.space()
    drawing.text("Where time went (seconds)", bold=True)
    times: list[dict[str, float]] = [dict(report["time_seconds"]) for report in reports]
    colours = _assign_colours(name for time in times for name in time)
    longest = max((sum(time.values()) for time in times), default=0.0)
    for time, title in zip(times, titles, strict=True):
        drawing.bar(title, time, colours, "{:.2f}", full_scale=longest)
    drawing.write(path)


def _assign_colours(names: Any) -> dict[str, str]:
    distinct = dict.fromkeys(names)
    return {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(distinct)}


class _Drawing:
    """An SVG that grows downwards."""

    def __init__(self) -> None:
        self._root = ET.Element(
            "svg",
            {"xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif", "font-size": "12"},
        )
        self._background = ET.SubElement(self._root, "rect", {"width": "100%", "fill": "white"})
        self._y = _MARGIN

    def text(self, text: str, *, bold: bool = False) -> None:
        self._y += _LINE_HEIGHT
        self._text(_MARGIN, self._y, text, "bold" if bold else "normal")
        self._y += 6

    def space(self) -> None:
        self._y += _LINE_HEIGHT

    def bar(
        self,
        title: str,
        parts: Mapping[str, float],
        colours: Mapping[str, str],
        number: str,
        *,
        full_scale: float = 1.0,
    ) -> None:
        """Add a titled, stacked bar and its legend."""
        self.text(title)
        scale = (_WIDTH - 2 * _MARGIN) / (full_scale or 1.0)
        x = float(_MARGIN)
        for name, value in parts.items():
            width = value * scale
            attributes = {
                "x": f"{x:.1f}",
                "y": str(self._y),
                "width": f"{width:.1f}",
                "height": str(_BAR_HEIGHT),
                "fill": colours[name],
            }
            part = ET.SubElement(self._root, "rect", attributes)
            ET.SubElement(part, "title").text = f"{name} {number.format(value)}"
            x += width
        self._y += _BAR_HEIGHT + 6
        self._legend({name: number.format(value) for name, value in parts.items()}, colours)

    def _legend(self, labels: Mapping[str, str], colours: Mapping[str, str]) -> None:
        x = _MARGIN
        for name, value in labels.items():
            label = f"{name} {value}"
            width = 24 + 7 * len(label)
            if x + width > _WIDTH - _MARGIN:
                x = _MARGIN
                self._y += _LINE_HEIGHT
            box = {"x": str(x), "y": str(self._y + 2), "width": "10", "height": "10"}
            ET.SubElement(self._root, "rect", {**box, "fill": colours[name]})
            self._text(x + 14, self._y + 11, label, "normal")
            x += width
        self._y += _LINE_HEIGHT + 6

    def _text(self, x: int, y: int, text: str, weight: str) -> None:
        attributes = {"x": str(x), "y": str(y), "font-weight": weight, "fill": "#222222"}
        ET.SubElement(self._root, "text", attributes).text = text

    def write(self, path: Path) -> None:
        height = str(self._y + _MARGIN)
        self._root.set("width", str(_WIDTH))
        self._root.set("height", height)
        self._root.set("viewBox", f"0 0 {_WIDTH} {height}")
        self._background.set("height", height)
        path.write_bytes(ET.tostring(self._root, encoding="utf-8", xml_declaration=True))
