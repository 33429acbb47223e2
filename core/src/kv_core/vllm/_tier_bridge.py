"""The tier mode: one of our tiers as a secondary tier of vLLM's own ``TieringOffloadingSpec``.

vLLM trusts its tiers: it asserts where a tier reports a job twice or not at all, lets every
exception through into its scheduler, and waits for a load for ever. Between it and the tier stands
:class:`kv_core.tiering.SingleTier`; this module is the translation.

All state belongs to the thread that drives vLLM's tiering manager.
"""

from __future__ import annotations

import atexit
import logging
import time
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_core.contract import NullMetrics, OffloadPolicy, PrimaryView, ReqContext
from kv_core.contract import ScheduleEndContext as OurScheduleEndContext
from kv_core.errors import ConfigError, EngineStateError
from kv_core.plugins import open_tier
from kv_core.tiering import SingleTier, TierMode, TierOptions
from kv_core.vllm import _compat
from kv_core.vllm._logs import log_where_vllm_does
from kv_core.vllm._namespace import namespace_of
from kv_core.vllm._slot_quarantine import SlotQuarantine
from kv_core.vllm._store_gate import store_gate
from kv_core.vllm._tier_metrics import TierReport, tier_definitions
from kv_core.vllm._tier_settings import BridgedTierSettings, read_settings
from kv_core.vllm._vllm_config import find_config

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from kv_core.contract import OffloadingEvent
    from kv_core.keys import OffloadKey
    from kv_core.tiering import JobOutcome

__all__ = ["TierBridge"]

_LOGGER: Final = logging.getLogger(__name__)

_STATS_PERIOD_S: Final = 0.25

# Looking a member up on its enum class costs more than the rest of a translation.
_HIT: Final = _compat.LookupResult.HIT
_MISS: Final = _compat.LookupResult.MISS
_RETRY: Final = _compat.LookupResult.RETRY


