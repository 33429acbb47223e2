"""vLLM's ``OffloadingManager`` over our tiering manager.

All state belongs to the scheduler's thread.

vLLM's connector differs from what our manager was written for in these ways:

* Completions name their keys in a set, so the order of a load is remembered here.
* Stores are always completed as successful; which were not, the workers have marked in the region.
* Before 0.33 it does not say that pre-reset copies have ended. It hands the workers, with the next
  step, all jobs to wait for, and so it is concluded here: from the end of any job that was made
  after the reset, or from so many steps that the workers must have carried that one out.
* After a reset it offers all blocks of running requests once more. Those of before that have left a
  sliding window may belong to other requests by then, and after an update of the weights all are of
  the old ones. So requests that had blocks then are not stored from, where one of the two may be.
* Its cursor moves past every block of a batch that was not declined as a whole. Our manager
  declines whole batches, and takes the leading part only of those that could never fit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_core.contract import OffloadPolicy, ReqContext, ScheduleEndContext
from kv_core.engine import LookupResult
from kv_core.tiering import PARAMS_KEY, EngineReset
from kv_core.vllm import _compat
from kv_core.vllm._rows import PrimaryRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from kv_core.engine import OffloadingManager
    from kv_core.keys import OffloadKey
    from kv_core.vllm._metrics import StatsFeed

__all__ = ["KVCoreOffloadingManager"]

_LOGGER: Final = logging.getLogger(__name__)

# Looking a member up on its enum class costs as much as the rest of a lookup on Python 3.11.
_HIT: Final = LookupResult.HIT
_MISS: Final = LookupResult.MISS
_PENDING: Final = LookupResult.PENDING
_VLLM_HIT: Final = _compat.LookupResult.HIT
_VLLM_MISS: Final = _compat.LookupResult.MISS
_VLLM_PENDING: Final = _compat.LookupResult.HIT_PENDING
_VLLM_RETRY: Final = _compat.LookupResult.RETRY


@final
class KVCoreOffloadingManager(_compat.OffloadingManager):  # type: ignore[misc]  # vLLM is not typed
    """Speaks vLLM's interface to vLLM's scheduler, and ours to our tiering manager."""

    def __init__(
        self,
        manager: OffloadingManager,
        *,
        feed: StatsFeed,
        take_failed: Callable[[Sequence[OffloadKey]], Collection[OffloadKey]],
        shutdown: Callable[[], None],
        engine_reset: EngineReset,
        flush_steps: int,
        has_windows: bool,
        level_types: Mapping[str, str],
    ) -> None:
        """Take over a manager.

        Args:
            manager: Ours.
            feed: Turns its measurements into vLLM's.
            take_failed: Tells, of blocks whose store has ended, which could not be copied.
            shutdown: Ends the manager and everything around it.
            engine_reset: What vLLM's reset of the connector's cache means.
            flush_steps: Ends of steps after a reset, the first one included, by which the workers
                have carried out the first step.
            has_windows: Whether a group of layers forgets blocks while a request runs.
            level_types: Types of the tiers by their names.
        """
        self._manager = manager
        self._lookup = manager.lookup
        self._feed = feed
        self._take_failed = take_failed
        self._shutdown = shutdown
        self._engine_reset = engine_reset
        self._flush_steps = flush_steps
        levels = {"cpu": "cpu", **level_types}
        self._sources = {name: _compat.hit_source(kind) for name, kind in levels.items()}
        self._contexts: dict[str, ReqContext] = {}
        # The keys of each request's load, in order; vLLM has one load of a request at a time.
        self._loads: dict[str, tuple[OffloadKey, ...]] = {}
        self._stores_in_flight = 0
        # Ends of steps until pre-reset copies have ended for certain; 0 when there are none.
        self._steps_to_flush = 0
        self._epoch = 0
        # Live requests that have blocks on the GPU, and those whose blocks are not to be stored.
        self._has_windows = has_windows
        self._started: set[str] = set()
        self._outdated: set[str] = set()

    # -- loads ----------------------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: _compat.ReqContext) -> _compat.LookupResult:
        context = self._contexts.get(req_context.req_id)
        if context is None:
            context = self._remember(req_context)
        answer = self._lookup(key, context)
        if answer is _HIT:
            return _VLLM_HIT
        if answer is _MISS:
            return _VLLM_MISS
        return _VLLM_PENDING if answer is _PENDING else _VLLM_RETRY

    @override
    def get_load_source(self, key: OffloadKey, req_context: _compat.ReqContext) -> Any:
        return self._sources[self._manager.hit_level(key, self._context(req_context))]

    @override
    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: _compat.ReqContext
    ) -> PrimaryRows:
        ordered = tuple(keys)
        spec = self._manager.prepare_load(ordered, self._context(req_context))
        self._loads[req_context.req_id] = ordered
        return PrimaryRows.of(spec)

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: _compat.ReqContext) -> None:
        # Workers finish everything older than a reset before what is newer.
        self.on_reset_flushed()
        ordered = self._loads.pop(req_context.req_id, None)
        if ordered is None:
            _LOGGER.debug("ignored the end of an unknown load of request %s", req_context.req_id)
            return
        self._manager.complete_load(ordered, self._context(req_context))

    @override
    def touch(self, keys: Collection[OffloadKey], req_context: _compat.ReqContext) -> None:
        self._manager.touch(tuple(keys), self._context(req_context))

    # -- stores ---------------------------------------------------------------------------------

    @override
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: _compat.ReqContext
    ) -> _compat.PrepareStoreOutput | None:
        offered = () if req_context.req_id in self._outdated else tuple(keys)
        output = self._manager.prepare_store(offered, self._context(req_context))
        if output is None:
            return None
        if output.keys_to_store:
            self._stores_in_flight += 1
        return _compat.PrepareStoreOutput(
            keys_to_store=list(output.keys_to_store),
            store_spec=PrimaryRows.of(output.store_spec),
            evicted_keys=list(output.evicted_keys),
        )

    @override
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: _compat.ReqContext,
        success: bool = True,
    ) -> None:
        # Workers finish everything older than a reset before what is newer.
        self.on_reset_flushed()
        self._stores_in_flight = max(0, self._stores_in_flight - 1)
        context = self._context(req_context)
        ended = tuple(keys)
        failed = self._take_failed(ended) if success else ended
        if failed:
            self._manager.complete_store(tuple(failed), context, success=False)
            ended = tuple(set(ended).difference(failed))
        if ended:
            self._manager.complete_store(ended, context)

    # -- requests and steps ---------------------------------------------------------------------

    def _context(self, req_context: _compat.ReqContext) -> ReqContext:
        """Return our word for a request, which may have ended."""
        return self._contexts.get(req_context.req_id) or _our_context(req_context)

    def _remember(self, req_context: _compat.ReqContext) -> ReqContext:
        context = self._contexts[req_context.req_id] = _our_context(req_context)
        return context

    @override
    def on_new_request(self, req_context: _compat.ReqContext) -> _compat.RequestOffloadingContext:
        answer = self._manager.on_new_request(self._remember(req_context))
        if answer.policy is OffloadPolicy.REQUEST_LEVEL:
            return _compat.RequestOffloadingContext(_compat.OffloadPolicy.REQUEST_LEVEL)
        return _compat.RequestOffloadingContext(_compat.block_level_policy())

    @override
    def on_request_finished(self, req_context: _compat.ReqContext) -> None:
        self._manager.on_request_finished(self._context(req_context))
        self._contexts.pop(req_context.req_id, None)
        self._started.discard(req_context.req_id)
        self._outdated.discard(req_context.req_id)

    @override
    def on_schedule_end(self, context: _compat.ScheduleEndContext) -> None:
        self._manager.on_schedule_end(
            ScheduleEndContext(frozenset(context.new_req_ids), frozenset(context.preempted_req_ids))
        )
        self._started.update(context.new_req_ids)
        if self._outdated:
            # They begin anew.
            self._outdated.difference_update(context.preempted_req_ids)
        if self._steps_to_flush > 1:
            self._steps_to_flush -= 1
        else:
            self.on_reset_flushed()

    @override
    def has_pending_work(self) -> bool:
        return bool(self._steps_to_flush) or self._manager.has_pending_work()

    # -- resets ---------------------------------------------------------------------------------

    @override
    def reset_cache(self) -> None:
        """Empty the cache; by configuration, make everything that was ever stored unreachable."""
        if self._engine_reset is EngineReset.EPOCH:
            self._epoch += 1
            self._manager.reset(self._epoch)
        else:
            self._manager.reset_cache()
        if self._loads or self._stores_in_flight or self._steps_to_flush:
            self._steps_to_flush = self._flush_steps
        else:
            self._manager.on_reset_flushed()
        if self._has_windows or self._engine_reset is EngineReset.EPOCH:
            self._outdated |= self._started.union(self._loads).intersection(self._contexts)
        # vLLM reports none of them any more.
        self._loads.clear()
        self._stores_in_flight = 0

    def on_reset_flushed(self) -> None:
        """Note that pre-reset copies have ended; from 0.33 on vLLM says so itself."""
        if self._steps_to_flush:
            self._steps_to_flush = 0
            self._manager.on_reset_flushed()

    # -- observation and end --------------------------------------------------------------------

    @override
    def take_events(self) -> Iterable[_compat.OffloadingEvent]:
        return [
            _compat.offloading_event(
                event.keys, None if event.medium == "CPU" else event.medium, removed=event.removed
            )
            for event in self._manager.take_events()
        ]

    @override
    def get_stats(self) -> Any:
        return self._feed.take()

    @override
    def shutdown(self) -> None:
        self._shutdown()


def _our_context(req_context: _compat.ReqContext) -> ReqContext:
    """Translate a request, with what its client wishes in vLLM's words."""
    params = req_context.kv_transfer_params or {}
    if not _compat.may_load_from_storage(req_context):
        wishes = params.get(PARAMS_KEY)
        if wishes is None:
            wishes = {}
        if isinstance(wishes, Mapping):
            params = {**params, PARAMS_KEY: {**wishes, "tiers": False}}
    return ReqContext(req_context.req_id, params)
