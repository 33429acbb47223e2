"""``kv-core replay``: the report, the restart, and what makes a replay fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Final

import pytest
import typer

from kv_core.cli import _runs, main
from kv_core.plugins import ENTRY_POINT_GROUP, TierRegistry
from kv_core.workload.replay import ReplayReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Run = Callable[..., tuple[int, str, str]]

# Each level is too small for what is asked of it, so that every one of them has hits.
TIGHT: Final = (
    "synthetic:chat",
    "--limit=40",
    "--gpu-blocks=100",
    "--cpu-bytes=400KiB",
    "--max-seqs=2",
)

# A tier on the kit that flips one bit of every block it gives back.
ROTTING_TIER: Final = """
import kv_core
from kv_core.contract import ContractVersion, TierSpec
from kv_core.errors import BlockMissingError
from kv_core.tierkit import ThreadedTier, TierKitConfig

class Tier(ThreadedTier):
    answers_at_once = True

    def open(self):
        self.blocks = {}

    def exists(self, key):
        return key in self.blocks

    def read_block(self, key, buffer):
        if key not in self.blocks:
            raise BlockMissingError("gone")
        buffer[:] = self.blocks[key]
        buffer[0] ^= 1

    def write_block(self, key, data):
        self.blocks[key] = bytes(data)

@kv_core.hookimpl
def kv_core_register_tier():
    return TierSpec(type="rot", summary="", contract=ContractVersion(1, 0), factory=Tier,
        config_model=TierKitConfig,
        limits=lambda config: config.limits(min_free_bytes=1))
