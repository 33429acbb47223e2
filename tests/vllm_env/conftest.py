"""What the tests on vLLM's own classes need: its tiering manager over tiers of ours."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import threading
import time
import uuid
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import pytest
from typing_extensions import override

import kv_core
from kv_core.contract import (
    Capability,
    ContractVersion,
    JobError,
    JobErrorKind,
    JobId,
    JobMetadata,
    JobResult,
    LookupAnswer,
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    SecondaryTierManager,
    TierConfig,
    TierContext,
    TierLimits,
    TierSpec,
    make_offload_key,
)
from kv_core.plugins import TierRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

PATIENCE_S: Final = 20.0
WORKER_BYTES: Final = 5000
"""Payload of a block: not a multiple of a page, so that rows have padding."""


@pytest.fixture(scope="session", autouse=True)
def _import_vllm() -> None:
    """Import vLLM before anything else: what it and its libraries warn of is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.kv_offload.tiering.spec  # noqa: F401


# -- a tier that does what the test says ----------------------------------------------------------


@final
class Script(SecondaryTierManager):
    """A tier of ours whose answers and results the test decides.

    Attributes:
        answers: Lookup answers by key; other keys are absent.
        jobs: Jobs that are not finished, by id.
        results: What the next poll yields.
        raising: Names of methods that raise.
        lost: Whether a drain ends no job.
        requests: Ids of live requests.
        is_shut_down: Whether ``shutdown`` was called.
    """

    @override
    def __init__(self, context: TierContext) -> None:
        self.context = context
        self.answers: dict[OffloadKey, LookupAnswer] = {}
        self.jobs: dict[JobId, JobMetadata] = {}
        self.results: list[Any] = []
        self.raising: set[str] = set()
        self.lost = False
        self.stuck: list[JobId] = []
        self.requests: set[str] = set()
        self.policy = OffloadPolicy.BLOCK_LEVEL
        self.events: list[OffloadingEvent] = []
        self.is_shut_down = False

    def finish(
        self, *, good: Sequence[OffloadKey] | None = None, kind: JobErrorKind = JobErrorKind.FAILED
    ) -> None:
        """Carry out all jobs, or those of their keys that are good."""
        for job in self.jobs.values():
            done = [key for key in job.keys if good is None or key in good]
            for key, slot in zip(job.keys, job.block_ids.tolist(), strict=True):
                if job.is_promotion and key in done:
                    with self.context.primary.block(slot) as block:
                        block[:] = content(key, len(block))
            whole = len(done) == len(job.keys)
            error = None if whole else JobError(kind, "as scripted")
            keys = () if whole else tuple(done)
            self.results.append(JobResult(job.job_id, whole, keys, error))
        self.jobs.clear()

    def _enter(self, method: str) -> None:
        if method in self.raising:
            raise RuntimeError(f"raises in {method}")

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        self._enter("lookup")
        return self.answers.get(key, False)

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._enter("submit_store")
        self.jobs[job.job_id] = job

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._enter("submit_load")
        self.jobs[job.job_id] = job

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._enter("get_finished_jobs")
        results, self.results = self.results, []
        return results

    @override
    def drain_jobs(self) -> Collection[JobId]:
        self._enter("drain_jobs")
        if self.lost:
            self.jobs.clear()
        stuck = {job_id: job for job_id, job in self.jobs.items() if job_id in self.stuck}
        for job_id in stuck:
            del self.jobs[job_id]
        self.finish()
        self.jobs.update(stuck)
        return tuple(stuck)

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._enter("on_new_request")
        self.requests.add(req_context.req_id)
        return RequestOffloadingContext(self.policy)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._enter("on_request_finished")
        self.requests.discard(req_context.req_id)

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self.events = self.events, []
        return events

    @override
    def shutdown(self) -> Collection[JobId]:
        self._enter("shutdown")
        self.is_shut_down = True
        return tuple(self.stuck)


def content(key: bytes, num_bytes: int) -> bytes:
    """Return the bytes of the block of this key."""
    return hashlib.shake_128(bytes(key)).digest(num_bytes)


