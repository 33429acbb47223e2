"""``kv-core replay``: a request trace through the whole engine, every loaded byte verified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, cast

import typer

from kv_core.cli._frame import report as say
from kv_core.cli._tier_option import parse_setting_options, parse_tier_options
from kv_core.units import parse_bytes

if TYPE_CHECKING:
    from kv_core.plugins import TierRegistry
    from kv_core.workload import SyntheticKind, Trace

__all__ = ["replay"]

_SYNTHETIC: Final = "synthetic:"
_SYNTHETIC_REQUESTS: Final = 500
_SHM_DIR: Final = Path("/dev/shm")  # noqa: S108 - memory is meant to be shared here
_OUTPUT_PARAMETERS: Final = frozenset({"restart", "json_file", "quiet"})


def replay(
    context: typer.Context,
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A trace file or folder (Mooncake, RAGPulse, Claude Code, Bailian; recognized by "
            "content), or synthetic:KIND with KIND chat, shared-prefix, rag or mixed.",
        ),
    ],
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE:KEY=VALUE,...",
            help="A secondary tier, in lookup order; repeatable. Also a JSON object.",
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="What is below the GPU: offloading (CPU memory and tiers), simple-eager or "
            "simple-lazy (CPU memory only).",
        ),
    ] = "offloading",
    cpu_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of the primary tier in CPU memory.")
    ] = "64MiB",
    gpu_blocks: Annotated[int, typer.Option(help="Blocks of the GPU pool.")] = 4096,
    block_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes of one GPU block.")
    ] = "4KiB",
    block_size_factor: Annotated[int, typer.Option(help="GPU blocks in one offloaded block.")] = 1,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Ranks, each with a GPU pool and a page of every block; several are processes.",
        ),
    ] = 1,
    policy: Annotated[str, typer.Option(help="Eviction policy of the primary tier.")] = "lru",
    max_seqs: Annotated[int, typer.Option(help="Most requests at the same time.")] = 16,
    tokens_per_step: Annotated[int, typer.Option(help="Token budget of one step.")] = 8192,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of a synthetic trace.")] = 0,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of the engine, such as lease_share=0.3."
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Then again, in a fresh process on the same storage."),
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the report, or with --restart both."),
    ] = None,
    shm_dir: Annotated[Path, typer.Option(help="Folder of the shared memory region.")] = _SHM_DIR,
    quiet: Annotated[bool, typer.Option("--quiet", help="No tables and no progress bar.")] = False,
) -> None:
    """Replay a request trace with real bytes and verify every block that is loaded.

    Exits with status 1 when a byte is wrong, a request did not finish, or the books do not
    balance, and with 2 when the input or the surroundings do not allow a replay.
    """
    from rich.console import Console

    from kv_core.cli._report_tables import print_reports
    from kv_core.cli._runs import check_writable, run_here, run_in_fresh_process, write_json
    from kv_core.workload.replay import ReplayConfig

    registry: TierRegistry = context.obj
    config = ReplayConfig(
        mode=mode,
        cpu_bytes=parse_bytes(cpu_bytes, setting="--cpu-bytes"),
        gpu_blocks=gpu_blocks,
        block_bytes=parse_bytes(block_bytes, setting="--block-bytes"),
        block_size_factor=block_size_factor,
        workers=workers,
        policy=policy,
        secondary_tiers=parse_tier_options(tier or ()),
        max_seqs=max_seqs,
        tokens_per_step=tokens_per_step,
        shm_dir=str(shm_dir),
        engine_options=parse_setting_options(setting or ()),
    )
    if json_file is not None:
        check_writable(json_file)
    requests = _read(trace, limit, seed)
    first = run_here(requests, config, registry, title="replay", show_progress=not quiet)
    runs, titles, problems = [first.to_json()], ["replay"], first.problems()
    if restart and not problems:
        second, status = run_in_fresh_process(_same_arguments(context))
        runs.append(second)
        titles = ["first run", "after restart"]
        if status:
            problems.append(f"the run after the restart ended with status {status}")
    if json_file is not None:
        write_json(json_file, {"runs": runs} if restart else runs[0])
    if not quiet:
        print_reports(Console(highlight=False), runs, titles)
    for problem in problems:
        say(f"error: {problem}")
    if problems:
        raise typer.Exit(1)


def _read(trace: str, limit: int | None, seed: int) -> Trace:
    from kv_core.workload import read_trace, synthetic_trace

    if not trace.startswith(_SYNTHETIC):
        return read_trace(Path(trace), limit=limit)
    kind = trace.removeprefix(_SYNTHETIC)
    # The generator refuses other words, naming the kinds there are.
    return synthetic_trace(
        cast("SyntheticKind", kind), seed=seed, num_requests=limit or _SYNTHETIC_REQUESTS
    )


def _same_arguments(context: typer.Context) -> list[str]:
    """Rebuild the command line, less what the run of the parent process takes care of."""
    options: list[str] = []
    positional: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in _OUTPUT_PARAMETERS or value is None:
            continue
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if parameter.param_type_name == "option":
                # One word: a value may begin with a dash.
                options.append(f"{parameter.opts[0]}={item}")
            else:
                positional.append(str(item))
    return [*options, "--", *positional]
