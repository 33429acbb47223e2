"""The values that cross the contract: frozen, slotted, with inert defaults."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typing_extensions import override

from kv_core import contract
from kv_core.contract import (
    CONTRACT_VERSION,
    ContractVersion,
    JobId,
    JobMetadata,
    JobResult,
    LookupAnswer,
    NullMetrics,
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TierLimits,
)
from kv_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection

REQUEST = ReqContext("r1")

VALUES = [
    getattr(contract, name)
    for name in contract.__all__
    if dataclasses.is_dataclass(getattr(contract, name))
]


class _Minimal(SecondaryTierManager):
    """Implements what is abstract and nothing else."""

    def __init__(self) -> None: ...

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        return {b"a": True, b"b": False}.get(key)

    @override
    def submit_store(self, job: JobMetadata) -> None: ...

    @override
    def submit_load(self, job: JobMetadata) -> None: ...

    @override
    def get_finished_jobs(self) -> list[JobResult]:
        return []

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @override
    def drain_jobs(self) -> Collection[JobId]:
        return ()


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value.__name__)
def test_every_value_is_frozen_slotted_and_documented(value: Any) -> None:
    """Nobody changes what another holds, a misspelt attribute fails, fields are explained."""
    assert value.__dataclass_params__.frozen
    assert "__dict__" not in dir(value)
    documentation = inspect.getdoc(value) or ""
    for field in dataclasses.fields(value):
        assert f"\n    {field.name}: " in documentation


def test_there_are_values_to_check() -> None:
    """The parametrization above is not empty by accident."""
    assert {JobMetadata, JobResult, TierLimits, ReqContext} <= set(VALUES)


def test_assigning_a_field_fails() -> None:
    """Frozen means frozen."""
    result = JobResult(JobId(1), success=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.success = False  # type: ignore[misc]  # the point of the test


def test_a_request_is_hashable_and_its_default_parameters_are_immutable() -> None:
    """Contexts are keys of mappings; nobody can write into the shared default."""
    assert {REQUEST: 1}[ReqContext("r1")] == 1
    with pytest.raises(TypeError):
        REQUEST.kv_transfer_params["x"] = 1  # type: ignore[index]  # the point of the test


def test_requests_with_unhashable_parameters_are_hashable() -> None:
    """What a client sent along does not take part in the hash."""
    assert hash(ReqContext("r1", {"remote": ["a"]})) == hash(REQUEST)


def test_jobs_compare_by_identity() -> None:
    """Two jobs with the same fields are two jobs; arrays are not compared."""
    fields: dict[str, Any] = {
        "job_id": JobId(1),
        "keys": (OffloadKey(b"a"),),
        "block_ids": np.array([0], dtype=np.int32),
        "is_promotion": False,
        "req_context": REQUEST,
        "submit_time": 0.0,
    }
    job = JobMetadata(**fields)
    assert job == job
    assert job != JobMetadata(**fields)


def test_defaults_are_inert() -> None:
    """A value made with the least says the least."""
    result = JobResult(JobId(1), success=False)
    assert (result.successful_keys, result.error, result.transfer_bytes) == ((), None, 0)
    assert RequestOffloadingContext().policy is OffloadPolicy.BLOCK_LEVEL
    assert ScheduleEndContext().new_req_ids == frozenset()
    limits = TierLimits(job_deadline_s=1.0, lookup_deadline_s=1.0)
    assert (limits.min_retained_blocks, limits.max_block_bytes, limits.staging_bytes) == (
        1,
        None,
        0,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"job_deadline_s": 0},
        {"job_deadline_s": float("nan")},
        {"lookup_deadline_s": float("inf")},
        {"open_deadline_s": "30"},
        {"error_backoff_s": -0.1},
        {"visibility_delay_s": None},
        {"min_retained_blocks": 1.5},
        {"max_job_keys": 0},
        {"max_block_bytes": True},
        {"staging_bytes": -1},
        {"min_free_bytes": -1},
        {"min_free_bytes": 0.5},
    ],
)
def test_limits_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    """No deadline that never passes, no job of no keys: the engine acts on these numbers."""
    fields: dict[str, Any] = {"job_deadline_s": 1.0, "lookup_deadline_s": 1.0, **change}
    with pytest.raises(ValueError, match=f"limit '{next(iter(change))}' must be"):
        TierLimits(**fields)


def test_events_compare_by_value() -> None:
    """Events are counted and compared in tests of tiers."""
    event = OffloadingEvent((OffloadKey(b"a"),), "fs", removed=False)
    assert event == OffloadingEvent((OffloadKey(b"a"),), "fs", removed=False)


def test_the_contract_version_reads_as_written() -> None:
    """Versions compare as numbers and print with a dot."""
    assert str(ContractVersion(1, 10)) == "1.10"
    assert ContractVersion(1, 9) < ContractVersion(1, 10)
    assert (CONTRACT_VERSION.major, CONTRACT_VERSION.minor) == (1, 0)


def test_optional_methods_are_inert() -> None:
    """A tier that implements only what it must is complete."""
    tier = _Minimal()
    key = OffloadKey(b"a")
    tier.touch([key], REQUEST)
    tier.on_request_finished(REQUEST)
    tier.on_schedule_end(ScheduleEndContext())
    assert tier.has_pending_work() is False
    assert list(tier.take_events()) == []
    assert tier.get_stats() == {}
    assert list(tier.build_metric_definitions()) == []
    assert list(tier.shutdown()) == []


def test_lookup_many_asks_one_by_one_in_order() -> None:
    """The default keeps order and all three answers."""
    keys = [OffloadKey(key) for key in (b"b", b"a", b"c")]
    assert _Minimal().lookup_many(keys, REQUEST) == [False, True, None]


def test_undeclared_abilities_raise() -> None:
    """usage() and delete() are not silently ignored."""
    with pytest.raises(UnsupportedError, match="_Minimal does not report its usage"):
        _Minimal().usage()
    with pytest.raises(UnsupportedError, match=r"_Minimal cannot delete 1 block"):
        _Minimal().delete([OffloadKey(b"a")])


def test_a_tier_without_the_abstract_methods_cannot_be_made() -> None:
    """Python names what is missing."""
    with pytest.raises(TypeError, match="abstract"):
        SecondaryTierManager(None)  # type: ignore[abstract,arg-type]  # the point of the test


def test_null_metrics_keep_nothing() -> None:
    """The default sink takes everything and says who it is."""
    sink = NullMetrics()
    sink.add("reads")
    sink.set("depth", 3.0)
    sink.observe("read_seconds", 0.1)
    assert repr(sink) == "NullMetrics()"
