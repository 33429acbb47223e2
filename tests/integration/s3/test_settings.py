"""Each setting has an effect, seen on the wire or in the store."""

from __future__ import annotations

import base64
import re
import socket
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_core.errors import TierOpenError
from kv_core.tierkit.testing import example_key
from kv_tier_s3._harness._meddler import Slow, error_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.tierkit.testing import TierDriver
    from kv_tier_s3._harness import S3Access, S3Server
    from kv_tier_s3._harness._meddler import Meddler, Request

pytestmark = pytest.mark.s3

BUCKET: Final = "kv-faults"
KEYS: Final = [example_key(number) for number in range(24)]


@pytest.fixture
def proxy(seaweed: S3Server, meddler: Callable[[S3Access], Meddler]) -> Meddler:
    """Return a proxy in front of the server."""
    return meddler(seaweed.access)


@pytest.fixture
def tier(seaweed: S3Server, proxy: Meddler, settings: Any, open_tier: Any) -> Callable[..., Any]:
    """Return a function that opens a tier behind the proxy, with some settings changed."""

    def run(**changes: Any) -> TierDriver:
        patient = {"job_deadline_s": 30.0, "lookup_deadline_s": 20.0, "read_timeout_s": 20.0}
        chosen = settings(seaweed.access, endpoint_url=proxy.endpoint_url, **patient)
        found: TierDriver = open_tier({**chosen, **changes})
        return found

    return run


def is_block(request: Request) -> bool:
    """Say whether a request is about a block."""
    return request.path.partition("?")[0].endswith(".kv")


def wire(proxy: Meddler, tier: Any, **changes: Any) -> Request:
    """Return the first request of a tier, whose server knows nothing."""
    proxy.rule = lambda _: error_answer(404, "NoSuchBucket")
    with pytest.raises(TierOpenError):
        tier(**changes)
    return proxy.requests[0]


def test_bucket_and_prefix_are_where_everything_lies(tier: Any, proxy: Meddler) -> None:
    """Not one request is about anything else."""
    assert tier(prefix="/team one/kv/").store(KEYS[:1]).success
    assert {request.path.split("/team%20one/kv/")[0] for request in proxy.requests} == {
        "/kv-faults"
    }


def test_the_region_is_what_requests_are_signed_for(tier: Any, proxy: Meddler) -> None:
    """As the store expects it."""
    authorization = wire(proxy, tier, region="eu-test-7").headers["authorization"]
    assert re.search(r"Credential=[^/]+/\d+/eu-test-7/s3/aws4_request", authorization)


def test_a_session_token_is_sent(tier: Any, proxy: Meddler) -> None:
    """And signed."""
    headers = wire(proxy, tier, session_token="a-token").headers
    assert headers["x-amz-security-token"] == "a-token"
    assert "x-amz-security-token" in headers["authorization"]


