"""Lookups: many in one question, on a thread that nothing waits for; and errors are no miss."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kv_core.tierkit.objects import ObjectNames
from kv_core.tierkit.testing import ManualClock, example_key, example_namespace
from kv_tier_s3.bucket import S3Error, S3ErrorKind

from ._fakes import NixlError, until
from .conftest import BLOCK_BYTES

if TYPE_CHECKING:
    from ._fakes import World
    from .conftest import Open

KEYS = tuple(example_key(number) for number in range(1000))
NAMES = ObjectNames("", example_namespace(BLOCK_BYTES))


def test_a_thousand_keys_are_a_few_questions(open_tier: Open, world: World) -> None:
    """What is asked while a question is on its way goes together with the next one."""
    driver = open_tier()
    for key in KEYS[::2]:
        world.objects[NAMES.block(key)] = b"an object"
    before = world.queries
    assert driver.resolve(KEYS) == [True, False] * 500
    assert world.queries - before <= 20
    assert 32 < world.most_queried <= 256


def test_a_question_holds_up_nobody(open_tier: Open, world: World) -> None:
    """While NIXL does not answer, lookups answer "not known yet", and blocks are moved."""
    driver = open_tier()
    world.query_gate.clear()
    world.querying.clear()
    assert driver.tier.lookup(KEYS[0], driver.request) is None
    driver.step()
    assert world.querying.wait(20)
    assert driver.tier.lookup(KEYS[0], driver.request) is None
    assert driver.store(KEYS[10:42]).success
    assert driver.load(KEYS[10:42]).success
    world.query_gate.set()
    assert driver.resolve(KEYS[:1]) == [False]


def test_an_error_is_no_miss(open_tier: Open, world: World) -> None:
    """A question that fails counts as errors with the store's reason, and is asked again later."""
    clock = ManualClock()
    driver = open_tier(clock=clock, error_backoff_s=2)
    driver.store(KEYS[:4])
    other = driver.tier
    world.query_error = NixlError("NIXL_ERR_BACKEND")
    world.client_errors["head"] = S3Error(
        S3ErrorKind.DENIED, "head", "x", 403, "AccessDenied", "not yours"
    )
    assert driver.resolve(KEYS[10:14]) == [False] * 4
    stats = other.get_stats()
    assert stats["lookup_errors"] == 4
    assert stats["lookup_misses"] == 0
    assert stats["s3_errors_denied"] == 1
    world.query_error = None
    world.client_errors.clear()
    for key in KEYS[10:14]:
        world.objects[NAMES.block(key)] = b"an object"
    clock.turn(3)
    assert driver.resolve(KEYS[10:14]) == [True] * 4


def test_a_bucket_that_is_gone_is_no_miss(open_tier: Open, world: World) -> None:
    """NIXL takes a bucket that is not there for one without the object; the tier does not."""
    clock = ManualClock()
    driver = open_tier(clock=clock)
    clock.turn(10)
    world.client_errors["get"] = S3Error(
        S3ErrorKind.NO_BUCKET, "get", "x", 404, "NoSuchBucket", "no bucket"
    )
    assert driver.resolve(KEYS[:2]) == [False] * 2
    assert driver.tier.get_stats()["lookup_errors"] == 2
    assert driver.tier.get_stats()["lookup_misses"] == 0


def test_an_error_of_one_question_is_not_that_of_the_next(open_tier: Open, world: World) -> None:
    """The thread that asks lives on."""
    driver = open_tier()
    world.query_error = NixlError("NIXL_ERR_BACKEND")
    assert driver.resolve(KEYS[:1]) == [False]
    world.query_error = None
    assert driver.resolve(KEYS[1:2]) == [False]
    assert driver.tier.get_stats()["lookup_misses"] == 1


def test_a_shutdown_waits_for_no_question_that_hangs(open_tier: Open, world: World) -> None:
    """It ends although NIXL does not answer; the thread ends with the answer."""
    driver = open_tier(job_deadline_s=1)
    world.query_gate.clear()
    world.querying.clear()
    driver.tier.lookup(KEYS[0], driver.request)
    driver.step()
    assert world.querying.wait(20)
    driver.close()
    world.query_gate.set()
    until(lambda: not any(thread.name == "kv-obj-asks" for thread in threading.enumerate()))
