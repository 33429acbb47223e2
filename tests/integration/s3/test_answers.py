"""What becomes of an answer, from the wire to the result of the job and the measurement.

A real store, a real client library, and a proxy that answers in the store's place or spoils what it
answers. Each job ends once and in time: the driver refuses a second result.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_core.contract import JobErrorKind
from kv_core.tierkit.testing import example_key
from kv_tier_s3._harness._meddler import Answer, Cut, Rewrite, Slow, error_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.tierkit.testing import TierDriver
    from kv_tier_s3._harness import S3Server
    from kv_tier_s3._harness._meddler import Meddler, Request

pytestmark = pytest.mark.s3

KEYS: Final = [example_key(number) for number in range(4)]


@pytest.fixture
def proxy(seaweed: S3Server, meddler: Callable[..., Meddler]) -> Meddler:
    """Return a proxy in front of the server."""
    return meddler(seaweed.access)


@pytest.fixture
def tier(seaweed: S3Server, proxy: Meddler, settings: Any, open_tier: Any) -> TierDriver:
    """Return a tier that has stored some blocks, behind the proxy."""
    driver: TierDriver = open_tier(
        settings(
            seaweed.access,
            endpoint_url=proxy.endpoint_url,
            max_attempts=1,
            job_deadline_s=4.0,
            lookup_deadline_s=3.0,
            read_timeout_s=3.0,
        )
    )
    assert driver.store(KEYS[:2]).success
    return driver


def is_block(request: Request) -> bool:
    """Say whether a request is about a block."""
    return request.path.partition("?")[0].endswith(".kv")


def spoil(proxy: Meddler, what: Any, *methods: str) -> None:
    """Have the answers to some methods about blocks spoiled; to all of them if none is named."""
    chosen = methods or ("GET", "HEAD", "PUT", "DELETE")
    proxy.rule = lambda request: what if is_block(request) and request.method in chosen else None


def heal(proxy: Meddler) -> None:
    """Let everything pass."""
    proxy.rule = lambda _: None


def errors(tier: TierDriver) -> dict[str, float]:
    """Return the errors that the tier has counted, by kind."""
    lead = "s3_errors_"
    stats = tier.tier.get_stats()
    return {name[len(lead) :]: n for name, n in stats.items() if name.startswith(lead) and n}


def loads_again(tier: TierDriver) -> bool:
    """Load what was stored at first."""
    result = tier.load(KEYS[:2])
    return result.success and tier.loaded(KEYS[:2]) == KEYS[:2]


ERRORS: Final = [
    (403, "AccessDenied", "denied"),
    (403, "InvalidAccessKeyId", "denied"),
    (400, "ExpiredToken", "expired"),
    (404, "NoSuchBucket", "no_bucket"),
    (301, "PermanentRedirect", "redirected"),
    (400, "AuthorizationHeaderMalformed", "redirected"),
    (503, "SlowDown", "throttled"),
    (429, "TooManyRequests", "throttled"),
    (500, "InternalError", "server"),
    (504, "GatewayTimeout", "timeout"),
    (403, "RequestTimeTooSkewed", "clock"),
    (403, "QuotaExceeded", "full"),
    (404, "", "not_s3"),
]


def answer_of(status: int, code: str) -> Answer:
    """Return an error of S3, or of a web server that has never heard of it."""
    return error_answer(status, code) if code else Answer(status, b"<html>not here</html>")


@pytest.mark.parametrize(("status", "code", "kind"), ERRORS)
def test_an_error_is_counted_logged_and_passes(
    tier: TierDriver,
    proxy: Meddler,
    engine: str,
    caplog: pytest.LogCaptureFixture,
    status: int,
    code: str,
    kind: str,
) -> None:
    """The load fails and is no miss; nothing is retired, and afterwards everything is as before."""
    answer = answer_of(status, code)
    spoil(proxy, answer)
    with caplog.at_level(logging.WARNING, "kv_tier_s3"):
        loaded = tier.load(KEYS[:2])
        stored = tier.store(KEYS[2:])
    assert loaded.error is not None
    assert (loaded.error.kind, loaded.successful_keys) == (JobErrorKind.FAILED, ())
    expected = JobErrorKind.DECLINED if kind in {"throttled", "full"} else JobErrorKind.FAILED
    assert stored.error is not None
    assert (stored.error.kind, stored.successful_keys) == (expected, ())
    assert errors(tier) == {kind: 4}
    lines = [record.getMessage() for record in caplog.records if "kv_tier_s3" in record.name]
    assert len(lines) == 1
    # obstore does not say which redirect it was.
    answer_is_told = (status, engine) != (301, "obstore")
    told = f" ({status}{f' {code}' if code else ''})" if answer_is_told else ""
    assert f": {kind}{told}" in lines[0]
    assert ".kv" in lines[0]
    heal(proxy)
    assert loads_again(tier)
    assert tier.store(KEYS[2:]).success


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [row for row in ERRORS if row[2] not in {"throttled", "server", "timeout"}],
)
def test_a_lookup_is_told_by_what_the_body_of_another_answer_says(
    tier: TierDriver,
    proxy: Meddler,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    kind: str,
) -> None:
    """HEAD has none. An error is no miss, and is not remembered beyond the back-off (LOOK-6)."""
    # Not even for the moment after a success.
    monkeypatch.setattr("kv_tier_s3._bucket._BUCKET_KNOWN_S", 0.0)
    tier.tier.on_request_finished(tier.request)
    answer = answer_of(status, code)
    proxy.rule = lambda request: None if request.path.endswith("namespace.json") else answer
    assert tier.resolve([KEYS[0]]) == [False]
    stats = tier.tier.get_stats()
    assert (stats["lookup_errors"], stats["lookup_misses"]) == (1, 0)
    assert errors(tier) == {kind: 1}
    heal(proxy)
    end = time.monotonic() + 10
    while tier.resolve([KEYS[0]]) != [True]:
        assert time.monotonic() < end


@pytest.mark.parametrize(
    ("what", "kind", "counted"),
    [
        (Cut(1000), JobErrorKind.FAILED, "network"),
        (Cut(0), JobErrorKind.FAILED, "network"),
        (Slow(16, 0.2), None, "timeout"),
        (Rewrite(lambda body: body[:-300]), JobErrorKind.DAMAGED, None),
        (Rewrite(lambda body: body[:0]), JobErrorKind.DAMAGED, None),
        (Rewrite(lambda body: body + bytes(3000)), JobErrorKind.DAMAGED, None),
        (Rewrite(lambda body: bytes([body[0] ^ 1]) + body[1:]), JobErrorKind.DAMAGED, None),
    ],
    ids=["cut", "cut at once", "trickle", "shortened", "emptied", "lengthened", "changed"],
)
def test_a_spoiled_block_is_not_loaded(
    tier: TierDriver, proxy: Meddler, what: Any, kind: JobErrorKind | None, counted: str | None
) -> None:
    """A connection that breaks has damaged nothing; a block that is wrong is removed."""
    spoil(proxy, what, "GET")
    began = time.monotonic()
    result = tier.load([KEYS[0]])
    assert time.monotonic() - began < 4.0 + 3.0
    assert result.error is not None
    # A trickle meets the deadline of the job or that of the client, whichever is looked at first.
    slow = {JobErrorKind.STALLED, JobErrorKind.FAILED}
    assert result.error.kind in ({kind} if kind else slow), result.error
    assert counted is None or errors(tier).get(counted, 0) > 0
    heal(proxy)
    assert tier.load([KEYS[1]]).success
    if kind is JobErrorKind.DAMAGED:
        # The second look has met the proxy, too: for all the tier could know it was bad.
        missing = tier.load([KEYS[0]])
        assert missing.error is not None
        assert missing.error.kind is JobErrorKind.MISSING
        assert tier.store([KEYS[0]]).success
    assert tier.load([KEYS[0]]).success
    assert tier.loaded([KEYS[0]]) == [KEYS[0]]


def test_an_object_of_gigabytes_is_not_read(
    tier: TierDriver, proxy: Meddler, seaweed: S3Server
) -> None:
    """Somebody else's, under the name of a block: no more of it comes than a block has."""
    name = next(request.path for request in proxy.requests if is_block(request))
    bucket, key = name.partition("?")[0].lstrip("/").split("/", 1)
    large = 64 << 20
    seaweed.access.client().put_object(Bucket=bucket, Key=key, Body=bytes(large))
    seen: list[int] = []

    def measure(body: bytes) -> bytes:
        seen.append(len(body))
        return body

    proxy.rule = lambda _: Rewrite(measure)
    damaged = next(k for k in KEYS[:2] if k[:32].hex() in key)
    result = tier.load([damaged])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.DAMAGED


