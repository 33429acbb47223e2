"""The tier obj on real stores that fail: NIXL says little, and nothing wrong comes of it.

The same stores, proxies and engine as for the tier s3, whose objects these are. What NIXL cannot
withdraw stays in staging memory, so that what is quarantined is never a block of the primary tier.
"""

from __future__ import annotations

import os
import random
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_core.errors import ConfigError, TierOpenError
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_s3._harness import Certificates, Rights
from kv_tier_s3._harness._meddler import Cut, Rewrite, Slow, error_answer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_core.contract import OffloadKey
    from kv_tier_s3._harness import S3Access, S3Server
    from kv_tier_s3._harness._meddler import Meddler, Request

pytestmark = [pytest.mark.s3, pytest.mark.timeout(300)]

BUCKET: Final = "kv-faults"
BLOCK: Final = 4096
BATCH: Final = 32
POISON: Final = 0xEE

DEADLINES: Final = {
    "job_deadline_s": 2.0,
    "lookup_deadline_s": 1.5,
    "error_backoff_s": 0.1,
    "max_attempts": 1,
    "request_timeout_s": 1.0,
    "threads": 4,
}
PATIENT: Final = {
    "job_deadline_s": 60.0,
    "lookup_deadline_s": 30.0,
    "request_timeout_s": 50.0,
}
_serial = count()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What goes wrong on purpose is logged."""
    caplog.set_level("CRITICAL")


@pytest.fixture
def settings() -> Callable[..., dict[str, Any]]:
    """Return a function that makes settings for a way to a server, in a prefix of their own."""
    prefix = f"obj-{os.getpid()}-{next(_serial)}"

    def make(access: S3Access, **changes: Any) -> dict[str, Any]:
        return {**access.settings(BUCKET), "prefix": prefix, **DEADLINES, **changes}

    return make


@pytest.fixture
def serve(serving: Any) -> Callable[..., Any]:
    """Return a function that serves a trace with an engine over the tier, and reports."""

    def run(settings: dict[str, Any], outage: Any = None, *, is_patient: bool = False) -> Any:
        chosen = {**settings, **(PATIENT if is_patient else {}), "type": "obj"}
        with serving(chosen, is_patient=is_patient) as engine:
            return engine.serve(outage)

    return run


def errors(report: Any) -> dict[str, float]:
    """Return the errors that the tier has counted, by kind."""
    lead = "tier.obj.s3_errors_"
    return {
        name.removeprefix(lead): value
        for name, value in report.stats.items()
        if name.startswith(lead) and value
    }


def is_block(request: Request) -> bool:
    """Say whether a request is about a block, and not about the namespace or the bucket."""
    return request.path.partition("?")[0].endswith(".kv")


def names_of_blocks(server: S3Server, settings: dict[str, Any]) -> list[str]:
    """Return the names of the objects of blocks, in order."""
    listing = server.access.client().list_objects_v2(Bucket=BUCKET, Prefix=f"{settings['prefix']}/")
    return sorted(item["Key"] for item in listing["Contents"] if item["Key"].endswith(".kv"))


def name_of(names: list[str], key: OffloadKey) -> str:
    """Return the name of the object of a key."""
    [name] = [name for name in names if bytes(key)[:16].hex() in name.replace("/", "")]
    return name


# -- one bad key of many --------------------------------------------------------------------------


def test_one_bad_object_of_32_loses_only_its_key(
    store: S3Server, settings: Any, open_obj: Any
) -> None:
    """Missing, cut, longer, empty, flipped, swapped: 31 blocks are loaded, and no wrong byte."""
    chosen = settings(store.access, **PATIENT)
    tier: TierDriver = open_obj(chosen)
    keys = [example_key(number) for number in range(BATCH)]
    assert tier.store(keys).success
    names = names_of_blocks(store, chosen)
    client = store.access.client()
    bodies = {name: client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}
    bad = keys[BATCH // 2]
    name, other = name_of(names, bad), name_of(names, keys[0])
    body = bodies[name]
    for damaged in (
        None,
        b"",
        body[:100],
        body[:-1],
        body + b"x",
        body + body,
        body[:100] + bytes([body[100] ^ 1]) + body[101:],
        bodies[other],
    ):
        if damaged is None:
            client.delete_object(Bucket=BUCKET, Key=name)
        else:
            client.put_object(Bucket=BUCKET, Key=name, Body=damaged)
        result = tier.load(keys)
        rest = [key for key in keys if key != bad]
        assert not result.success
        assert set(result.successful_keys or ()) == set(rest)
        assert tier.loaded(keys) == rest
        # Repaired by the next store (DATA-10).
        assert tier.store([bad]).success
        assert tier.load([bad]).success
        assert tier.loaded([bad]) == [bad]


# -- what never ends ------------------------------------------------------------------------------


def test_what_nixl_cannot_withdraw_is_no_block_of_the_primary_tier(
    store: S3Server, settings: Any, open_obj: Any
) -> None:
    """A frozen store: jobs end at their deadlines, and what comes later goes nowhere."""
    tier: TierDriver = open_obj(settings(store.access))
    keys = [example_key(number) for number in range(BATCH)]
    assert tier.wait(tier.submit_store(keys), timeout_s=60.0).success
    slots = tier.tier.get_stats()["obj_staging_slots_free"]
    store.freeze()
    began = time.monotonic()
    result = tier.load(keys)
    assert not result.success
    assert not result.successful_keys
    assert time.monotonic() - began < 2 * DEADLINES["job_deadline_s"]
    stats = tier.tier.get_stats()
    assert stats["obj_requests_given_up"] > 0
    assert stats["obj_staging_slots_free"] < slots
    # The slots are others' now.
    for block_id in range(2 * BATCH):
        tier.poison(block_id, POISON)
    store.thaw()
    end = time.monotonic() + 30.0
    while tier.tier.get_stats()["obj_staging_slots_free"] < slots:
        assert time.monotonic() < end, "NIXL has not let go of the staging memory"
        tier.step()
        time.sleep(0.01)
    for block_id in range(2 * BATCH):
        with tier.primary.block(block_id) as block:
            assert bytes(block) == bytes([POISON]) * BLOCK
    assert tier.load(keys).success
    assert tier.loaded(keys) == keys


def test_a_shutdown_does_not_wait_for_what_never_ends(
    store: S3Server, settings: Any, open_obj: Any
) -> None:
    """It ends in time, the memory is unmapped, and NIXL crashes nothing afterwards."""
    tier: TierDriver = open_obj(settings(store.access))
    keys = [example_key(number) for number in range(BATCH)]
    assert tier.wait(tier.submit_store(keys), timeout_s=60.0).success
    store.freeze()
    tier.submit_load(keys)
    began = time.monotonic()
    tier.close()
    assert time.monotonic() - began < 2 * DEADLINES["job_deadline_s"]
    store.thaw()
    # In this process, which is the one that would crash.
    again: TierDriver = open_obj(settings(store.access, **PATIENT))
    assert again.load(keys).success


# -- the engine -----------------------------------------------------------------------------------


def test_a_store_that_is_killed_and_started_again(
    store: S3Server, settings: Any, serve: Any, outage: Any
) -> None:
    """In the middle of jobs; what it had is still there."""
    chosen = settings(store.access)
    report = serve(chosen, outage(store.kill, store.restart))
    assert errors(report).get("network", 0) > 0
    again = serve(chosen, is_patient=True)
    assert again.hits["obj"] > 0
    assert errors(again) == {}


def test_a_store_that_freezes_and_never_comes_back(
    store: S3Server, settings: Any, serve: Any, outage: Any
) -> None:
    """The rest is served without it, no block is quarantined, and the engine ends in time."""
    began = time.monotonic()
    report = serve(settings(store.access), outage(store.freeze))
    assert report.stats["tier.obj.store_failures"] > 0
    assert report.stats["tier.obj.obj_requests_given_up"] > 0
    assert report.stats["share_blocks_quarantined"] == 0
    assert report.stats["tier.obj.health"] == 1
    assert time.monotonic() - began < 120


def test_permissions_that_are_taken_away_and_given_back(
    store: S3Server, settings: Any, serve: Any, outage: Any
) -> None:
    """Denied is no miss, though NIXL says the same of both."""
    user = f"obj-revoked-{store.name}-{random.getrandbits(32):x}"
    chosen = settings(store.add_user(user, BUCKET, Rights.ALL))
    revoked = outage(
        lambda: store.allow(user, BUCKET, Rights.NONE),
        lambda: store.allow(user, BUCKET, Rights.ALL),
    )
    report = serve(chosen, revoked)
    assert errors(report).get("denied", 0) > 0
    again = serve(chosen, is_patient=True)
    assert again.hits["obj"] > 0


def test_a_storm_of_errors(
    seaweed: S3Server, settings: Any, serve: Any, outage: Any, meddler: Callable[..., Meddler]
) -> None:
    """Nine of ten requests are answered "slow down" for a while."""
    proxy = meddler(seaweed.access)
    chosen = settings(seaweed.access, endpoint_url=proxy.endpoint_url)
    draw = random.Random(1)

    def storm(request: Request) -> Any:
        is_hit = is_block(request) and draw.random() < 0.9
        return error_answer(503, "SlowDown") if is_hit else None

    def rule(chosen_rule: Callable[[Request], Any]) -> None:
        proxy.rule = chosen_rule

    report = serve(chosen, outage(lambda: rule(storm), lambda: rule(lambda _: None)))
    # A refused store leaves no words, and the answer to the question why has a status only.
    assert errors(report).keys() & {"throttled", "server"}
    assert serve(chosen, is_patient=True).hits["obj"] > 0


def test_answers_that_are_spoiled(
    seaweed: S3Server, settings: Any, serve: Any, meddler: Callable[..., Meddler]
) -> None:
    """Half of what is read is cut off, of another length, changed, or comes too slowly."""
    proxy = meddler(seaweed.access)
    chosen = settings(seaweed.access, endpoint_url=proxy.endpoint_url)
    serve(chosen, is_patient=True)
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
    # A trickle takes longer than a request may, and nothing else does.
    slow = {"job_deadline_s": 2.5, "lookup_deadline_s": 20.0, "request_timeout_s": 2.0}
    report = serve({**chosen, **slow})
    assert report.stats["tier.obj.load_failures"] > 0
    proxy.rule = lambda _: None
    assert serve(chosen, is_patient=True).hits["obj"] > 0


def test_objects_that_are_removed_damaged_and_swapped(
    store: S3Server, settings: Any, serve: Any
) -> None:
    """Behind the tier's back: what is wrong is recomputed, removed and stored again."""
    chosen = settings(store.access)
    serve(chosen, is_patient=True)
    client = store.access.client()
    names = names_of_blocks(store, chosen)[:60]
    bodies = {name: client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}
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
            3: bodies[names[(number + 1) % len(names)]],
        }[number % 4]
        client.put_object(Bucket=BUCKET, Key=name, Body=damaged)
    report = serve(chosen, is_patient=True)
    assert report.hits["obj"] > 0
    assert report.stats["tier.obj.load_failures"] > 0


# -- the start ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bucket": "no-such-bucket-here"}, "no_bucket"),
        ({"access_key_id": "NOBODYSKEY0123456789"}, "denied"),
        ({"secret_access_key": "of-another-key"}, "denied"),
        ({"endpoint_url": "http://127.0.0.1:9"}, "network"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_opened_says_why(
    store: S3Server, settings: Any, open_obj: Any, changes: dict[str, Any], words: str
) -> None:
    """Which NIXL does not know; and no secret is told."""
    with pytest.raises((TierOpenError, ConfigError)) as caught:
        open_obj(settings(store.access, **changes))
    assert words in str(caught.value)
    assert "of-another-key" not in str(caught.value)


def test_over_tls(store: S3Server, settings: Any, open_obj: Any, tmp_path: Path) -> None:
    """With the authority that has signed the server's certificate, and with no other."""
    tier: TierDriver = open_obj(settings(store.tls_access, **PATIENT))
    assert tier.store([example_key(1)]).success
    assert tier.load([example_key(1)]).success
    other = Certificates.make(tmp_path).authority
    with pytest.raises(TierOpenError) as caught:
        open_obj(settings(store.tls_access, ca_bundle=str(other)))
    assert "tls" in str(caught.value)
