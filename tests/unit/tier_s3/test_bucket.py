"""One bucket: what is a miss, what is counted, how often is asked, and how long."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from kv_core.contract import parse_tier_config
from kv_core.tierkit.testing import ManualClock
from kv_tier_s3 import S3Config
from kv_tier_s3._bucket import Bucket
from kv_tier_s3._errors import S3Error, S3ErrorKind

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from botocore.credentials import ReadOnlyCredentials

    from kv_tier_s3._credentials import CredentialChain

K = S3ErrorKind


def failure(
    kind: S3ErrorKind, status: int | None = None, code: str | None = None, operation: str = "head"
) -> S3Error:
    """Return an error of a kind."""
    return S3Error(kind, operation, "kv-cache/x", status, code, "as the test asked")


NO_SUCH_KEY = failure(K.MISSING, 404, "NoSuchKey", "get")
HEAD_404 = failure(K.MISSING, 404)


class Client:
    """An engine whose answers a test sets: one for each operation, and for what nobody makes."""

    def __init__(self) -> None:
        self.errors: dict[str, S3Error] = {"nothing": NO_SUCH_KEY}
        self.asked: Counter[str] = Counter()
        self.hangs = False
        self.chain: Chain | None = None

    @property
    def credentials(self) -> CredentialChain | None:
        """What the test has set."""
        return cast("CredentialChain | None", self.chain)

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def length(self, name: str) -> int:
        """Answer HEAD."""
        await self._answer("head")
        return 5

    async def get_range(self, name: str, start: int, end: int) -> bytes:
        """Answer GET."""
        await self._answer("nothing" if "asks-whether" in name else "get")
        return b"12345"[start:end]

    async def get_into(self, name: str, parts: Sequence[memoryview]) -> int:
        """Answer GET."""
        await self._answer("get")
        return 5

    async def put(self, name: str, data: bytes | bytearray, *, only_new: bool = False) -> None:
        """Answer PUT."""
        await self._answer("put_new" if only_new else "put")

    async def remove(self, name: str) -> None:
        """Answer DELETE."""
        await self._answer("delete")

    async def _answer(self, operation: str) -> None:
        self.asked[operation] += 1
        if self.hangs:
            await asyncio.Event().wait()
        error = self.errors.get(operation)
        if error is not None and (self.chain is None or self.chain.now == "old"):
            raise error


class Chain:
    """Credentials that a test renews."""

    def __init__(self) -> None:
        self.now = "old"
        self.next = "new"

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return those of now."""
        return cast("ReadOnlyCredentials", self.now)

    async def renew(self, refused: ReadOnlyCredentials) -> bool:
        """Take the next ones."""
        self.now = self.next
        return bool(self.now != refused)


class Counts:
    """A metrics sink that keeps counters."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def add(self, name: str, amount: float = 1.0) -> None:
        """Count."""
        self.counters[name] += int(amount)


class Fixture:
    """A bucket over a client whose answers a test sets."""

    def __init__(self, **settings: Any) -> None:
        self.client = Client()
        self.clock = ManualClock()
        self.counts = Counts()
        config = parse_tier_config("cold", S3Config, {"bucket": "kv-cache", **settings})
        context = SimpleNamespace(
            clock=self.clock, metrics=self.counts, tier_name="cold", config=config
        )
        self.bucket = Bucket(self.client, cast("Any", context))


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end."""
    return asyncio.run(coroutine)


# -- misses ---------------------------------------------------------------------------------------


def test_a_missing_object_is_a_miss() -> None:
    """Of a bucket that is there; it is no error and counts as none."""
    case = Fixture()
    case.client.errors["head"] = HEAD_404
    with pytest.raises(FileNotFoundError):
        run(case.bucket.length("x"))
    assert case.counts.counters == {}


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (failure(K.NO_BUCKET, 404, "NoSuchBucket", "get"), K.NO_BUCKET),
        (failure(K.NOT_S3, 404, None, "get"), K.NOT_S3),
        (failure(K.EXPIRED, 400, "ExpiredToken", "get"), K.EXPIRED),
        (failure(K.NETWORK, None, None, "get"), K.NETWORK),
    ],
)
def test_404_is_no_miss_where_there_is_no_bucket(reason: S3Error, kind: S3ErrorKind) -> None:
    """HEAD answers 404 for both, and a gateway without a store behind it answers so, too."""
    case = Fixture()
    case.client.errors.update(head=HEAD_404, nothing=reason)
    with pytest.raises(S3Error) as caught:
        run(case.bucket.length("x"))
    assert (caught.value.kind, caught.value.operation) == (kind, "head")
    assert caught.value.s3_code == reason.s3_code
    assert case.counts.counters == {f"s3_errors_{kind.value}": 1}