def _scripted_plugin(opened: list[Script]) -> ModuleType:
    """Return the entry-point module of a package that provides the type ``scripted``."""
    module = ModuleType("kv_tier_scripted")

    def make(context: TierContext) -> Script:
        opened.append(Script(context))
        return opened[-1]

    @kv_core.hookimpl
    def kv_core_register_tier() -> TierSpec:
        return TierSpec(
            type="scripted",
            summary="a tier of the tests",
            contract=ContractVersion(1, 0),
            factory=make,
            config_model=TierConfig,
            limits=lambda _: TierLimits(
                job_deadline_s=5.0, lookup_deadline_s=5.0, min_free_bytes=1
            ),
            capabilities=frozenset({Capability.EVENTS}),
        )

    module.kv_core_register_tier = kv_core_register_tier  # type: ignore[attr-defined]
    return module


# -- what vLLM hands to a spec --------------------------------------------------------------------


@dataclasses.dataclass
class PageSpec:
    """Stands for a spec of vLLM's: what one page of a layer is."""

    block_size: int = 16
    num_kv_heads: int = 2
    dtype: str = "float32"
    page_size_bytes: int = WORKER_BYTES
    sliding_window: int | None = None


class VllmConfig(SimpleNamespace):
    """Stands for vLLM's, with what the namespace reads."""


class KVCacheConfig(SimpleNamespace):
    """Stands for vLLM's, with what the namespace reads."""


def make_vllm_config(model: Path) -> VllmConfig:
    """Return the configuration of an engine that serves a model."""
    return VllmConfig(
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            hf_config=SimpleNamespace(),
            dtype="float32",
            seed=0,
            hf_config_path=None,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(nnodes_within_dp=1),
        speculative_config=None,
        lora_config=None,
    )


def make_offloading_config(extra_config: dict[str, Any], *, events: bool = False) -> Any:
    """Return vLLM's own ``OffloadingConfig``, with the fields that this version has."""
    from vllm.v1.kv_offload import config as vllm_config_module

    def build(cls: Any, **values: Any) -> Any:
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    return build(
        vllm_config_module.OffloadingConfig,
        groups=(
            build(
                vllm_config_module.OffloadingGroupConfig,
                tokens_per_block=16,
                layer_names=("layer",),
                group_id=0,
            ),
        ),
        worker_kv_bytes_per_block=WORKER_BYTES,
        enable_kv_cache_events=events,
        extra_config=extra_config,
        engine_id=f"tests-{uuid.uuid4()}",
        model=build(vllm_config_module.OffloadingModelConfig, name="tests", dtype="float32"),
        cache=build(
            vllm_config_module.OffloadingCacheConfig, tokens_per_hash=16, blocks_per_chunk=1
        ),
        parallel=build(
            vllm_config_module.OffloadingParallelConfig,
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        kv_cache_layout="LBHNC",
    )


@final
class Rig:
    """vLLM's own tiering manager over tiers of ours, and what its scheduler does with it.

    Attributes:
        spec: vLLM's ``TieringOffloadingSpec``.
        manager: Its manager.
        bridges: The tiers as vLLM has them.
    """

    def __init__(
        self,
        model: Path,
        entries: list[dict[str, Any]],
        *,
        num_slots: int = 8,
        events: bool = False,
        **extra_config: Any,
    ) -> None:
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        # The bridge finds these two, by their names, as it finds those of a connector.
        vllm_config = make_vllm_config(model)  # noqa: F841
        kv_cache_config = KVCacheConfig(  # noqa: F841
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=PageSpec())]
        )
        extra_config |= {"cpu_bytes_to_use": num_slots * 8192, "secondary_tiers": entries}
        self.spec = TieringOffloadingSpec(make_offloading_config(extra_config, events=events))
        self.manager = self.spec.get_manager()
        self.bridges = self.manager.secondary_tiers
        self._view = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        self._requests: dict[str, Any] = {}

    def request(self, req_id: str) -> Any:
        """Return a request, announced at its first use."""
        from vllm.v1.kv_offload.base import ReqContext as VllmReqContext

        if req_id not in self._requests:
            self._requests[req_id] = VllmReqContext(req_id)
            self.manager.on_new_request(self._requests[req_id])
        return self._requests[req_id]

    def end_request(self, req_id: str) -> None:
        """End a request."""
        self.manager.on_request_finished(self._requests.pop(req_id))

    def ask(self, req_id: str, *keys: OffloadKey) -> list[str]:
        """Look keys up; return vLLM's answers as words."""
        return [self.manager.lookup(key, self.request(req_id)).name for key in keys]

    def end_step(self, *new_req_ids: str) -> None:
        """End a step."""
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids, ()))

    def store(self, req_id: str, *keys: OffloadKey) -> None:
        """Store blocks in the primary tier; cascades begin."""
        request = self.request(req_id)
        output = self.manager.prepare_store(keys, request)
        for key, slot in zip(output.keys_to_store, _slots_of(output.store_spec), strict=True):
            row = np.frombuffer(content(key, WORKER_BYTES), dtype=np.int8)
            self._view[slot, :WORKER_BYTES] = row
        # As vLLM's scheduler has them.
        self.manager.complete_store(set(output.keys_to_store), request)

    def load(self, req_id: str, *keys: OffloadKey) -> list[bytes]:
        """Read blocks of the primary tier, as the worker does for the GPU."""
        request = self.request(req_id)
        slots = _slots_of(self.manager.prepare_load(keys, request))
        blocks = [self._view[slot, :WORKER_BYTES].tobytes() for slot in slots]
        self.manager.complete_load(keys, request)
        return blocks

    def settle(self) -> None:
        """Go through steps until no job is in flight; real tiers need their time."""
        end = time.monotonic() + PATIENCE_S
        pause = threading.Event()
        self.end_step()
        while self.manager.has_pending_work():
            assert time.monotonic() < end, "jobs do not end"
            pause.wait(0.001)
            self.end_step()

    def until_known(self, req_id: str, *keys: OffloadKey) -> list[str]:
        """Ask in step after step until no answer is "ask again", nor "on its way"."""
        end = time.monotonic() + PATIENCE_S
        pause = threading.Event()
        while True:
            answers = self.ask(req_id, *keys)
            if not {"RETRY", "HIT_PENDING"} & set(answers):
                return answers
            assert time.monotonic() < end, f"still {answers}"
            self.end_step()
            pause.wait(0.001)

    def stats(self) -> dict[str, float]:
        """Return what vLLM would publish, by name and labels; waits for our next report."""
        from kv_core.vllm import _compat

        total = _compat.new_stats()
        pause = threading.Event()
        end = time.monotonic() + PATIENCE_S
        while True:
            stats = self.manager.get_stats()
            if stats is not None:
                total.aggregate(stats)
            reduced = dict(total.reduce())
            if any("kv_core" in name for name in reduced):
                return reduced
            assert time.monotonic() < end, "no report of ours"
            pause.wait(0.05)

    def close(self) -> None:
        """Shut down; the memory must be free of exports then."""
        del self._view
        self.manager.shutdown()


