"""Shared pieces of the tests of the simple mode: requests made of letters, and an engine's step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_core.connector import ScheduledRequest, StepSchedule
from kv_core.engine import KVCacheGroupConfig
from kv_core.keys import make_offload_key
from kv_core.simple import (
    NO_EVENT,
    RankMemory,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadScheduler,
    SimpleCPUOffloadWorkerMetadata,
    SimpleOffloadConfig,
)
from kv_core.workload.replay import GpuBlockPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_core.keys import OffloadKey
    from kv_core.simple import SimpleLoadReport

BLOCK_TOKENS: Final = 4
BLOCK_BYTES: Final = 64
FULL: Final = KVCacheGroupConfig(tokens_per_block=BLOCK_TOKENS, layer_names=("full",))


def hashes_of(word: str) -> tuple[bytes, ...]:
    """Return a chained hash for each letter."""
    return tuple(hashlib.sha256(word[: end + 1].encode()).digest() for end in range(len(word)))


def key_of(word: str, group_idx: int = 0) -> OffloadKey:
    """Return the key of the last block of a word."""
    return make_offload_key(hashes_of(word)[-1], group_idx)


@dataclass(eq=False)
class Request:
    """A request whose full blocks are the letters of a word, with some tokens after them."""

    req_id: str
    word: str
    more_tokens: int = 1
    kv_transfer_params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.word) * BLOCK_TOKENS + self.more_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.num_tokens

    @property
    def block_hashes(self) -> tuple[bytes, ...]:
        """Hashes of the full blocks."""
        return hashes_of(self.word)


class Engine:
    """A scheduler under test, with a GPU pool and with workers that do as they are told."""

    def __init__(
        self,
        *,
        gpu_blocks: int = 32,
        cpu_blocks: int = 16,
        groups: Sequence[KVCacheGroupConfig] = (FULL,),
        world_size: int = 1,
        max_batched_tokens: int = 2 * BLOCK_TOKENS,
        lazy: bool = False,
        record_events: bool = False,
    ) -> None:
        rank = RankMemory(gpu_blocks * BLOCK_BYTES, cpu_blocks * BLOCK_BYTES)
        self.config = SimpleOffloadConfig(
            groups=tuple(groups),
            tokens_per_hash=BLOCK_TOKENS,
            gpu_blocks=gpu_blocks,
            ranks=(rank,) * world_size,
            max_batched_tokens=max_batched_tokens,
            lazy=lazy,
            record_events=record_events,
        )
        self.pool = GpuBlockPool(gpu_blocks)
        self.freed: list[int] = []
        self.scheduler = SimpleCPUOffloadScheduler(
            self.config, self.pool, cpu_block_freed=self.freed.append
        )
        self.tables: dict[str, list[list[int]]] = {}

    # -- the engine's part ----------------------------------------------------------------------

    def allocate(self, request: Request, num_blocks: int) -> list[list[int]]:
        """Give a request a block table, the same number of blocks for each group."""
        table = []
        for _ in self.config.groups:
            block_ids = self.pool.allocate(num_blocks)
            assert block_ids is not None
            table.append(block_ids)
        self.tables[request.req_id] = table
        return table

    def compute(self, request: Request, *, computed: int = 0) -> SimpleCPUOffloadMetadata:
        """Run a step in which a request computes all of its tokens."""
        num_blocks = -(-request.num_tokens // BLOCK_TOKENS)
        table = self.tables.get(request.req_id) or self.allocate(request, num_blocks)
        scheduled = ScheduledRequest(request, computed, request.num_tokens - computed, table)
        allocated = frozenset(block_id for ids in table for block_id in ids)
        metadata = self.step(scheduled, allocated=allocated)
        for block_id, block_hash in zip(table[0], request.block_hashes, strict=False):
            self.pool.register(block_id, block_hash)
        return metadata

    def step(
        self,
        *scheduled: ScheduledRequest,
        preempted: frozenset[str] = frozenset(),
        allocated: frozenset[int] = frozenset(),
    ) -> SimpleCPUOffloadMetadata:
        """End the scheduling of a step."""
        return self.scheduler.build_connector_meta(
            StepSchedule(scheduled, preempted_req_ids=preempted, allocated_block_ids=allocated)
        )

    def begin_load(self, request: Request, num_blocks: int = 2) -> list[list[int]]:
        """Give a request that CPU memory knows blocks of the GPU, and have the next step load it.

        Returns:
            Its block table.
        """
        tokens = self.matched(request)
        assert tokens
        table = self.allocate(request, num_blocks)
        self.scheduler.update_state_after_alloc(request, table, tokens)
        return table

    def finish(self, request: Request) -> None:
        """End a request and release its blocks."""
        for block_ids in self.tables.pop(request.req_id, []):
            self.pool.release(block_ids)
        self.scheduler.request_finished(request)

    # -- the workers' part ----------------------------------------------------------------------

    def report(
        self, metadata: SimpleCPUOffloadMetadata, *, ranks: int | None = None, failed: bool = False
    ) -> SimpleLoadReport:
        """Report the end of a step's transfers, by all ranks or by some."""
        count = self.config.world_size if ranks is None else ranks
        output = SimpleCPUOffloadWorkerMetadata()
        for event, counts, failures in (
            (metadata.load_event, output.completed_load_events, output.failed_load_events),
            (metadata.store_event, output.completed_store_events, output.failed_store_events),
        ):
            if event != NO_EVENT:
                counts[event] = count
                if failed:
                    failures.add(event)
        return self.scheduler.update_connector_output(output)

    def store(self, word: str) -> None:
        """Bring a word into CPU memory, by a request of its own that is over then."""
        request = Request(f"store-{word}", word)
        self.report(self.compute(request))
        self.finish(request)

    # -- what the tests look at -----------------------------------------------------------------

    def matched(self, request: Request, computed: int = 0) -> int:
        """Ask for loadable tokens."""
        return self.scheduler.get_num_new_matched_tokens(request, computed)[0]

    def stat(self, name: str) -> float:
        """Return a counter."""
        return self.scheduler.get_stats()[name]

    def finds(self, word: str) -> int:
        """Return how many leading blocks of a word can be loaded, and hold none of them."""
        request = Request(f"probe-{word}", word)
        tokens = self.matched(request)
        self.scheduler.request_finished(request)
        return tokens // BLOCK_TOKENS


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    """Return the class of engines."""
    return Engine


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """Return the class of requests."""
    return Request


@pytest.fixture
def key() -> Callable[..., OffloadKey]:
    """Return the function that names a word's last block."""
    return key_of
