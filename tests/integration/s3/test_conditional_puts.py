"""Stores that happen at the same time: the condition "unless there is one", on real servers."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_core.contract import parse_tier_config
from kv_core.tierkit.testing import example_key
from kv_tier_s3 import S3Config
from kv_tier_s3._errors import S3Error, S3ErrorKind
from kv_tier_s3._obstore_store import ObstoreStore
from kv_tier_s3._s3fs_store import S3fsStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_tier_s3._bucket import S3Client
    from kv_tier_s3._harness import S3Server
    from kv_tier_s3._harness._meddler import Meddler

pytestmark = pytest.mark.s3

BUCKET: Final = "kv-faults"
SERVERS: Final = ("seaweedfs", "rgw")
WRITERS: Final = 12
MADE: Final = "made"
REFUSED: Final = "refused"


@pytest.fixture(params=SERVERS)
def server(servers: Any, request: pytest.FixtureRequest) -> S3Server:
    """Return each server in turn."""
    found: S3Server = servers(request.param)
    return found


@pytest.fixture
def with_client(settings: Any, engine: str, server: S3Server) -> Callable[[Any], Any]:
    """Return a function that runs a coroutine function with an open client of the tier."""

    def run(work: Callable[[S3Client], Any]) -> Any:
        async def main() -> Any:
            made = settings(server.access, job_deadline_s=30.0, read_timeout_s=20.0)
            made.pop("prefix")
            config = parse_tier_config("cold", S3Config, made)
            client: S3Client = S3fsStore(config) if engine == "s3fs" else ObstoreStore(config)
            try:
                await client.open()
                return await work(client)
            finally:
                await client.close()

        return asyncio.run(main())

    return run


async def try_to_make(client: S3Client, name: str, body: bytes) -> str:
    """Put an object unless there is one, and return what became of it."""
    try:
        await client.put(name, body, only_new=True)
    except S3Error as error:
        return REFUSED if error.kind is S3ErrorKind.PRECONDITION else str(error)
    return MADE


def test_one_of_many_writers_makes_the_object(
    with_client: Callable[[Any], Any], server: S3Server, engine: str
) -> None:
    """The others are told that there is one; its bytes are those of the first."""
    name = f"raced-for-{engine}"

    async def race(client: S3Client) -> list[str]:
        bodies = [bytes([number]) * 200_000 for number in range(WRITERS)]
        return list(await asyncio.gather(*(try_to_make(client, name, body) for body in bodies)))

    outcomes = with_client(race)
    assert sorted(outcomes) == [MADE] + [REFUSED] * (WRITERS - 1)
    found = server.access.client().get_object(Bucket=BUCKET, Key=name)["Body"].read()
    assert found == bytes([outcomes.index(MADE)]) * 200_000


def test_what_was_removed_can_be_made_again(with_client: Callable[[Any], Any], engine: str) -> None:
    """The condition is about what is there, not about what has been."""
    name = f"made-again-{engine}"

    async def again(client: S3Client) -> list[str]:
        first = await try_to_make(client, name, b"first")
        second = await try_to_make(client, name, b"second")
        await client.remove(name)
        return [first, second, await try_to_make(client, name, b"third")]

    assert with_client(again) == [MADE, REFUSED, MADE]


def test_a_writer_of_the_same_moment_does_no_harm(
    server: S3Server, settings: Any, open_tier: Any, engine: str
) -> None:
    """Two tiers that store the same keys at once, again and again: all succeed (DATA-5)."""
    tiers = [open_tier(settings(server.access, job_deadline_s=30.0)) for _ in range(2)]
    keys = [example_key(number) for number in range(60)]
    failed: list[object] = []

    def store(tier: Any) -> None:
        for start in range(0, len(keys), 20):
            result = tier.store(keys[start : start + 20])
            if not result.success:
                failed.append(result.error)

    threads = [threading.Thread(target=store, args=(tier,)) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    for tier in tiers:
        result = tier.load(keys[:32])
        assert result.success, result.error
        assert tier.loaded(keys[:32]) == keys[:32]


def test_a_block_that_another_has_stored_is_sent_with_the_condition_only(
    server: S3Server, settings: Any, open_tier: Any, meddler: Callable[..., Meddler], engine: str
) -> None:
    """One conditional put and one look at the end of the object; nothing is put without it."""
    one = open_tier(settings(server.access, job_deadline_s=30.0))
    keys = [example_key(number) for number in range(4)]
    assert one.store(keys).success
    proxy = meddler(server.access)
    access = settings(server.access, job_deadline_s=30.0)
    access["endpoint_url"] = proxy.endpoint_url
    other = open_tier(access)
    before = len(proxy.requests)
    assert other.store(keys).success
    puts = [request for request in proxy.requests[before:] if request.method == "PUT"]
    assert len(puts) == len(keys)
    assert all(request.headers.get("if-none-match") == "*" for request in puts)
