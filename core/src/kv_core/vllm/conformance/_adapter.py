"""One of our tiers over one of vLLM's: the calls are translated, and nothing else is done.

In the place of vLLM's tiering manager, this does what that does around a tier: it makes the tier
with vLLM's factory, gives it a view of the memory and releases that view after the tier's
shutdown, keeps one context for each request, and counts lookups and failures, as vLLM's tiers leave
that to their manager. It has no thread of its own.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_core.contract import (
    ABSENT,
    PRESENT,
    UNKNOWN,
    JobResult,
    OffloadingEvent,
    OffloadPolicy,
    RequestOffloadingContext,
    SecondaryTierManager,
)
from kv_core.errors import ConfigError, TierOpenError
from kv_core.vllm import _compat
from kv_core.vllm.conformance._settings import UncheckedConfig, tier_settings
from kv_core.vllm.conformance._surroundings import spec_for

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kv_core.contract import (
        JobId,
        JobMetadata,
        LookupAnswer,
        OffloadKey,
        PrimaryView,
        ReqContext,
        ScheduleEndContext,
        TierContext,
    )

__all__ = ["VllmTier", "prepare_process"]

_ANSWERS: Final[Mapping[Any, LookupAnswer]] = {
    _compat.LookupResult.HIT: PRESENT,
    _compat.LookupResult.MISS: ABSENT,
    _compat.LookupResult.RETRY: UNKNOWN,
    # For managers; a tier has no use for it.
    _compat.LookupResult.HIT_PENDING: UNKNOWN,
}


@final
class VllmTier(SecondaryTierManager):
    """A tier of vLLM's, driven through our contract.

    What has no counterpart stays empty: the reason of a failure (vLLM's results carry none), the
    keys that a failed store has stored (vLLM does not read them), and errors of lookups (vLLM's
    lookups have no such answer).

    Attributes:
        inner: vLLM's tier.
    """

    def __init__(self, context: TierContext, vllm_type: str) -> None:
        """Make the tier as vLLM's factory does.

        Args:
            context: What the suite gives.
            vllm_type: Type of the tier among vLLM's.

        Raises:
            ConfigError: vLLM refused the settings, with a TypeError or ValueError.
            TierOpenError: The storage failed.
        """
        if not isinstance(context.config, UncheckedConfig):
            raise TypeError(f"settings of a vLLM tier expected, found {context.config!r}")
        settings = tier_settings(context.config)
        self._view = _signed_view(context.primary)
        self._requests: dict[str, Any] = {}
        self._counted: dict[str, set[OffloadKey]] = {}
        self._jobs: dict[JobId, JobMetadata] = {}
        self._counts = dict.fromkeys(
            (
                "lookup_queries",
                "lookup_hits",
                "lookup_misses",
                "lookup_errors",
                "store_failures",
                "load_failures",
                "stalled_jobs",
            ),
            0.0,
        )
        with ExitStack() as on_failure:
            on_failure.callback(self._view.release)
            try:
                self.inner: Any = _compat.SecondaryTierFactory.create_secondary_tier(
                    {**settings, "type": vllm_type}, self._view, spec_for(context, settings)
                )
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"vLLM's tier {vllm_type!r} refused its settings with "
                    f"{type(error).__name__}: {error}",
                    setting=context.tier_name,
                ) from error
            except OSError as error:
                raise TierOpenError(
                    f"vLLM's tier {vllm_type!r} cannot be opened: {error}"
                ) from error
            on_failure.pop_all()

    # -- lookups --------------------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        answer = _ANSWERS[self.inner.lookup(key, self._request(req_context))]
        if answer is not UNKNOWN:
            self._count(key, req_context.req_id, is_hit=answer)
        return answer

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.inner.touch(keys, self._request(req_context))

    # -- jobs -----------------------------------------------------------------------------------

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._jobs[job.job_id] = job
        self.inner.submit_store(self._job(job))

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._jobs[job.job_id] = job
        self.inner.submit_load(self._job(job))

    def _job(self, job: JobMetadata) -> Any:
        return _compat.TransferJob(
            job_id=job.job_id,
            keys=job.keys,
            chunk_ids=job.block_ids,
            is_promotion=job.is_promotion,
            req_context=self._request(job.req_context),
            submit_time=job.submit_time,
        )

    @override
    def get_finished_jobs(self) -> list[JobResult]:
        return [self._result(result) for result in self.inner.get_finished_jobs()]

    def _result(self, result: Any) -> JobResult:
        job = self._jobs.pop(result.job_id, None)
        loaded: tuple[OffloadKey, ...] = ()
        if job is not None and not result.success:
            if job.is_promotion:
                loaded = tuple(result.successful_keys or ())
            failures = "load_failures" if job.is_promotion else "store_failures"
            self._counts[failures] += len(job.keys) - len(loaded)
        return JobResult(
            result.job_id,
            result.success,
            successful_keys=loaded,
            transfer_time_s=result.transfer_time or 0.0,
            transfer_bytes=result.transfer_bytes or 0,
        )

    @override
    def drain_jobs(self) -> Collection[JobId]:
        self.inner.drain_jobs()
        return ()

    # -- requests and steps ---------------------------------------------------------------------

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        request = self._requests[req_context.req_id] = _vllm_request(req_context)
        self._counted[req_context.req_id] = set()
        wanted = self.inner.on_new_request(request).policy
        if wanted is _compat.OffloadPolicy.REQUEST_LEVEL:
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._request(req_context)
        self._requests.pop(req_context.req_id, None)
        self._counted.pop(req_context.req_id, None)
        self.inner.on_request_finished(request)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.inner.on_schedule_end(
            _compat.ScheduleEndContext(context.new_req_ids, context.preempted_req_ids)
        )

    @override
    def has_pending_work(self) -> bool:
        return bool(self.inner.has_pending_work())

    def _request(self, req_context: ReqContext) -> Any:
        """Return the one context that vLLM has for a request; a new one for unknown requests."""
        return self._requests.get(req_context.req_id) or _vllm_request(req_context)

    # -- observation ----------------------------------------------------------------------------

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return [
            OffloadingEvent(tuple(event.keys), event.medium.value, event.removed)
            for event in self.inner.take_events()
        ]

    @override
    def get_stats(self) -> Mapping[str, float]:
        return self._counts

    def _count(self, key: OffloadKey, req_id: str, *, is_hit: bool) -> None:
        counted = self._counted.get(req_id)
        if counted is None or key in counted:
            return
        counted.add(key)
        self._counts["lookup_queries"] += 1
        self._counts["lookup_hits" if is_hit else "lookup_misses"] += 1

    # -- end ------------------------------------------------------------------------------------

    @override
    def shutdown(self) -> Collection[JobId]:
        self.inner.shutdown()
        self._view.release()
        return ()


def prepare_process(vllm_type: str) -> None:
    """Import a tier of vLLM's, and silence vLLM's log.

    It logs every failed job, with the exception, whose frames hold slices of the memory; and pytest
    keeps every record until the end of a test. Both would look as if the tier kept them.
    """
    _compat.SecondaryTierFactory.get_tier_class({"type": vllm_type})
    logging.getLogger("vllm").setLevel(logging.CRITICAL)


def _vllm_request(req_context: ReqContext) -> Any:
    return _compat.ReqContext(req_context.req_id, dict(req_context.kv_transfer_params) or None)


def _signed_view(primary: PrimaryView) -> memoryview:
    """Return the memory as vLLM's region shows it: shape (blocks, row stride), format ``b``."""
    flat = primary.view.cast("B")
    return flat.cast("b", (primary.num_blocks, primary.row_stride))
