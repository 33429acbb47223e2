"""How close does collecting whole segments come to an LRU of single blocks?

Run ``python tests/benchmarks/fs_policy.py TRACE`` (default: the Mooncake trace below
``$KV_CORE_TRACES``, or a synthetic one; ``--quick`` for a smoke run, ``--json`` for machines,
``--tier`` to replay over the real tier as well, with small blocks on the disk of ``--dir``).
Every request of the trace looks its blocks up and stores those that are missing, once over an
exact LRU, then over simulated segments with different rules of which segment goes, what is copied
out of it first, and how much of that at most. The hit rate counts blocks; the prefix rate only
blocks up to the first miss, which is what an engine can use; write amplification is what is
written over what was stored.

The budget, at every capacity: a hit rate within 1 point of the LRU, at a write amplification of at
most 1.3. The last line is the verdict; a full run exits with 1 when the tier's own rule misses it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from _fs_bench._policies import Outcome, Rule, replay_lru, replay_segments
from _fs_bench._tier_replay import replay_tier

from kv_core.workload import read_trace, synthetic_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.workload import Trace

_POINTS: Final = 1.0
_AMPLIFICATION: Final = 1.3
_SEGMENTS: Final = 32
_SHARE: Final = 0.2

_OURS: Final = Rule("loss", "used", _SHARE)
_RULES: Final = (
    _OURS,
    Rule("mean", "used", _SHARE),
    Rule("oldest", "used", _SHARE),
    Rule("untouched", "used", _SHARE),
    Rule("loss", "recent", _SHARE),
    Rule("loss", "used", _SHARE / 2),
    Rule("loss", "none", 0.0),
)
# Of the distinct blocks of the trace.
_CAPACITY_SHARES: Final = (0.02, 0.04, 0.09, 0.18, 0.35)


@dataclass(frozen=True, slots=True)
class Line:
    """One rule at one capacity, against the LRU.

    Attributes:
        capacity: Blocks.
        rule: Its name.
        lru: What the LRU reaches.
        outcome: What the rule reaches.
    """

    capacity: int
    rule: str
    lru: Outcome
    outcome: Outcome

    @property
    def points(self) -> float:
        """Hit rate above that of the LRU, in points."""
        return 100 * (self.outcome.hit_rate - self.lru.hit_rate)

    @property
    def prefix_points(self) -> float:
        """The same of the hits before the first miss of a request."""
        return 100 * (self.outcome.prefix_rate - self.lru.prefix_rate)

    @property
    def keeps_budget(self) -> bool:
        """Whether it is close enough."""
        return self.points >= -_POINTS and self.outcome.amplification <= _AMPLIFICATION


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print and judge."""
    options = _parse(arguments)
    trace = _trace(options.trace, quick=options.quick)
    numbers: dict[bytes, int] = {}
    requests = [
        [numbers.setdefault(key, len(numbers)) for key in request.block_hashes]
        for request in trace.requests
    ]
    shares = _CAPACITY_SHARES[2:3] if options.quick else _CAPACITY_SHARES
    lines: list[Line] = []
    for share in shares:
        capacity = max(4, round(share * len(numbers) / _SEGMENTS)) * _SEGMENTS
        lru = replay_lru(requests, capacity)
        for rule in _RULES[:2] if options.quick else _RULES:
            outcome = replay_segments(requests, len(numbers), capacity, _SEGMENTS, rule)
            lines.append(Line(capacity, str(rule), lru, outcome))
        if options.tier:
            with tempfile.TemporaryDirectory(prefix="kv-core-fs-policy-", dir=options.dir) as name:
                outcome = replay_tier(Path(name) / "tier", requests, len(numbers), capacity)
            lines.append(Line(capacity, "the tier", lru, outcome))
    judged = [line for line in lines if line.rule in (str(_OURS), "the tier")]
    missed = [line for line in judged if not line.keeps_budget]
    verdict = f"verdict: {len(judged) - len(missed)} of {len(judged)} within the budget"
    verdict += ", unjudged" if options.quick else ""
    if options.json:
        found = [
            asdict(line) | {"points": line.points, "prefix_points": line.prefix_points}
            for line in lines
        ]
        _write(json.dumps({"trace": trace.name, "lines": found, "verdict": verdict}, indent=2))
        sys.stdout.flush()
        sys.stderr.write(verdict + "\n")
    else:
        _print(trace, lines)
        _write(verdict)
    return int(bool(missed) and not options.quick)


def _trace(path: str | None, *, quick: bool) -> Trace:
    limit = 2000 if quick else None
    if path is None and (folder := os.environ.get("KV_CORE_TRACES")):
        path = str(Path(folder, "mooncake", "conversation_trace.jsonl"))
    if path is None:
        return synthetic_trace("chat", seed=1, num_requests=limit or 20_000)
    return read_trace(path, limit=limit)


def _print(trace: Trace, lines: Sequence[Line]) -> None:
    _write(
        f"{trace.name}: {trace.num_block_references} references to {trace.num_distinct_blocks} "
        f"blocks; {_SEGMENTS} segments"
    )
    capacity = 0
    for line in lines:
        if line.capacity != capacity:
            capacity = line.capacity
            _write(f"\n{capacity} blocks: LRU {line.lru.hit_rate:.2%}")
        outcome = line.outcome
        _write(
            f"  {line.rule:44} {outcome.hit_rate:7.2%} ({line.points:+.2f})  prefix "
            f"{outcome.prefix_rate:7.2%} ({line.prefix_points:+.2f})  amplification "
            f"{outcome.amplification:.3f}" + ("" if line.keeps_budget else "  *")
        )
    _write("\n* out of the budget")


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="a recorded trace")
    parser.add_argument("--tier", action="store_true", help="replay over the real tier, too")
    parser.add_argument("--dir", metavar="FOLDER", help="on a disk, for --tier")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="does it still run? judges nothing")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
