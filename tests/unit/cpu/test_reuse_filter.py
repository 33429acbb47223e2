"""The filter in front of the ledger that admits what is asked for again."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from typing_extensions import override

from kv_core.contract import (
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from kv_core.cpu import CPUOffloadingManager, FilterReusedOffloadingManager
from kv_core.engine import (
    CPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    PrepareStoreOutput,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


class RecordingManager(OffloadingManager):
    """Writes down every call and answers something recognizable."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.output: PrepareStoreOutput | None = PrepareStoreOutput((), CPULoadStoreSpec([]))

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self.calls.append(("lookup", key, req_context))
        return LookupResult.RETRY

    @override
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self.calls.append(("prepare_load", keys, req_context))
        return CPULoadStoreSpec([7])

    @override
    def complete_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        self.calls.append(("complete_load", keys, req_context))

    @override
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self.calls.append(("prepare_store", keys, req_context))
        return self.output

    @override
    def complete_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, success: bool = True
    ) -> None:
        self.calls.append(("complete_store", keys, req_context, success))

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.calls.append(("touch", keys, req_context))

    @override
    def release(self, req_context: ReqContext) -> None:
        self.calls.append(("release", req_context))

    @override
    def hit_level(self, key: OffloadKey, req_context: ReqContext) -> str:
        self.calls.append(("hit_level", key, req_context))
        return "fs"

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        self.calls.append(("take_events",))
        return (OffloadingEvent((), "X", removed=True),)

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.calls.append(("on_new_request", req_context))
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self.calls.append(("on_request_finished", req_context))

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.calls.append(("on_schedule_end", context))

    @override
    def has_pending_work(self) -> bool:
        self.calls.append(("has_pending_work",))
        return True

    @override
    def reset_cache(self) -> None:
        self.calls.append(("reset_cache",))

    @override
    def on_reset_flushed(self) -> None:
        self.calls.append(("on_reset_flushed",))

    @override
    def get_stats(self) -> Mapping[str, float]:
        return {"blocks_total": 9}

    @override
    def shutdown(self) -> None:
        self.calls.append(("shutdown",))


def _passed(
    manager: FilterReusedOffloadingManager,
    backing: RecordingManager,
    keys: Sequence[OffloadKey],
    req_id: str,
) -> list[OffloadKey]:
    manager.prepare_store(keys, ReqContext(req_id))
    return cast("list[OffloadKey]", backing.calls[-1][1])


def test_a_block_passes_once_enough_requests_have_offered_it(keys: list[OffloadKey]) -> None:
    """With a threshold of 3, the third distinct request gets it stored, and later ones too."""
    backing = RecordingManager()
    manager = FilterReusedOffloadingManager(backing, store_threshold=3)
    passed = [len(_passed(manager, backing, keys[:1], req_id)) for req_id in "abcd"]
    assert passed == [0, 0, 1, 1]


def test_the_same_request_counts_once(keys: list[OffloadKey]) -> None:
    """Offering again, as after a decline, is no reuse."""
    backing = RecordingManager()
    manager = FilterReusedOffloadingManager(backing)
    assert [_passed(manager, backing, keys[:1], "a") for _ in range(3)] == [[], [], []]
    assert _passed(manager, backing, keys[:1], "b") == [keys[0]]


def test_a_reused_block_passes_wherever_it_is_in_the_prefix(keys: list[OffloadKey]) -> None:
    """What lies behind a block seen for the first time counts as well (vllm#52022)."""
    backing = RecordingManager()
    manager = FilterReusedOffloadingManager(backing)
    assert _passed(manager, backing, [keys[0], keys[5], keys[6]], "a") == []
    assert _passed(manager, backing, [keys[1], keys[5], keys[6]], "b") == [keys[5], keys[6]]


def test_filtered_blocks_are_not_declined(keys: list[OffloadKey]) -> None:
    """Nobody needs to offer them again; an empty rest is still delegated."""
    manager = FilterReusedOffloadingManager(CPUOffloadingManager(2))
    output = manager.prepare_store(keys[:2], ReqContext("a"))
    assert output is not None
    assert (output.keys_to_store, output.declined_keys) == ((), ())


def test_an_empty_offer_is_delegated(keys: list[OffloadKey]) -> None:
    """The backing manager polls its tiers in every prepare_store."""
    backing = RecordingManager()
    assert _passed(FilterReusedOffloadingManager(backing), backing, [], "a") == []
    assert len(backing.calls) == 1


