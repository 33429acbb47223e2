"""One bucket as an object store: only what is a miss is a miss, and everything else is counted.

**Who owns what.** Everything here runs on the tier's loop.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol, cast, final

from kv_core.tierkit import Occasionally
from kv_tier_s3._advice import cannot_open
from kv_tier_s3._breaker import Breaker
from kv_tier_s3._counts import ErrorCounts
from kv_tier_s3._errors import S3Error, S3ErrorKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence
    from typing import TypeVar

    from botocore.credentials import ReadOnlyCredentials
    from typing_extensions import Buffer

    from kv_core.contract import TierContext
    from kv_tier_s3._config import S3Config
    from kv_tier_s3._credentials import CredentialChain

    ResultT = TypeVar("ResultT")

__all__ = ["Bucket", "S3Client", "cannot_open"]

_LOGGER: Final = logging.getLogger(__name__)

_BUCKET_KNOWN_S: Final = 0.2
"""How long a bucket that has answered is taken to be there, so that a thousand misses are not a
thousand questions. HEAD of an object does not tell whether the object or the bucket is missing."""

_NO_SUCH_NAME: Final = "kv-core-asks-whether-there-is-a-bucket"

_REFUSED: Final = frozenset({S3ErrorKind.DENIED, S3ErrorKind.EXPIRED})
"""Errors that other credentials may not meet."""

# What is an answer to a condition of such a request, and nothing that is wrong. Of requests without
# one the same kinds are errors.
_ANSWERS_TO_RANGES: Final = frozenset({S3ErrorKind.RANGE})
_ANSWERS_TO_CONDITIONS: Final = frozenset({S3ErrorKind.PRECONDITION, S3ErrorKind.UNSUPPORTED})

_WORTH_A_LINE_S: Final = 1.0
"""Requests that were given up sooner were not slow: the tier was shut down under them."""


class S3Client(Protocol):
    """What the engines have in common. All errors are :class:`S3Error`.

    Attributes:
        credentials: Where credentials come from that may change; ``None`` if they are settings.
    """

    @property
    def credentials(self) -> CredentialChain | None:
        """Where credentials come from."""

    async def open(self) -> None:
        """Get ready for requests."""

    async def close(self) -> None:
        """Let go of everything; also after an ``open`` that failed half way."""

    async def length(self, name: str) -> int:
        """Return the length of an object, by HEAD: the error of a missing one has no code."""

    async def get_range(self, name: str, start: int, end: int) -> Buffer:
        """Return a range of an object, as far as there is one; ``RANGE`` when there is nothing."""

    async def get_into(self, name: str, parts: Sequence[memoryview]) -> int:
        """Read an object into several buffers, and return its length.

        Of an object that is longer than the buffers any greater number will do, and nothing of it
        need be read; ``RANGE`` when it is empty is fine.
        """

    async def put(self, name: str, data: bytes | bytearray, *, only_new: bool = False) -> None:
        """Store an object in one request; with ``only_new``, ``PRECONDITION`` if there is one."""

    async def remove(self, name: str) -> None:
        """Remove an object; ``MISSING``, or nothing, when it is not there."""


@final
class Bucket:
    """The object store of a tier.

    Args:
        client: An engine, not open yet.
        context: What the tier was given.

    Attributes:
        client: The engine.
        counts: Errors by kind.
    """

    def __init__(self, client: S3Client, context: TierContext) -> None:
        config = cast("S3Config", context.config)
        self.client = client
        self._clock = context.clock
        self.counts = ErrorCounts(context.metrics)
        self._tier_name = context.tier_name
        self._bucket = config.bucket
        self._lookup_deadline_s = config.lookup_deadline_s
        self._nothing = f"{config.prefix}/{_NO_SUCH_NAME}" if config.prefix else _NO_SUCH_NAME
        self._breaker = Breaker(
            context.clock,
            config.error_backoff_s,
            self.counts.note_not_asked,
        )
        # When a request has succeeded last; when the bucket was looked at last, and what was seen.
        self._seen_at = float("-inf")
        self._looked_at = float("-inf")
        self._looked: S3Error | None = None
        self._looking = asyncio.Lock()
        self._has_conditions = True
        self._warnings: dict[S3ErrorKind, Occasionally] = {}

    async def open(self) -> None:
        """Get ready, and see that there is a bucket of S3.

        Raises:
            S3Error: There is not, or nobody can say.
        """
        await self.client.open()
        if self.client.credentials is not None:
            await self.client.credentials.get_frozen_credentials()
        await self.see_bucket()

    async def close(self) -> None:
        """Close the client."""
        await self.client.close()

    async def length(self, name: str) -> int:
        """Return the length of an object.

        Raises:
            FileNotFoundError: There is none, and the bucket is there.
            S3Error: It could not be found out.
        """
        return await self._breaker.call(lambda: self._length_in_time(name))

    async def get(self, name: str, most_bytes: int) -> Buffer:
        """Return an object, or the beginning of a longer one. Errors as for :meth:`length`."""
        return await self.get_range(name, 0, most_bytes)

    async def get_range(self, name: str, start: int, end: int) -> Buffer:
        """Return a range of an object; nothing when it is shorter. Errors as above."""
        try:
            return await self._answer(
                "get",
                name,
                lambda: self.client.get_range(name, start, end),
                answers=_ANSWERS_TO_RANGES,
            )
        except S3Error as error:
            if error.kind is S3ErrorKind.RANGE:
                return b""
            raise

    async def get_into(self, name: str, parts: Sequence[memoryview]) -> int:
        """Read an object into several buffers, and return its length. Errors as above."""
        try:
            return await self._answer(
                "get",
                name,
                lambda: self.client.get_into(name, parts),
                answers=_ANSWERS_TO_RANGES,
            )
        except S3Error as error:
            if error.kind is S3ErrorKind.RANGE:
                return 0
            raise

    async def put(self, name: str, data: bytes | bytearray) -> None:
        """Store an object."""
        await self._answer("put", name, lambda: self.client.put(name, data))

    async def put_new(self, name: str, data: bytes | bytearray) -> bool:
        """Store an object unless there is one, if the store has conditions; else store it."""
        if self._has_conditions:
            try:
                await self._answer(
                    "put",
                    name,
                    lambda: self.client.put(name, data, only_new=True),
                    answers=_ANSWERS_TO_CONDITIONS,
                )
            except S3Error as error:
                if error.kind is S3ErrorKind.PRECONDITION:
                    return False
                if error.kind is not S3ErrorKind.UNSUPPORTED:
                    raise
                self._has_conditions = False
            else:
                return True
        await self.put(name, data)
        return True

    async def remove(self, name: str) -> None:
        """Remove an object; one that is not there is removed already."""
        with suppress(FileNotFoundError):
            await self._answer("delete", name, lambda: self.client.remove(name))

    async def _length_in_time(self, name: str) -> int:
        # Nobody waits longer for it, and it would keep a connection from those who do.
        asking = self._answer("head", name, lambda: self.client.length(name))
        try:
            return await asyncio.wait_for(asking, self._lookup_deadline_s)
        except asyncio.TimeoutError:
            detail = f"no answer within {self._lookup_deadline_s:g} s (lookup_deadline_s)"
            raise self._timeout("head", name, detail) from None

    async def _answer(
        self,
        operation: str,
        name: str,
        ask: Callable[[], Awaitable[ResultT]],
        *,
        answers: Collection[S3ErrorKind] = (),
    ) -> ResultT:
        """Make a request and count what becomes of it, unless it is one of its ``answers``."""
        began = self._clock()
        try:
            return await self._ask(operation, name, ask)
        except asyncio.CancelledError:
            took_s = self._clock() - began
            error = self._timeout(operation, name, f"given up after {took_s:.1f} s")
            self.note(error, worth_a_line=took_s >= _WORTH_A_LINE_S)
            raise
        except S3Error as error:
            if error.kind not in answers:
                self.note(error)
            raise

    async def _ask(
        self, operation: str, name: str, ask: Callable[[], Awaitable[ResultT]]
    ) -> ResultT:
        """Make a request, and once more with other credentials if it is refused for these."""
        chain = self.client.credentials
        used = None if chain is None else await chain.get_frozen_credentials()
        try:
            return await self._seeing(ask)
        except S3Error as error:
            found = await self._explained(error)
        if found.kind in _REFUSED and await self._has_others(used):
            try:
                return await self._seeing(ask)
            except S3Error as error:
                found = await self._explained(error)
        if found.kind is S3ErrorKind.MISSING and operation != "put":
            raise FileNotFoundError(name)
        raise found

    async def _has_others(self, refused: ReadOnlyCredentials | None) -> bool:
        chain = self.client.credentials
        return chain is not None and refused is not None and await chain.renew(refused)

    async def _seeing(self, ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
        result = await ask()
        self._seen_at = self._clock()
        return result

    async def _explained(self, error: S3Error) -> S3Error:
        """Return an error with what HEAD has not told: which of several things it means."""
        if error.operation != "head" or error.status is None or error.s3_code is not None:
            return error
        if error.kind in {S3ErrorKind.THROTTLED, S3ErrorKind.SERVER, S3ErrorKind.TIMEOUT}:
            # What asks for patience is not to be asked twice as much.
            return error
        is_miss = error.kind is S3ErrorKind.MISSING
        if is_miss and self._clock() - self._seen_at < _BUCKET_KNOWN_S:
            return error
        try:
            await self.see_bucket()
        except S3Error as reason:
            return S3Error(
                reason.kind,
                error.operation,
                error.name,
                error.status,
                reason.s3_code,
                reason.detail,
            )
        return error

    async def see_bucket(self) -> None:
        """See that there is a bucket, as far as that may be asked.

        Raises:
            S3Error: There is none, or nobody can say.
        """
        async with self._looking:
            if self._clock() - self._looked_at >= _BUCKET_KNOWN_S:
                self._looked = await self._look()
                self._looked_at = self._clock()
            if self._looked is not None:
                raise self._looked.with_traceback(None)

    async def _look(self) -> S3Error | None:
        """Ask for an object that nobody makes; how that is refused tells what is there."""
        try:
            await self.client.get_range(self._nothing, 0, 1)
        except S3Error as error:
            # Who may use objects and not list them is told "denied" of those that are not there.
            if error.kind is S3ErrorKind.MISSING or error.s3_code == "AccessDenied":
                return None
            return error
        return S3Error(
            S3ErrorKind.NOT_S3,
            "get",
            f"{self._bucket}/{self._nothing}",
            None,
            None,
            "an object that nobody makes is there",
        )

    def _timeout(self, operation: str, name: str, detail: str) -> S3Error:
        return S3Error(S3ErrorKind.TIMEOUT, operation, f"{self._bucket}/{name}", None, None, detail)

    def note(self, error: S3Error, *, worth_a_line: bool = True) -> None:
        """Count an error, and log one of its kind once in a while."""
        self.counts.note(error.kind)
        due = self._warnings.setdefault(error.kind, Occasionally(self._clock))
        if worth_a_line and due.due():
            _LOGGER.warning("tier %r: %s", self._tier_name, error)
