"""What does kv-core cost a vLLM engine that needs nothing from it, and what does a hit save?

Run ``python tests/benchmarks/vllm_overhead.py`` after ``make vllm-env`` (``--quick`` for a smoke
run, ``--json`` for machines). Real engines with real random weights, on the CPU:

*Everything hot*: all prompts are in the engine's own cache and in the CPU tier, so there is nothing
to load and nothing to store. The same batch is answered by an engine with the connector and by one
without, in turns; the ratio of their throughputs must be 0.97 or more. On a machine that has other
work the two rounds of a pair find it in different states, and only their processor time compares:
the better of the two is judged. The last line says whether the budget is met; if not, status 1.

*Restart and hit*: a long prompt after a restart of the engine, computed, and loaded from storage.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
# Where the tests have their engine process.
sys.path.insert(0, str(ROOT))

from tests.integration.vllm._caches import Cache  # noqa: E402 - the path comes first
from tests.integration.vllm._engine import Answers, Engine  # noqa: E402
from tests.integration.vllm._processes import Fresh  # noqa: E402
from tests.integration.vllm._prompts import Prompts  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

# Keys and values of one block: ten layers of eight heads for the large model.
BLOCK_BYTES = {"large": 2 * 10 * 8 * 64 * 4 * 32, "tiny": 64 << 10}

LEAST_THROUGHPUT = 0.97

_THROUGHPUT = "with / without, median of pairs"
_PROCESSOR = "the same in processor time, median"


class Bench:
    """Starts engines in a folder of its own."""

    def __init__(self, python: Path, folder: Path, model: str) -> None:
        self._python = python
        self._folder = folder
        self._cache = Cache("engine", "fs", folder, settings={"layout": "files"})
        self._model = model

    def start(self, store: Path | None) -> Engine:
        """Start an engine, with the connector above a store or without one."""
        connector: dict[str, Any] | None = None
        if store is not None:
            connector = self._cache.connector(
                blocks=300, block_bytes=BLOCK_BYTES[self._model], store=store
            )
        return Engine(
            launch=Fresh(self._python),
            folder=self._folder,
            models=self._folder / "models",
            model=self._model,
            connector=connector,
            # Threads that wait for each other burn processor time, which is to be compared.
            environment={"OMP_NUM_THREADS": "1"},
            options={"num_gpu_blocks_override": 400},
        )

    def everything_hot(
        self, *, starts: int, pairs: int, batch: int, tokens: int
    ) -> dict[str, float]:
        """Measure throughput with and without the connector, in turns.

        Two processes that do the same differ by ten percent at times, for as long as they run. So
        several of each are started.
        """
        # Of 256 tokens the last block would be loaded: the engine's own cache stops before it.
        prompts = Prompts()("hot", *[250] * batch)
        without: list[Answers] = []
        with_ours: list[Answers] = []
        for start in range(starts):
            with self.start(None) as plain, self.start(self._folder / f"hot-{start}") as ours:
                for engine in (plain, ours):
                    engine.generate(prompts, max_tokens=tokens)
                    engine.settle()
                    cached = engine.generate(prompts, max_tokens=tokens).cached
                    if min(cached) < 224:
                        raise SystemExit(f"the prompts are not hot: {cached}")
                for pair in range(pairs // starts):
                    # Whoever goes first has the machine as the other left it.
                    for engine in (plain, ours) if (start + pair) % 2 == 0 else (ours, plain):
                        rounds = without if engine is plain else with_ours
                        rounds.append(engine.generate(prompts, max_tokens=tokens))
                loaded = self._cache.moved(ours).loaded
            if loaded:
                raise SystemExit(f"something was loaded: {loaded} blocks")
        pairs_of_rounds = list(zip(without, with_ours, strict=True))
        ratios = [one.seconds / other.seconds for one, other in pairs_of_rounds]
        of_processor = [
            one.processor_seconds / other.processor_seconds for one, other in pairs_of_rounds
        ]
        done = batch * tokens
        return {
            "tokens/s without": done / statistics.median(one.seconds for one in without),
            "tokens/s with": done / statistics.median(one.seconds for one in with_ours),
            _THROUGHPUT: statistics.median(ratios),
            "with / without, least": min(ratios),
            "with / without, most": max(ratios),
            _PROCESSOR: statistics.median(of_processor),
            "the same in processor time, least": min(of_processor),
            "the same in processor time, most": max(of_processor),
        }

    def restart_and_hit(self, *, length: int) -> dict[str, float]:
        """Measure the time to the first token of a long prompt, computed and loaded."""
        [warm_up, prompt] = Prompts()("restart", length, length)
        store = self._folder / "restart"
        with self.start(store) as engine:
            engine.generate([warm_up], max_tokens=1)
            computed = engine.generate([prompt], max_tokens=1)
            engine.settle()
        with self.start(store) as engine:
            # Another prompt of the same length, so that nothing is done for the first time.
            engine.generate([warm_up], max_tokens=1)
            loaded = engine.generate([prompt], max_tokens=1)
        if loaded.tokens != computed.tokens or loaded.cached[0] < length - 32:
            raise SystemExit(f"no hit after the restart: {loaded.cached}")
        return {
            "prefill computed, s": computed.seconds,
            "prefill loaded after a restart, s": loaded.seconds,
            "prefill time saved, %": 100 * (1 - loaded.seconds / computed.seconds),
        }


def verdict(results: dict[str, float]) -> tuple[bool, str]:
    """Say whether the budget of the throughput is met."""
    ratio = max(results[_THROUGHPUT], results[_PROCESSOR])
    is_met = ratio >= LEAST_THROUGHPUT
    word = "met" if is_met else "MISSED"
    return is_met, f"verdict: throughput {ratio:.3f}, budget {LEAST_THROUGHPUT}: {word}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small and few: does it still run?")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of measurements")
    parser.add_argument("--starts", type=int, default=5, help="engines of either kind")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    options = parser.parse_args(arguments)
    python = Path(os.environ.get("KV_CORE_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if not python.exists():
        sys.stderr.write(f"{python} is not there: run 'make vllm-env'\n")
        return 0 if options.quick else 2
    with tempfile.TemporaryDirectory(prefix="kv-core-bench-") as folder:
        bench = Bench(python, Path(folder), "tiny" if options.quick else "large")
        results = (
            bench.everything_hot(starts=1, pairs=2, batch=2, tokens=16)
            if options.quick
            else bench.everything_hot(
                starts=options.starts, pairs=options.pairs, batch=8, tokens=options.tokens
            )
        )
        results |= bench.restart_and_hit(length=500 if options.quick else 2000)
    is_met, text = verdict(results)
    # Two short rounds say nothing about speed.
    status = 0 if is_met or options.quick else 1
    if options.json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")
        return status
    width = max(map(len, results))
    for line, value in results.items():
        sys.stdout.write(f"{line:<{width}}  {value:10.3f}\n")
    sys.stdout.write("verdict: none of a quick run\n" if options.quick else f"{text}\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
