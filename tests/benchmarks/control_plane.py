"""Cost of the ledger on the scheduler's thread, in microseconds a block, beside vLLM's.

Run ``python tests/benchmarks/control_plane.py`` (``--quick`` for a smoke run, ``--json`` for
machines). The same calls, with the same keys in the same batches, go to kv-core's managers and to
vLLM's. The time is CPU time of the calling thread: what tiers do on threads of their own is not in
it, nor is waiting. Each line is the median over repeats; sides and lines take turns within a
repeat, so that a slow second of the machine does not land on one of them only.

Three sides: ``kv-core``, called directly; ``vLLM``, unchanged; and ``engine-mode``, kv-core's
tiering manager as vLLM's connector calls it, through ``kv_core.vllm``.

Two kinds of tiers: ``keys`` keeps keys and moves nothing, on both sides, so that the difference is
the managers'; ``example`` is each project's own tier of that name, of which kv-core's copies bytes
on threads of its own and vLLM's keeps keys.

vLLM is found in this interpreter, or in the one that KV_CORE_VLLM_PYTHON names, or in
``.venv-vllm``; then the whole run moves there. Without it, and without ``kv-tier-example``, the
lines that need them are left out. Status 1: a line is above its budget.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import importlib.util
import json
import logging
import os
import statistics
import sys
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_core.contract import (
    ContractVersion,
    JobResult,
    NullMetrics,
    PrimaryView,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TierConfig,
    TierLimits,
    TierSpec,
    make_offload_key,
)
from kv_core.cpu import CPUOffloadingManager, CPUPrimaryTierOffloadingManager
from kv_core.engine import LookupResult
from kv_core.plugins import TierRegistry, open_tier
from kv_core.tiering import EngineReset, TieringConfig, TieringOffloadingManager
from kv_core.tierkit.testing import example_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from kv_core.contract import JobId, JobMetadata, OffloadKey, TierContext
    from kv_core.tiering import JobObserver

BATCH_BLOCKS = 64

# Small: copies of tiers shall not get in the way of what is measured. vLLM wants whole pages.
TIER_BLOCK_BYTES = 4096
POLL_SECONDS = 0.01
PATIENCE_SECONDS = 60.0

OURS: Final = "kv-core"
VLLM: Final = "vLLM"
ENGINE_MODE: Final = "engine-mode"

# What a line is about, and how much of vLLM's time kv-core may take, in percent.
BUDGETS: Final = {
    "tier: store life cycle": 70,
    "tier: promoted hit life cycle": 50,
    "tier: hit life cycle": 50,
    "cpu": 100,
}


@dataclass(frozen=True, slots=True)
class Scale:
    """How much work one run does.

    Attributes:
        num_blocks: Slots of the primary tier, a multiple of four batches.
        repeats: Measurements of each line.
    """

    num_blocks: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Side:
    """One project's managers, as far as making them differs; their methods have the same names.

    Attributes:
        name: For the lines.
        hit: The answer of a lookup that found a block.
        miss: The answer of one that found none.
        make_context: Makes the context of a request from its id.
        make_step_end: Makes the context of a step's end from the ids of its new requests.
        make_cpu_manager: Makes a plain manager of (blocks, policy); ``None``: there is none.
        make_tiering_manager: Makes a manager of (blocks, kind of tier, number of tiers).
        reset: Empties the primary tier of a tiering manager.
    """

    name: str
    hit: object
    miss: object
    make_context: Callable[[str], Any]
    make_step_end: Callable[[list[str]], Any]
    make_cpu_manager: Callable[[int, str], Any] | None
    make_tiering_manager: Callable[[int, str, int], Any]
    reset: Callable[[Any], None]


@final
class Lines:
    """Collects measurements by line."""

    def __init__(self) -> None:
        self._seconds_per_block: defaultdict[str, list[float]] = defaultdict(list)

    def measure(self, line: str, num_blocks: int, work: Callable[[], None]) -> None:
        """Time one piece of work over so many blocks."""
        gc.collect()
        start = time.thread_time()
        work()
        self._seconds_per_block[line].append((time.thread_time() - start) / num_blocks)

    def medians_us(self) -> dict[str, float]:
        """Return the median of each line, in microseconds a block."""
        return {
            line: round(statistics.median(seconds) * 1e6, 3)
            for line, seconds in self._seconds_per_block.items()
        }


# -- the same calls for every side ----------------------------------------------------------------


def make_keys(count: int, salt: str) -> list[OffloadKey]:
    """Return distinct keys of the usual length (SHA-256 and a group index)."""
    return [
        make_offload_key(hashlib.sha256(f"{salt}-{index}".encode()).digest(), 0)
        for index in range(count)
    ]


def batches(
    side: Side, keys: Sequence[OffloadKey], owner: str
) -> Iterator[tuple[Any, list[OffloadKey]]]:
    """Cut keys into the blocks of consecutive requests."""
    for start in range(0, len(keys), BATCH_BLOCKS):
        yield side.make_context(f"{owner}-{start}"), list(keys[start : start + BATCH_BLOCKS])


def measure_cpu_manager(lines: Lines, side: Side, policy: str, scale: Scale) -> None:
    """Measure one life of a CPU manager: fill, look up, touch, load, and store when full."""
    if side.make_cpu_manager is None:
        return
    num_blocks = scale.num_blocks
    manager = side.make_cpu_manager(num_blocks, policy)
    keys = make_keys(num_blocks, "resident")
    resident = list(batches(side, keys, "writer"))
    readers = list(batches(side, keys, "reader"))
    loaders = list(batches(side, keys, "loader"))
    absent = list(batches(side, make_keys(num_blocks, "absent"), "asker"))
    incoming = list(batches(side, make_keys(num_blocks, "incoming"), "newcomer"))
    step_end = side.make_step_end([])

    def store(offers: list[tuple[Any, list[OffloadKey]]]) -> None:
        for context, offered in offers:
            manager.on_new_request(context)
            output = manager.prepare_store(offered, context)
            if output is None or len(output.keys_to_store) != len(offered):
                raise RuntimeError("a store was declined that had room")
            manager.complete_store(offered, context)
            manager.on_request_finished(context)
            manager.on_schedule_end(step_end)

    def look_up(asked: list[tuple[Any, list[OffloadKey]]], expected: object) -> None:
        for context, wanted in asked:
            lookup = manager.lookup
            for key in wanted:
                if lookup(key, context) is not expected:
                    raise RuntimeError(f"a lookup did not answer {expected}")
            manager.on_schedule_end(step_end)

    def touch() -> None:
        for context, used in readers:
            manager.touch(used, context)
            manager.on_request_finished(context)

    def load() -> None:
        for context, wanted in loaders:
            manager.on_new_request(context)
            manager.prepare_load(wanted, context)
            manager.complete_load(wanted, context)
            manager.on_request_finished(context)

    name = f"{side.name} cpu {policy}"
    lines.measure(f"{name}: fill", num_blocks, lambda: store(resident))
    lines.measure(f"{name}: lookup hit", num_blocks, lambda: look_up(readers, side.hit))
    lines.measure(f"{name}: lookup miss", num_blocks, lambda: look_up(absent, side.miss))
    lines.measure(f"{name}: touch", num_blocks, touch)
    lines.measure(f"{name}: load + complete", num_blocks, load)
    lines.measure(f"{name}: evicting store", num_blocks, lambda: store(incoming))


def measure_tiering_manager(
    lines: Lines, side: Side, kind: str, num_tiers: int, scale: Scale
) -> None:
    """Measure the lives of a block.

    Stored and cascaded; found below, promoted and loaded; found in the primary tier and loaded.
    """
    # Promotions and their leases hold pins while the step goes on; half of the slots suffice.
    num_blocks = scale.num_blocks // 4
    manager = side.make_tiering_manager(num_blocks, kind, num_tiers)
    keys = make_keys(num_blocks, "tiered")
    stored = list(batches(side, keys, "writer"))
    promoters = list(batches(side, keys, "promoter"))
    loaders = list(batches(side, keys, "loader"))
    step_end = side.make_step_end([])

    def end_step_until_idle() -> None:
        manager.on_schedule_end(step_end)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while manager.has_pending_work():
            if time.monotonic() > deadline:
                raise RuntimeError("the tiers did not finish their jobs")
            if kind != "keys":
                time.sleep(POLL_SECONDS)
            manager.on_schedule_end(step_end)

    def store() -> None:
        for context, offered in stored:
            manager.on_new_request(context)
            output = manager.prepare_store(offered, context)
            if output is None or len(output.keys_to_store) != len(offered):
                raise RuntimeError("a store was declined that had room")
            manager.complete_store(offered, context)
            manager.on_request_finished(context)
        end_step_until_idle()

    def ask(askers: list[tuple[Any, list[OffloadKey]]]) -> None:
        for context, wanted in askers:
            manager.on_new_request(context)
            for key in wanted:
                manager.lookup(key, context)

    def load(askers: list[tuple[Any, list[OffloadKey]]]) -> None:
        for context, wanted in askers:
            for key in wanted:
                if manager.lookup(key, context) is not side.hit:
                    raise RuntimeError("a block that a tier has was not promoted")
            manager.prepare_load(wanted, context)
        manager.on_schedule_end(side.make_step_end([context.req_id for context, _ in askers]))
        for context, wanted in askers:
            manager.complete_load(wanted, context)
            manager.on_request_finished(context)
        manager.on_schedule_end(step_end)

    def promoted_hit() -> None:
        ask(promoters)
        end_step_until_idle()
        load(promoters)

    def hit() -> None:
        for context, _ in loaders:
            manager.on_new_request(context)
        load(loaders)

    name = f"{side.name} tiering, {num_tiers} {kind} tier" + ("s" if num_tiers > 1 else "")
    if not num_tiers:
        name = f"{side.name} tiering, no tier"
    lines.measure(f"{name}: store life cycle", num_blocks, store)
    if num_tiers:
        # The tiers keep what the primary loses, so every block has to be promoted.
        side.reset(manager)
        lines.measure(f"{name}: promoted hit life cycle", num_blocks, promoted_hit)
    lines.measure(f"{name}: hit life cycle", num_blocks, hit)
    manager.shutdown()


# -- kv-core --------------------------------------------------------------------------------------


@final
class KeysTier(SecondaryTierManager):
    """Keeps keys, moves nothing, and reports a job in the poll after its submission."""

    def __init__(self, context: TierContext) -> None:
        self._keys: set[OffloadKey] = set()
        self._finished: list[JobResult] = []

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        return key in self._keys

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._keys.update(job.keys)
        self._finished.append(JobResult(job.job_id, success=True))

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._finished.append(JobResult(job.job_id, success=self._keys.issuperset(job.keys)))

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished, self._finished = self._finished, []
        return finished

    @override
    def drain_jobs(self) -> Collection[JobId]:
        return ()

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()


class KeysConfig(TierConfig):
    """Nothing can be set."""


KEYS_SPEC: Final = TierSpec(
    type="keys",
    summary="Keeps keys and moves nothing.",
    contract=ContractVersion(1, 0),
    factory=KeysTier,
    config_model=KeysConfig,
    limits=lambda _: TierLimits(job_deadline_s=30.0, lookup_deadline_s=30.0, min_free_bytes=1),
)


def our_tiering_manager(
    num_blocks: int, kind: str, num_tiers: int, observer: JobObserver | None = None
) -> TieringOffloadingManager:
    """Return a manager whose tiers hold every block."""
    view = memoryview(bytearray(num_blocks * TIER_BLOCK_BYTES)).cast(
        "B", (num_blocks, TIER_BLOCK_BYTES)
    )
    tiers = [
        open_tier(
            KEYS_SPEC if kind == "keys" else kind,
            name=f"{kind}-{index}",
            settings={} if kind == "keys" else {"max_blocks": num_blocks},
            namespace=example_namespace(TIER_BLOCK_BYTES),
            primary=PrimaryView(view, TIER_BLOCK_BYTES),
            clock=time.monotonic,
            metrics=NullMetrics(),
        )
        for index in range(num_tiers)
    ]
    return TieringOffloadingManager(
        CPUPrimaryTierOffloadingManager(num_blocks, view, TIER_BLOCK_BYTES),
        tiers,
        config=TieringConfig(lease_share=1.0),
        observer=observer,
    )


def our_side() -> Side:
    """Return kv-core's managers."""

    def reset(manager: TieringOffloadingManager) -> None:
        manager.reset_cache()
        manager.on_reset_flushed()

    return Side(
        name=OURS,
        hit=LookupResult.HIT,
        miss=LookupResult.MISS,
        make_context=ReqContext,
        make_step_end=lambda new: ScheduleEndContext(new_req_ids=frozenset(new)),
        make_cpu_manager=CPUOffloadingManager,
        make_tiering_manager=our_tiering_manager,
        reset=reset,
    )


