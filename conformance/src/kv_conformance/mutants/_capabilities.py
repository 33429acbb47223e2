"""Mutants of INT, EVT, DEL, USE, WITHDRAW, and of what is not declared."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import (
    DictHarness,
    DictTier,
    FolderHarness,
    FolderTier,
    dict_spec,
    folder_spec,
)
from kv_core.contract import Capability, TierUsage
from kv_core.errors import BlockDamagedError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import (
        JobMetadata,
        OffloadingEvent,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
        TierContext,
    )

_ALL_BUT_WITHDRAWAL: Final = frozenset(Capability) - {Capability.WITHDRAWS_IO}
_HEAD_BYTES: Final = 256


# -- INT ------------------------------------------------------------------------------------------


class _ChecksTheStart(FolderTier):
    """Keeps checksums beside the blocks, over their first bytes."""

    @override
    def open(self) -> None:
        super().open()
        self._sums: dict[OffloadKey, int] = {}

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        self._sums[key] = zlib.crc32(data[:_HEAD_BYTES])
        return super().write_block(key, data)

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        try:
            super().read_block(key, buffer)
        except BlockDamagedError as error:
            # By its length the object is whole; so is its head.
            if "length" in str(error) or self._sums.get(key) != zlib.crc32(buffer[:_HEAD_BYTES]):
                raise


@mutant(
    "INT-1",
    breaks="Its checksum covers the head of a block only.",
    source="vllm#54363: a file of the right length with wrong bytes is taken for good",
    also=frozenset({"DATA-1"}),
)
def checks_the_head_only(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ChecksTheStart))


class _DamageIsNotCounted(FolderTier):
    @override
    def get_stats(self) -> Mapping[str, float]:
        return {**super().get_stats(), "load_failures": 0.0}


@mutant(
    "INT-1",
    breaks="Finds damage, repairs it, and counts nothing: nobody learns that the disk is dying.",
    source="errors that are handled so well that no one sees them",
    also=frozenset({"MET-1"}),
)
def damage_is_not_counted(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DamageIsNotCounted))


# -- EVT ------------------------------------------------------------------------------------------


class _TellsNoRemovals(FolderTier):
    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return [event for event in super().take_events() if not event.removed]


@mutant(
    "EVT-1",
    breaks="Emits no event for what it evicts or retires.",
    source="vllm#47923: events that part from the storage, and never meet it again",
)
def tells_no_removals(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_TellsNoRemovals))


class _ForgetsEventsInRush(FolderTier):
    """Keeps the last events only."""

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return list(super().take_events())[-1:]


@mutant(
    "EVT-1",
    breaks="Keeps one event between two polls: the latest.",
    source="LMCache#3532, vllm#43468: events lost on the way",
    also=frozenset({"EVT-2"}),
)
def keeps_the_last_event(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ForgetsEventsInRush))


class _TellsAtSubmit(FolderTier):
    @override
    def submit_store(self, job: JobMetadata) -> None:
        for key in job.keys:
            self.note_stored(key)
        super().submit_store(job)


@mutant(
    "EVT-2",
    breaks="Emits stored when a store is submitted, whether it succeeds or not.",
    source="vllm#43468: events that no transfer stands behind",
    also=frozenset({"EVT-1"}),
)
def tells_at_submit(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_TellsAtSubmit))


class _RemovalsFirst(FolderTier):
    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return sorted(super().take_events(), key=lambda event: not event.removed)


@mutant(
    "EVT-2",
    breaks="Keeps stored and removed in two lists, and emits the removals first.",
    source="batching by kind: the order between the two is lost",
    also=frozenset({"EVT-1"}),
)
def removals_first(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_RemovalsFirst))


# -- DEL and USE ----------------------------------------------------------------------------------


class _DeletesNextStep(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._next_step: list[OffloadKey] = []

    @override
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        self._next_step.extend(keys)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        keys, self._next_step = self._next_step, []
        if keys:
            super().delete(keys)
        super().on_schedule_end(context)


@mutant(
    "DEL-1",
    breaks="Collects deletions until the end of the step, and serves the blocks until then.",
    source="the batching of deletions, before anything hides the keys",
)
def deletes_at_the_end_of_the_step(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DeletesNextStep))


class _HidesOnly(FolderTier):
    @override
    def _sweep(self, keys: tuple[OffloadKey, ...]) -> None:
        """Leave the objects where they are."""


@mutant(
    "DEL-1",
    breaks="Hides deleted keys and keeps their objects, which a restart brings back.",
    source="a deletion of the index entry alone",
    also=frozenset({"EVT-1", "USE-1", "CAP-4"}),
)
def hides_deleted_keys_only(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_HidesOnly))


class _DeletedForEver(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._gone: set[OffloadKey] = set()

    @override
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        self._gone.update(keys)
        super().delete(keys)

    @override
    def exists(self, key: OffloadKey) -> bool:
        return key not in self._gone and super().exists(key)

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        if key in self._gone:
            raise BlockDamagedError("it was deleted")
        super().read_block(key, buffer)


@mutant(
    "DEL-1",
    breaks="Never forgets that a key was deleted: what is stored again cannot be loaded.",
    source="tombstones without an end",
    also=frozenset({"EVT-1"}),
)
def deleted_for_ever(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_DeletedForEver))


class _UsageOfThisRun(FolderTier):
    @override
    def open(self) -> None:
        super().open()
        self._found = self._count

    @override
    def usage(self) -> TierUsage:
        usage = super().usage()
        blocks = max(0, usage.blocks - self._found)
        return TierUsage(
            blocks=blocks,
            bytes=blocks * self.context.block_bytes,
            capacity_blocks=usage.capacity_blocks,
        )


@mutant(
    "USE-1",
    breaks="Reports what was added since the opening, and not what is there.",
    source="LMCache#4564: usage starts at 0 after a restart",
    also=frozenset({"CAP-3", "CAP-4"}),
)
def usage_of_this_run(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_UsageOfThisRun))


class _UsageInBlocksOnly(FolderTier):
    @override
    def usage(self) -> TierUsage:
        usage = super().usage()
        return TierUsage(blocks=usage.blocks, bytes=usage.blocks * 16)


@mutant(
    "USE-1",
    breaks="Takes tokens for bytes, and tells no capacity although it has one.",
    source="llm-d-router#1650: routers that cannot see how large a tier is",
)
def usage_in_tokens(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_UsageInBlocksOnly))


# -- WITHDRAW -------------------------------------------------------------------------------------


class _WaitsForStores(DictTier):
    """Breaks loads off at their deadline, and lets stores take as long as they take."""

    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._endless = context.config.model_copy(update={"job_deadline_s": 1e9})

    @override
    def _advance(self, job: Any) -> None:
        usual = self._config
        if not job.metadata.is_promotion:
            self._config = self._endless  # type: ignore[assignment]  # a DictConfig, too
        try:
            super()._advance(job)
        finally:
            self._config = usual


@mutant(
    "WITHDRAW-1",
    breaks="Withdraws loads at their deadline, and waits for stores as long as they take.",
    source="vllm#49829: a stalled write holds its blocks for ever",
    also=frozenset({"JOB-5"}),
)
def waits_for_stalled_stores(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_WaitsForStores))


# -- not declared ---------------------------------------------------------------------------------


@mutant(
    "UNDECLARED-PERSISTENT",
    breaks="Finds its blocks again without having declared it.",
    source="LMCache#1139, vllm#47636: keys that differ from process to process",
)
def persists_in_secret(workdir: Path) -> Harness:
    """Make the harness."""
    capabilities = _ALL_BUT_WITHDRAWAL - {Capability.PERSISTENT}
    return FolderHarness(workdir, folder_spec(capabilities=capabilities))


@mutant(
    "UNDECLARED-EVENTS",
    breaks="Emits events without having declared them.",
    source="a switch of the kit that was left on",
)
def tells_in_secret(workdir: Path) -> Harness:
    """Make the harness."""
    capabilities = _ALL_BUT_WITHDRAWAL - {Capability.EVENTS}
    return FolderHarness(workdir, folder_spec(capabilities=capabilities))


class _DeleteDoesNothing(DictTier):
    @override
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Do nothing."""


