"""``kv-core replay --mode simple-eager`` and ``simple-lazy``, and what they refuse."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Refusal = Callable[..., str]
    Run = Callable[..., tuple[int, str, str]]

MODES: Final = ("simple-eager", "simple-lazy")
TIGHT: Final = (
    "synthetic:mixed",
    "--limit=60",
    "--block-bytes=512",
    "--gpu-blocks=700",
    "--cpu-bytes=1MiB",
    "--tokens-per-step=2048",
)


def test_lazy_moves_less_and_finds_as_much(run_replay: Run, tmp_path: Path) -> None:
    """The reports of both modes have the figures to compare them by."""
    reports = {}
    for mode in MODES:
        file = tmp_path / f"{mode}.json"
        status, out, err = run_replay(*TIGHT, f"--mode={mode}", f"--json={file}", "--quiet")
        assert (status, out, err) == (0, "", "")
        report = reports[mode] = json.loads(file.read_text())
        assert report["requests_finished"] == 60
        assert report["bytes_wrong"] == 0
        assert list(report["hits"]) == ["gpu", "cpu"]
        assert sum(report["hits"].values()) + report["misses"] == report["blocks_requested"]
        assert report["hits"]["cpu"] > 0
    stored = [reports[mode]["bytes_moved"]["gpu_to_cpu"] for mode in MODES]
    assert stored[1] < stored[0]


@pytest.mark.parametrize("mode", MODES)
def test_tables_show_two_levels(mode: str, run_replay: Run, shm_dir: Path) -> None:
    """And nothing is left: no region, which this mode has no use for, and no thread."""
    threads = threading.enumerate()
    status, out, err = run_replay(*TIGHT, f"--mode={mode}")
    assert (status, err) == (0, "")
    for word in ("gpu to cpu", "cpu to gpu", "computed", "0 bytes wrong"):
        assert word in out
    assert list(shm_dir.iterdir()) == []
    assert threading.enumerate() == threads


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--mode=lazy"], ["'mode' must be one of offloading, simple-eager", "found 'lazy'"]),
        (["--mode="], ["'mode' must be one of", "found ''"]),
        (["--mode=simple-lazy", "--cpu-bytes=4095"], ["'cpu_bytes' is 4095", "takes 4096 bytes"]),
        (["--mode=simple-lazy", "--cpu-bytes=1024TiB"], ["--cpu-bytes", "a process can have here"]),
        (["--mode=simple-eager", "--tier=example"], ["'secondary_tiers'", "has no tiers"]),
        (["--mode=simple-eager", "--workers=2"], ["'workers' is 2", "a single worker"]),
        (["--mode=simple-eager", "--policy=arc"], ["'policy' is 'arc'", "mode 'offloading'"]),
        (["--mode=simple-eager", "--block-size-factor=2"], ["'block_size_factor' is 2"]),
        (["--mode=simple-eager", "--set=lease_share=0.3"], ["'engine_options'", "lease_share"]),
    ],
)
def test_what_the_mode_has_no_use_for_is_refused(
    options: list[str], parts: list[str], refusal: Refusal
) -> None:
    """One line that says what was found and what to do; nothing is ignored in silence."""
    message = refusal("synthetic:chat", "--limit=5", *options)
    for part in parts:
        assert part in message