@pytest.mark.parametrize("status", [301, 400, 403])
def test_what_head_does_not_tell_is_asked_for(status: int) -> None:
    """A token that has expired is 400 without a word."""
    case = Fixture()
    case.client.errors.update(
        head=failure(K.OTHER, status), nothing=failure(K.EXPIRED, 400, "ExpiredToken", "get")
    )
    with pytest.raises(S3Error) as caught:
        run(case.bucket.length("x"))
    assert (caught.value.kind, caught.value.s3_code) == (K.EXPIRED, "ExpiredToken")


@pytest.mark.parametrize("kind", [K.THROTTLED, K.SERVER, K.TIMEOUT])
def test_a_store_in_trouble_is_not_asked_twice_as_much(kind: S3ErrorKind) -> None:
    """To find out what its trouble is called."""
    case = Fixture()
    case.client.errors["head"] = failure(kind, 503)
    with pytest.raises(S3Error):
        run(case.bucket.length("x"))
    assert case.client.asked["nothing"] == 0


def test_a_thousand_misses_are_not_a_thousand_questions_more() -> None:
    """One look at the bucket is enough for those that are found out at the same time."""
    case = Fixture()
    case.client.errors["head"] = HEAD_404

    async def miss(count: int) -> None:
        found = await asyncio.gather(
            *(case.bucket.length(str(number)) for number in range(count)), return_exceptions=True
        )
        assert {type(error) for error in found} == {FileNotFoundError}

    run(miss(1000))
    assert case.client.asked["nothing"] == 1


def test_a_bucket_that_goes_is_noticed_at_once() -> None:
    """What has been seen is not believed for long."""
    case = Fixture()
    case.client.errors["head"] = HEAD_404

    async def miss() -> None:
        with pytest.raises(FileNotFoundError):
            await case.bucket.length("x")
        case.client.errors["nothing"] = failure(K.NO_BUCKET, 404, "NoSuchBucket", "get")
        case.clock.turn(0.2)
        with pytest.raises(S3Error):
            await case.bucket.length("x")

    run(miss())


def test_a_bucket_that_may_not_be_listed_is_taken_to_be_there() -> None:
    """Credentials for objects alone are common."""
    case = Fixture()
    denied = failure(K.DENIED, 403, "AccessDenied", "get")
    case.client.errors.update(head=HEAD_404, nothing=denied)
    run(case.bucket.open())
    with pytest.raises(FileNotFoundError):
        run(case.bucket.length("x"))


@pytest.mark.parametrize(
    "reason",
    [
        failure(K.DENIED, 403, "InvalidAccessKeyId", "get"),
        failure(K.NO_BUCKET, 404, "NoSuchBucket", "get"),
        failure(K.NOT_S3, 404, None, "get"),
        failure(K.NETWORK, None, None, "get"),
    ],
)
def test_a_bucket_that_is_not_there_is_not_opened(reason: S3Error) -> None:
    """Nor one that nobody can ask for."""
    case = Fixture()
    case.client.errors["nothing"] = reason
    with pytest.raises(S3Error) as caught:
        run(case.bucket.open())
    assert (caught.value.kind, caught.value.s3_code) == (reason.kind, reason.s3_code)


def test_a_web_server_that_has_everything_is_no_bucket() -> None:
    """It answers 200 to an object that nobody makes."""
    case = Fixture()
    del case.client.errors["nothing"]
    with pytest.raises(S3Error) as caught:
        run(case.bucket.open())
    assert caught.value.kind is K.NOT_S3


def test_the_bucket_is_asked_for_below_the_prefix() -> None:
    """Where a policy may end."""
    case = Fixture(prefix="team/kv")
    assert case.bucket._nothing.startswith("team/kv/")


# -- errors ---------------------------------------------------------------------------------------

ASKS: dict[str, Callable[[Bucket], Coroutine[Any, Any, Any]]] = {
    "head": lambda bucket: bucket.length("x"),
    "get": lambda bucket: bucket.get("x", 10),
    "get_range": lambda bucket: bucket.get_range("x", 0, 1),
    "get_into": lambda bucket: bucket.get_into("x", (memoryview(bytearray(5)),)),
    "put": lambda bucket: bucket.put("x", b"1"),
    "put_new": lambda bucket: bucket.put_new("x", b"1"),
    "remove": lambda bucket: bucket.remove("x"),
}


