"""What does the connector cost in each step of a vLLM engine, with our spec and with vLLM's own?

Run ``python tests/benchmarks/vllm_steps.py`` after ``make vllm-env`` (``--quick`` for a smoke run,
``--json`` for machines). Real engines on the CPU, each in a process of its own, in turns. Every
call that vLLM makes into its OffloadingConnector is timed, on either side, in CPU time of the
calling thread; the median over runs. What happens:

*decode*: prompts are answered whose blocks are in the engine's own cache and in CPU memory; nothing
is to be stored or loaded, step after step. Microseconds a step.

*store*: new prompts of 20 blocks; every one of them is offered and stored. Microseconds a prompt:
how many steps it takes depends on when copies end.

*load*: the same prompts after the engine's own cache was emptied; every block is loaded.
Microseconds a prompt.

vLLM's own spec runs on CUDA only; here it has the copying worker of the end-to-end tests, which
copies when it is called, so that the worker's lines compare less than the scheduler's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path(__file__).parents[2]
ENGINE_PROCESS: Final = ROOT / "tests" / "integration" / "vllm"

SCHEDULER_CALLS: Final = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "get_kv_connector_stats",
    "take_events",
)
WORKER_CALLS: Final = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "build_connector_worker_meta",
)
SIDES: Final = ("vLLM", "kv-core")


class Stopwatch:
    """Adds up the time of calls into an object, and counts the steps."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps = 0

    def watch(self, target: Any, names: tuple[str, ...], part: str) -> None:
        """Time methods of an object under one name."""
        for name in names:
            setattr(target, name, self._timed(getattr(target, name), part, name))

    def _timed(self, call: Callable[..., Any], part: str, name: str) -> Callable[..., Any]:
        is_step = name == "build_connector_meta"

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.steps += is_step
            started = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[part] += time.thread_time() - started

        return timed

    def take(self, prompts: int | None = None) -> dict[str, float]:
        """Return microseconds a step, or a prompt, by part, and start again."""
        divisor, unit = (self.steps, "step") if prompts is None else (prompts, "prompt")
        taken = {
            f"{part}, us/{unit}": seconds / max(1, divisor) * 1e6
            for part, seconds in self.seconds.items()
        }
        self.seconds.clear()
        self.steps = 0
        return taken


def run_engine(side: str, folder: Path, *, requests: int, tokens: int) -> dict[str, float]:
    """Run one engine through the phases; return microseconds by phase and part."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        PYTHONHASHSEED="0",
    )
    sys.path.insert(0, str(ENGINE_PROCESS))
    from engine_process._models import build_model  # type: ignore[import-not-found]
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    own = {
        "spec_name": "CPUTieringOffloadingSpec",
        "spec_module_path": "engine_process.workers",
        "secondary_tiers": [{"type": "example"}],
    }
    ours = {"spec_name": "KVCoreOffloadingSpec", "secondary_tiers": [{"type": "example"}]}
    extra = {"cpu_bytes_to_use": 256 * 2**20, **(ours if side == "kv-core" else own)}
    llm = LLM(
        model=str(build_model(folder / "models", "tiny")),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        seed=0,
        enable_prefix_caching=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
    )
    draw = random.Random(7)
    prompts = [
        {"prompt_token_ids": [draw.randrange(2, 500) for _ in range(640)]} for _ in range(requests)
    ]

    def answer(num_tokens: int) -> None:
        sampling = SamplingParams(
            temperature=0, ignore_eos=True, detokenize=False, max_tokens=num_tokens
        )
        llm.generate(prompts, sampling, use_tqdm=False)

    watch = Stopwatch()
    core = llm.llm_engine.engine_core.engine_core
    watch.watch(core.scheduler.connector, SCHEDULER_CALLS, "scheduler")
    watch.watch(get_kv_transfer_group(), WORKER_CALLS, "worker")
    measured: dict[str, float] = {}
    for phase, num_tokens in (("store", 4), ("decode", tokens), ("load", 4)):
        if phase == "load":
            llm.reset_prefix_cache()
        watch.take()
        answer(num_tokens)
        taken = watch.take(None if phase == "decode" else requests)
        measured |= {f"{phase}, {part}": us for part, us in taken.items()}
    core.shutdown()
    return measured


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small and few: does it still run?")
    parser.add_argument("--engine", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        requests, tokens = (4, 32) if arguments.quick else (16, 256)
        measured = run_engine(arguments.engine, arguments.folder, requests=requests, tokens=tokens)
        print("measured:" + json.dumps(measured))
        return
    python = os.environ.get("KV_CORE_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python"
    lines: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 if arguments.quick else 5):
            for side in SIDES:
                command = [python, __file__, "--engine", side, "--folder", folder]
                done = subprocess.run(
                    [*command, *(["--quick"] if arguments.quick else [])],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                answer = next(x for x in done.stdout.splitlines() if x.startswith("measured:"))
                for line, us in json.loads(answer.removeprefix("measured:")).items():
                    lines[f"{line}: {side}"].append(us)
    medians = {line: round(statistics.median(us), 1) for line, us in lines.items()}
    if arguments.json:
        print(json.dumps(medians))
        return
    for line in sorted(medians):
        text = f"{line:44s} {medians[line]:9.1f}"
        if line.endswith("kv-core"):
            text += f"  {medians[line] / medians[line.replace('kv-core', 'vLLM')]:7.1%} of vLLM's"
        print(text)


if __name__ == "__main__":
    main()
