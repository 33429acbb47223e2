"""Transfers: every result comes once, and memory is used again only when NIXL has let go of it."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from kv_core.contract import JobErrorKind
from kv_core.errors import TierOpenError
from kv_core.tierkit.objects import ObjectNames
from kv_core.tierkit.testing import ManualClock, example_key, example_namespace
from kv_tier_obj import _mover
from kv_tier_s3.bucket import S3Error, S3ErrorKind

from ._fakes import document, until
from .conftest import BLOCK_BYTES

if TYPE_CHECKING:
    from kv_core.tierkit.testing import TierDriver
    from kv_tier_obj._staging import Staging

    from ._fakes import World
    from .conftest import Open

KEYS = tuple(example_key(number) for number in range(32))
NAMES = ObjectNames("", example_namespace(BLOCK_BYTES))
NAME = NAMES.block(KEYS[0])
POISON = b"\xee" * BLOCK_BYTES

STEPS = ("register_memory", "prep_xfer_dlist", "make_prepped_xfer", "transfer", "check_xfer_state")
RELEASES = ("release_xfer_handle", "release_dlist_handle", "deregister_memory")


def free_slots(driver: TierDriver) -> float:
    """Return how many staging slots nobody has."""
    return driver.tier.get_stats()["obj_staging_slots_free"]


def all_free(driver: TierDriver) -> bool:
    """Say whether no slot is held; 16 blocks in flight have twice as many."""
    return free_slots(driver) == 32


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_raises_fails_one_block(open_tier: Open, world: World, step: str) -> None:
    """Whatever call of NIXL fails: one block fails, nothing is left, and the next job is fine."""
    driver = open_tier()
    driver.store(KEYS)
    kept = len(world.live)
    world.raises[step] = 1
    result = driver.load(KEYS)
    assert not result.success
    assert len(result.successful_keys or ()) == 31
    assert result.error is not None
    assert result.error.kind is JobErrorKind.FAILED
    assert driver.loaded(KEYS) == list(result.successful_keys or ())
    until(lambda: all_free(driver))
    assert len(world.live) == kept
    assert driver.load(KEYS).success


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("load", [False, True])
def test_a_release_that_raises_costs_no_result(
    open_tier: Open, world: World, release: str, load: bool
) -> None:
    """The result of a transfer that has ended comes, once, whatever becomes of its handles."""
    driver = open_tier()
    driver.store(KEYS[1:2])
    kept = len(world.live)
    world.raises[release] = 3
    result = driver.load(KEYS[1:2]) if load else driver.store(KEYS[:1])
    assert result.success
    until(lambda: all_free(driver))
    assert world.raises[release] == 0
    assert len(world.live) == kept


def test_a_slot_that_nixl_keeps_is_not_lent(open_tier: Open, world: World) -> None:
    """As long as a handle cannot be released, its slot is nobody's; others move all blocks."""
    driver = open_tier()
    world.raises["release_xfer_handle"] = 1 << 30
    assert driver.store(KEYS[:1]).success
    world.raises["release_xfer_handle"] = 50
    assert driver.store(KEYS[1:]).success
    assert driver.load(KEYS).success
    assert driver.loaded(KEYS) == list(KEYS)
    until(lambda: all_free(driver))


def test_one_thread_has_the_agent(open_tier: Open, world: World) -> None:
    """Loads, stores and questions have an agent each, which one thread uses, and not the engine's.

    That each agent is used by one thread only is what the world watches over in every test.
    """
    driver = open_tier()
    driver.store(KEYS)
    driver.resolve([example_key(99)])
    assert set(world.agents) == {"read", "write", "asks"}
    names = {agent.name for agent in world.agents.values()}
    assert len(names) == 3
    assert world.query_threads == {"kv-obj-asks"}


def test_devices_are_used_again(open_tier: Open, world: World) -> None:
    """No two objects in flight have one device, and there are no more devices than slots."""
    driver = open_tier()
    for _ in range(10):
        assert driver.store(KEYS).success
        assert driver.load(KEYS).success
    assert world.devices <= set(range(1, 65))


