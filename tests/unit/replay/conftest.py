"""Shared pieces of the replay tests: traces made of letters, and tiers that do wrong on purpose."""

from __future__ import annotations

import hashlib
import itertools
import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import pytest
from typing_extensions import override

import kv_core
from kv_core.contract import (
    ContractVersion,
    JobError,
    JobErrorKind,
    JobResult,
    RequestOffloadingContext,
    SecondaryTierManager,
    TierConfig,
    TierLimits,
    TierSpec,
)
from kv_core.plugins import ENTRY_POINT_GROUP, TierRegistry
from kv_core.workload import POISON_BYTE, SyntheticShape, Trace, TraceRequest, synthetic_trace
from kv_core.workload.replay import ReplayConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    from kv_core.contract import (
        JobId,
        JobMetadata,
        LookupAnswer,
        OffloadKey,
        ReqContext,
        TierContext,
    )
    from kv_core.workload import SyntheticKind

BLOCK_TOKENS: Final = 16

SMALL: Final = SyntheticShape(
    turn_tokens=40,
    output_tokens=24,
    num_shared_prompts=4,
    shared_prompt_tokens=120,
    turns_per_chat=4.0,
    max_prompt_tokens=600,
    num_passages=20,
    passage_tokens=40,
    passages_per_request=2,
)


def letters_trace(*prompts: str, output_tokens: int = 4, last_tokens: int = BLOCK_TOKENS) -> Trace:
    """Make a trace in which each letter is a block and equal beginnings are equal prefixes.

    Args:
        prompts: One word a request.
        output_tokens: Output tokens of each request.
        last_tokens: Tokens of each prompt's last block.
    """
    return Trace(
        name="letters",
        format="letters",
        block_tokens=BLOCK_TOKENS,
        requests=[
            TraceRequest(
                req_id=f"{number}-{word}",
                arrival_s=float(number),
                prompt_tokens=(len(word) - 1) * BLOCK_TOKENS + last_tokens,
                output_tokens=output_tokens,
                block_hashes=tuple(
                    hashlib.sha256(word[: end + 1].encode()).digest() for end in range(len(word))
                ),
            )
            for number, word in enumerate(prompts)
        ],
    )