@pytest.mark.parametrize(
    ("style", "url"),
    [
        ("path", r"http://store\.example/kv-faults/test-"),
        ("auto", r"http://store\.example/kv-faults/test-"),
        ("virtual", r"http://kv-faults\.store\.example/test-"),
    ],
)
def test_the_bucket_is_in_the_path_or_in_the_host(
    tier: Any, proxy: Meddler, monkeypatch: pytest.MonkeyPatch, style: str, url: str
) -> None:
    """By way of a proxy of the network, which both engines find in the environment."""
    monkeypatch.setenv("HTTP_PROXY", proxy.endpoint_url)
    monkeypatch.setenv("http_proxy", proxy.endpoint_url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    request = wire(proxy, tier, endpoint_url="http://store.example", addressing_style=style)
    assert re.match(url, request.path), request.path


def test_an_address_has_no_hosts_below_it(tier: Any, proxy: Meddler) -> None:
    """The bucket stays in the path."""
    assert tier(addressing_style="virtual").store(KEYS[:1]).success
    assert all(request.path.startswith(f"/{BUCKET}/") for request in proxy.requests)


@pytest.mark.parametrize(
    ("changes", "headers"),
    [
        ({"server_side_encryption": "AES256"}, {"x-amz-server-side-encryption": "AES256"}),
        (
            {"server_side_encryption": "aws:kms", "sse_kms_key_id": "our-key"},
            {
                "x-amz-server-side-encryption": "aws:kms",
                "x-amz-server-side-encryption-aws-kms-key-id": "our-key",
            },
        ),
    ],
)
def test_encryption_is_asked_for(
    tier: Any, proxy: Meddler, changes: dict[str, Any], headers: dict[str, str]
) -> None:
    """With every object that is stored, and no other request."""
    proxy.rule = lambda r: error_answer(500, "InternalError") if r.method == "PUT" else None
    with pytest.raises(TierOpenError):
        tier(**changes)
    for request in proxy.requests:
        sent = {name: value for name, value in request.headers.items() if name in headers}
        assert sent == (headers if request.method == "PUT" else {}), request


def test_a_key_of_the_management_service_encrypts(
    servers: Any, settings: Any, open_tier: Any
) -> None:
    """On a store that has one: the object says with which key."""
    server = servers("rgw")
    kms = {"server_side_encryption": "aws:kms", "sse_kms_key_id": server.kms_key_id}
    chosen = settings(server.tls_access, job_deadline_s=30.0, **kms)
    tier = open_tier(chosen)
    assert tier.store(KEYS[:2]).success
    assert tier.load(KEYS[:2]).success
    assert tier.loaded(KEYS[:2]) == KEYS[:2]
    client = server.access.client()
    listing = client.list_objects_v2(Bucket=BUCKET, Prefix=chosen["prefix"])["Contents"]
    for item in listing:
        found = client.head_object(Bucket=BUCKET, Key=item["Key"])
        assert found["ServerSideEncryption"] == "aws:kms"
        assert found["SSEKMSKeyId"] == server.kms_key_id


def test_a_key_of_ones_own_encrypts(servers: Any, settings: Any, open_tier: Any) -> None:
    """Who does not have it reads nothing; who does loads what was stored."""
    server = servers("rgw")
    key = base64.b64encode(bytes(range(32))).decode()
    chosen = settings(server.tls_access, job_deadline_s=30.0, sse_customer_key=key)
    tier = open_tier(chosen)
    assert tier.resolve(KEYS[:1]) == [False]
    assert tier.store(KEYS[:2]).success
    assert tier.load(KEYS[:2]).success
    assert tier.loaded(KEYS[:2]) == KEYS[:2]
    assert open_tier(chosen).resolve(KEYS[:2]) == [True, True]
    other = base64.b64encode(bytes(32)).decode()
    with pytest.raises(TierOpenError) as caught:
        open_tier({**chosen, "sse_customer_key": other})
    assert key not in str(caught.value)
    assert other not in str(caught.value)


def test_a_connection_that_is_not_made_is_given_up(tier: Any, seaweed: S3Server) -> None:
    """After 'connect_timeout_s': nobody takes it, because others wait already."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(TierOpenError, match=": timeout"):
            tier(endpoint_url=url, connect_timeout_s=0.5, max_attempts=1)
        assert 0.5 <= time.monotonic() - began < 6.0


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"io_threads": 4}, 4),
        # A third of it is for copies: two objects of a block and its trailer fit.
        ({"io_threads": 32, "staging_bytes": 65536, "max_attempts": 1}, 5),
    ],
)
def test_no_more_transfers_than_allowed(
    tier: Any, proxy: Meddler, changes: dict[str, Any], most: int
) -> None:
    """By 'io_threads', and by the memory that 'staging_bytes' leaves for copies."""
    driver = tier(**changes)
    assert driver.store(KEYS).success
    proxy.rule = lambda r: Slow(1 << 20, 0.3) if r.method == "GET" and is_block(r) else None
    before = len(proxy.requests)
    assert driver.load(KEYS).success
    times = sorted(r.at for r in proxy.requests[before:] if is_block(r))
    took = [sum(start <= other < start + 0.25 for other in times) for start in times]
    assert 1 < max(took) <= most
