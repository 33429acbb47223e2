"""One bucket as an object store: only what is a miss is a miss, and everything else is counted.

**Who owns what.** Everything here runs on the tier's loop.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol, final

from kv_core.errors import TierOpenError
from kv_core.tierkit import Occasionally
from kv_tier_s3._errors import S3Error, S3ErrorKind

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from typing import TypeVar

    from typing_extensions import Buffer

    from kv_core.contract import TierContext
    from kv_tier_s3._config import S3Config

    ResultT = TypeVar("ResultT")

__all__ = ["Bucket", "S3Client", "cannot_open"]

_LOGGER: Final = logging.getLogger(__name__)

_BUCKET_KNOWN_S: Final = 5.0
"""How long a bucket that has answered is taken to be there. HEAD of an object does not tell
whether it is the object or the bucket that does not exist."""

_ADVICE: Final = {
    S3ErrorKind.NO_BUCKET: "Make the bucket, or correct 'bucket'; the tier makes none itself",
    S3ErrorKind.DENIED: (
        "The credentials are wrong, or lack s3:GetObject, s3:PutObject or s3:DeleteObject below "
        "the prefix, or s3:ListBucket, without which a missing object is answered with 403, too. "
        "Check 'access_key_id' or 'profile', and the policy of the bucket"
    ),
    S3ErrorKind.EXPIRED: "Renew the credentials, or leave them out so that the usual chain does",
    S3ErrorKind.REDIRECTED: "The bucket is in another region: set 'region' to that of the bucket",
    S3ErrorKind.TIMEOUT: "Nothing answers: check 'endpoint_url', the network and its proxies",
    S3ErrorKind.NETWORK: "No connection: check 'endpoint_url', the network and its proxies",
    S3ErrorKind.TLS: (
        "The certificate of the store is not trusted, or it speaks no TLS there: set 'ca_bundle', "
        "or begin 'endpoint_url' with 'http://' if that is what it speaks"
    ),
    S3ErrorKind.THROTTLED: "The store asks for patience; start again later",
    S3ErrorKind.SERVER: "The store has trouble of its own; look at its log",
}


class S3Client(Protocol):
    """What the engines have in common. All errors are :class:`S3Error`."""

    async def open(self) -> None:
        """Find credentials; connect."""

    async def close(self) -> None:
        """Let go of everything; also after an ``open`` that failed half way."""

    async def check_bucket(self) -> None:
        """Ask for the bucket itself: ``NO_BUCKET`` when there is none."""

    async def length(self, name: str) -> int:
        """Return the length of an object."""

    async def get(self, name: str) -> Buffer:
        """Return a whole object."""

    async def get_range(self, name: str, start: int, end: int) -> Buffer:
        """Return a range of an object; ``RANGE`` when it is shorter."""

    async def put(self, name: str, data: bytes) -> None:
        """Store an object in one request."""

    async def remove(self, name: str) -> None:
        """Remove an object; ``MISSING``, or nothing, when it is not there."""


@final
class Bucket:
    """The object store of a tier.

    Args:
        client: An engine, not open yet.
        context: What the tier was given.
    """

    def __init__(self, client: S3Client, context: TierContext) -> None:
        self.client = client
        self._clock = context.clock
        self._metrics = context.metrics
        self._tier_name = context.tier_name
        self._known_until = float("-inf")
        self._warnings: dict[S3ErrorKind, Occasionally] = {}

    async def open(self) -> None:
        """Connect, and see that the bucket is there as far as that may be asked."""
        await self.client.open()
        try:
            await self.client.check_bucket()
        except S3Error as error:
            # Many credentials may use objects and not ask for the bucket. The first object tells.
            if error.kind is not S3ErrorKind.DENIED:
                raise

    async def close(self) -> None:
        """Close the client."""
        await self.client.close()

    async def length(self, name: str) -> int:
        """Return the length of an object.

        Raises:
            FileNotFoundError: There is none, and the bucket is there.
            S3Error: It could not be found out.
        """
        return await self._answer(self.client.length(name), name)

    async def get(self, name: str) -> Buffer:
        """Return a whole object. Errors as for :meth:`length`."""
        return await self._answer(self.client.get(name), name)

    async def get_range(self, name: str, start: int, end: int) -> Buffer:
        """Return a range of an object; nothing when it is shorter. Errors as above."""
        try:
            return await self._answer(self.client.get_range(name, start, end), name)
        except S3Error as error:
            if error.kind is S3ErrorKind.RANGE:
                return b""
            raise

    async def put(self, name: str, data: bytes) -> None:
        """Store an object."""
        await self._answer(self.client.put(name, data), name)

    async def remove(self, name: str) -> None:
        """Remove an object; one that is not there is removed already."""
        with suppress(FileNotFoundError):
            await self._answer(self.client.remove(name), name)

    async def _answer(self, asking: Awaitable[ResultT], name: str) -> ResultT:
        try:
            result = await asking
        except S3Error as error:
            if error.kind is S3ErrorKind.MISSING:
                await self._require_bucket()
                raise FileNotFoundError(name) from None
            if error.kind is not S3ErrorKind.RANGE:
                self._note(error)
            raise
        self._known_until = self._clock() + _BUCKET_KNOWN_S
        return result

    async def _require_bucket(self) -> None:
        """See that a missing object is missing from a bucket that is there.

        Raises:
            S3Error: There is no bucket, or nobody can say.
        """
        if self._clock() < self._known_until:
            return
        try:
            await self.client.check_bucket()
        except S3Error as error:
            if error.kind is not S3ErrorKind.DENIED:
                self._note(error)
                raise
        self._known_until = self._clock() + _BUCKET_KNOWN_S

    def _note(self, error: S3Error) -> None:
        self._metrics.add(f"s3_errors_{error.kind.value}")
        due = self._warnings.setdefault(error.kind, Occasionally(self._clock))
        if due.due():
            _LOGGER.warning("tier %r: %s", self._tier_name, error)


def cannot_open(config: S3Config, error: S3Error) -> TierOpenError:
    """Return what an operator reads when the bucket cannot be used."""
    advice = _ADVICE.get(error.kind, "See what the store said, and check all settings")
    if error.kind is S3ErrorKind.TLS and (config.endpoint_url or "").startswith("http://"):
        advice = "Check 'endpoint_url' and the proxies of the network"
    return TierOpenError(
        f"bucket {config.bucket!r} at {config.where} cannot be used: {error.message}. {advice}"
    )