# -- vLLM -----------------------------------------------------------------------------------------


def vllm_side() -> Side:
    """Return vLLM's managers, unchanged. Its ``example`` tier is the ``keys`` tier of this script.

    Raises:
        ImportError: This interpreter has no vLLM with tiers.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as VllmCPUManager
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering import manager as tiering
    from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager

    logging.getLogger("vllm").setLevel(logging.WARNING)

    def make_tiering_manager(num_blocks: int, kind: str, num_tiers: int) -> Any:
        region = SharedOffloadRegion(
            engine_id=f"benchmark-{uuid.uuid4().hex}",
            num_chunks=num_blocks,
            rank=None,
            kv_bytes_per_chunk=TIER_BLOCK_BYTES,
            cpu_page_size=TIER_BLOCK_BYTES,
        )
        primary = tiering.CPUPrimaryTierOffloadingManager(num_blocks, region)
        tiers = [
            # It takes the spec for what other tiers need from it, and never looks at it.
            ExampleSecondaryTierManager(None, primary.get_kv_memoryview(), f"{kind}-{index}")
            for index in range(num_tiers)
        ]
        return tiering.TieringOffloadingManager(primary, tiers)

    return Side(
        name=VLLM,
        hit=base.LookupResult.HIT,
        miss=base.LookupResult.MISS,
        make_context=base.ReqContext,
        make_step_end=lambda new: base.ScheduleEndContext(set(new), set()),
        make_cpu_manager=VllmCPUManager,
        make_tiering_manager=make_tiering_manager,
        reset=lambda manager: manager.reset_cache(),
    )


def engine_mode_side(vllm: Side) -> Side:
    """Return kv-core's tiering manager behind vLLM's interface.

    Args:
        vllm: vLLM's own side, for what both have in common.
    """
    from kv_core.vllm._manager import KVCoreOffloadingManager
    from kv_core.vllm._metrics import StatsFeed

    def make_tiering_manager(num_blocks: int, kind: str, num_tiers: int) -> Any:
        names = [f"{kind}-{index}" for index in range(num_tiers)]
        feed = StatsFeed(dict, names, TIER_BLOCK_BYTES)
        manager = our_tiering_manager(num_blocks, kind, num_tiers, feed)
        return KVCoreOffloadingManager(
            manager,
            feed=feed,
            # As long as no copy has ever failed, asking for those that have is this cheap.
            take_failed=lambda _: (),
            shutdown=manager.shutdown,
            engine_reset=EngineReset.CACHE,
            flush_steps=1,
            has_windows=False,
            level_types=dict.fromkeys(names, kind),
        )

    return dataclasses.replace(
        vllm, name=ENGINE_MODE, make_cpu_manager=None, make_tiering_manager=make_tiering_manager
    )


def python_with_vllm() -> Path | None:
    """Return another interpreter that has vLLM, or ``None``."""
    beside = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
    named = os.environ.get("KV_CORE_VLLM_PYTHON")
    python = Path(named) if named else beside
    return python if python.exists() and Path(sys.executable) != python else None


# -- the script ---------------------------------------------------------------------------------


def measure(scale: Scale, sides: list[Side]) -> dict[str, float]:
    """Return microseconds a block by line."""
    lines = Lines()
    has_example_tier = any(claim.type == "example" for claim in TierRegistry().installed())
    cases = [("keys", 0), ("keys", 1), ("keys", 3)]
    if has_example_tier:
        cases += [("example", 1), ("example", 3)]
    # What the imports left is not what a full collection should cost; vLLM's engine does the same.
    gc.collect()
    gc.freeze()
    for repeat in range(scale.repeats):
        in_turn = sides if repeat % 2 else sides[::-1]
        for policy in ("lru", "arc"):
            for side in in_turn:
                measure_cpu_manager(lines, side, policy, scale)
        for kind, num_tiers in cases:
            for side in in_turn:
                measure_tiering_manager(lines, side, kind, num_tiers, scale)
    return lines.medians_us()


def ratios(results: dict[str, float]) -> dict[str, tuple[float, int | None]]:
    """Return, by line, kv-core's time in percent of vLLM's, and the budget where there is one."""
    found: dict[str, tuple[float, int | None]] = {}
    for line, ours in results.items():
        side, _, rest = line.partition(" ")
        theirs = results.get(f"{VLLM} {rest}")
        if side != VLLM and theirs:
            budget = BUDGETS["cpu"] if rest.startswith("cpu") else None
            if ", 1 " in rest:
                budget = BUDGETS[rest.partition(", 1 ")[2].partition(" ")[2]]
            found[line] = (round(100 * ours / theirs, 1), budget)
    return found


def missed(results: dict[str, float]) -> list[str]:
    """Return the lines that are above their budget."""
    return [
        line
        for line, (percent, budget) in ratios(results).items()
        if budget is not None and percent > budget
    ]


def report(results: dict[str, float]) -> str:
    """Return the table of a run."""
    compared = ratios(results)
    width = max(map(len, results))
    rows = []
    for line, microseconds in sorted(results.items(), key=lambda item: item[0].split(" ", 1)[1]):
        text = f"{line:<{width}}  {microseconds:8.3f} us/block"
        if line in compared:
            percent, budget = compared[line]
            text += f"  {percent:6.1f} % of vLLM's"
            if budget is not None:
                text += f", budget {budget} %" + ("" if percent <= budget else ": MISSED")
        rows.append(text)
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small and few: does it still run?")
    parser.add_argument("--without-vllm", action="store_true", help="measure kv-core only")
    options = parser.parse_args(arguments)
    sides = [our_side()]
    if not options.without_vllm:
        if importlib.util.find_spec("vllm") is not None:
            sides.append(vllm_side())
            sides.append(engine_mode_side(sides[-1]))
        elif (python := python_with_vllm()) is not None:
            os.execv(python, [str(python), __file__, *(arguments or sys.argv[1:])])  # noqa: S606
        else:
            sys.stderr.write(
                "no vLLM here, so nothing to compare with: name a Python that has it in "
                "KV_CORE_VLLM_PYTHON\n"
            )
    results = measure(Scale(1024, 2) if options.quick else Scale(16_384, 9), sides)
    if options.json:
        document = {"unit": "us/block", "lines": results, "percent_of_vllm": ratios(results)}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(report(results))
    # Few repeats say nothing about speed.
    return 1 if missed(results) and not options.quick else 0


if __name__ == "__main__":
    raise SystemExit(main())