def _slots_of(spec: Any) -> list[int]:
    slots = spec.chunk_ids if hasattr(spec, "chunk_ids") else spec.block_ids
    return [int(slot) for slot in slots]


@pytest.fixture
def keys() -> list[OffloadKey]:
    """Return 32 distinct keys."""
    return [make_offload_key(hashlib.sha256(bytes([i])).digest(), 0) for i in range(32)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a model, as far as its identity is concerned."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def make_rig(model: Path) -> Iterator[Callable[..., Rig]]:
    """Return the maker of rigs: a list of entries of ``secondary_tiers``, and more settings."""
    from kv_core.vllm import register

    register()
    rigs: list[Rig] = []

    def make(*entries: dict[str, Any], **settings: Any) -> Rig:
        rigs.append(Rig(settings.pop("model", model), list(entries), **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        if hasattr(rig, "_view"):
            rig.close()
    left = [path.name for path in Path("/dev/shm").glob("vllm_offload_tests-*")]  # noqa: S108
    assert left == []


@pytest.fixture
def scripted(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Rig, Script]]:
    """Return the maker of rigs over one scripted tier."""
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    opened: list[Script] = []
    monkeypatch.setitem(sys.modules, "kv_tier_scripted", _scripted_plugin(opened))
    point = EntryPoint("scripted", "kv_tier_scripted", "kv_core.tiers")
    monkeypatch.setattr("kv_core.vllm._tier_settings.TierRegistry", lambda: TierRegistry([point]))
    if "kv:scripted" not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier("kv:scripted", "kv_core.vllm._tier_bridge", "TierBridge")

    def make(**settings: Any) -> tuple[Rig, Script]:
        rig = make_rig({"type": "kv:scripted", **settings.pop("entry", {})}, **settings)
        return rig, opened[-1]

    return make
