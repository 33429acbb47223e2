"""The table of errors: only a missing object is a miss, whatever a client library makes of it."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import botocore.exceptions as boto
import pytest

from kv_core.contract import parse_tier_config
from kv_core.errors import TierError
from kv_core.tierkit.testing import ManualClock
from kv_tier_s3 import S3Config
from kv_tier_s3._bucket import Bucket, cannot_open
from kv_tier_s3._errors import S3Error, S3ErrorKind, kind_of
from kv_tier_s3._s3fs_store import S3fsStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

CONFIG = parse_tier_config("cold", S3Config, {"bucket": "kv-cache"})


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "NoSuchKey", S3ErrorKind.MISSING),
        (404, None, S3ErrorKind.NOT_S3),
        (404, "NoSuchBucket", S3ErrorKind.NO_BUCKET),
        (403, None, S3ErrorKind.DENIED),
        (403, "AccessDenied", S3ErrorKind.DENIED),
        (403, "SignatureDoesNotMatch", S3ErrorKind.DENIED),
        (400, "ExpiredToken", S3ErrorKind.EXPIRED),
        (301, "PermanentRedirect", S3ErrorKind.REDIRECTED),
        (301, None, S3ErrorKind.REDIRECTED),
        (400, "AuthorizationHeaderMalformed", S3ErrorKind.REDIRECTED),
        (503, "SlowDown", S3ErrorKind.THROTTLED),
        (429, None, S3ErrorKind.THROTTLED),
        (500, "InternalError", S3ErrorKind.SERVER),
        (503, None, S3ErrorKind.SERVER),
        (504, None, S3ErrorKind.TIMEOUT),
        (412, "PreconditionFailed", S3ErrorKind.PRECONDITION),
        (416, "InvalidRange", S3ErrorKind.RANGE),
        (418, "Teapot", S3ErrorKind.OTHER),
        (None, None, S3ErrorKind.OTHER),
    ],
)
def test_an_answer_has_a_kind(status: int | None, code: str | None, kind: S3ErrorKind) -> None:
    """By code where there is one: it says more than the status."""
    assert kind_of(status, code) is kind


def test_an_error_says_what_where_and_why() -> None:
    """HTTP status, S3 code and key, for whoever reads the log."""
    error = S3Error(S3ErrorKind.THROTTLED, "put", "kv-cache/x", 503, "SlowDown", "be patient")
    assert str(error).startswith("put kv-cache/x: throttled (503 SlowDown): be patient")
    assert isinstance(error, TierError)
    assert isinstance(error, OSError)


# -- what the client library raises ---------------------------------------------------------------


def answer(status: int, code: str) -> boto.ClientError:
    """Return an error as botocore makes it."""
    response: Any = {
        "Error": {"Code": code, "Message": "m"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return boto.ClientError(response, "GetObject")


def translated(error: BaseException) -> S3Error:
    """Return what the engine makes of an error."""

    async def translate() -> S3Error:
        return S3fsStore(CONFIG)._error("get", "kv-cache/x", error)

    return asyncio.run(translate())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answer(404, "NoSuchKey"), S3ErrorKind.MISSING),
        (answer(404, "404"), S3ErrorKind.MISSING),
        (answer(404, "NoSuchBucket"), S3ErrorKind.NO_BUCKET),
        (answer(403, "403"), S3ErrorKind.DENIED),
        (boto.NoCredentialsError(), S3ErrorKind.DENIED),
        (boto.SSLError(endpoint_url="x", error="certificate"), S3ErrorKind.TLS),
        (ssl.SSLError("wrong version"), S3ErrorKind.TLS),
        (boto.ConnectTimeoutError(endpoint_url="x"), S3ErrorKind.TIMEOUT),
        (boto.ReadTimeoutError(endpoint_url="x"), S3ErrorKind.TIMEOUT),
        (asyncio.TimeoutError(), S3ErrorKind.TIMEOUT),
        (boto.EndpointConnectionError(endpoint_url="x"), S3ErrorKind.NETWORK),
        (aiohttp.ClientPayloadError("cut short"), S3ErrorKind.NETWORK),
        (ConnectionResetError(), S3ErrorKind.NETWORK),
        (ValueError("what?"), S3ErrorKind.OTHER),
    ],
    ids=repr,
)
def test_an_error_of_the_library_has_a_kind(error: BaseException, kind: S3ErrorKind) -> None:
    """Also without an answer of the store."""
    assert translated(error).kind is kind


def test_a_missing_bucket_is_no_miss_though_python_calls_it_a_missing_file() -> None:
    """s3fs raises FileNotFoundError for both."""
    wrapped = FileNotFoundError("The specified bucket does not exist")
    wrapped.__cause__ = answer(404, "NoSuchBucket")
    found = translated(wrapped)
    assert (found.kind, found.status, found.s3_code) == (
        S3ErrorKind.NO_BUCKET,
        404,
        "NoSuchBucket",
    )


def test_a_number_is_no_code() -> None:
    """Answers to HEAD have no body, and botocore puts the status where the code would be."""
    assert translated(answer(403, "403")).s3_code is None


# -- the bucket -----------------------------------------------------------------------------------


class Client:
    """An engine whose answers a test sets."""

    def __init__(self) -> None:
        self.error: S3Error | None = None
        self.bucket_error: S3Error | None = None
        self.asked_for_bucket = 0

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def check_bucket(self) -> None:
        """Count, and fail as set."""
        self.asked_for_bucket += 1
        if self.bucket_error is not None:
            raise self.bucket_error

    async def length(self, name: str) -> int:
        """Fail as set."""
        if self.error is not None:
            raise self.error
        return 5

    async def get(self, name: str) -> bytes:
        """Fail as set."""
        await self.length(name)
        return b"12345"

    async def get_range(self, name: str, start: int, end: int) -> bytes:
        """Fail as set."""
        return (await self.get(name))[start:end]

    async def put(self, name: str, data: bytes) -> None:
        """Fail as set."""
        await self.length(name)

    async def remove(self, name: str) -> None:
        """Fail as set."""
        await self.length(name)


def failure(kind: S3ErrorKind) -> S3Error:
    """Return an error of a kind."""
    return S3Error(kind, "head", "kv-cache/x", None, None, "as the test asked")


class Counts:
    """A metrics sink that keeps counters."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def add(self, name: str, amount: float = 1.0) -> None:
        """Count."""
        self.counters[name] += int(amount)