def test_a_store_over_a_damaged_object_repairs_it(
    tier: TierDriver, proxy: Meddler, seaweed: S3Server
) -> None:
    """The condition "unless there is one" must not leave what is wrong where it is (DATA-10)."""
    names = {request.path.partition("?")[0] for request in proxy.requests if is_block(request)}
    client = seaweed.access.client()
    for name in names:
        bucket, key = name.lstrip("/").split("/", 1)
        body = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        client.put_object(Bucket=bucket, Key=key, Body=body[:-1])
    assert tier.store(KEYS[:2]).success
    assert loads_again(tier)


def test_a_block_that_is_there_is_not_sent_again_and_again(
    tier: TierDriver, proxy: Meddler
) -> None:
    """A store of it succeeds without bytes: at most the condition is sent with the first of it."""
    result = tier.store(KEYS[:2])
    assert (result.success, result.transfer_bytes) == (True, 0)


# -- retries and limits ---------------------------------------------------------------------------


def test_what_passes_is_asked_again_with_pauses(
    seaweed: S3Server, proxy: Meddler, settings: Any, open_tier: Any
) -> None:
    """As often as 'max_attempts' says."""
    tier = open_tier(
        settings(
            seaweed.access, endpoint_url=proxy.endpoint_url, max_attempts=3, job_deadline_s=30.0
        )
    )
    before = len(proxy.requests)
    spoil(proxy, error_answer(503, "SlowDown"), "GET")
    tier.load([KEYS[0]])
    asked = [r for r in proxy.requests[before:] if r.method == "GET" and is_block(r)]
    assert len(asked) == 3
    assert asked[2].at > asked[1].at > asked[0].at


