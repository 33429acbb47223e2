"""What secondary tiers need of the primary one."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kv_core.contract import OffloadingEvent, OffloadKey, ReqContext
from kv_core.cpu import CPUOffloadingManager, CPUPrimaryTierOffloadingManager, PreparedWrite
from kv_core.engine import LookupResult
from kv_core.errors import ConfigError, EngineStateError, RegionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Store = Callable[[CPUOffloadingManager, Sequence[OffloadKey], str], list[int]]

Primary = CPUPrimaryTierOffloadingManager


def _reserve(primary: Primary, keys: Sequence[OffloadKey]) -> PreparedWrite:
    prepared = primary.prepare_write(keys)
    assert prepared is not None
    return prepared


# -- cascades -----------------------------------------------------------------------------------


def test_a_read_names_slots_in_order_and_pins_them(
    primary: Primary, keys: list[OffloadKey], store: Store
) -> None:
    """Slots come as ``int32``, and stay until each read has ended."""
    slots = store(primary, keys[:2], "a")
    block_ids = primary.prepare_read([keys[1], keys[0]])
    assert block_ids.dtype == np.int32
    assert block_ids.tolist() == [slots[1], slots[0]]
    primary.prepare_read(keys[:1])
    primary.complete_read(block_ids)
    assert primary.get_stats()["blocks_pinned"] == 1
    primary.complete_read([slots[0]])
    assert primary.get_stats()["blocks_pinned"] == 0


def test_a_read_checks_all_keys_before_it_pins_any(
    primary: Primary, keys: list[OffloadKey], store: Store
) -> None:
    """A key that is not ready is named, and nothing is pinned."""
    store(primary, keys[:1], "a")
    with pytest.raises(EngineStateError, match=keys[1].hex()):
        primary.prepare_read(keys[:2])
    assert primary.get_stats()["blocks_pinned"] == 0


def test_a_read_is_no_use(primary: Primary, keys: list[OffloadKey], store: Store) -> None:
    """Copying down says nothing about demand."""
    store(primary, keys[:4], "a")
    primary.complete_read(primary.prepare_read(keys[3:4]))
    output = primary.prepare_store(keys[4:5], ReqContext("b"))
    assert output is not None
    assert output.evicted_keys == (keys[3],)


def test_the_end_of_a_read_that_is_not_running_is_ignored(
    primary: Primary, keys: list[OffloadKey], store: Store
) -> None:
    """A second completion takes neither the pin of a load nor anything else."""
    slots = store(primary, keys[:1], "a")
    primary.prepare_load(keys[:1], ReqContext("a"))
    primary.complete_read([slots[0], 3])
    assert primary.get_stats()["blocks_pinned"] == 1
    assert primary.get_stats()["blocks_free"] == 3


# -- promotions ---------------------------------------------------------------------------------


def test_a_promotion_makes_blocks_ready_one_by_one(
    primary: Primary, keys: list[OffloadKey], request_a: ReqContext
) -> None:
    """Each key has its own outcome (vllm#50321)."""
    prepared = _reserve(primary, keys[:2])
    assert prepared == PreparedWrite((0, 1), (1, 1), ())
    assert primary.lookup(keys[0], request_a) is LookupResult.PENDING
    assert primary.block_id_of(keys[1]) == 1
    assert primary.generation_of(1) == 1
    assert primary.complete_write(keys[0], 0, 1, success=True) is True
    assert primary.complete_write(keys[1], 1, 1, success=False) is False
    assert primary.is_ready(keys[0])
    assert primary.block_id_of(keys[1]) is None
    assert list(primary.take_events()) == [OffloadingEvent((keys[0],), "CPU", False)]


def test_a_promotion_evicts_but_never_what_is_protected(
    primary: Primary, keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """Protected keys and hits of this step stay; without other candidates there is no room."""
    store(primary, keys[:4], "w")
    primary.lookup(keys[3], request_a)
    prepared = primary.prepare_write(keys[4:5], protected=[keys[2]])
    assert prepared is not None
    assert prepared.evicted_keys == (keys[1],)
    assert primary.prepare_write(keys[5:7], protected=[keys[2]]) is None
    assert primary.is_ready(keys[0])


def test_a_promotion_of_a_known_key_is_refused(
    primary: Primary, keys: list[OffloadKey], store: Store
) -> None:
    """Two writers of one key are a fault of the caller; nothing is reserved."""
    store(primary, keys[:1], "a")
    with pytest.raises(EngineStateError, match=f"{keys[0].hex()} is present"):
        primary.prepare_write([keys[1], keys[0]])
    with pytest.raises(EngineStateError, match=r"2 keys .* only 1 distinct"):
        primary.prepare_write([keys[1], keys[1]])
    assert primary.get_stats()["blocks_free"] == 3


def test_a_store_cannot_complete_a_promotion(
    primary: Primary, keys: list[OffloadKey], request_a: ReqContext
) -> None:
    """A late completion by key does not declare unwritten bytes ready."""
    _reserve(primary, keys[:1])
    primary.complete_store(keys[:1], request_a)
    primary.complete_store(keys[:1], request_a, success=False)
    assert primary.lookup(keys[0], request_a) is LookupResult.PENDING


def test_a_promotion_cannot_complete_a_store(
    primary: Primary, keys: list[OffloadKey], request_a: ReqContext
) -> None:
    """A slot that the GPU writes is not a promotion's to complete."""
    primary.prepare_store(keys[:1], request_a)
    assert primary.complete_write(keys[0], 0, 1, success=True) is False
    assert primary.lookup(keys[0], request_a) is LookupResult.PENDING


@pytest.mark.parametrize(
    ("block_id", "generation"), [(0, 2), (0, 0), (1, 1), (3, 0), (-1, 1), (4, 1)]
)
def test_a_completion_with_another_slot_or_generation_is_ignored(
    block_id: int,
    generation: int,
    primary: Primary,
    keys: list[OffloadKey],
    request_a: ReqContext,
) -> None:
    """Completions match by key, slot and generation, and never raise."""
    _reserve(primary, keys[:1])
    assert primary.complete_write(keys[0], block_id, generation, success=True) is False
    assert primary.lookup(keys[0], request_a) is LookupResult.PENDING


def test_a_completion_with_another_key_is_ignored(
    primary: Primary, keys: list[OffloadKey], request_a: ReqContext
) -> None:
    """The right slot for the wrong key makes nothing ready."""
    _reserve(primary, keys[:1])
    assert primary.complete_write(keys[1], 0, 1, success=True) is False
    assert primary.lookup(keys[0], request_a) is LookupResult.PENDING


def test_a_duplicate_completion_is_ignored(primary: Primary, keys: list[OffloadKey]) -> None:
    """The second report of a job changes nothing, also after the slot has a new owner."""
    _reserve(primary, keys[:1])
    assert primary.complete_write(keys[0], 0, 1, success=False) is False
    assert primary.complete_write(keys[0], 0, 1, success=True) is False
    assert primary.get_stats()["blocks_free"] == 4
    for key in keys[:4]:
        _reserve(primary, [key])
    assert primary.block_id_of(keys[3]) == 0
    assert primary.complete_write(keys[3], 0, 1, success=True) is False
    assert not primary.is_ready(keys[3])


def test_free_and_evictable_slots_are_counted(
    primary: Primary, keys: list[OffloadKey], request_a: ReqContext, store: Store
) -> None:
    """Pinned and written slots are neither."""
    assert primary.num_free_or_evictable() == 4
    store(primary, keys[:2], "w")
    assert primary.num_free_or_evictable() == 4
    primary.prepare_load(keys[:1], request_a)
    _reserve(primary, keys[2:3])
    assert primary.num_free_or_evictable() == 2


# -- abandoned promotions -----------------------------------------------------------------------


def test_an_abandoned_promotion_is_absent_and_its_slot_out_of_use(
    primary: Primary, keys: list[OffloadKey], request_a: ReqContext
) -> None:
    """A stalled write costs a slot for a while, not a request (vllm#49829)."""
    _reserve(primary, keys[:1])
    assert primary.abandon_write(keys[0], 0, 1) is True
    assert primary.abandon_write(keys[0], 0, 1) is False
    assert primary.lookup(keys[0], request_a) is LookupResult.MISS
    assert primary.get_stats()["blocks_orphaned"] == 1
    output = primary.prepare_store(keys[:1], request_a)
    assert output is not None
    assert output.store_spec.block_ids.tolist() == [1]  # type: ignore[attr-defined]


def test_a_late_success_is_adopted_while_the_key_is_absent(
    primary: Primary, keys: list[OffloadKey], request_a: ReqContext
) -> None:
    """The bytes are there after all, and nobody else wrote them."""
    _reserve(primary, keys[:1])
    primary.abandon_write(keys[0], 0, 1)
    assert primary.complete_write(keys[0], 0, 1, success=True) is True
    assert primary.lookup(keys[0], request_a) is LookupResult.HIT
    assert primary.get_stats()["blocks_orphaned"] == 0
    assert list(primary.take_events()) == [OffloadingEvent((keys[0],), "CPU", False)]


@pytest.mark.parametrize("reason", ["failure", "key came back", "reset"])
def test_a_late_report_otherwise_only_frees_the_slot(
    reason: str, primary: Primary, keys: list[OffloadKey], request_a: ReqContext
) -> None:
    """A failure, a new copy of the key, or a reset in between: the old bytes are not used."""
    _reserve(primary, keys[:1])
    primary.abandon_write(keys[0], 0, 1)
    if reason == "key came back":
        primary.prepare_store(keys[:1], request_a)
    elif reason == "reset":
        primary.reset_cache()
        assert primary.get_stats()["blocks_orphaned"] == 1
    assert primary.complete_write(keys[0], 0, 1, success=reason != "failure") is False
    assert primary.get_stats()["blocks_orphaned"] == 0
    assert not primary.is_ready(keys[0])


# -- the memory ---------------------------------------------------------------------------------


def test_shutdown_releases_the_view_and_then_closes_the_region() -> None:
    """The region is told once, after the last export of the ledger is gone."""
    view = memoryview(bytearray(8192)).cast("B", (2, 4096))
    closed: list[bool] = []

    def close() -> None:
        with pytest.raises(ValueError, match="released"):
            view.tobytes()
        closed.append(True)

    primary = Primary(2, view, 4096, on_shutdown=close)
    assert primary.get_kv_memoryview() is view
    primary.shutdown()
    primary.shutdown()
    assert closed == [True]


def test_shutdown_names_a_view_that_is_still_held() -> None:
    """A tier that kept an export is told of, and a second try works."""
    view = memoryview(bytearray(8192)).cast("B", (2, 4096))
    closed: list[bool] = []
    primary = Primary(2, view, 4096, on_shutdown=lambda: closed.append(True))
    held = pickle.PickleBuffer(primary.get_kv_memoryview())
    with pytest.raises(RegionError, match="Shut the tiers down first"):
        primary.shutdown()
    assert closed == []
    held.release()
    primary.shutdown()
    assert closed == [True]


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes", "message"),
    [(3, 4096, r"shape \(3, row_stride\)"), (2, 4097, "row stride 4096"), (2, 0, "found 0")],
)
def test_a_view_that_does_not_fit_is_refused(
    num_blocks: int, block_bytes: int, message: str
) -> None:
    """Slots and payload must lie within the mapping."""
    view = memoryview(bytearray(8192)).cast("B", (2, 4096))
    with pytest.raises(ConfigError, match=message):
        Primary(num_blocks, view, block_bytes)


# -- one by one and all at once -----------------------------------------------------------------


def _primary(num_blocks: int, *, enable_events: bool = False) -> Primary:
    view = memoryview(bytearray(num_blocks * 512)).cast("B", (num_blocks, 512))
    return Primary(num_blocks, view, 512, enable_events=enable_events)


def test_one_slot_is_reserved_as_several_are(keys: list[OffloadKey]) -> None:
    """Room is made when there is none, the caller hears of it, and there may be none to make."""
    primary = _primary(2)
    evicted: list[OffloadKey] = []
    slots = [primary.reserve(key, evicted.extend) for key in keys[:2]]
    assert slots == [0, 1]
    assert primary.reserve(keys[2], evicted.extend) is None
    assert primary.complete_write(keys[0], 0, 1, success=True)
    assert primary.reserve(keys[2], evicted.extend) == 0
    assert evicted == [keys[0]]
    assert primary.generations_of([0, 1]) == (2, 1)


def test_the_writes_of_a_job_end_together(keys: list[OffloadKey]) -> None:
    """Good ones are readable, bad ones gone, given-up ones adopted, stale ones ignored."""
    primary = _primary(4, enable_events=True)
    slots = [primary.reserve(key, lambda _: None) for key in keys[:4]]
    assert slots == [0, 1, 2, 3]
    assert primary.abandon_write(keys[1], 1, 1)
    ready = primary.complete_writes(
        keys[:4], [0, 1, 2, 3], [1, 1, 1, 7], {keys[0], keys[1], keys[3]}
    )
    assert ready == keys[:2]
    assert [primary.is_ready(key) for key in keys[:4]] == [True, True, False, False]
    assert primary.get_stats()["blocks_writing"] == 1
    assert primary.get_stats()["blocks_free"] == 1
    events = [key for event in primary.take_events() for key in event.keys]
    assert events == keys[:2]