class Fixture:
    """A bucket over a client whose answers a test sets."""

    def __init__(self) -> None:
        self.client = Client()
        self.clock = ManualClock()
        self.counts = Counts()
        context = SimpleNamespace(clock=self.clock, metrics=self.counts, tier_name="cold")
        self.bucket = Bucket(self.client, cast("Any", context))


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end."""
    return asyncio.run(coroutine)


def test_a_missing_object_is_a_miss() -> None:
    """Of a bucket that is there; it is no error and counts as none."""
    case = Fixture()
    case.client.error = failure(S3ErrorKind.MISSING)
    with pytest.raises(FileNotFoundError):
        run(case.bucket.length("x"))
    assert case.counts.counters == {}


def test_an_object_of_a_bucket_that_is_gone_is_an_error() -> None:
    """HEAD answers 404 for both, so the bucket is asked for before a miss is believed."""
    case = Fixture()
    case.client.error = failure(S3ErrorKind.MISSING)
    case.client.bucket_error = failure(S3ErrorKind.NO_BUCKET)
    with pytest.raises(S3Error) as caught:
        run(case.bucket.length("x"))
    assert caught.value.kind is S3ErrorKind.NO_BUCKET
    assert case.counts.counters == {"s3_errors_no_bucket": 1}


def test_a_bucket_that_has_just_answered_is_not_asked_for_again() -> None:
    """A thousand misses cost one request more, not a thousand; later it is asked again."""
    case = Fixture()
    case.client.error = failure(S3ErrorKind.MISSING)

    async def miss() -> None:
        for _ in range(3):
            with pytest.raises(FileNotFoundError):
                await case.bucket.length("x")

    run(miss())
    assert case.client.asked_for_bucket == 1
    case.clock.turn(10.0)
    run(miss())
    assert case.client.asked_for_bucket == 2


def test_a_bucket_that_may_not_be_asked_for_is_taken_to_be_there() -> None:
    """Credentials for objects alone are common."""
    case = Fixture()
    case.client.error = failure(S3ErrorKind.MISSING)
    case.client.bucket_error = failure(S3ErrorKind.DENIED)
    run(case.bucket.open())
    with pytest.raises(FileNotFoundError):
        run(case.bucket.length("x"))


@pytest.mark.parametrize(
    "kind", [k for k in S3ErrorKind if k not in {S3ErrorKind.MISSING, S3ErrorKind.RANGE}]
)
@pytest.mark.parametrize(
    "ask",
    [
        lambda bucket: bucket.length("x"),
        lambda bucket: bucket.get("x"),
        lambda bucket: bucket.get_range("x", 0, 1),
        lambda bucket: bucket.put("x", b"1"),
        lambda bucket: bucket.remove("x"),
    ],
    ids=["length", "get", "get_range", "put", "remove"],
)
def test_everything_else_is_an_error_and_counted_by_kind(
    kind: S3ErrorKind, ask: Callable[[Bucket], Coroutine[Any, Any, Any]]
) -> None:
    """Never a miss: what was not found out is not absent (nixl#1496)."""
    case = Fixture()
    case.client.error = failure(kind)
    with pytest.raises(S3Error):
        run(ask(case.bucket))
    assert case.counts.counters == {f"s3_errors_{kind.value}": 1}


def test_an_object_shorter_than_a_range_has_nothing_there() -> None:
    """It is damaged, which the caller sees by the length."""
    case = Fixture()
    case.client.error = failure(S3ErrorKind.RANGE)
    assert run(case.bucket.get_range("x", 5, 9)) == b""
    assert case.counts.counters == {}


def test_an_object_that_is_gone_is_removed_already() -> None:
    """Another process was faster."""
    case = Fixture()
    case.client.error = failure(S3ErrorKind.MISSING)
    run(case.bucket.remove("x"))


def test_a_storm_of_errors_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Of each kind."""
    case = Fixture()

    async def fail(kind: S3ErrorKind) -> None:
        case.client.error = failure(kind)
        for _ in range(5):
            with pytest.raises(S3Error):
                await case.bucket.get("x")

    run(fail(S3ErrorKind.THROTTLED))
    run(fail(S3ErrorKind.SERVER))
    case.clock.turn(61.0)
    run(fail(S3ErrorKind.SERVER))
    assert len(caplog.records) == 3
    assert case.counts.counters == {"s3_errors_throttled": 5, "s3_errors_server": 10}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (S3ErrorKind.NO_BUCKET, "Make the bucket"),
        (S3ErrorKind.DENIED, "s3:ListBucket, without which a missing object is answered with 403"),
        (S3ErrorKind.REDIRECTED, "set 'region'"),
        (S3ErrorKind.TLS, "set 'ca_bundle'"),
        (S3ErrorKind.TIMEOUT, "check 'endpoint_url'"),
        (S3ErrorKind.OTHER, "check all settings"),
    ],
)
def test_why_a_bucket_cannot_be_used_says_what_to_do(kind: S3ErrorKind, told: str) -> None:
    """No bucket, no permission, a wrong endpoint and TLS trouble are told apart."""
    message = str(cannot_open(CONFIG, failure(kind)))
    assert "bucket 'kv-cache' at AWS cannot be used: head kv-cache/x" in message
    assert told in message
