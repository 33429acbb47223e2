"""Tables of reports: every number where it belongs, what failed, and nothing folded."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from kv_core.cli._report_tables import level_shares, print_reports
from kv_core.workload.replay import LatencySummary, ReplayReport

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_report(**fields: Any) -> dict[str, Any]:
    """Make a report of 200 blocks."""
    defaults: dict[str, Any] = {
        "trace": "t",
        "requests": 9,
        "requests_finished": 9,
        "blocks_requested": 200,
        "hits": {"gpu": 100, "cpu": 40, "fs": 10},
        "misses": 50,
        "blocks_verified": 50,
        "bytes_moved": {"gpu_to_cpu": 3 << 20, "cpu_to_fs": 2048},
        "latency_seconds": {
            "gpu_to_cpu": LatencySummary(4, 0.001, 0.002, 0.0035, 0.004),
            "cpu_to_fs": LatencySummary(0, 0.0, 0.0, 0.0, 0.0),
        },
        "time_seconds": {"scheduling": 1.25, "other": 0.5},
        "tokens_saved": 640,
        "wall_seconds": 1.75,
    }
    return ReplayReport(**{**defaults, **fields}).to_json()


def show(reports: Sequence[dict[str, Any]], titles: Sequence[str], width: int = 80) -> list[str]:
    """Return the lines that are printed into a pipe, with frames replaced by spaces."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_reports(console, reports, titles)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().replace("│", " ").replace("┃", " ").splitlines()


def cells(lines: list[str], first: str) -> list[str]:
    """Return the words of the only line that begins with a cell."""
    (line,) = (line for line in lines if line.strip().startswith(first))
    return line.split()


def test_shares_of_levels() -> None:
    """GPU, CPU, tiers in lookup order, computed blocks last."""
    shares = level_shares(make_report(hits={"gpu": 100, "cpu": 40, "z": 4, "a": 6}))
    assert shares == {"gpu": 0.5, "cpu": 0.2, "z": 0.02, "a": 0.03, "computed": 0.25}
    assert list(shares) == ["gpu", "cpu", "z", "a", "computed"]


def test_no_blocks_have_no_shares() -> None:
    """An empty trace divides by nothing."""
    empty = make_report(blocks_requested=0, hits={"gpu": 0, "cpu": 0}, misses=0)
    assert level_shares(empty) == {}
    assert cells(show([empty], ["replay"]), "requested") == ["requested", "0"]


def test_every_level_has_blocks_and_share() -> None:
    """One line a level, the sum below."""
    lines = show([make_report()], ["replay"])
    assert cells(lines, "gpu  ") == ["gpu", "100", "50.0%"]
    assert cells(lines, "cpu  ") == ["cpu", "40", "20.0%"]
    assert cells(lines, "fs") == ["fs", "10", "5.0%"]
    assert cells(lines, "computed") == ["computed", "50", "25.0%"]
    assert cells(lines, "requested") == ["requested", "200"]


def test_every_hop_has_bytes_and_latency() -> None:
    """Percentiles in milliseconds; a dash where nothing was measured."""
    lines = show([make_report()], ["replay"])
    assert cells(lines, "gpu to cpu")[3:] == ["3", "MiB", "1.00", "ms", "3.50", "ms"]
    assert cells(lines, "cpu to fs")[3:] == ["2", "KiB", "-", "-"]


def test_runs_stand_side_by_side() -> None:
    """What only one run has is zero in the other, and ``computed`` and ``other`` come last."""
    second = make_report(
        hits={"gpu": 100, "cpu": 40, "s3": 60},
        misses=0,
        bytes_moved={"s3_to_cpu": 1024},
        latency_seconds={},
        time_seconds={"other": 1.0, "verifying loads": 2.0},
    )
    lines = show([make_report(), second], ["one", "two"])
    assert cells(lines, "fs") == ["fs", "10", "5.0%", "0", "0.0%"]
    assert cells(lines, "s3  ") == ["s3", "0", "0.0%", "60", "30.0%"]
    assert cells(lines, "s3 to cpu")[3:] == ["0", "B", "-", "-", "1", "KiB", "-", "-"]
    assert cells(lines, "verifying loads")[2:] == ["0.000", "2.000"]
    firsts = [line.split()[0] for line in lines if line.split()]
    assert firsts.index("computed") > firsts.index("s3")
    assert firsts.index("other") > firsts.index("verifying")


def test_each_run_ends_in_one_line() -> None:
    """The summary is not folded, however long its numbers are."""
    report = make_report(tokens_saved=10**18, blocks_verified=10**18)
    lines = show([report, report], ["first run", "after restart"])
    summary = (
        f"9 of 9 requests finished, {10**18} loaded blocks verified, 0 bytes wrong, {10**18} "
        "prompt tokens saved, 1.75 s"
    )
    assert lines[-2:] == [f"first run: {summary}", f"after restart: {summary}"]


def test_what_failed_is_said() -> None:
    """A full disk or a broken tier costs hits, which nobody would notice in the shares."""
    broken = make_report(
        loads_failed=2,
        stores_declined=7,
        stats={
            "tier.fs.store_failures": 160.0,
            "tier.fs.stalled_jobs": 1.0,
            "tier.fs.lookup_queries": 9.0,
            "tier.gone.load_failures": 3.0,
        },
    )
    lines = show([make_report(), broken], ["one", "two"])
    assert lines[-3:] == [
        "two: tier 'fs' had 160 store failures, 1 stalled jobs",
        "two: 2 load(s) to the GPU failed",
        "two: 7 store(s) found no room in CPU memory",
    ]
    assert lines[-4].startswith("two: 9 of 9 requests finished")


@pytest.mark.parametrize("width", [20, 80, 300])
def test_a_pipe_folds_nothing(width: int) -> None:
    """Tables in a pipe keep the room they need."""
    lines = show([make_report()], ["replay"], width=width)
    assert cells(lines, "computed") == ["computed", "50", "25.0%"]
    assert "Where prompt blocks came from" in lines[0]