def test_a_decline_of_the_backing_manager_is_handed_on(keys: list[OffloadKey]) -> None:
    """``None`` stays ``None``."""
    backing = RecordingManager()
    backing.output = None
    manager = FilterReusedOffloadingManager(backing)
    assert manager.prepare_store(keys[:1], ReqContext("a")) is None


def test_the_least_recently_counted_block_is_forgotten(keys: list[OffloadKey]) -> None:
    """The tracker is bounded, and an offer renews its place."""
    backing = RecordingManager()
    manager = FilterReusedOffloadingManager(backing, max_tracker_size=2)
    for key in (keys[0], keys[1], keys[0], keys[2]):
        _passed(manager, backing, [key], "a")
    assert manager.get_stats()["reuse_filter_tracked"] == 2
    assert _passed(manager, backing, keys[:1], "b") == [keys[0]]
    assert _passed(manager, backing, keys[1:2], "b") == []


@pytest.mark.parametrize(("threshold", "size"), [(1, 10), (0, 10), (2, 0)])
def test_useless_settings_are_refused(threshold: int, size: int) -> None:
    """A threshold below 2 filters nothing, an empty tracker everything."""
    with pytest.raises(ValueError, match="must be at least"):
        FilterReusedOffloadingManager(RecordingManager(), threshold, size)


def test_stats_add_to_those_of_the_backing_manager(keys: list[OffloadKey]) -> None:
    """What was filtered is counted next to what the ledger counts."""
    manager = FilterReusedOffloadingManager(RecordingManager())
    manager.prepare_store(keys[:3], ReqContext("a"))
    manager.prepare_store(keys[:1], ReqContext("b"))
    assert manager.get_stats() == {
        "blocks_total": 9,
        "reuse_filter_tracked": 3,
        "reuse_filter_filtered": 3,
    }


CONTEXT = ReqContext("r")
KEYS = (OffloadKey(b"k0000"),)
STEP = ScheduleEndContext(frozenset({"r"}))

DELEGATED: list[tuple[tuple[object, ...], Callable[[OffloadingManager], object], object]] = [
    (("lookup", KEYS[0], CONTEXT), lambda m: m.lookup(KEYS[0], CONTEXT), LookupResult.RETRY),
    (("complete_load", KEYS, CONTEXT), lambda m: m.complete_load(KEYS, CONTEXT), None),
    (
        ("complete_store", KEYS, CONTEXT, False),
        lambda m: m.complete_store(KEYS, CONTEXT, success=False),
        None,
    ),
    (("touch", KEYS, CONTEXT), lambda m: m.touch(KEYS, CONTEXT), None),
    (("release", CONTEXT), lambda m: m.release(CONTEXT), None),
    (("hit_level", KEYS[0], CONTEXT), lambda m: m.hit_level(KEYS[0], CONTEXT), "fs"),
    (("take_events",), lambda m: m.take_events(), (OffloadingEvent((), "X", removed=True),)),
    (
        ("on_new_request", CONTEXT),
        lambda m: m.on_new_request(CONTEXT),
        RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL),
    ),
    (("on_request_finished", CONTEXT), lambda m: m.on_request_finished(CONTEXT), None),
    (("on_schedule_end", STEP), lambda m: m.on_schedule_end(STEP), None),
    (("has_pending_work",), lambda m: m.has_pending_work(), True),
    (("reset_cache",), lambda m: m.reset_cache(), None),
    (("on_reset_flushed",), lambda m: m.on_reset_flushed(), None),
    (("shutdown",), lambda m: m.shutdown(), None),
]


@pytest.mark.parametrize(
    ("recorded", "call", "answer"), DELEGATED, ids=[str(case[0][0]) for case in DELEGATED]
)
def test_everything_else_is_delegated(
    recorded: tuple[object, ...], call: Callable[[OffloadingManager], object], answer: object
) -> None:
    """Arguments and answers pass unchanged."""
    backing = RecordingManager()
    assert call(FilterReusedOffloadingManager(backing)) == answer
    assert backing.calls == [recorded]


def test_loads_are_delegated(keys: list[OffloadKey]) -> None:
    """The spec is the backing manager's own object."""
    backing = RecordingManager()
    spec = FilterReusedOffloadingManager(backing).prepare_load(keys[:1], CONTEXT)
    assert backing.calls == [("prepare_load", keys[:1], CONTEXT)]
    assert isinstance(spec, CPULoadStoreSpec)
    assert spec.block_ids.tolist() == [7]


def test_every_method_of_the_interface_is_delegated() -> None:
    """A method added to the interface must not fall back to its inert default here."""
    for name, member in vars(OffloadingManager).items():
        if callable(member) and not name.startswith("_"):
            assert name in vars(FilterReusedOffloadingManager), name
