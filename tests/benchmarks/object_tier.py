"""Do the tiers over object storage move blocks as fast as the libraries they are built on?

Run ``python tests/benchmarks/object_tier.py`` (``--quick`` for a smoke run, ``--json`` for
machines, ``--server rgw`` for Ceph RGW instead of SeaweedFS, or the address of a server of your
own). Each engine of ``s3`` is compared with its client library alone: the same server, bytes,
memory and number of requests in flight, one right after the other, in turn. Data is random, and
what is loaded is compared with what was stored. Then: a thousand lookups, how long calls hold up
the engine's thread, and memory over ten thousand puts and gets.

The last line is the verdict (with ``--json`` on standard error). A full run exits with 1 when a
budget is missed. A quick run is too short to judge: it fails only when something does not work or
bytes are wrong, and says what it found. A full run writes about 50 GB to the server's disk, which
is given back at the end where the server was started here. Client and server share the processors.
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
from _fs_bench._budgets import verdict
from _fs_bench._memory import Memory
from _object_bench._blocking import measure_blocking
from _object_bench._growth import measure_growth
from _object_bench._pairs import all_pairs
from _object_bench._place import SERVERS, serving
from _object_bench._report import budgets_of, print_tables
from _object_bench._speeds import Scale, measure_finding, measure_moving

if TYPE_CHECKING:
    from collections.abc import Sequence

_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much one kind of run does.

    Attributes:
        scale: Of the comparison.
        blocking_sizes: Bytes of the blocks that move while calls are timed.
        blocking_s: Seconds of that, for each.
        growth_blocks: Blocks that are stored and loaded while memory is watched.
    """

    scale: Scale
    blocking_sizes: tuple[int, ...]
    blocking_s: float
    growth_blocks: int


_FULL: Final = Sizes(
    scale=Scale((_MIB, 4 * _MIB), (4, 1), 9, 1000, 9),
    blocking_sizes=(_MIB, 4 * _MIB),
    blocking_s=10.0,
    growth_blocks=10_000,
)

_QUICK: Final = Sizes(
    scale=Scale((_MIB, 4 * _MIB), (1, 1), 1, 200, 1),
    blocking_sizes=(_MIB,),
    blocking_s=1.0,
    growth_blocks=300,
)

_HALF_BYTES: Final = 128 * _MIB


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    options = _parse(arguments)
    sizes: Sizes = _QUICK if options.quick else _FULL
    scale = sizes.scale
    if options.repeats is not None:
        scale = replace(scale, repeats=options.repeats, find_repeats=options.repeats)
    random = np.random.default_rng(options.seed)

    with ExitStack() as stack:
        name = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="kv-core-object-tier-", dir=options.dir)
        )
        memory = stack.enter_context(Memory(_HALF_BYTES))
        _say(f"starting {options.server}" if options.server in SERVERS else options.server)
        place = stack.enter_context(serving(options.server, Path(name)))
        pairs = all_pairs(place, memory, options.only)
        moving = measure_moving(pairs, memory, scale, random, _say)
        _say("lookups")
        finding = measure_finding(pairs, memory, scale, random)
        _say("calls of the engine's thread")
        blocking = [
            measure_blocking(pair.tier, memory, block_bytes, sizes.blocking_s, random)
            for block_bytes in sizes.blocking_sizes
            for pair in pairs
        ]
        _say("memory")
        growth = [measure_growth(pair.tier, memory, sizes.growth_blocks, random) for pair in pairs]

    budgets = list(budgets_of(pairs, scale, moving, finding, blocking, growth))
    line = verdict(budgets, judged=not options.quick)
    found: dict[str, Any] = {
        "machine": {
            "system": platform.release(),
            "processors": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "server": place.name,
        },
        "moving": moving.table(),
        "finding": finding.table(),
        "blocking": [asdict(one) for one in blocking],
        "growth": [asdict(one) for one in growth],
        "budgets": [asdict(budget) | {"met": budget.met} for budget in budgets],
        "verdict": line,
    }
    if options.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        sys.stdout.flush()
        sys.stderr.write(line + "\n")
    else:
        print_tables(found, budgets)
        sys.stdout.write(line + "\n")
    return int(not options.quick and not all(budget.met for budget in budgets))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--server",
        metavar="|".join((*SERVERS, "URL")),
        default=SERVERS[0],
        help="what to measure on; default: %(default)s. With a URL, KV_TIER_S3_BUCKET, "
        "KV_TIER_S3_ACCESS_KEY and KV_TIER_S3_SECRET_KEY are read from the environment",
    )
    parser.add_argument(
        "--only", metavar="TIER", default="", help="as in 's3 obstore', 's3', 'obj'"
    )
    parser.add_argument("--dir", metavar="FOLDER", help="for the server's data; default: temporary")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick", action="store_true", help="does it still run? judges no speed; under 50 s"
    )
    parser.add_argument("--repeats", type=int, help="samples of each speed; default: 9, quick: 1")
    parser.add_argument("--seed", type=int, default=1, help="of placement and order")
    return parser.parse_args(arguments)


def _say(what: str) -> None:
    sys.stderr.write(f"... {what}\n")


if __name__ == "__main__":
    raise SystemExit(main())
