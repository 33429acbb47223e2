"""Runs a replay here, or in a fresh process on the same storage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from kv_core.cli._frame import report as say
from kv_core.cli._interrupts import interrupts_held_back
from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from kv_core.plugins import TierRegistry
    from kv_core.workload import Trace
    from kv_core.workload.replay import ReplayConfig, ReplayReport

__all__ = [
    "check_folder",
    "check_writable",
    "run_here",
    "run_in_fresh_process",
    "write_json",
]

_STATUSES_WITH_REPORT: Final = frozenset({0, 1})
_SIGNAL_STATUS: Final = 128
_OWN_CLEANUP_S: Final = 5.0
_TOLD_CLEANUP_S: Final = 20.0


def run_here(
    trace: Trace, config: ReplayConfig, registry: TierRegistry, *, title: str, show_progress: bool
) -> ReplayReport:
    """Replay in this process, with a progress bar on a terminal and none in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kv_core.workload.replay import replay_trace

    def run(progress: Callable[[int], None] | None = None) -> ReplayReport:
        with interrupts_held_back() as check:
            return replay_trace(
                trace, config, registry=registry, progress=progress, between_steps=check
            )

    # Not the console's own opinion: FORCE_COLOR, common in CI, would make a pipe a terminal.
    if not show_progress or not sys.stderr.isatty():
        return run()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=len(trace.requests))
        return run(lambda finished: bar.update(task, completed=finished))


def run_in_fresh_process(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Run ``kv-core replay`` with these arguments in a new interpreter.

    Returns:
        The report of the run and its exit status.

    Raises:
        typer.Exit: The run could not report; the reason was said, and its status is passed on.
    """
    with tempfile.TemporaryDirectory(prefix="kv-core-") as folder:
        report_file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "kv_core", "replay", "--quiet"]
        command += ["--json", str(report_file), *arguments]
        with subprocess.Popen(command) as process:  # noqa: S603 - our own command
            status = _wait(process)
        if status in _STATUSES_WITH_REPORT and report_file.exists():
            return json.loads(report_file.read_text()), status
    if status < 0:
        say(f"error: the run after the restart was ended by signal {-status}")
        status = _SIGNAL_STATUS - status
    elif status == 0:
        say("error: the run after the restart ended without a report")
    raise typer.Exit(status or 1)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; after an interrupt, see that it has cleaned up before we leave."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        # A terminal interrupts both processes. An interrupt of this one alone is passed on.
        for patience_s, stop in (
            (_OWN_CLEANUP_S, signal.SIGINT),
            (_TOLD_CLEANUP_S, signal.SIGKILL),
        ):
            try:
                process.wait(patience_s)
                break
            except subprocess.TimeoutExpired:
                process.send_signal(stop)
        raise


def check_folder(path: Path, *, setting: str) -> None:
    """Refuse a folder for results that cannot be made or written to, before the work.

    Raises:
        ConfigError: Something else has its name, or the place is not writable.
    """
    existing = path
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        problem = f"{str(existing)!r} is no folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{str(existing)!r} is not writable"
    else:
        return
    raise ConfigError(
        f"{setting}: results cannot be written to {str(path)!r}: {problem}", setting=setting
    )


def check_writable(path: Path) -> None:
    """Refuse a report file that cannot be written, before the work and not after it.

    Raises:
        ConfigError: Its folder does not exist or is not writable, or it is a folder itself.
    """
    if path.is_dir():
        problem = "it is a folder"
    elif not path.parent.is_dir():
        problem = f"there is no folder {str(path.parent)!r}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "it is not writable"
    else:
        return
    raise ConfigError(
        f"--json: the report cannot be written to {str(path)!r}: {problem}", setting="--json"
    )


def write_json(path: Path, content: object) -> None:
    """Write a report, readable by people too."""
    path.write_text(json.dumps(content, indent=2) + "\n")
