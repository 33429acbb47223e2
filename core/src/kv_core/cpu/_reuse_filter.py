"""Admits to the primary tier only what has been asked for more than once."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from kv_core.engine import OffloadingManager

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kv_core.contract import (
        OffloadingEvent,
        OffloadKey,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
    )
    from kv_core.engine import LoadStoreSpec, LookupResult, PrepareStoreOutput

__all__ = ["FilterReusedOffloadingManager"]

_LEAST_THRESHOLD: Final = 2


@final
class FilterReusedOffloadingManager(OffloadingManager):
    """Passes a block on to the backing manager once enough distinct requests have offered it.

    Offers are counted, not lookups: a lookup ends at the first miss, so what lies behind it would
    never be counted and could be kept out for ever. Offering again counts nothing for the same
    request. Blocks that are filtered out are not declined: nobody needs to offer them again.

    One thread at a time; nothing blocks that the backing manager does not block.
    """

    def __init__(
        self,
        backing: OffloadingManager,
        store_threshold: int = 2,
        max_tracker_size: int = 64_000,
    ) -> None:
        """Wrap a manager.

        Args:
            backing: The manager that does the work.
            store_threshold: Distinct requests that must offer a block, at least 2.
            max_tracker_size: Blocks to keep counts of; the least recently counted goes.

        Raises:
            ValueError: The threshold is below 2 or the tracker holds nothing.
        """
        if store_threshold < _LEAST_THRESHOLD:
            raise ValueError(
                f"store_threshold must be at least {_LEAST_THRESHOLD}, found {store_threshold}; "
                "leave the filter out to store every block"
            )
        if max_tracker_size < 1:
            raise ValueError(f"max_tracker_size must be at least 1, found {max_tracker_size}")
        self._backing = backing
        self._store_threshold = store_threshold
        self._max_tracker_size = max_tracker_size
        # Requests that offered a block, no more than the threshold; least recently counted first.
        self._offered_by: OrderedDict[OffloadKey, tuple[str, ...]] = OrderedDict()
        self._num_filtered = 0

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        admitted = [key for key in keys if self._count(key, req_context.req_id)]
        self._num_filtered += len(keys) - len(admitted)
        return self._backing.prepare_store(admitted, req_context)

    def _count(self, key: OffloadKey, req_id: str) -> bool:
        """Count an offer and say whether the block may pass."""
        offered_by = self._offered_by
        requests = offered_by.get(key, ())
        if len(requests) < self._store_threshold and req_id not in requests:
            requests = (*requests, req_id)
        offered_by[key] = requests
        offered_by.move_to_end(key)
        if len(offered_by) > self._max_tracker_size:
            offered_by.popitem(last=False)
        return len(requests) >= self._store_threshold

    @override
    def get_stats(self) -> Mapping[str, float]:
        return {
            **self._backing.get_stats(),
            "reuse_filter_tracked": len(self._offered_by),
            "reuse_filter_filtered": self._num_filtered,
        }

    # -- everything else is the backing manager's -----------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._backing.lookup(key, req_context)

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        return self._backing.prepare_load(keys, req_context)

    @override
    def complete_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        self._backing.complete_load(keys, req_context, success=success)

    @override
    def complete_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        self._backing.complete_store(keys, req_context, success=success)

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._backing.touch(keys, req_context)

    @override
    def release(self, req_context: ReqContext) -> None:
        self._backing.release(req_context)

    @override
    def hit_level(self, key: OffloadKey, req_context: ReqContext) -> str:
        return self._backing.hit_level(key, req_context)

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._backing.take_events()

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return self._backing.on_new_request(req_context)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._backing.on_request_finished(req_context)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._backing.on_schedule_end(context)

    @override
    def has_pending_work(self) -> bool:
        return self._backing.has_pending_work()

    @override
    def reset_cache(self) -> None:
        self._backing.reset_cache()

    @override
    def on_reset_flushed(self) -> None:
        self._backing.on_reset_flushed()

    @override
    def reset(self, epoch: int) -> None:
        self._backing.reset(epoch)

    @override
    def take_lost_keys(self) -> Collection[OffloadKey]:
        return self._backing.take_lost_keys()

    @override
    def shutdown(self) -> None:
        self._backing.shutdown()
