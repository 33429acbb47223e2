"""The base class for tiers over a blocking client: files, sockets, most libraries.

**Who owns what.** The hooks ``exists``, ``read_block``, ``write_block`` and ``retire`` run on
pool threads, several at a time. A pool thread owns the chunk it runs. The lock of
a key is held while the key is stored, and while a bad object is read again and retired, so a
fresh object is never retired in the place of the bad one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final

from typing_extensions import override

from kv_core.contract import JobErrorKind
from kv_core.tierkit._errors import (
    RETIRING_KINDS,
    BlockFailure,
    load_error_kind,
    moved_bytes,
    store_error_kind,
    without_frames,
)
from kv_core.tierkit._key_locks import KeyLocks
from kv_core.tierkit._pooled import PooledTier
from kv_core.tierkit._probes import ProbeThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_core.contract import OffloadKey, PrimaryView
    from kv_core.tierkit._base import Lookups
    from kv_core.tierkit._jobs import Chunk, Executor, Job
    from kv_core.tierkit._lookup import AsyncLookup, Question

__all__ = ["ThreadedTier"]

_PROBE_THREADS: Final = 2


class ThreadedTier(PooledTier):
    """A conforming tier made of three blocking functions.

    Write ``exists``, ``read_block`` and ``write_block``; add ``retire``, ``open`` and ``close``
    where the storage needs them. They may raise anything: ``BlockMissingError``,
    ``BlockDamagedError`` and ``BlockDeclinedError`` say what they say, ``ENOSPC`` and ``EDQUOT``
    count as declined, everything else as a failure of the backend. The kit keeps the rest of the
    contract: lookups, partial results, deadlines, drains, statistics, shutdown.

    Class of the configuration: derived from :class:`TierKitConfig`.

    Attributes:
        answers_at_once: Whether ``exists`` never blocks (an index in memory). Lookups then call
            it on the engine's thread and never answer unknown for lack of a probe. Set it at the
            latest in :meth:`open`.
    """

    answers_at_once: bool = False

    _lookups: AsyncLookup

    _hooks: ClassVar[tuple[str, ...]] = (
        "exists",
        "exists_many",
        "read_block",
        "write_block",
        "retire",
        "open",
        "close",
    )

    # -- to be written --------------------------------------------------------------------------

    @abstractmethod
    def exists(self, key: OffloadKey) -> bool:
        """Say whether a block can be loaded. Raise when that cannot be found out."""

    @abstractmethod
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        """Fill the buffer, all of it, with a block.

        Args:
            key: The block.
            buffer: Flat, writable, of the block's size; shared memory, valid until the return.
                Its contents are undefined after an error.

        Raises:
            BlockMissingError: There is no such object.
            BlockDamagedError: The object is not what was stored.
        """

    @abstractmethod
    def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        """Store a block, so that other threads and processes see all of it or nothing.

        Never called for one key on two threads at a time. A key that is present already counts
        as stored.

        Args:
            key: The block.
            data: Flat, read-only, of the block's size; shared memory, valid until the return.

        Returns:
            Bytes moved, for the statistics; ``None`` for all of them.

        Raises:
            BlockDeclinedError: The tier is full or throttled.
        """

    def retire(self, key: OffloadKey) -> None:
        """Remove the object of a block that turned out missing or damaged.

        Called while no store of the key runs in this process, right after a second read failed
        on the same thread. Without an override the kit answers absent for the key until it has
        been stored again.
        """

    def exists_many(self, keys: Sequence[OffloadKey]) -> Sequence[bool | BaseException]:
        """Answer :meth:`exists` for several keys; an error stands for the answer of its key.

        Override it when the backend takes batches.
        """
        answers: list[bool | BaseException] = []
        for key in keys:
            try:
                answers.append(self.exists(key))
            except BaseException as error:  # noqa: BLE001 - an error of one key stays with it
                answers.append(without_frames(error))
        return answers

    # -- life -----------------------------------------------------------------------------------

    @override
    def _open(self) -> tuple[Executor, Lookups]:
        name = f"kv-{self.context.tier_name}-lookup"
        self._locks = KeyLocks()
        self._probes = ProbeThreads(self._answer, num_threads=_PROBE_THREADS, name=name)
        return super()._open()

    @override
    def _start_lookups(self) -> Lookups:
        self._lookups = self._async_lookup(
            self._probes, probe_now=self.exists if self.answers_at_once else None
        )
        self._probes.start()
        return self._lookups

    @override
    def _stop_lookups(self, timeout_s: float | None) -> bool:
        return self._probes.stop(timeout_s)

    # -- probe threads --------------------------------------------------------------------------

    def _answer(self, questions: list[Question]) -> None:
        answers: Sequence[bool | BaseException]
        try:
            answers = self.exists_many([key for key, _ in questions])
        except BaseException as error:  # noqa: BLE001 - the whole batch was not answered
            answers = [without_frames(error)] * len(questions)
        for question, answer in zip(questions, answers, strict=True):
            self._lookups.answer(question, answer)

    # -- pool threads ---------------------------------------------------------------------------

    @override
    def _run_chunk(self, chunk: Chunk) -> None:
        job = chunk.job
        move = self._load_block if job.metadata.is_promotion else self._store_block
        try:
            while chunk.reached < chunk.stop and chunk.begin_block(self._clock()):
                chunk.record(move(job, chunk.reached))
            chunk.ended = self._clock()
        finally:
            self._finish_chunk(chunk)

    def _store_block(self, job: Job, index: int) -> BlockFailure | int:
        key = job.metadata.keys[index]
        if not self._locks.acquire(key, job.deadline - self._clock()):
            return BlockFailure(
                JobErrorKind.STALLED, "another store of the block did not end in time", 0
            )
        try:
            job.tickets[index] = next(self._tickets)
            moved = self._call(self.write_block, key, self._source, job.block_ids[index])
        finally:
            self._locks.release(key)
        if isinstance(moved, BaseException):
            return BlockFailure(store_error_kind(moved), self._describe(moved), 0)
        return self.context.block_bytes if moved is None else moved

    def _load_block(self, job: Job, index: int) -> BlockFailure | int:
        failure = self._read(job, index)
        if failure is None:
            return self.context.block_bytes
        if failure.kind not in RETIRING_KINDS:
            return failure
        key = job.metadata.keys[index]
        if not self._locks.acquire(key, job.deadline - self._clock()):
            return failure
        try:
            # A store may have replaced the object since: only what is bad now is retired.
            failure = self._read(job, index)
            if failure is None:
                return self.context.block_bytes
            if failure.kind not in RETIRING_KINDS or not self._retire(key):
                return failure
            return BlockFailure(failure.kind, failure.message, failure.ticket, retired=True)
        finally:
            self._locks.release(key)

    def _read(self, job: Job, index: int) -> BlockFailure | None:
        ticket = next(self._tickets)
        key = job.metadata.keys[index]
        error = self._call(self.read_block, key, self._target, job.block_ids[index])
        if isinstance(error, BaseException):
            return BlockFailure(load_error_kind(error), self._describe(error), ticket)
        return None

    def _retire(self, key: OffloadKey) -> bool:
        if type(self).retire is ThreadedTier.retire:
            return False
        try:
            self.retire(key)
        except BaseException as error:  # noqa: BLE001 - the kit remembers the key instead
            self._warn_not_retired(error)
            return False
        return True

    def _call(
        self,
        hook: Callable[[OffloadKey, memoryview], int | None],
        key: OffloadKey,
        primary: PrimaryView,
        block_id: int,
    ) -> int | BaseException | None:
        """Call a hook with the view of a slot; return what it returns or raises."""
        outcome: int | BaseException | None
        view = None
        try:
            view = primary.block(block_id)
            outcome = moved_bytes(hook.__name__, hook(key, view))
        except BaseException as error:  # noqa: BLE001 - one block's error fails that block
            outcome = without_frames(error)
        self._give_back(view, hook.__name__)
        return outcome
