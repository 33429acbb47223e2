"""The tiers in a bucket: what becomes of the description while one is open."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, cast

from typing_extensions import override

from kv_core.contract import parse_tier_config
from kv_core.tierkit.objects import describe_namespace
from kv_core.tierkit.testing import TierDriver, example_key, example_namespace
from kv_tier_fsspec.store import scatter
from kv_tier_s3 import S3Config
from kv_tier_s3.bucket import BucketTier, S3Error, S3ErrorKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from kv_tier_s3.bucket import S3Client

BLOCK_BYTES: Final = 512
NAMESPACE: Final = example_namespace(BLOCK_BYTES)
KEY: Final = example_key(1)


class Client:
    """A bucket in memory, which may be read only."""

    credentials = None

    def __init__(self, *, read_only: bool = False) -> None:
        self.objects: dict[str, bytes] = {}
        self.puts = 0
        self._read_only = read_only

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def length(self, name: str) -> int:
        """Return the length of an object."""
        return len(self._found("head", name))

    async def get_range(self, name: str, start: int, end: int) -> bytes:
        """Return a range of an object."""
        return self._found("get", name)[start:end]

    async def get_into(self, name: str, parts: Sequence[memoryview]) -> int:
        """Read an object into buffers."""
        return scatter(self._found("get", name), parts)

    async def put(self, name: str, data: bytes | bytearray, *, only_new: bool = False) -> None:
        """Store an object."""
        self.puts += 1
        if self._read_only:
            raise S3Error(S3ErrorKind.DENIED, "put", name, 403, "AccessDenied", "no")
        if only_new and name in self.objects:
            raise S3Error(S3ErrorKind.PRECONDITION, "put", name, 412, "PreconditionFailed", "")
        self.objects[name] = bytes(data)

    async def remove(self, name: str) -> None:
        """Remove an object."""
        self.objects.pop(name, None)

    def _found(self, operation: str, name: str) -> bytes:
        try:
            return self.objects[name]
        except KeyError:
            raise S3Error(S3ErrorKind.MISSING, operation, name, 404, "NoSuchKey", "") from None


class Tier(BucketTier):
    """A tier over the bucket whose days are as short as the loop can make them."""

    client: Client

    @override
    def make_client(self) -> S3Client:
        return cast("S3Client", self.client)

    @override
    async def _wait_a_day(self) -> None:
        await asyncio.sleep(0)


def drive(client: Client) -> TierDriver:
    """Open a tier over a bucket."""
    kind: Any = type("ClientTier", (Tier,), {"client": client})
    config = parse_tier_config("cold", S3Config, {"bucket": "kv-cache"})
    return TierDriver(kind, config, num_blocks=4, block_bytes=BLOCK_BYTES)


def test_who_may_not_write_does_not_try_each_day(caplog: pytest.LogCaptureFixture) -> None:
    """A day that fails would count as an error of a store that does as it is told."""
    client = Client(read_only=True)
    client.objects[f"{NAMESPACE.folder_name}/namespace.json"] = describe_namespace(NAMESPACE)
    with drive(client) as driver:
        puts, lines = client.puts, len(caplog.records)
        # Each takes several turns of the loop, in which days would pass.
        for _ in range(10):
            assert not driver.load([KEY]).success
        assert (client.puts, len(caplog.records)) == (puts, lines)
    assert "blocks can be read and not written" in caplog.text
