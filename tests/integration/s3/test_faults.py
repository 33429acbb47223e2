"""Faults of a real store under the real engine: every request finishes, and the metrics say why.

Whatever happens, no byte is wrong, every job ends once, and the tier serves again afterwards.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_tier_s3._harness import Rights
from kv_tier_s3._harness._meddler import Cut, Rewrite, Slow, error_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_tier_s3._harness import S3Server
    from kv_tier_s3._harness._meddler import Meddler, Request

pytestmark = pytest.mark.s3

BUCKET: Final = "kv-faults"


def errors(report: Any) -> dict[str, float]:
    """Return the errors that the tier has counted, by kind."""
    lead = "tier.s3.s3_errors_"
    stats = report.stats
    return {key[len(lead) :]: stats[key] for key in stats if key.startswith(lead) and stats[key]}


def is_block(request: Request) -> bool:
    """Say whether a request is about a block, and not about the namespace or the bucket."""
    return request.path.partition("?")[0].endswith(".kv")


def serve_again(serving: Any, settings: dict[str, Any]) -> Any:
    """Serve the same trace with a new engine: what is in the store is as good as ever."""
    with serving(settings, is_patient=True) as engine:
        report = engine.serve()
    assert report.hits["s3"] > 0
    assert errors(report) == {}
    return report


def test_a_store_that_is_killed_and_started_again(
    store: S3Server, settings: Any, serving: Any, outage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of jobs; what it had is still there."""
    caplog.set_level("CRITICAL")
    chosen = settings(store.access)
    with serving(chosen) as engine:
        report = engine.serve(outage(store.kill, store.restart))
    assert errors(report).get("network", 0) > 0
    assert report.stats["tier.s3.health_changes"] >= 1
    serve_again(serving, chosen)


def test_a_store_that_freezes_for_longer_than_every_deadline(
    store: S3Server, settings: Any, serving: Any, outage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections are accepted and nothing is answered (SIGSTOP)."""
    caplog.set_level("CRITICAL")
    chosen = settings(store.access)
    began = time.monotonic()
    with serving(chosen) as engine:
        # Longer than the deadline of a job.
        report = engine.serve(outage(store.freeze, store.thaw, least_s=3.0))
        took_s = time.monotonic() - began
    assert errors(report).get("timeout", 0) > 0
    assert set(errors(report)) <= {"timeout", "network"}
    assert took_s < 60
    serve_again(serving, chosen)


def test_a_store_that_never_comes_back(
    store: S3Server, settings: Any, serving: Any, outage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest is served without it, and the engine ends in time."""
    caplog.set_level("CRITICAL")
    with serving(settings(store.access)) as engine:
        report = engine.serve(outage(store.freeze))
        ending = time.monotonic()
    assert time.monotonic() - ending < 10
    assert errors(report)["timeout"] > 0
    assert report.stats["tier.s3.health"] == 1


def test_permissions_that_are_taken_away_and_given_back(
    store: S3Server, settings: Any, serving: Any, outage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Denied is no miss, and no reason to forget what is there."""
    caplog.set_level("CRITICAL")
    user = f"revoked-{store.name}-{random.getrandbits(32):x}"
    access = store.add_user(user, BUCKET, Rights.ALL)
    chosen = settings(access)
    revoked = outage(
        lambda: store.allow(user, BUCKET, Rights.NONE),
        lambda: store.allow(user, BUCKET, Rights.ALL),
    )
    with serving(chosen) as engine:
        report = engine.serve(revoked)
    assert revoked.is_over
    assert errors(report).get("denied", 0) > 0
    serve_again(serving, chosen)


def test_a_storm_of_errors(
    seaweed: S3Server,
    engine: str,
    settings: Any,
    serving: Any,
    outage: Any,
    meddler: Callable[..., Meddler],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nine of ten requests are answered "slow down" for a while; stores of then are declined."""
    caplog.set_level("CRITICAL")
    proxy = meddler(seaweed.access)
    chosen = settings(seaweed.access, endpoint_url=proxy.endpoint_url, max_attempts=1)
    draw = random.Random(1)
    ended: list[float] = []

    def storm(request: Request) -> Any:
        is_hit = is_block(request) and draw.random() < 0.9
        return error_answer(503, "SlowDown") if is_hit else None

    def begin() -> None:
        proxy.rule = storm

    def end() -> None:
        proxy.rule = lambda _: None
        ended.append(time.monotonic())

    with serving(chosen) as serves:
        report = serves.serve(outage(begin, end))
    assert any(is_block(request) and request.at > ended[0] for request in proxy.requests)
    assert errors(report)["throttled"] > 0
    assert report.stats["tier.s3.engine_blocks_declined"] > 0
    serve_again(serving, chosen)


def test_answers_that_are_spoiled(
    seaweed: S3Server,
    engine: str,
    settings: Any,
    serving: Any,
    meddler: Callable[..., Meddler],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half of what is read is cut off, of another length, changed, or comes too slowly."""
    caplog.set_level("CRITICAL")
    proxy = meddler(seaweed.access)
    chosen = settings(seaweed.access, endpoint_url=proxy.endpoint_url)
    with serving(chosen, is_patient=True) as serves:
        serves.serve()
    draw = random.Random(1)
    ways = (
        Cut(1000),
        Slow(64, 0.2),
        Rewrite(lambda body: body[:-300]),
        Rewrite(lambda body: body + bytes(300)),
        Rewrite(lambda body: bytes([body[0] ^ 1]) + body[1:]),
    )

    def spoil(request: Request) -> Any:
        is_hit = request.method == "GET" and is_block(request) and draw.random() < 0.5
        return draw.choice(ways) if is_hit else None

    proxy.rule = spoil
    with serving(chosen, is_patient=True, job_deadline_s=2.0) as serves:
        report = serves.serve()
    assert report.stats["tier.s3.load_failures"] > 0
    proxy.rule = lambda _: None
    serve_again(serving, chosen)


def test_objects_that_are_removed_damaged_and_swapped(
    store: S3Server, settings: Any, serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind the tier's back: what is wrong is recomputed, removed and stored again."""
    caplog.set_level("CRITICAL")
    chosen = settings(store.access)
    with serving(chosen, is_patient=True) as engine:
        engine.serve()
    client = store.access.client()
    listing = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{chosen['prefix']}/")
    names = sorted(item["Key"] for item in listing["Contents"] if item["Key"].endswith(".kv"))
    bodies = {
        name: client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names[:60]
    }
    draw = random.Random(2)
    for number, (name, body) in enumerate(bodies.items()):
        if number % 4 == 0:
            client.delete_object(Bucket=BUCKET, Key=name)
            continue
        place = draw.randrange(len(body))
        damaged = {
            1: body[:place],
            2: body[:place] + bytes([body[place] ^ 0x10]) + body[place + 1 :],
            # Whole, and another block.
            3: bodies[names[(number + 1) % 60]],
        }[number % 4]
        client.put_object(Bucket=BUCKET, Key=name, Body=damaged)
    with serving(chosen, is_patient=True) as engine:
        report = engine.serve()
    assert report.hits["s3"] > 0
    assert report.stats["tier.s3.load_failures"] > 0
