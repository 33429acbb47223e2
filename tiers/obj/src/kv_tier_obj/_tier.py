"""The tier over NIXL's OBJ plugin: native threads move the objects, and what they bring is checked.

**Never a wrong byte.** NIXL says that an object was moved, and not how much of it there was: of one
that is too short the old contents of the memory stay behind, of one that is too long the rest is
left out, and instead of one that is missing there is the answer of the store that says so. So
objects carry the trailer of ``docs/spec/object-format.md``, and nothing comes into the primary tier
before it has been checked.

**Why a staging buffer.** One request moves one contiguous piece of memory, and behind a block in
the primary tier is the next block, not room for a trailer. The ways there are, 32 objects at a time
on the same server: through a staging slot with one copy, 479-543 MB/s to read at 1 MiB and 363-498
at 4 MiB; straight into the block and the trailer by a second request, 193-320 and 411-525; without
any trailer 356-422 and 400-557. The copy costs less than the noise; the second request does not. It
also keeps NIXL out of the primary tier: it is never registered there, so that no answer of a store
is ever written over a block, and a request that never ends holds a staging slot and no block. That
is why jobs end in time whatever NIXL does (``Capability.WITHDRAWS_IO``).

**What a lookup says.** That an object of the name is there: the question is NIXL's, for many
objects in one call, and it is told no length. What is wrong with the object shows when it is
loaded. To read the trailers instead takes one to three times as long (1,000 objects: 0.7-1.3 s, and
0.5-0.6 s).

**Who owns what.** Coroutines run on the loop's thread, which owns the staging slots and
``_waiting``. Each agent of NIXL belongs to a thread of its own: ``kv-<tier>-loads``,
``kv-<tier>-stores`` and ``kv-<tier>-asks``. Everything beside the blocks (the start, the
description of the namespace, removals, the reason of a failure) is asked through the client of
kv-tier-s3, which tells errors apart.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import time
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from kv_core.contract import MetricDefinition, MetricKind
from kv_core.errors import BlockDamagedError, TierOpenError
from kv_tier_fsspec.store import copy_bytes
from kv_tier_obj._answers import HEAD_BYTES, error_in
from kv_tier_obj._config import GUARD_BYTES, slot_bytes_of
from kv_tier_obj._mover import READ, WRITE, Mover, Transfer, TransferError
from kv_tier_obj._nixl import open_agent
from kv_tier_obj._prober import ObjectProber
from kv_tier_obj._staging import Staging
from kv_tier_s3.bucket import (
    DEFAULT_REGION,
    BucketTier,
    S3Error,
    S3ErrorKind,
    S3fsStore,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_core.contract import OffloadKey
    from kv_tier_obj._config import ObjConfig
    from kv_tier_obj._nixl import Agent
    from kv_tier_s3.bucket import S3Client

__all__ = ["ObjTier"]

_LOGGER: Final = logging.getLogger(__name__)

_PATIENCE_SHARE: Final = 0.3
"""Of the job deadline: how long a shutdown waits for what NIXL has not ended."""

_LOOK_EVERY_S: Final = 0.005

_GIVEN_UP: Final = "obj_requests_given_up"
_SLOTS_FREE: Final = "obj_staging_slots_free"
_METRICS: Final = (
    MetricDefinition(
        _GIVEN_UP,
        MetricKind.COUNTER,
        "Requests that nobody waited for any longer, and that NIXL cannot withdraw.",
    ),
    MetricDefinition(
        _SLOTS_FREE,
        MetricKind.GAUGE,
        "Staging slots that neither a block nor a request of NIXL has.",
    ),
)

_LATE: Final = TransferError("no end in time")

_serial: Final = itertools.count()


@final
class ObjTier(BucketTier):
    """One checksummed object a block, in one bucket, moved by NIXL."""

    config: ObjConfig

    # -- life -----------------------------------------------------------------------------------

    @override
    async def open_bucket(self) -> None:
        # Refused, if it is, before there is anything to close.
        self._environment = self.config.nixl_environment()
        await super().open_bucket()
        form = self._blocks.format
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Transfer, asyncio.Future[TransferError | None]] = {}
        self._given_up = 0
        # What an object that is too long writes over. Nobody who writes one can know it.
        self._guard = secrets.token_bytes(GUARD_BYTES)
        self._memory = Staging(
            slot_bytes_of(form.object_bytes),
            self.config.most_slots(form.object_bytes),
            users=2,
        )
        name = f"kv-{self.context.tier_name}"
        self._loads = self._make_mover(READ, form.object_bytes + GUARD_BYTES, f"{name}-loads")
        self._stores = self._make_mover(WRITE, form.object_bytes, f"{name}-stores")
        self._asker = ObjectProber(lambda: self._open_agent("asks"), name=f"{name}-asks")
        self._threads: tuple[Mover | ObjectProber, ...] = (self._loads, self._stores, self._asker)
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            await asyncio.wrap_future(thread.opened)
        await self._see_by_nixl(self._blocks.names.description)

    def _make_mover(self, operation: str, length_bytes: int, name: str) -> Mover:
        return Mover(
            lambda: self._open_agent(operation.lower()),
            self._memory,
            operation=operation,
            length_bytes=length_bytes,
            threads=self.config.threads,
            deliver=self._deliver,
            name=name,
        )

    def _open_agent(self, does: str) -> Agent:
        # The name is what the two sides of a transfer are told apart by: of this agent only.
        name = f"kv-core-{self.context.tier_name}-{os.getpid()}-{next(_serial)}-{does}"
        return open_agent(
            name,
            self.config.nixl_parameters(_usual_region()),
            defaults=self.config.nixl_defaults(),
            environment=self._environment,
        )

    async def _see_by_nixl(self, name: str) -> None:
        """See that NIXL finds and reads what the other client has just read.

        Raises:
            S3Error: It does not.
            TierOpenError: It looks somewhere else.
        """
        async with self._memory.slot(stores=False) as slot:
            self._clear(slot)
            try:
                await self._get(name, slot)
            except S3Error as error:
                if error.kind is not S3ErrorKind.MISSING:
                    raise
            with self._memory.view(slot) as view:
                is_it = bytes(view[:1]) == b"{"
        if not (is_it and (await self._ask([name]))[0]):
            raise TierOpenError(
                f"NIXL does not find {name!r} in bucket {self.config.bucket!r}, where another "
                "client has just read it: check 'endpoint_url', 'addressing_style' and the "
                "variables of the environment that begin with AWS_"
            )

    @override
    async def close(self) -> None:
        await self._stop_threads()
        await super().close()

    async def _stop_threads(self) -> None:
        threads = [thread for thread in getattr(self, "_threads", ()) if thread.is_alive()]
        for thread in threads:
            thread.stop()
        end = time.monotonic() + self.config.job_deadline_s * _PATIENCE_SHARE
        while any(thread.is_alive() for thread in threads):
            if time.monotonic() >= end:
                _LOGGER.warning(
                    "tier %r: NIXL has requests that do not end; its threads and the staging "
                    "memory are left to them until they do",
                    self.context.tier_name,
                )
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    @override
    def make_client(self) -> S3Client:
        return S3fsStore(self.config.control())

    @override
    def get_stats(self) -> Mapping[str, float]:
        return {
            **super().get_stats(),
            _GIVEN_UP: float(self._given_up),
            _SLOTS_FREE: float(self._memory.free),
        }

    @override
    def build_metric_definitions(self) -> Sequence[MetricDefinition]:
        return (*super().build_metric_definitions(), *_METRICS)

    # -- lookups --------------------------------------------------------------------------------

    @override
    async def exists_many(self, keys: Sequence[OffloadKey]) -> Sequence[bool | BaseException]:
        names = [self._blocks.names.block(key) for key in keys]
        try:
            answers = await self._ask(names)
            if not all(answers):
                # To NIXL, a bucket that is not there is one without the object.
                await self._bucket.see_bucket()
        except S3Error as error:
            return [error] * len(keys)
        return answers

    async def _ask(self, names: Sequence[str]) -> list[bool]:
        """Ask NIXL which objects are there.

        Raises:
            S3Error: It could not be found out.
        """
        try:
            return await asyncio.wrap_future(self._asker.ask(names))
        except TransferError as error:
            raise await self._reason(error, "head", names[0]) from None

    # -- transfers ------------------------------------------------------------------------------

    @override
    async def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        name = self._blocks.names.block(key)
        async with self._memory.slot(stores=False) as slot:
            self._clear(slot)
            try:
                await self._get(name, slot)
            except S3Error as error:
                if error.kind is S3ErrorKind.MISSING:
                    raise self._blocks.missing(key) from None
                if error.kind is S3ErrorKind.RANGE:
                    raise BlockDamagedError(f"block {key.hex()}: the object is empty") from None
                raise
            self._take(key, slot, buffer)

    @override
    async def write_block(self, key: OffloadKey, data: memoryview) -> int:
        name = self._blocks.names.block(key)
        async with self._memory.slot(stores=True) as slot:
            form = self._blocks.format
            with (
                self._memory.view(slot) as view,
                view[: form.payload_bytes] as target,
            ):
                copy_bytes(target, data)
                # Of the copy, which is what is sent.
                view[form.payload_bytes : form.object_bytes] = form.trailer(key, target)
            try:
                await self._move(self._stores, "put", name, slot)
            except TransferError as error:
                raise refusal(await self._reason(error, "put", name)) from None
        return len(data)

    def _clear(self, slot: int) -> None:
        """Make sure that nothing in a slot can be taken for what is about to be read."""
        form = self._blocks.format
        with self._memory.view(slot) as view:
            view[:1] = b"\0"
            view[form.payload_bytes : form.object_bytes] = bytes(
                form.object_bytes - form.payload_bytes
            )
            view[form.object_bytes : form.object_bytes + GUARD_BYTES] = self._guard

    def _take(self, key: OffloadKey, slot: int, buffer: memoryview) -> None:
        """Check what was read, and copy it into the primary tier if it is the block."""
        form = self._blocks.format
        with (
            self._memory.view(slot) as view,
            view[: form.payload_bytes] as payload,
            view[form.payload_bytes : form.object_bytes] as trailer,
        ):
            if view[form.object_bytes : form.object_bytes + GUARD_BYTES] != self._guard:
                raise BlockDamagedError(
                    f"block {key.hex()}: the object is longer than {form.object_bytes} bytes"
                )
            form.check(key, payload, trailer)
            copy_bytes(buffer, payload)

    async def _get(self, name: str, slot: int) -> None:
        """Read an object into a slot that has been cleared.

        Raises:
            S3Error: NIXL could not.
        """
        try:
            await self._move(self._loads, "get", name, slot)
        except TransferError as error:
            with self._memory.view(slot) as view:
                answer = error_in(bytes(view[:HEAD_BYTES]), "get", f"{self.config.bucket}/{name}")
            if answer is None:
                answer = await self._reason(error, "get", name)
            elif answer.kind not in {S3ErrorKind.MISSING, S3ErrorKind.RANGE}:
                self._bucket.note(answer)
            raise answer from None

    async def _move(self, mover: Mover, operation: str, name: str, slot: int) -> None:
        """Have NIXL move an object between its slot and the store.

        Raises:
            TransferError: It could not.
            S3Error: It did not within the time for a request.
        """
        transfer = Transfer(name, slot)
        done = self._waiting[transfer] = self._loop.create_future()
        # Until NIXL lets go of it, whatever becomes of this coroutine.
        self._memory.hold(slot)
        mover.submit(transfer)
        timeout_s = self.config.request_timeout_s
        timer = self._loop.call_later(timeout_s, _end_wait, done)
        try:
            failure = await done
        finally:
            timer.cancel()
            if self._waiting.pop(transfer, None) is not None:
                self._given_up += 1
                self.context.metrics.add(_GIVEN_UP)
        if failure is _LATE:
            error = S3Error(
                S3ErrorKind.TIMEOUT,
                operation,
                f"{self.config.bucket}/{name}",
                None,
                None,
                f"no end within {timeout_s:g} s (request_timeout_s)",
            )
            self._bucket.note(error)
            raise error
        if failure is not None:
            raise failure

    def _deliver(self, ended: list[Transfer], freed: list[int]) -> None:
        """Hand on what the mover's thread tells."""
        try:
            self._loop.call_soon_threadsafe(self._delivered, ended, freed)
        except RuntimeError:
            # The loop has ended, and with it everybody who could wait for this.
            return

    def _delivered(self, ended: list[Transfer], freed: list[int]) -> None:
        for transfer in ended:
            done = self._waiting.pop(transfer, None)
            if done is not None and not done.done():
                done.set_result(transfer.error)
        for slot in freed:
            self._memory.drop(slot)

    # -- reasons --------------------------------------------------------------------------------

    async def _reason(self, error: TransferError, operation: str, name: str) -> S3Error:
        """Find out why NIXL could not do something: ask the store in a way that tells."""
        where = f"{self.config.bucket}/{name}"
        try:
            await self._bucket.length(name)
        except S3Error as found:
            # Counted by the bucket.
            return S3Error(found.kind, operation, where, found.status, found.s3_code, found.detail)
        except FileNotFoundError:
            pass
        # Short: the log shows no more than some 300 characters of an error.
        detail = f"{error}; another client is answered"
        if operation == "put":
            detail += ": check s3:PutObject, and 'req_checksum'"
        reason = S3Error(S3ErrorKind.OTHER, operation, where, None, None, detail)
        self._bucket.note(reason)
        return reason


def _end_wait(done: asyncio.Future[TransferError | None]) -> None:
    if not done.done():
        done.set_result(_LATE)


def _usual_region() -> str:
    """Return the region to sign with at a store that is not AWS, if the settings name none."""
    named = (os.environ.get(name) for name in ("AWS_DEFAULT_REGION", "AWS_REGION"))
    return next(filter(None, named), DEFAULT_REGION)