def test_retries_stay_within_the_deadline_of_the_job(
    seaweed: S3Server, proxy: Meddler, settings: Any, open_tier: Any
) -> None:
    """Attempts times timeouts would be a multiple of it."""
    tier = open_tier(
        settings(
            seaweed.access,
            endpoint_url=proxy.endpoint_url,
            max_attempts=20,
            job_deadline_s=1.5,
            read_timeout_s=60.0,
        )
    )
    spoil(proxy, error_answer(500, "InternalError"))
    began = time.monotonic()
    result = tier.load(KEYS)
    assert time.monotonic() - began < 1.5 + 3.0
    assert not result.success
    assert sum(errors(tier).values()) > 0


def test_no_more_connections_than_allowed(
    seaweed: S3Server, proxy: Meddler, settings: Any, open_tier: Any
) -> None:
    """However many blocks and lookups are under way."""
    tier = open_tier(
        settings(
            seaweed.access,
            endpoint_url=proxy.endpoint_url,
            max_connections=3,
            job_deadline_s=60.0,
            lookup_deadline_s=60.0,
            read_timeout_s=60.0,
        )
    )
    keys = [example_key(number) for number in range(32)]
    stored = tier.submit_store(keys)
    tier.resolve([example_key(number) for number in range(100, 164)], timeout_s=60)
    assert tier.wait(stored, timeout_s=60).success
    assert 1 < proxy.most_connections <= 3


@pytest.mark.parametrize(("changes", "least_s", "most_s"), [({"read_timeout_s": 0.5}, 0.5, 4.0)])
def test_a_silent_answer_is_given_up(
    seaweed: S3Server,
    proxy: Meddler,
    settings: Any,
    open_tier: Any,
    changes: dict[str, Any],
    least_s: float,
    most_s: float,
) -> None:
    """After 'read_timeout_s', long before the job's deadline."""
    tier = open_tier(
        settings(
            seaweed.access,
            endpoint_url=proxy.endpoint_url,
            max_attempts=1,
            job_deadline_s=30.0,
            **changes,
        )
    )
    assert tier.store([KEYS[0]]).success
    spoil(proxy, Slow(2000, 20.0), "GET")
    began = time.monotonic()
    result = tier.load([KEYS[0]])
    took_s = time.monotonic() - began
    assert result.error is not None
    assert result.error.kind is JobErrorKind.FAILED
    assert least_s <= took_s < most_s
    assert errors(tier) == {"timeout": 1}
