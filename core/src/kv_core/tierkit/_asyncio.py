"""The base class for tiers over an asynchronous client: one event loop on one thread.

**Who owns what.** All hooks run on the loop's thread, which owns the key locks. The calling
thread reaches it only through :mod:`kv_core.tierkit._loop`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from abc import abstractmethod
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

from typing_extensions import override

from kv_core.contract import JobErrorKind
from kv_core.tierkit._base import KitTier
from kv_core.tierkit._errors import (
    RETIRING_KINDS,
    BlockFailure,
    load_error_kind,
    moved_bytes,
    store_error_kind,
    without_frames,
)
from kv_core.tierkit._loop import LoopExecutor, LoopProber, LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from kv_core.contract import OffloadKey, PrimaryView
    from kv_core.tierkit._base import Lookups
    from kv_core.tierkit._jobs import Chunk, Executor, Job
    from kv_core.tierkit._lookup import AsyncLookup, Question

__all__ = ["AsyncioTier"]

logger = logging.getLogger(__name__)

_OPEN_SHARE: Final = 0.9

_BROKEN_OFF: Final = (
    "the transfer was broken off, at the deadline of its job or by a drain or shutdown"
)


class AsyncioTier(KitTier):
    """A conforming tier made of three coroutines.

    The coroutine twin of :class:`ThreadedTier`: the same hooks with the same promises, all on
    one event loop on a thread of its own. ``io_threads`` is the number of chunks that are moved
    at a time; stores take at most half of them.

    A hook must not block: what blocks the loop stalls every job of the tier.

    Attributes:
        withdraws_io: Whether cancelling ``read_block`` or ``write_block`` ends its use of the
            buffer before the coroutine ends. Then jobs are cancelled at their deadline. Set it
            when the tier declares ``Capability.WITHDRAWS_IO``.
        open_deadline_s: Longest time for :meth:`open`; the same number as in the tier's limits.
    """

    withdraws_io: ClassVar[bool] = False
    open_deadline_s: ClassVar[float] = 30.0

    _lookups: AsyncLookup

    # -- to be written --------------------------------------------------------------------------

    @abstractmethod
    async def exists(self, key: OffloadKey) -> bool:
        """Say whether a block can be loaded. Raise when that cannot be found out."""

    @abstractmethod
    async def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        """Fill the buffer, all of it, with a block. See :meth:`ThreadedTier.read_block`."""

    @abstractmethod
    async def write_block(self, key: OffloadKey, data: memoryview) -> int | None:
        """Store a block, atomically. See :meth:`ThreadedTier.write_block`."""

    async def retire(self, key: OffloadKey) -> None:
        """Remove the object of a block that turned out missing or damaged.

        Called while no store of the key runs in this process, right after a second read failed.
        Without an override the kit answers absent for the key until it has been stored again.
        """

    async def exists_many(self, keys: Sequence[OffloadKey]) -> Sequence[bool | BaseException]:
        """Answer :meth:`exists` for several keys at a time; an error stands for an answer.

        Override it when the backend takes batches.
        """
        return await asyncio.gather(*(self._exists(key) for key in keys))

    async def open(self) -> None:
        """Open the storage, on the loop; before any other hook.

        When it raises, :meth:`close` is called, too: it must cope with a half-open storage.
        """

    async def close(self) -> None:
        """Close the storage, on the loop, after the last call of any other hook."""

    # -- life -----------------------------------------------------------------------------------

    @override
    def _open(self) -> tuple[Executor, Lookups]:
        self._locks = _KeyLocks()
        self._thread = LoopThread(f"kv-{self.context.tier_name}-loop")
        self._thread.start()
        end = time.monotonic() + self.open_deadline_s
        try:
            # The deadline covers the closing of what does not open.
            opening = self.open()
            _expect_coroutine("open", opening)
            self._thread.run(opening, self.open_deadline_s * _OPEN_SHARE)
        except BaseException:
            self._close(max(0.1, end - time.monotonic()))
            self._thread.stop(max(0.1, end - time.monotonic()))
            raise
        self._prober = LoopProber(self._thread, self._answer)
        executor = LoopExecutor(
            self._thread,
            self._run_chunk,
            self._finish_chunk,
            slots=self.config.io_threads,
            withdraws_io=self.withdraws_io,
        )
        self._lookups = self._async_lookup(self._prober)
        return executor, self._lookups

    @override
    def _stop(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        if not self._thread.stopping:
            if not self._ledger.wait_until_idle(timeout_s):
                return False
            with suppress(TimeoutError):
                self._thread.run(self._prober.end(), max(0.1, end - time.monotonic()))
            self._close(max(0.1, end - time.monotonic()))
        return self._thread.stop(max(0.1, end - time.monotonic()))

    def _close(self, timeout_s: float) -> None:
        try:
            closing = self.close()
            _expect_coroutine("close", closing)
            self._thread.run(closing, timeout_s)
        except Exception as error:  # noqa: BLE001 - must not hide why the storage is given up
            logger.error(  # noqa: TRY400 - a traceback would repeat secrets
                "tier %r: close() raised: %s", self.context.tier_name, self._describe(error)
            )

    # -- the loop's thread ----------------------------------------------------------------------

    async def _exists(self, key: OffloadKey) -> bool | BaseException:
        try:
            answer = self.exists(key)
            _expect_coroutine("exists", answer)
            return await answer
        except BaseException as error:  # noqa: BLE001 - an error of one key stays with it
            return without_frames(error)

    async def _answer(self, questions: list[Question]) -> None:
        answers: Sequence[bool | BaseException]
        try:
            answers = await self.exists_many([key for key, _ in questions])
        except BaseException as error:  # noqa: BLE001 - the whole batch was not answered
            answers = [without_frames(error)] * len(questions)
        for question, answer in zip(questions, answers, strict=True):
            self._lookups.answer(question, answer)

    @override
    async def _run_chunk(self, chunk: Chunk) -> None:
        job = chunk.job
        move = self._load_block if job.metadata.is_promotion else self._store_block
        while chunk.reached < chunk.stop and chunk.begin_block(self._clock()):
            chunk.record(await move(job, chunk.reached))
        chunk.ended = self._clock()

    async def _store_block(self, job: Job, index: int) -> BlockFailure | int:
        key = job.metadata.keys[index]
        if not await self._locks.acquire(key, job.deadline - self._clock()):
            return BlockFailure(
                JobErrorKind.STALLED, "another store of the block did not end in time", 0
            )
        try:
            job.tickets[index] = next(self._tickets)
            moved = await self._call(self.write_block, key, self._source, job.block_ids[index])
        finally:
            self._locks.release(key)
        if isinstance(moved, BaseException):
            return BlockFailure(_store_kind(moved), self._describe_transfer(moved), 0)
        return self.context.block_bytes if moved is None else moved

    async def _load_block(self, job: Job, index: int) -> BlockFailure | int:
        failure = await self._read(job, index)
        if failure is None:
            return self.context.block_bytes
        if failure.kind not in RETIRING_KINDS:
            return failure
        key = job.metadata.keys[index]
        if not await self._locks.acquire(key, job.deadline - self._clock()):
            return failure
        try:
            # A store may have replaced the object since: only what is bad now is retired.
            failure = await self._read(job, index)
            if failure is None:
                return self.context.block_bytes
            if failure.kind not in RETIRING_KINDS or not await self._retire(key):
                return failure
            return BlockFailure(failure.kind, failure.message, failure.ticket, retired=True)
        finally:
            self._locks.release(key)

    async def _read(self, job: Job, index: int) -> BlockFailure | None:
        ticket = next(self._tickets)
        key = job.metadata.keys[index]
        error = await self._call(self.read_block, key, self._target, job.block_ids[index])
        if isinstance(error, BaseException):
            return BlockFailure(_load_kind(error), self._describe_transfer(error), ticket)
        return None

    def _describe_transfer(self, error: BaseException) -> str:
        # Its own text is its name, which tells an operator nothing.
        return _BROKEN_OFF if isinstance(error, asyncio.CancelledError) else self._describe(error)

    async def _retire(self, key: OffloadKey) -> bool:
        if type(self).retire is AsyncioTier.retire:
            return False
        try:
            await self.retire(key)
        except BaseException as error:  # noqa: BLE001 - the kit remembers the key instead
            self._warn_not_retired(error)
            return False
        return True

    async def _call(
        self,
        hook: Callable[[OffloadKey, memoryview], Coroutine[Any, Any, int | None]],
        key: OffloadKey,
        primary: PrimaryView,
        block_id: int,
    ) -> int | BaseException | None:
        """Call a hook with the view of a slot; return what it returns or raises."""
        outcome: int | BaseException | None
        view = None
        try:
            view = primary.block(block_id)
            moving = hook(key, view)
            _expect_coroutine(hook.__name__, moving)
            outcome = moved_bytes(hook.__name__, await moving)
        except BaseException as error:  # noqa: BLE001 - one block's error fails that block
            outcome = without_frames(error)
        self._give_back(view, hook.__name__)
        return outcome


def _expect_coroutine(hook: str, returned: Any) -> None:
    if not inspect.isawaitable(returned):
        raise TypeError(
            f"{hook} returned a {type(returned).__name__}, expected a coroutine: write "
            f"'async def {hook}', or derive from ThreadedTier"
        )


def _load_kind(error: BaseException) -> JobErrorKind:
    # Only the deadline, a drain or the shutdown cancels a transfer.
    if isinstance(error, asyncio.CancelledError):
        return JobErrorKind.STALLED
    return load_error_kind(error)


def _store_kind(error: BaseException) -> JobErrorKind:
    if isinstance(error, asyncio.CancelledError):
        return JobErrorKind.STALLED
    return store_error_kind(error)


@final
class _KeyLocks:
    """One lock per key that is in use: the coroutine twin of ``KeyLocks``. Loop's thread only."""

    def __init__(self) -> None:
        # The waiters of a key, first in line first; a key without an entry is free.
        self._waiters: dict[OffloadKey, deque[asyncio.Future[None]]] = {}

    async def acquire(self, key: OffloadKey, timeout_s: float) -> bool:
        """Take the lock of a key, waiting at most ``timeout_s`` seconds. Not reentrant."""
        waiters = self._waiters.get(key)
        if waiters is None:
            self._waiters[key] = deque()
            return True
        turn = asyncio.get_running_loop().create_future()
        waiters.append(turn)
        try:
            await asyncio.wait((turn,), timeout=max(0.0, timeout_s))
        except asyncio.CancelledError:
            if turn.done():
                self.release(key)
            else:
                waiters.remove(turn)
            raise
        if turn.done():
            return True
        waiters.remove(turn)
        return False

    def release(self, key: OffloadKey) -> None:
        """Give the lock of a key to the next in line, or back."""
        waiters = self._waiters[key]
        if waiters:
            waiters.popleft().set_result(None)
        else:
            del self._waiters[key]
