"""Requests, configurations and a manager that answers as told and remembers every call."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import override

from kv_core.connector import (
    ConnectorOutput,
    OffloadingConnectorScheduler,
    ScheduledRequest,
    StepSchedule,
)
from kv_core.contract import OffloadKey, make_offload_key
from kv_core.engine import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVCacheGroupConfig,
    LookupResult,
    OffloadingConfig,
    OffloadingManager,
    PrepareStoreOutput,
)
from kv_core.keys import GroupGeometry, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_core.connector import ConnectorMetadata, Transfer
    from kv_core.contract import ReqContext, ScheduleEndContext

TOKENS = 16


@dataclass
class Request:
    """A request; implements ``kv_core.connector.KVRequest``.

    Attributes:
        req_id: Its name.
        num_prompt_tokens: Tokens of the prompt.
        block_hashes: Hashes of its full blocks.
        num_output_tokens: Tokens of the output so far.
        kv_transfer_params: Empty.
    """

    req_id: str
    num_prompt_tokens: int
    block_hashes: list[bytes]
    num_output_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the output so far."""
        return self.num_prompt_tokens + self.num_output_tokens


def block_hash(name: str) -> bytes:
    """Return the hash of a block of this name."""
    return hashlib.sha256(name.encode()).digest()


def key_of(name: str, group_idx: int = 0) -> OffloadKey:
    """Return the key of a block of this name."""
    return make_offload_key(block_hash(name), group_idx)


def make_request(req_id: str, names: str, *, prompt_tokens: int | None = None) -> Request:
    """Make a request whose blocks have these names, separated by spaces."""
    hashes = [block_hash(name) for name in names.split()]
    tokens = TOKENS * len(hashes) if prompt_tokens is None else prompt_tokens
    return Request(req_id, tokens, hashes)


def make_config(
    *groups: KVCacheGroupConfig, num_workers: int = 1, **extra_config: Any
) -> OffloadingConfig:
    """Describe an engine with these groups; by default one of full attention."""
    groups = groups or (KVCacheGroupConfig(tokens_per_block=TOKENS, layer_names=("l0",)),)
    factor = extra_config.get("blocks_per_chunk", 1)
    return OffloadingConfig(
        groups=groups,
        worker_block_bytes=4096,
        tokens_per_cache_block=TOKENS,
        namespace=Namespace(
            model="tests/model",
            model_fingerprint="weights-1",
            revision="local",
            dtype="int8",
            kv_layout="flat",
            groups=tuple(
                GroupGeometry(
                    tokens_per_block=group.tokens_per_block * factor,
                    bytes_per_block=4096 * factor,
                    num_layers=1,
                    sliding_window=group.sliding_window,
                )
                for group in groups
            ),
            block_bytes=4096 * factor * num_workers,
            tokens_per_hash=TOKENS,
            block_size_factor=factor,
            hash_algorithm="sha256",
            hash_seed="0",
        ),
        engine_id="connector-tests",
        num_workers=num_workers,
        enable_events=True,
        extra_config=extra_config,
    )