def largest_request(trace: Trace) -> int:
    """Return the GPU blocks that the largest request of a trace needs."""
    return max(-(-(r.prompt_tokens + r.output_tokens) // BLOCK_TOKENS) for r in trace.requests)


@pytest.fixture
def letters() -> Callable[..., Trace]:
    """Return :func:`letters_trace`."""
    return letters_trace


@pytest.fixture
def small_trace() -> Callable[..., Trace]:
    """Return a function that makes a small synthetic trace."""

    def make(kind: SyntheticKind = "mixed", seed: int = 1, num_requests: int = 40) -> Trace:
        return synthetic_trace(
            kind, seed=seed, num_requests=num_requests, block_tokens=BLOCK_TOKENS, shape=SMALL
        )

    return make


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., ReplayConfig]:
    """Return a function that makes a config whose sizes are given in blocks.

    ``cpu_slots`` are slots of the primary tier; ``spare_gpu_blocks`` come on top of what the
    largest request of ``trace`` needs.
    """

    def make(
        trace: Trace, *, cpu_slots: int = 64, spare_gpu_blocks: int = 0, **fields: Any
    ) -> ReplayConfig:
        fields = {"block_bytes": 512, "shm_dir": str(tmp_path), **fields}
        row_bytes = -(-fields["block_bytes"] * fields.get("block_size_factor", 1) // 4096) * 4096
        return ReplayConfig(
            cpu_bytes=cpu_slots * row_bytes,
            gpu_blocks=1 + largest_request(trace) + spare_gpu_blocks,
            **fields,
        )

    return make


class DictTier(SecondaryTierManager):
    """A correct tier without threads: a job is done when it is submitted, reported at the poll.

    Derived classes do one thing wrong. ``storage`` outlives the tier.
    """

    storage: dict[OffloadKey, bytes]

    def __init__(self, context: TierContext) -> None:
        self.context = context
        self.results: list[JobResult] = []

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        return key in self.storage

    @override
    def submit_store(self, job: JobMetadata) -> None:
        for key, block_id in zip(job.keys, job.block_ids.tolist(), strict=True):
            self.storage[key] = bytes(self.context.primary.block(block_id))
        self.results.append(JobResult(job.job_id, success=True))

    @override
    def submit_load(self, job: JobMetadata) -> None:
        for key, block_id in zip(job.keys, job.block_ids.tolist(), strict=True):
            self.load_block(key, block_id)
        self.results.append(JobResult(job.job_id, success=True))

    def load_block(self, key: OffloadKey, block_id: int) -> None:
        """Copy one block into its slot."""
        self.context.primary.block(block_id)[:] = self.storage[key]

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results, self.results = self.results, []
        return results

    @override
    def drain_jobs(self) -> Collection[JobId]:
        return ()

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()


class FlippedByteTier(DictTier):
    """Flips the first byte of every block it loads."""

    @override
    def load_block(self, key: OffloadKey, block_id: int) -> None:
        super().load_block(key, block_id)
        self.context.primary.block(block_id)[0] ^= 1


class NextSlotTier(DictTier):
    """Loads into the slot behind the right one."""

    @override
    def load_block(self, key: OffloadKey, block_id: int) -> None:
        super().load_block(key, (block_id + 1) % self.context.num_blocks)


class HalfBlockTier(DictTier):
    """Stops in the middle of each block, like a short read (Mooncake#3066)."""

    @override
    def load_block(self, key: OffloadKey, block_id: int) -> None:
        block, half = self.context.primary.block(block_id), 256
        block[:half] = self.storage[key][:half]


class NoBytesTier(DictTier):
    """Reports loads as successful without writing anything (dynamo#15079)."""

    @override
    def load_block(self, key: OffloadKey, block_id: int) -> None:
        pass


class OtherBlockTier(DictTier):
    """Loads the bytes of another block (LMCache#4385)."""

    @override
    def load_block(self, key: OffloadKey, block_id: int) -> None:
        other = next(other for other in self.storage if other != key)
        super().load_block(other, block_id)


class PoisonedSlotsTier(DictTier):
    """Fails a load into a slot that still holds anything of what was there before."""

    @override
    def submit_load(self, job: JobMetadata) -> None:
        poison = bytes([POISON_BYTE]) * self.context.block_bytes
        if all(block == poison for block in self.context.primary.blocks(job.block_ids.tolist())):
            super().submit_load(job)
        else:
            self.results.append(JobResult(job.job_id, success=False))


class FailingLoadsTier(DictTier):
    """Fails every load, after it has spoilt the slots."""

    @override
    def submit_load(self, job: JobMetadata) -> None:
        for block_id in job.block_ids.tolist():
            self.context.primary.block(block_id)[:100] = b"x" * 100
        error = JobError(JobErrorKind.MISSING, "gone")
        self.results.append(JobResult(job.job_id, success=False, error=error))


class EveryOtherKeyTier(DictTier):
    """Loads the first key of each pair and reports exactly those (vllm#50321)."""

    @override
    def submit_load(self, job: JobMetadata) -> None:
        good = job.keys[::2]
        for key, block_id in zip(good, job.block_ids[::2].tolist(), strict=True):
            self.load_block(key, block_id)
        error = JobError(JobErrorKind.DAMAGED, "every other block is damaged")
        self.results.append(JobResult(job.job_id, len(job.keys) == 1, good, error))


class SilentStoresTier(DictTier):
    """Never reports a store, and says so when it is shut down."""

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self.stuck = [*getattr(self, "stuck", []), job.job_id]

    @override
    def drain_jobs(self) -> Collection[JobId]:
        return self.stuck

    @override
    def shutdown(self) -> Collection[JobId]:
        return self.stuck


class TrickleTier(DictTier):
    """Reports one job at every fiftieth poll."""

    polls = 0

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self.polls += 1
        if self.polls % 50:
            return []
        first, self.results = self.results[:1], self.results[1:]
        return first


class SilentLoadsTier(DictTier):
    """Never reports a load, and forgets about it (vllm#49829)."""

    @override
    def submit_load(self, job: JobMetadata) -> None:
        pass


class RaisingTier(DictTier):
    """Raises wherever the engine calls it."""

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        raise RuntimeError("lookup")

    @override
    def submit_store(self, job: JobMetadata) -> None:
        raise RuntimeError("store")

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        raise RuntimeError("request")


class UnsureTier(DictTier):
    """Answers every first question with "unknown"."""

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        asked: set[tuple[OffloadKey, str]] = self.__dict__.setdefault("asked", set())
        question = (key, req_context.req_id)
        if question in asked:
            return super().lookup(key, req_context)
        asked.add(question)
        return None


TIERS: Final = {
    tier.__name__: tier
    for tier in (
        DictTier,
        EveryOtherKeyTier,
        FailingLoadsTier,
        FlippedByteTier,
        HalfBlockTier,
        NextSlotTier,
        NoBytesTier,
        OtherBlockTier,
        PoisonedSlotsTier,
        RaisingTier,
        SilentLoadsTier,
        SilentStoresTier,
        TrickleTier,
        UnsureTier,
    )
}

_COUNTER: Final = itertools.count()


@pytest.fixture
def install_tier(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], TierRegistry]:
    """Return a function that installs a tier class of this file under the type ``test``.

    Each installation has a storage of its own, which engines opened on it share.
    """

    def install(class_name: str) -> TierRegistry:
        tier = type(class_name, (TIERS[class_name],), {"storage": {}})
        module = ModuleType(f"kv_replay_test_tier_{next(_COUNTER)}")

        @kv_core.hookimpl
        def kv_core_register_tier() -> TierSpec:
            return TierSpec(
                type="test",
                summary="a tier of the replay tests",
                contract=ContractVersion(1, 0),
                factory=tier,
                config_model=TierConfig,
                limits=lambda _: TierLimits(
                    job_deadline_s=1.0, lookup_deadline_s=1.0, min_free_bytes=1
                ),
            )

        module.__dict__["kv_core_register_tier"] = kv_core_register_tier
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return TierRegistry([EntryPoint("test", module.__name__, ENTRY_POINT_GROUP)])

    return install