@final
class TierBridge(_compat.SecondaryTierManager):  # type: ignore[misc]  # vLLM is optional
    """A secondary tier of vLLM that is one of ours.

    Attributes:
        medium: What vLLM's events say of where blocks are.
        cache_hit_source: What vLLM's metrics say of where hits come from; ``None`` before 0.32.
    """

    medium = _compat.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """Open the tier. May block up to its ``open_deadline_s``.

        Args:
            offloading_spec: vLLM's spec.
            primary_kv_view: vLLM's primary tier, shape ``(slots, row stride)``, format ``b``.
            tier_type: As the user wrote it, with our prefix or without.
            backpressure_detector: vLLM's own, if the user configured one; it decides as well.
            settings: The other keys of the tier's entry.

        Raises:
            KVCoreError: The settings cannot be used, something that makes bytes interchangeable is
                not known, or the storage cannot be opened. The message says what to do.
        """
        log_where_vllm_does()
        config = offloading_spec.config
        read = read_settings(tier_type, settings, config.extra_config)
        _require_one_host(config.parallel)
        gate = store_gate(lambda: self._tier, backpressure_detector)
        _compat.init_tier(self, offloading_spec, primary_kv_view, tier_type, gate)
        if read.locality is not None:
            self.locality = _compat.Locality(read.locality)
        # vLLM has one word for all storage, and ours need not be a disk.
        self.cache_hit_source = _compat.hit_source(read.entry.type)
        block_bytes = _compat.chunk_bytes(offloading_spec)
        self._view = PrimaryView(_as_bytes(primary_kv_view), block_bytes)
        try:
            self._tier = self._open(read, config, block_bytes)
        except BaseException:
            self._view.release()
            raise
        self._quarantine = SlotQuarantine(offloading_spec)
        self._requests: dict[str, ReqContext] = {}
        self._report = TierReport(_label(offloading_spec, tier_type, settings))
        self._reported_at = time.monotonic()
        self._publishes_events = offloading_spec.kv_events_config.enable_kv_cache_events
        self._is_shut_down = False
        # Not every way to end vLLM shuts its managers down, and stores may be under way.
        atexit.register(self.shutdown)
        _LOGGER.info(
            "tier %r of type %r is open under vLLM's own tiering: %s",
            read.entry.name,
            read.entry.type,
            read.checked.shown_settings(),
        )

    def _open(self, read: BridgedTierSettings, config: Any, block_bytes: int) -> SingleTier:
        entry = read.entry
        opened = open_tier(
            entry.type,
            name=entry.name,
            settings=entry.settings,
            namespace=namespace_of(config, block_bytes=block_bytes, lasting=read.is_lasting),
            primary=self._view,
            clock=time.monotonic,
            metrics=NullMetrics(),
            registry=read.registry,
            read_only=entry.read_only,
        )
        return SingleTier(
            opened,
            num_blocks=self._view.num_blocks,
            block_bytes=block_bytes,
            can_hold_slots=lambda: self._quarantine.is_possible,
            options=TierOptions(TierMode.READ_ONLY if entry.read_only else TierMode.READ_WRITE),
            config=read.engine,
        )

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Declare what :meth:`get_stats` reports."""
        return tier_definitions()

    # -- lookup ---------------------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: Any) -> Any:
        """Answer HIT, MISS or RETRY."""
        answer = self._tier.lookup(key, self._context(req_context))
        if answer is None:
            return _RETRY
        return _HIT if answer else _MISS

    @override
    def touch(self, keys: Collection[OffloadKey], req_context: Any) -> None:
        """Pass on a use of blocks."""
        self._tier.touch(tuple(keys), self._context(req_context))

    def _context(self, req_context: Any) -> ReqContext:
        context = self._requests.get(req_context.req_id)
        if context is None:
            params = req_context.kv_transfer_params
            context = (
                ReqContext(req_context.req_id, params) if params else ReqContext(req_context.req_id)
            )
            self._requests[req_context.req_id] = context
        return context

    # -- jobs -----------------------------------------------------------------------------------

    @override
    def submit_store(self, job_metadata: Any) -> None:
        """Give the tier copies of blocks of the primary tier."""
        # vLLM's keys are a set at times, whose order of iteration is that of the slots.
        self._tier.submit_store(
            job_metadata.job_id,
            tuple(job_metadata.keys),
            _compat.job_slots(job_metadata),
            self._context(job_metadata.req_context),
        )

    @override
    def submit_load(self, job_metadata: Any) -> None:
        """Have the tier load blocks into slots of the primary tier."""
        self._tier.submit_load(
            job_metadata.job_id,
            tuple(job_metadata.keys),
            _compat.job_slots(job_metadata),
            self._context(job_metadata.req_context),
        )

    @override
    def get_finished_jobs(self) -> Iterator[Any]:
        """Yield the result of each job once.

        Between two results vLLM has acted on the first of them; that is the moment to take slots
        out of use that it has just got back.
        """
        self._quarantine.release(self._tier.take_released())
        for outcome in self._tier.poll():
            yield self._result(outcome)
            if outcome.busy_slots:
                self._quarantine.hold(outcome.busy_slots)

    def _result(self, outcome: JobOutcome) -> Any:
        partial = outcome.is_promotion and not outcome.is_complete and outcome.succeeded
        return _compat.job_result(
            outcome.job_id,
            success=outcome.is_complete,
            successful_keys=outcome.succeeded if partial else None,
            transfer_time_s=outcome.busy_s,
            transfer_bytes=len(outcome.succeeded) * self._view.block_bytes,
        )

    @override
    def has_pending_work(self) -> bool:
        """Say whether the tier needs further steps beyond vLLM's own jobs."""
        return self._tier.has_pending_work()

    @override
    def drain_jobs(self) -> None:
        """Wait for all jobs: vLLM is about to give their slots away, and asserts that none is left.

        What it waits for is in the log every five seconds.
        """
        self._tier.drain()

    # -- requests and steps ---------------------------------------------------------------------

    @override
    def on_new_request(self, req_context: Any) -> Any:
        """Announce a request and say which of its blocks the tier wants."""
        self._requests.pop(req_context.req_id, None)
        policy = self._tier.on_new_request(self._context(req_context))
        if policy is OffloadPolicy.REQUEST_LEVEL:
            return _compat.RequestOffloadingContext(_compat.OffloadPolicy.REQUEST_LEVEL)
        return _compat.RequestOffloadingContext(_compat.block_level_policy())

    @override
    def on_request_finished(self, req_context: Any) -> None:
        """Announce the end of a request."""
        context = self._requests.pop(req_context.req_id, None)
        if context is not None:
            self._tier.on_request_finished(context)

    @override
    def on_schedule_end(self, context: Any) -> None:
        """Announce the end of a step."""
        self._tier.on_schedule_end(
            OurScheduleEndContext(
                frozenset(context.new_req_ids), frozenset(context.preempted_req_ids)
            )
        )

    # -- observation and end --------------------------------------------------------------------

    @override
    def take_events(self) -> Iterator[Any]:
        """Yield what became present in the tier and what left it."""
        events: list[OffloadingEvent] = self._tier.take_events()
        if self._publishes_events:
            for event in events:
                yield _compat.offloading_event(
                    event.keys, event.medium, removed=event.removed, locality=self.locality
                )

    @override
    def get_stats(self) -> Any:
        """Return what was measured since the last time; ``None`` most of the time.

        vLLM asks in every step, and reading all there is takes longer than its other work.
        """
        now = time.monotonic()
        if now - self._reported_at < _STATS_PERIOD_S:
            return None
        self._reported_at = now
        stats = _compat.new_stats()
        self._report.add_to(stats, self._tier.guard.get_stats())
        return stats

    @override
    def shutdown(self) -> None:
        """Let stores under way end, and close the tier. Idempotent. May block.

        Raises:
            EngineStateError: I/O of the tier could not be stopped. vLLM keeps its primary tier
                mapped then, as it must.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        atexit.unregister(self.shutdown)
        stuck = self._tier.shutdown()
        if stuck:
            raise EngineStateError(
                f"{stuck} job(s) of tier {self._tier.guard.name!r} could not be stopped; the "
                "primary tier stays mapped until this process ends"
            )
        self._view.release()


def _as_bytes(view: memoryview) -> memoryview:
    """Return the same memory as rows of format ``B``."""
    if view.shape is None or view.ndim != 2:
        raise EngineStateError(
            f"vLLM's primary tier has the shape {view.shape}, expected (slots, row stride)"
        )
    with view.cast("B") as flat:
        return flat.cast("B", view.shape)


def _label(offloading_spec: Any, tier_type: str, settings: dict[str, Any]) -> str:
    """Return vLLM's label of the tier: its place among the tiers, from 1 on, and its type."""
    for place, entry in enumerate(offloading_spec.secondary_tier_configs, start=1):
        if entry.get("type") == tier_type and settings.items() <= entry.items():
            return f"{place}:{tier_type}"
    return tier_type


def _require_one_host(parallel: Any) -> None:
    """Refuse an engine whose ranks do not share the memory of the primary tier."""
    hosts = getattr(find_config().vllm.parallel_config, "nnodes_within_dp", 1)
    if hosts != 1:
        raise ConfigError(
            f"the {parallel.world_size} ranks of this engine are spread over {hosts} hosts, but "
            "vLLM's primary tier is the memory of one host, which all ranks must share. Keep the "
            "ranks of an engine on one host, and run one engine on each host",
            setting="nnodes",
        )
