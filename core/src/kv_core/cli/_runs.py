"""Runs a replay here, or in a fresh process on the same storage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from kv_core.plugins import TierRegistry
    from kv_core.workload import Trace
    from kv_core.workload.replay import ReplayConfig, ReplayReport

__all__ = ["check_writable", "run_here", "run_in_fresh_process", "write_json"]


def run_here(
    trace: Trace, config: ReplayConfig, registry: TierRegistry, *, title: str, show_progress: bool
) -> ReplayReport:
    """Replay in this process, with a progress bar on a terminal and none in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kv_core.workload.replay import replay_trace

    console = Console(stderr=True)
    if not show_progress or not console.is_terminal:
        return replay_trace(trace, config, registry=registry)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=len(trace.requests))
        return replay_trace(
            trace,
            config,
            registry=registry,
            progress=lambda finished: bar.update(task, completed=finished),
        )


def run_in_fresh_process(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Run ``kv-core replay`` with these arguments in a new interpreter.

    Returns:
        The report of the run and its exit status.

    Raises:
        typer.Exit: The run could not report; it has said why, and its status is passed on.
    """
    with tempfile.TemporaryDirectory(prefix="kv-core-") as folder:
        report_file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "kv_core", "replay", *arguments]
        command += ["--quiet", "--json", str(report_file)]
        status = subprocess.run(command, check=False).returncode  # noqa: S603 - our own command
        if not report_file.exists():
            raise typer.Exit(status or 1)
        return json.loads(report_file.read_text()), status


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
    raise ConfigError(f"the report cannot be written to {str(path)!r}: {problem}", setting="--json")


def write_json(path: Path, content: object) -> None:
    """Write a report, readable by people too."""
    path.write_text(json.dumps(content, indent=2) + "\n")