@mutant(
    "UNDECLARED-DELETE",
    breaks="Takes a deletion and does nothing.",
    source="an empty method to satisfy a caller",
)
def delete_does_nothing(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_DeleteDoesNothing))


class _DeletesBeforeItRefuses(DictTier):
    @override
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.store.remove(key)
        raise UnsupportedError("deleting is not supported")


@mutant(
    "UNDECLARED-DELETE",
    breaks="Refuses a deletion when it has done it.",
    source="a refusal that was put in later, at the wrong end",
)
def deletes_before_it_refuses(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_DeletesBeforeItRefuses))


class _MadeUpUsage(DictTier):
    @override
    def usage(self) -> TierUsage:
        return TierUsage(blocks=0, bytes=0)


@mutant(
    "UNDECLARED-USAGE",
    breaks="Reports that it is empty, whatever it holds.",
    source="a default that looks like an answer",
)
def made_up_usage(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_MadeUpUsage))


class _TouchRaises(DictTier):
    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        raise UnsupportedError("touching is not supported")


@mutant(
    "UNDECLARED-TOUCH",
    breaks="Raises when blocks are touched.",
    source="taking touch for a method that is refused when it is not declared",
)
def touch_raises(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_TouchRaises))


class _TouchStores(DictTier):
    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        for key in keys:
            self.store.objects.setdefault(key, b"")


@mutant(
    "UNDECLARED-TOUCH",
    breaks="Makes an entry for whatever is touched.",
    source="a dictionary that grows when it is asked",
)
def touch_makes_entries(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_TouchStores))