"""


@pytest.fixture
def rotting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TierRegistry:
    """Return a registry with a tier ``rot`` that gives back wrong bytes."""
    (tmp_path / "kv_cli_rotting_tier.py").write_text(ROTTING_TIER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kv_cli_rotting_tier", raising=False)
    return TierRegistry([EntryPoint("rot", "kv_cli_rotting_tier", ENTRY_POINT_GROUP)])


def assert_books_balance(report: dict[str, Any]) -> None:
    """Check what holds for every report of a replay without faults."""
    hits = report["hits"]
    assert sum(hits.values()) + report["misses"] == report["blocks_requested"]
    loaded = sum(blocks for level, blocks in hits.items() if level != "gpu")
    assert report["blocks_verified"] == loaded + report["blocks_reloaded"]
    assert report["bytes_wrong"] == 0
    assert report["requests_finished"] == report["requests"]


def test_the_report_has_every_measurement(run_replay: Run, tmp_path: Path) -> None:
    """The file for programs has all keys, and blocks at every level add up."""
    file = tmp_path / "report.json"
    status, _, err = run_replay(*TIGHT, f"--tier=fs:root_dir={tmp_path}/blocks", f"--json={file}")
    assert (status, err) == (0, "")
    report = json.loads(file.read_text())
    assert report.keys() >= {
        "requests", "blocks_requested", "hits", "misses", "blocks_verified", "bytes_wrong",
        "bytes_moved", "latency_seconds", "peaks", "stores_declined", "wall_seconds",
        "tokens_saved",
    }  # fmt: skip
    assert_books_balance(report)
    assert list(report["hits"]) == ["gpu", "cpu", "fs"]
    assert min(report["hits"].values()) > 0
    hops = {"gpu_to_cpu", "cpu_to_gpu", "cpu_to_fs", "fs_to_cpu"}
    assert report["bytes_moved"].keys() == report["latency_seconds"].keys() == hops
    for latency in report["latency_seconds"].values():
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
    assert report["peaks"].keys() >= {"running", "waiting", "jobs_in_flight"}
    assert 0 < report["tokens_saved"] <= sum(report["hits"].values()) * 64


def test_a_replay_leaves_nothing_but_its_blocks(
    run_replay: Run, tmp_path: Path, shm_dir: Path
) -> None:
    """No region, no temporary file, no thread outlives a replay."""
    threads = threading.enumerate()
    root = tmp_path / "blocks"
    assert run_replay(*TIGHT, f"--tier=fs:root_dir={root}")[0] == 0
    assert threading.enumerate() == threads
    assert list(shm_dir.iterdir()) == []
    kinds = {path.suffix or path.name for path in root.rglob("*") if path.is_file()}
    assert kinds == {".seg", ".idx", ".json", ".lock", "lock"}


def test_no_tier_is_legal(run_replay: Run, tmp_path: Path, trace_file: Path) -> None:
    """Two levels are a replay, too; levels without a hit are in the report."""
    file = tmp_path / "report.json"
    assert run_replay(str(trace_file), f"--json={file}")[0] == 0
    report = json.loads(file.read_text())
    assert_books_balance(report)
    assert report["blocks_requested"] == 7
    assert list(report["hits"]) == ["gpu", "cpu"]


def test_tiers_are_reported_by_name_in_lookup_order(
    run_replay: Run, tmp_path: Path, trace_file: Path
) -> None:
    """Two tiers of one type are told apart, and the order given is kept."""
    file = tmp_path / "report.json"
    tiers = ("--tier=fs:root_dir=%s/z,name=zuse", "--tier=example:name=ada", "--tier=example")
    arguments = [tier.replace("%s", str(tmp_path)) for tier in tiers]
    assert run_replay(str(trace_file), *arguments, f"--json={file}")[0] == 0
    report = json.loads(file.read_text())
    assert list(report["hits"]) == ["gpu", "cpu", "zuse", "ada", "example"]
    assert {"cpu_to_zuse", "cpu_to_ada", "cpu_to_example"} <= report["bytes_moved"].keys()


def test_the_limit_cuts_the_trace(run_replay: Run, tmp_path: Path, trace_file: Path) -> None:
    """Only the first requests are replayed."""
    file = tmp_path / "report.json"
    assert run_replay(str(trace_file), "--limit=2", f"--json={file}")[0] == 0
    report = json.loads(file.read_text())
    assert (report["requests"], report["blocks_requested"]) == (2, 4)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("factor", [1, 3])
def test_any_geometry_and_policy_is_sound(
    policy: str, factor: int, run_replay: Run, tmp_path: Path
) -> None:
    """Policies and offloaded blocks of several GPU blocks keep every byte."""
    file = tmp_path / "report.json"
    geometry = [f"--policy={policy}", f"--block-size-factor={factor}", "--block-bytes=1000"]
    status, _, err = run_replay(*TIGHT, *geometry, "--tier=example", f"--json={file}", "--seed=5")
    assert (status, err) == (0, "")
    assert_books_balance(json.loads(file.read_text()))


# -- what people see -----------------------------------------------------------------------------


def test_tables_name_every_level_and_hop(run_replay: Run, trace_file: Path) -> None:
    """Blocks by level, hops and time, without a progress bar in a pipe."""
    status, out, err = run_replay(str(trace_file), "--tier=example")
    assert (status, err) == (0, "")
    for word in ("gpu", "cpu", "example", "computed", "cpu to example", "scheduling"):
        assert word in out
    assert "replay: 3 of 3 requests finished" in out


def test_quiet_is_silent(run_replay: Run, trace_file: Path) -> None:
    """--quiet prints nothing at all when all is well."""
    assert run_replay(str(trace_file), "--quiet") == (0, "", "")


def test_forced_colours_make_no_progress_bar(
    run_replay: Run, trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that takes colours is still no terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run_replay(str(trace_file))[2] == ""


def test_a_terminal_gets_a_progress_bar(trace_file: Path, shm_dir: Path) -> None:
    """On a terminal the finished requests are counted."""
    reader, writer = os.openpty()
    command = ["replay", str(trace_file), "--shm-dir", str(shm_dir)]
    with subprocess.Popen(
        [sys.executable, "-m", "kv_core", *command], stdout=subprocess.DEVNULL, stderr=writer
    ) as process:
        os.close(writer)
        shown = b""
        # Linux says EIO, not end of file, when the last writer has left a terminal.
        with suppress(OSError):
            while part := os.read(reader, 4096):
                shown += part
        os.close(reader)
    assert process.returncode == 0
    assert b"replay" in shown
    assert b"/3" in shown


# -- the restart ---------------------------------------------------------------------------------


def test_a_restart_finds_the_blocks_on_disk(run_replay: Run, tmp_path: Path, shm_dir: Path) -> None:
    """Two reports; what the second run loads first comes from the file system tier."""
    file = tmp_path / "report.json"
    arguments = ["synthetic:chat", "--limit=20", f"--tier=fs:root_dir={tmp_path}/blocks"]
    status, out, err = run_replay(*arguments, f"--json={file}", "--restart")
    assert (status, err) == (0, "")
    content = json.loads(file.read_text())
    assert list(content) == ["runs"]
    first, second = content["runs"]
    for run in (first, second):
        assert_books_balance(run)
    assert first["hits"]["fs"] == 0
    assert second["hits"]["fs"] > 0
    assert second["misses"] < first["misses"]
    assert second["bytes_moved"]["fs_to_cpu"] > 0
    assert "first run" in out
    assert "after restart" in out
    assert list(shm_dir.iterdir()) == []


def test_the_restart_gets_the_same_options(
    run_replay: Run, tmp_path: Path, trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that decides about the replay is passed on; where to report is not."""
    passed: list[str] = []

    def record(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
        passed.extend(arguments)
        return ReplayReport(trace="t", requests=0).to_json(), 0

    monkeypatch.setattr(_runs, "run_in_fresh_process", record)
    tiers = ['{"type": "example", "name": "a", "max_blocks": 7}', "example:max_blocks=9"]
    options = [f"--tier={tier}" for tier in tiers]
    options += ["--cpu-bytes=1MB", "--gpu-blocks=20", "--block-bytes=512", "--policy=arc"]
    options += ["--block-size-factor=2", "--max-seqs=3", "--tokens-per-step=99", "--seed=-4"]
    options += ["--limit=3", "--mode=offloading", "--workers=1"]
    report = ["--quiet", "--restart", f"--json={tmp_path}/r.json"]
    assert run_replay(*options, *report, str(trace_file))[0] == 0
    shm = f"--shm-dir={tmp_path}/shm"
    assert sorted(passed[:-2]) == sorted([*options, shm])
    assert passed[-2:] == ["--", str(trace_file)]


def test_a_second_run_that_fails_fails_the_command(
    run_replay: Run, tmp_path: Path, trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status of the fresh process counts, and both reports are written."""
    second = ReplayReport(trace="t", requests=1).to_json()
    monkeypatch.setattr(_runs, "run_in_fresh_process", lambda _arguments: (second, 1))
    file = tmp_path / "report.json"
    status, _, err = run_replay(str(trace_file), "--restart", f"--json={file}")
    assert status == 1
    assert err == "error: the run after the restart ended with status 1\n"
    assert len(json.loads(file.read_text())["runs"]) == 2


def test_a_fresh_process_that_cannot_start_passes_its_status_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What stops the second run is said once, by itself."""
    with pytest.raises(typer.Exit) as caught:
        _runs.run_in_fresh_process(["synthetic:chat", "--cpu-bytes=0"])
    assert caught.value.exit_code == 2
    err = capfd.readouterr().err
    assert err.startswith("error: --cpu-bytes: '0' must be positive")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "status", "message"),
    [
        ("kill -9 $$", 137, "error: the run after the restart was ended by signal 9\n"),
        ("exit 0", 1, "error: the run after the restart ended without a report\n"),
    ],
)
def test_a_fresh_process_that_dies_is_a_failure(
    program: str,
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A killed process, by the kernel perhaps, is no success and is named."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{program}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(typer.Exit) as caught:
        _runs.run_in_fresh_process(["synthetic:chat"])
    assert caught.value.exit_code == status
    assert capfd.readouterr().err == message


# -- failures ------------------------------------------------------------------------------------


def test_wrong_bytes_fail_the_replay(
    run_replay: Run, tmp_path: Path, rotting: TierRegistry
) -> None:
    """A tier that changes one bit a block is found out; the report says how many bytes."""
    file = tmp_path / "report.json"
    status, _, err = run_replay(
        *TIGHT, "--tier=rot", "--restart", f"--json={file}", registry=rotting
    )
    (report,) = json.loads(file.read_text())["runs"]
    assert report["bytes_wrong"] > 0
    assert status == 1
    assert f"error: {report['bytes_wrong']} byte(s) of loaded blocks are wrong (" in err
    assert f"{report['bytes_wrong_by_level']['rot']} from rot" in err


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"requests_finished": 2}, "1 of 3 requests did not finish"),
        ({"misses": 6}, "hits and misses add up to 6, but 7 blocks were requested"),
        ({"stalled": True, "jobs_unfinished": 4}, "4 transfer(s) and tier job(s) had not ended"),
    ],
)
def test_an_unsound_report_fails_the_replay(
    broken: dict[str, Any],
    message: str,
    run_replay: Run,
    trace_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests that did not finish and books that do not balance are status 1, and said."""
    sound = {"requests_finished": 3, "blocks_requested": 7, "misses": 7}
    report = ReplayReport(trace="t", requests=3, **{**sound, **broken})
    monkeypatch.setattr(
        "kv_core.workload.replay.replay_trace", lambda *_arguments, **_options: report
    )
    status, _, err = run_replay(str(trace_file))
    assert status == 1
    assert message in err
    assert "Traceback" not in err


def test_an_interrupt_while_waiting_for_the_restart_stops_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches both processes; the parent leaves when the child has cleaned up."""

    class Child:
        """Cleans up when it is interrupted the second time."""

        signals: list[int]

        def __init__(self) -> None:
            self.signals = []

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                raise KeyboardInterrupt
            if not self.signals:
                raise subprocess.TimeoutExpired("child", timeout)
            return 130

        def send_signal(self, number: int) -> None:
            self.signals.append(number)

    child: Any = Child()
    with pytest.raises(KeyboardInterrupt):
        _runs._wait(child)
    assert child.signals == [2]


def test_the_command_needs_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a trace the usage is shown."""
    assert main(["replay"]) == 2
    assert "TRACE" in capsys.readouterr().err