def test_what_comes_while_nixl_is_busy_is_begun(open_tier: Open, world: World) -> None:
    """Nobody wakes the thread for it; it is begun all the same, and so is what comes after."""
    driver = open_tier(threads=2)
    assert driver.store(KEYS).success
    for _ in range(20):
        world.stuck.update(map(NAMES.block, KEYS[:6]))
        busy = driver.submit_load(KEYS[:6])
        until(lambda: free_slots(driver) == 26)
        late = driver.submit_load(KEYS[6:8])
        world.let_go()
        assert driver.wait(busy).success
        assert driver.wait(late).success
        assert driver.load(KEYS[8:9]).success


def test_a_job_ends_in_time_whatever_nixl_does(open_tier: Open, world: World) -> None:
    """A read that never ends: the job is reported, its slots are the engine's, and stay so."""
    clock = ManualClock()
    driver = open_tier(clock=clock, job_deadline_s=5)
    driver.store(KEYS[:2])
    world.stuck.add(NAME)
    job = driver.submit_load(KEYS[:2])
    until(lambda: free_slots(driver) == 31)
    clock.turn(6)
    result = driver.wait(job)
    assert result.successful_keys == (KEYS[1],)
    assert result.error is not None
    assert result.error.kind is JobErrorKind.STALLED
    assert driver.tier.get_stats()["stalled_jobs"] == 1
    assert driver.tier.get_stats()["obj_requests_given_up"] == 1
    # The job is over. What NIXL still writes, it does not write here.
    assert free_slots(driver) == 31
    world.let_go()
    until(lambda: all_free(driver))
    with driver.primary.block(driver.primary.num_blocks - 2) as block:
        assert bytes(block) == POISON


def test_a_store_that_hangs_sends_what_it_was_given(open_tier: Open, world: World) -> None:
    """A store that was given up goes on from its own copy, not from the block that follows."""
    clock = ManualClock()
    driver = open_tier(clock=clock, job_deadline_s=5)
    world.stuck.add(NAME)
    job = driver.submit_store(KEYS[:1])
    until(lambda: free_slots(driver) == 31)
    clock.turn(6)
    assert not driver.wait(job).success
    driver.poison(0)
    world.let_go()
    until(lambda: all_free(driver))
    assert driver.resolve(KEYS[:1]) == [True]
    assert driver.load(KEYS[:1]).success
    assert driver.loaded(KEYS[:1]) == [KEYS[0]]


def test_a_request_has_a_time_of_its_own(open_tier: Open, world: World) -> None:
    """A request that takes longer than it may is a timeout, long before the deadline of its job."""
    driver = open_tier(request_timeout_s=0.05)
    driver.store(KEYS[:2])
    world.stuck.add(NAME)
    result = driver.load(KEYS[:2])
    assert result.successful_keys == (KEYS[1],)
    assert result.error is not None
    assert "request_timeout_s" in result.error.message
    assert driver.tier.get_stats()["s3_errors_timeout"] == 1
    assert free_slots(driver) == 31


def test_stores_that_hang_keep_no_load_from_moving(open_tier: Open, world: World) -> None:
    """Stores that never end have half of the memory at most; loads go on with the rest."""
    driver = open_tier(io_threads=4)
    assert driver.store(KEYS[:4]).success
    many = tuple(example_key(number) for number in range(100, 132))
    world.stuck.update(NAMES.block(key) for key in many)
    job = driver.submit_store(many)
    for _ in range(3):
        assert driver.load(KEYS[:4]).success
    assert free_slots(driver) >= 4
    world.let_go()
    assert driver.wait(job).success


def test_a_shutdown_waits_for_no_transfer_that_hangs(open_tier: Open, world: World) -> None:
    """It ends in time; the thread and the memory stay until NIXL has let go, and then they go."""
    driver = open_tier(job_deadline_s=1)
    driver.store(KEYS[:1])
    world.stuck.add(NAME)
    job = driver.submit_load(KEYS[:1])
    until(lambda: free_slots(driver) == 31)
    driver.close()
    assert any(thread.name == "kv-obj-loads" for thread in threading.enumerate())
    assert [result.job_id for result in driver.poll()] == [job]
    world.let_go()
    until(lambda: not any(thread.name == "kv-obj-loads" for thread in threading.enumerate()))
    assert world.live == set()


