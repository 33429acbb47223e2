"""Does the tier ``fs`` move blocks at the speed of the disk?

Run ``python tests/benchmarks/fs_tier.py --dir FOLDER``, a folder on the disk that is asked about
(``--quick`` for a smoke run, ``--json`` for machines, ``--against-vllm PYTHON`` to compare with
vLLM's own file system tier, given an interpreter that has vLLM). Everything is measured in one
run, taking turns, as medians: the disk without any tier, with O_DIRECT and the same scattered
memory; the tier, checksums on; vLLM's tier, in a process that maps the same memory; and fio, if it
is installed. Data is random, and what is loaded is compared with what was stored. Then: loads
beside a backlog of stores, stores into a full cache, and the index of a million blocks.

The last line is the verdict (with ``--json`` on standard error). A full run exits with 1 when a
budget is missed. A quick run is too short to judge speeds: it fails only when something does not
work or bytes are wrong, and says what it found. At most 4 GB of disk and 1.2 GB of memory are in
use at a time, and all of it is given back.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from _fs_bench._budgets import latency_budgets, lookup_budgets, speed_budgets, verdict
from _fs_bench._checksums import measure_checksums
from _fs_bench._contenders import Contender, FsContender, VllmContender
from _fs_bench._latency import measure_mixed, measure_steady
from _fs_bench._lookups import measure_index, measure_lookups_under_load
from _fs_bench._memory import Memory
from _fs_bench._raw import takes_direct_io
from _fs_bench._tables import print_tables
from _fs_bench._throughput import Scale, measure_fio, measure_throughput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _fs_bench._budgets import Budget

_KIB: Final = 2**10
_MIB: Final = 2**20
_BLOCK_SIZES: Final = (32 * _KIB, 64 * _KIB, 256 * _KIB, _MIB, 2 * _MIB, 4 * _MIB)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much one kind of run does.

    Attributes:
        half_bytes: Memory to store from; as much again is loaded into.
        scale: Of the measurement of speeds.
        fio_bytes: Size of fio's files; 0 for no fio.
        backlog_bytes: Stores in front of the mixed loads.
        rounds: Of the mixed loads.
        capacity_bytes: Bound of the full cache.
        steady_repeats: Of the full cache.
        index_blocks: Blocks of the large index.
        index_repeats: Openings of it.
        busy_s: Seconds of lookups beside I/O.
    """

    half_bytes: int
    scale: Scale
    fio_bytes: int
    backlog_bytes: int
    rounds: int
    capacity_bytes: int
    steady_repeats: int
    index_blocks: int
    index_repeats: int
    busy_s: float


_FULL: Final = Sizes(
    half_bytes=512 * _MIB,
    scale=Scale(_BLOCK_SIZES, (1, 8, 32, 128), 256 * _MIB, 256 * _MIB, 64 * _MIB, 5),
    fio_bytes=512 * _MIB,
    backlog_bytes=2048 * _MIB,
    rounds=3,
    capacity_bytes=1024 * _MIB,
    steady_repeats=3,
    index_blocks=1_000_000,
    index_repeats=3,
    busy_s=5.0,
)

_QUICK: Final = Sizes(
    half_bytes=128 * _MIB,
    scale=Scale((32 * _KIB, 256 * _KIB, 2 * _MIB), (32,), 128 * _MIB, 32 * _MIB, 16 * _MIB, 1),
    fio_bytes=0,
    backlog_bytes=256 * _MIB,
    rounds=1,
    capacity_bytes=512 * _MIB,
    steady_repeats=1,
    index_blocks=100_000,
    index_repeats=1,
    busy_s=1.0,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    options = _parse(arguments)
    sizes: Sizes = _QUICK if options.quick else _FULL
    if options.repeats is not None:
        sizes = replace(sizes, scale=replace(sizes.scale, repeats=options.repeats))
    random = np.random.default_rng(options.seed)
    found: dict[str, Any] = {}
    budgets: list[Budget] = []

    with ExitStack() as stack:
        name = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="kv-core-fs-tier-", dir=options.dir)
        )
        folder = Path(name)
        memory = stack.enter_context(Memory(sizes.half_bytes))
        direct = takes_direct_io(folder)
        segments = FsContender(memory, "segments")
        contenders: list[Contender] = [segments, FsContender(memory, "files")]
        found["machine"] = {
            "system": platform.release(),
            "processors": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "direct_io": direct,
        }
        if options.against_vllm:
            vllm = VllmContender(options.against_vllm, memory)
            stack.callback(vllm.end)
            contenders.append(vllm)
            found["vllm"] = {"version": vllm.version, "c_extension": vllm.extension}

        _say("the disk and the tiers")
        speeds = measure_throughput(
            folder, memory, contenders, sizes.scale, random, direct=direct, say=_say
        )
        if sizes.fio_bytes:
            _say("fio")
            found["fio"] = measure_fio(folder, sizes.scale.block_sizes, sizes.fio_bytes)
        _say("loads beside stores")
        mixed = measure_mixed(
            folder,
            memory,
            segments,
            random,
            block_bytes=256 * _KIB,
            backlog_bytes=sizes.backlog_bytes,
            rounds=sizes.rounds,
        )
        _say("stores into a full cache")
        steady = measure_steady(
            folder,
            memory,
            segments,
            random,
            block_bytes=256 * _KIB,
            capacity_bytes=sizes.capacity_bytes,
            repeats=sizes.steady_repeats,
        )
        _say("lookups")
        index = measure_index(folder, "segments", sizes.index_blocks, sizes.index_repeats)
        busy = measure_lookups_under_load(folder, memory, segments, random, seconds=sizes.busy_s)

    found["gb_per_s"] = speeds.table()
    found["mixed"] = asdict(mixed) | {"ratio": mixed.ratio}
    found["steady"] = asdict(steady) | {"ratio": steady.ratio}
    found["index"] = asdict(index)
    found["lookups_beside_io"] = asdict(busy)
    found["checksums"] = measure_checksums(seconds=0.02 if options.quick else 0.3)
    rival = VllmContender.name if options.against_vllm else None
    budgets += speed_budgets(speeds, segments.name, rival)
    budgets += latency_budgets(mixed, steady)
    budgets += lookup_budgets(index, busy)
    found["budgets"] = [asdict(budget) | {"met": budget.met} for budget in budgets]
    line = verdict(budgets, judged=not options.quick)
    found["verdict"] = line

    if options.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        sys.stdout.flush()
        sys.stderr.write(line + "\n")
    else:
        print_tables(found, budgets)
        sys.stdout.write(line + "\n")
    broken = index.found < 1
    return int(broken or (not options.quick and not all(budget.met for budget in budgets)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", metavar="FOLDER", help="on the disk; default: for temporary files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick", action="store_true", help="does it still run? judges no speed; under 50 s"
    )
    parser.add_argument(
        "--against-vllm", metavar="PYTHON", help="an interpreter with vLLM, to compare with"
    )
    parser.add_argument("--repeats", type=int, help="samples of each speed; default: 5, quick: 1")
    parser.add_argument("--seed", type=int, default=1, help="of placement and order")
    return parser.parse_args(arguments)


def _say(what: str) -> None:
    sys.stderr.write(f"... {what}\n")


if __name__ == "__main__":
    raise SystemExit(main())