class RecordingManager(OffloadingManager):
    """Answers as the test says and keeps every call, ``(method, request, keys)``, in order.

    Attributes:
        calls: All calls.
        answers: Lookup answers by key; other keys are misses.
        known: Keys that a store is told are known.
        declined: Keys that a store is told to offer again.
        declines_all: Whether stores are answered with ``None``.
        pending: Answer of ``has_pending_work``.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[OffloadKey, ...]]] = []
        self.answers: dict[OffloadKey, LookupResult] = {}
        self.known: set[OffloadKey] = set()
        self.declined: set[OffloadKey] = set()
        self.declines_all = False
        self.pending = False

    def of(self, method: str) -> list[tuple[OffloadKey, ...]]:
        """Return the keys of every call of one method."""
        return [keys for name, _, keys in self.calls if name == method]

    def hits(self, *keys: OffloadKey) -> None:
        """Answer these keys as hits from now on."""
        self.answers.update(dict.fromkeys(keys, LookupResult.HIT))

    def _note(self, method: str, req_context: ReqContext, keys: Sequence[OffloadKey] = ()) -> None:
        self.calls.append((method, req_context.req_id, tuple(keys)))

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._note("lookup", req_context, (key,))
        return self.answers.get(key, LookupResult.MISS)

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        self._note("prepare_load", req_context, keys)
        return CPULoadStoreSpec(list(range(100, 100 + len(keys))))

    @override
    def complete_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        self._note("complete_load", req_context, keys)

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self._note("prepare_store", req_context, keys)
        if self.declines_all:
            return None
        new = tuple(key for key in keys if key not in self.known and key not in self.declined)
        declined = tuple(key for key in keys if key in self.declined)
        spec = CPULoadStoreSpec(list(range(len(new))))
        return PrepareStoreOutput(new, spec, declined_keys=declined)

    @override
    def complete_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        self._note("complete_store" if success else "complete_store failed", req_context, keys)

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._note("touch", req_context, keys)

    @override
    def release(self, req_context: ReqContext) -> None:
        self._note("release", req_context)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._note("on_request_finished", req_context)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.calls.append(("on_schedule_end", ",".join(sorted(context.new_req_ids)), ()))

    @override
    def has_pending_work(self) -> bool:
        return self.pending

    @override
    def reset_cache(self) -> None:
        self.calls.append(("reset_cache", "", ()))

    @override
    def on_reset_flushed(self) -> None:
        self.calls.append(("on_reset_flushed", "", ()))

    @override
    def shutdown(self) -> None:
        self.calls.append(("shutdown", "", ()))


class Connector:
    """The scheduler's half over a recording manager.

    Attributes:
        manager: The manager.
        scheduler: The object under test.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        self.manager = RecordingManager()
        self.scheduler = OffloadingConnectorScheduler(config, self.manager)

    def step(
        self,
        *scheduled: ScheduledRequest,
        new: Sequence[str] = (),
        preempted: Sequence[str] = (),
        allocated: Sequence[int] = (),
    ) -> ConnectorMetadata:
        """Build the orders of one step."""
        return self.scheduler.build_connector_meta(
            StepSchedule(scheduled, frozenset(new), frozenset(preempted), frozenset(allocated))
        )

    def compute(self, request: Request, tokens: int, *tables: Sequence[int]) -> ConnectorMetadata:
        """Run one step that computes a request's tokens up to this one."""
        return self.step(ScheduledRequest(request, 0, tokens, tables))

    def report(self, *transfers: Transfer, failed: bool = False, workers: int = 1) -> Any:
        """Let workers report these transfers."""
        ids = [transfer.job_id for transfer in transfers]
        return self.scheduler.update_connector_output(
            ConnectorOutput(dict.fromkeys(ids, workers), set(ids) if failed else set())
        )

    def find(self, request: Request, num_computed_tokens: int = 0) -> int | None:
        """Return how many tokens can be loaded."""
        tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        assert is_async is bool(tokens)
        return tokens

    @property
    def offered(self) -> list[tuple[OffloadKey, ...]]:
        """The keys of each offer so far."""
        return self.manager.of("prepare_store")


def gpu_spec(transfer: Transfer) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """Return the GPU side of a transfer: block ids, group sizes, block indices."""
    for spec in transfer.spec:
        if isinstance(spec, GPULoadStoreSpec):
            return spec.block_ids.tolist(), spec.group_sizes, spec.block_indices
    raise AssertionError("a transfer has a GPU side")


@pytest.fixture
def connect() -> Callable[..., Connector]:
    """Return the maker of connectors over a configuration."""
    return Connector


@pytest.fixture
def connector() -> Connector:
    """Return a connector for one group of full attention, blocks of 16 tokens."""
    return Connector(make_config())


@pytest.fixture
def config() -> Callable[..., OffloadingConfig]:
    """Return the maker of configurations."""
    return make_config


@pytest.fixture
def request_of() -> Callable[..., Request]:
    """Return the maker of requests from block names."""
    return make_request


@pytest.fixture
def key() -> Callable[..., OffloadKey]:
    """Return the function from a block's name, and a group, to its key."""
    return key_of


@pytest.fixture
def gpu_side() -> Callable[[Transfer], tuple[list[int], tuple[int, ...], tuple[int, ...]]]:
    """Return the function that reads the GPU side of a transfer."""
    return gpu_spec