def test_a_shutdown_leaves_nothing(open_tier: Open, world: World) -> None:
    """Every handle and registration has been given back, and the threads have ended."""
    driver = open_tier()
    driver.store(KEYS)
    driver.close()
    assert world.live == set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-obj")]


@pytest.mark.parametrize("step", ["open_agent", "register_memory", "prep_xfer_dlist"])
def test_what_cannot_be_opened_leaves_nothing(open_tier: Open, world: World, step: str) -> None:
    """A tier that cannot be opened has no threads and no handles."""
    world.raises[step] = 1
    with pytest.raises(TierOpenError):
        open_tier()
    assert world.live == set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-obj")]


def test_nixl_that_looks_elsewhere_is_found_out(open_tier: Open, world: World) -> None:
    """What the other client reads and NIXL does not find is said at the start."""
    name = NAMES.description
    world.documents[name] = document("NoSuchKey")
    with pytest.raises(TierOpenError, match=r"NIXL does not find .*endpoint_url"):
        open_tier()


def test_nixl_that_is_refused_is_found_out(open_tier: Open, world: World) -> None:
    """What only NIXL is refused is said at the start, as the store has said it."""
    world.documents[NAMES.description] = document("SignatureDoesNotMatch")
    with pytest.raises(TierOpenError, match="SignatureDoesNotMatch"):
        open_tier()


def test_what_nixl_never_lets_go_of_stays_mapped(open_tier: Open, world: World) -> None:
    """A handle that cannot be released to the end keeps its memory, beyond that of the tier."""
    driver = open_tier(job_deadline_s=1)
    kept = len(_mover._KEPT)
    world.raises["release_xfer_handle"] = 1 << 30
    assert driver.store(KEYS[:1]).success
    driver.close()
    until(lambda: len(_mover._KEPT) == kept + 1)
    _, staging, unreleased, lost = cast(
        "tuple[Any, Staging, list[Any], list[Any]]", _mover._KEPT.pop()
    )
    assert len(unreleased) + len(lost) == 1
    with staging.view(0) as view:
        assert len(view) == staging.slot_bytes


def test_a_store_says_why_it_failed(open_tier: Open, world: World) -> None:
    """NIXL does not know why it could not store; the store is asked by the other client."""
    driver = open_tier()
    world.refused.add(NAME)
    world.client_errors["head"] = S3Error(
        S3ErrorKind.DENIED, "head", NAME, 403, "AccessDenied", "not yours"
    )
    result = driver.store(KEYS[:2])
    assert result.successful_keys == (KEYS[1],)
    assert result.error is not None
    assert "denied (403 AccessDenied)" in result.error.message
    assert driver.tier.get_stats()["s3_errors_denied"] == 1


def test_a_store_that_asks_for_patience_declines(open_tier: Open, world: World) -> None:
    """A throttled store says nothing against the tier."""
    driver = open_tier()
    world.refused.add(NAME)
    world.client_errors["head"] = S3Error(
        S3ErrorKind.THROTTLED, "head", NAME, 503, "SlowDown", "later"
    )
    result = driver.store(KEYS[:1])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.DECLINED


def test_a_failure_without_a_reason_names_what_to_check(open_tier: Open, world: World) -> None:
    """NIXL alone is refused: the settings that only NIXL has are named."""
    driver = open_tier()
    world.refused.add(NAME)
    result = driver.store(KEYS[:1])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.FAILED
    assert "req_checksum" in result.error.message
    assert driver.tier.get_stats()["s3_errors_other"] == 1


def test_many_jobs_leak_nothing(open_tier: Open, world: World) -> None:
    """After hundreds of jobs with faults all handles are back, and all memory is free."""
    driver = open_tier(request_timeout_s=0.5)
    kept = len(world.live)
    draw = random.Random(9)
    for _ in range(300):
        keys = draw.sample(KEYS, draw.randrange(1, 9))
        if draw.random() < 0.3:
            world.raises[draw.choice((*STEPS, *RELEASES))] = draw.randrange(1, 3)
        load = draw.random() < 0.5
        result = driver.load(keys) if load else driver.store(keys)
        if load:
            good = set(result.successful_keys or (keys if result.success else ()))
            assert set(driver.loaded(keys)) == good
    world.raises.clear()
    until(lambda: all_free(driver))
    assert len(world.live) == kept
    assert len(world.devices) <= 64
