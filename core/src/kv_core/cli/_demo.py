"""``kv-core demo``: see KV blocks travel GPU, CPU, disk and back over a restart."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kv_core.cli._frame import report as say

if TYPE_CHECKING:
    from kv_core.plugins import TierRegistry

__all__ = ["demo"]

# Small enough for seconds on a laptop; each level is too small for all that is asked of it.
# Four GPU blocks to a file: file systems take longer to make and remove files than to fill them.
_REQUESTS: Final = 300
_SEED: Final = 7
_GPU_BLOCKS: Final = 320
_BLOCK_BYTES: Final = 64 * 1024
_BLOCK_SIZE_FACTOR: Final = 4
_CPU_BYTES: Final = 48 * 1024 * 1024


def demo(
    context: typer.Context,
    output: Annotated[
        Path, typer.Option(help="Folder for the chart and the report; made if need be.")
    ] = Path("demo-output"),
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep the stored blocks in this folder instead of a scratch folder."),
    ] = None,
) -> None:
    """Run a small workload over GPU, CPU and disk, restart, run it again, verify every byte."""
    from kv_core.cli._runs import check_folder

    check_folder(output, setting="--output")
    if keep is not None:
        _demo(context.obj, output, keep)
        return
    with tempfile.TemporaryDirectory(prefix="kv-core-demo-") as scratch:
        _demo(context.obj, output, Path(scratch))


def _demo(registry: TierRegistry, output: Path, storage: Path) -> None:
    from rich.console import Console

    from kv_core.cli._chart import write_chart
    from kv_core.cli._report_tables import print_reports
    from kv_core.cli._runs import run_here, run_in_fresh_process, write_json
    from kv_core.units import format_bytes
    from kv_core.workload import synthetic_trace
    from kv_core.workload.replay import ReplayConfig

    console = Console(highlight=False)
    trace = synthetic_trace("mixed", seed=_SEED, num_requests=_REQUESTS)
    tier = {"type": "fs", "root_dir": str(storage)}
    config = ReplayConfig(
        cpu_bytes=_CPU_BYTES,
        gpu_blocks=_GPU_BLOCKS,
        block_bytes=_BLOCK_BYTES,
        block_size_factor=_BLOCK_SIZE_FACTOR,
        secondary_tiers=[tier],
    )
    console.print(
        f"{_REQUESTS} requests of chats, shared prompts and retrieval over three levels: "
        f"{_GPU_BLOCKS} GPU blocks of {format_bytes(_BLOCK_BYTES)}, {format_bytes(_CPU_BYTES)} of "
        f"CPU memory, and files of {_BLOCK_SIZE_FACTOR} blocks each. Then the same requests in a "
        "fresh process: what it finds comes from the files.\n"
    )
    first = run_here(trace, config, registry, title="first run", show_progress=True)
    second, status = run_in_fresh_process(
        [
            "synthetic:mixed",
            f"--limit={_REQUESTS}",
            f"--seed={_SEED}",
            f"--cpu-bytes={_CPU_BYTES}",
            f"--gpu-blocks={_GPU_BLOCKS}",
            f"--block-bytes={_BLOCK_BYTES}",
            f"--block-size-factor={_BLOCK_SIZE_FACTOR}",
            "--tier",
            json.dumps(tier),
        ]
    )
    runs, titles = [first.to_json(), second], ["first run", "after restart"]
    print_reports(console, runs, titles)
    output.mkdir(parents=True, exist_ok=True)
    chart, report = output / "demo.svg", output / "demo.json"
    write_chart(chart, runs, titles)
    write_json(report, {"runs": runs})
    console.print(f"\nChart: {chart}\nReport: {report}", markup=False, soft_wrap=True)
    problems = first.problems()
    if status:
        problems.append(f"the run after the restart ended with status {status}")
    if not second["hits"].get("fs"):
        problems.append("no block was found on disk after the restart")
    for problem in problems:
        say(f"error: {problem}")
    if problems:
        raise typer.Exit(1)