# What each may be answered besides, and is no error.
ANSWERS: dict[str, set[S3ErrorKind]] = {
    "head": {K.MISSING},
    "get": {K.MISSING, K.RANGE},
    "get_range": {K.MISSING, K.RANGE},
    "get_into": {K.MISSING, K.RANGE},
    "put": set(),
    "put_new": {K.PRECONDITION},
    "remove": {K.MISSING},
}


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        pytest.param(ask, kind, id=f"{name}-{kind.value}")
        for name, ask in ASKS.items()
        for kind in K
        if kind not in ANSWERS[name]
    ],
)
def test_everything_else_is_an_error_and_counted_by_kind(
    ask: Callable[[Bucket], Coroutine[Any, Any, Any]],
    kind: S3ErrorKind,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Never a miss: what was not found out is not absent (nixl#1496)."""
    case = Fixture()
    for operation in ("head", "get", "put", "put_new", "delete"):
        case.client.errors[operation] = failure(kind, None, None, operation)
    with pytest.raises(S3Error):
        run(ask(case.bucket))
    assert case.counts.counters == {f"s3_errors_{kind.value}": 1}
    assert len(caplog.records) == 1


def test_a_store_that_finds_nothing_is_an_error() -> None:
    """There is no such thing as a store of a missing object."""
    case = Fixture()
    case.client.errors["put"] = failure(K.MISSING, 404, "NoSuchKey", "put")
    with pytest.raises(S3Error):
        run(case.bucket.put("x", b"1"))
    assert case.counts.counters == {"s3_errors_missing": 1}


def test_an_object_shorter_than_a_range_has_nothing_there() -> None:
    """It is damaged, which the caller sees by the length."""
    case = Fixture()
    case.client.errors["get"] = failure(K.RANGE, 416, "InvalidRange", "get")
    assert run(case.bucket.get_range("x", 5, 9)) == b""
    assert run(case.bucket.get_into("x", (memoryview(bytearray(5)),))) == 0
    assert case.counts.counters == {}


def test_an_object_that_is_gone_is_removed_already() -> None:
    """Another process was faster."""
    case = Fixture()
    case.client.errors["delete"] = failure(K.MISSING, 404, "NoSuchKey", "delete")
    run(case.bucket.remove("x"))


def test_an_object_that_is_there_is_not_stored_over() -> None:
    """A condition that does not hold is an answer and no error."""
    case = Fixture()
    case.client.errors["put_new"] = failure(K.PRECONDITION, 412, "PreconditionFailed", "put")
    assert run(case.bucket.put_new("x", b"1")) is False
    assert (case.client.asked["put"], case.counts.counters) == (0, {})


def test_a_store_without_conditions_is_asked_for_one_once() -> None:
    """Then objects are simply stored."""
    case = Fixture()
    case.client.errors["put_new"] = failure(K.UNSUPPORTED, 501, "NotImplemented", "put")

    async def store() -> list[bool]:
        return [await case.bucket.put_new("x", b"1") for _ in range(2)]

    assert run(store()) == [True, True]
    assert case.client.asked == {"put_new": 1, "put": 2}
    assert case.counts.counters == {}


def test_a_storm_of_errors_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Of each kind, with status, code and key."""
    case = Fixture()

    async def fail(kind: S3ErrorKind, code: str) -> None:
        case.client.errors["get"] = failure(kind, 503, code, "get")
        for _ in range(5):
            with pytest.raises(S3Error):
                await case.bucket.get("x", 10)

    run(fail(K.THROTTLED, "SlowDown"))
    run(fail(K.SERVER, "InternalError"))
    case.clock.turn(61.0)
    run(fail(K.SERVER, "InternalError"))
    assert len(caplog.records) == 3
    assert "tier 'cold': get kv-cache/x: throttled (503 SlowDown)" in caplog.text
    assert case.counts.counters == {"s3_errors_throttled": 5, "s3_errors_server": 10}


# -- time -----------------------------------------------------------------------------------------


def test_a_lookup_ends_at_its_deadline_and_counts_as_a_timeout() -> None:
    """It must not keep its connection from those that are still waited for (LOOK-2)."""
    case = Fixture(lookup_deadline_s=0.02)
    case.client.hangs = True
    with pytest.raises(S3Error, match=r"no answer within 0.02 s \(lookup_deadline_s\)") as caught:
        run(case.bucket.length("x"))
    assert caught.value.kind is K.TIMEOUT
    assert case.counts.counters == {"s3_errors_timeout": 1}


@pytest.mark.parametrize(("took_s", "lines"), [(5.0, 1), (0.1, 0)])
def test_a_request_that_is_given_up_counts_as_a_timeout(
    took_s: float, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its job has passed its deadline; one of a tier that is shut down is no news."""
    case = Fixture()
    case.client.hangs = True

    async def give_up() -> None:
        asking = asyncio.ensure_future(case.bucket.get("x", 10))
        await asyncio.sleep(0)
        case.clock.turn(took_s)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    run(give_up())
    assert case.counts.counters == {"s3_errors_timeout": 1}
    assert len(caplog.records) == lines


# -- credentials ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [K.DENIED, K.EXPIRED])
@pytest.mark.parametrize("operation", ["head", "get", "put"])
def test_what_is_refused_is_asked_once_more_with_other_credentials(
    kind: S3ErrorKind, operation: str
) -> None:
    """Keys are revoked and replaced while the tier runs."""
    case = Fixture()
    case.client.chain = Chain()
    case.client.errors[operation] = failure(kind, 403, "InvalidAccessKeyId", operation)
    run(ASKS[operation](case.bucket))
    assert case.client.asked[operation] == 2
    assert case.counts.counters == {}


def test_what_is_refused_without_other_credentials_is_an_error() -> None:
    """Asking again would not help."""
    case = Fixture()
    case.client.chain = Chain()
    case.client.chain.next = "old"
    case.client.errors["get"] = failure(K.DENIED, 403, "AccessDenied", "get")
    with pytest.raises(S3Error):
        run(case.bucket.get("x", 10))
    assert case.client.asked["get"] == 1
    assert case.counts.counters == {"s3_errors_denied": 1}


# -- the breaker ----------------------------------------------------------------------------------


def test_a_store_that_does_not_answer_is_left_alone_and_asked_again() -> None:
    """Lookups fail at once meanwhile; one of them finds out when the store is back."""
    case = Fixture(error_backoff_s=1.0)
    down = failure(K.NETWORK, None, None, "head")

    async def lookups(count: int) -> list[type[BaseException] | int]:
        found = await asyncio.gather(
            *(case.bucket.length(str(number)) for number in range(count)), return_exceptions=True
        )
        return [type(each) if isinstance(each, BaseException) else each for each in found]

    async def outage() -> None:
        case.client.errors["head"] = down
        assert await lookups(8) == [S3Error] * 8
        assert await lookups(5) == [S3Error] * 5
        assert case.client.asked["head"] == 8
        case.clock.turn(1.0)
        assert await lookups(5) == [S3Error] * 5
        assert case.client.asked["head"] == 9
        case.clock.turn(1.0)
        del case.client.errors["head"]
        assert await lookups(5) == [5] * 5

    run(outage())
    assert case.counts.counters == {"s3_errors_network": 9, "s3_lookups_not_asked": 9}


def test_misses_do_not_open_the_breaker() -> None:
    """The store has answered them."""
    case = Fixture()
    case.client.errors["head"] = HEAD_404

    async def miss() -> None:
        for _ in range(20):
            with pytest.raises(FileNotFoundError):
                await case.bucket.length("x")

    run(miss())
    assert case.client.asked["head"] == 20


def test_nobody_waits_long_for_the_one_that_finds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run into its deadline, while others are refused."""
    monkeypatch.setattr("kv_tier_s3._breaker._WAIT_FOR_PROBE_S", 0.01)
    case = Fixture(lookup_deadline_s=0.5)
    case.client.errors["head"] = failure(K.NETWORK, None, None, "head")

    async def outage() -> None:
        for _ in range(8):
            with pytest.raises(S3Error):
                await case.bucket.length("x")
        case.client.hangs = True
        case.clock.turn(1.0)
        probe = asyncio.ensure_future(case.bucket.length("x"))
        await asyncio.sleep(0)
        with pytest.raises(S3Error, match="not asked again, after 8 failures in a row"):
            await case.bucket.length("y")
        assert not probe.done()
        with pytest.raises(S3Error, match="no answer within"):
            await probe

    run(outage())


def test_jobs_are_not_held_back_by_the_breaker_of_lookups() -> None:
    """The engine has one of its own for them."""
    case = Fixture()
    case.client.errors["head"] = failure(K.NETWORK, None, None, "head")

    async def outage() -> None:
        for _ in range(9):
            with pytest.raises(S3Error):
                await case.bucket.length("x")
        await case.bucket.put("x", b"1")

    run(outage())
    assert case.client.asked["put"] == 1
