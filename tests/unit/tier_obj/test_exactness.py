"""Never a wrong byte in the primary tier, and one bad object is the failure of one block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.contract import JobErrorKind, parse_tier_config
from kv_core.tierkit.objects import TRAILER_BYTES, ObjectFormat, ObjectNames
from kv_core.tierkit.testing import TierDriver, block_bytes_of, example_key, example_namespace
from kv_tier_s3 import S3Config
from kv_tier_s3._tier import S3Tier

from ._fakes import FakeClient, document
from .conftest import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.contract import OffloadKey

    from ._fakes import World
    from .conftest import Open

KEYS = tuple(example_key(number) for number in range(32))
NAMESPACE = example_namespace(BLOCK_BYTES)
NAMES = ObjectNames("", NAMESPACE)
BAD = 5
POISON = b"\xee" * BLOCK_BYTES


def slot_of(driver: TierDriver, index: int) -> bytes:
    """Return the slot that the last load had for a key."""
    with driver.primary.block(driver.primary.num_blocks - len(KEYS) + index) as block:
        return bytes(block)


def other(key: OffloadKey) -> bytes:
    """Return the object of another key."""
    payload = block_bytes_of(key, BLOCK_BYTES)
    return payload + ObjectFormat(NAMESPACE).trailer(key, memoryview(payload))


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], JobErrorKind]] = {
    "half": (lambda whole: whole[: len(whole) // 2], JobErrorKind.DAMAGED),
    "no trailer": (lambda whole: whole[:-TRAILER_BYTES], JobErrorKind.DAMAGED),
    "short of 8 bytes": (lambda whole: whole[:-8], JobErrorKind.DAMAGED),
    "empty": (lambda _: b"", JobErrorKind.DAMAGED),
    "more at the end": (lambda whole: whole + b"more", JobErrorKind.DAMAGED),
    "twice": (lambda whole: whole + whole, JobErrorKind.DAMAGED),
    "a bit of the payload": (lambda whole: bytes([whole[0] ^ 1]) + whole[1:], JobErrorKind.DAMAGED),
    "a bit of the trailer": (
        lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
        JobErrorKind.DAMAGED,
    ),
    "another block": (lambda _: other(KEYS[7]), JobErrorKind.DAMAGED),
    "a document": (lambda _: document("NoSuchKey"), JobErrorKind.DAMAGED),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_object_fails_its_block_only(open_tier: Open, world: World, damage: str) -> None:
    """Of 32 blocks 31 are loaded, and nothing of the damaged one comes into the primary tier.

    The memory that it is read into has held the whole object before.
    """
    driver = open_tier()
    assert driver.store(KEYS).success
    assert driver.load(KEYS).success
    change, kind = DAMAGES[damage]
    name = NAMES.block(KEYS[BAD])
    world.objects[name] = change(world.objects[name])
    result = driver.load(KEYS)
    assert not result.success
    assert result.error is not None
    assert result.error.kind is kind
    good = tuple(key for key in KEYS if key != KEYS[BAD])
    assert result.successful_keys == good
    assert driver.loaded(KEYS) == list(good)
    assert slot_of(driver, BAD) == POISON


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_object_is_removed_and_stored_again(
    open_tier: Open, world: World, damage: str
) -> None:
    """After a load of a damaged object there is none, until a store brings a good one."""
    driver = open_tier()
    driver.store(KEYS[:1])
    name = NAMES.block(KEYS[0])
    whole = world.objects[name]
    world.objects[name] = DAMAGES[damage][0](whole)
    assert not driver.load(KEYS[:1]).success
    assert name not in world.objects
    assert driver.resolve(KEYS[:1]) == [False]
    assert driver.store(KEYS[:1]).success
    assert driver.resolve(KEYS[:1]) == [True]
    assert driver.load(KEYS[:1]).success
    assert world.objects[name] == whole


def test_a_missing_object_leaves_no_document_behind(open_tier: Open, world: World) -> None:
    """A missing object is missing: what the store sends instead is written over no block."""
    driver = open_tier()
    driver.store(KEYS)
    del world.objects[NAMES.block(KEYS[BAD])]
    result = driver.load(KEYS)
    assert result.error is not None
    assert result.error.kind is JobErrorKind.MISSING
    assert len(result.successful_keys or ()) == len(KEYS) - 1
    assert slot_of(driver, BAD) == POISON


@pytest.mark.parametrize("code", ["AccessDenied", "InternalError", "NoSuchBucket", "SlowDown"])
def test_a_refusal_is_no_miss(open_tier: Open, world: World, code: str) -> None:
    """What the store refuses fails with its reason, and the object is not taken for missing."""
    driver = open_tier()
    driver.store(KEYS[:4])
    name = NAMES.block(KEYS[2])
    world.documents[name] = document(code)
    result = driver.load(KEYS[:4])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.FAILED
    assert code in result.error.message
    assert result.successful_keys == (KEYS[0], KEYS[1], KEYS[3])
    assert name in world.objects


def test_a_block_has_its_own_size(open_tier: Open) -> None:
    """Rows that are longer than blocks: what is between the blocks is not touched."""
    stride = BLOCK_BYTES + 512
    driver = open_tier(row_stride=stride)
    driver.store(KEYS[:8])
    assert driver.load(KEYS[:8]).success
    assert driver.loaded(KEYS[:8]) == list(KEYS[:8])
    flat = driver.primary.view.cast("B")
    with flat:
        for block_id in range(driver.primary.num_blocks):
            start = block_id * stride + BLOCK_BYTES
            assert bytes(flat[start : start + 512]) == bytes(512)


def test_what_is_stored_keeps_to_the_format(open_tier: Open, world: World) -> None:
    """Names, payloads and trailers are those of the specification."""
    open_tier(prefix="caches").store(KEYS[:1])
    name = ObjectNames("caches", NAMESPACE).block(KEYS[0])
    assert world.objects[name] == other(KEYS[0])


def test_the_s3_tier_reads_what_nixl_has_stored(
    open_tier: Open, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either tier finds and loads what the other has stored under the same settings."""
    monkeypatch.setattr(S3Tier, "make_client", lambda _: FakeClient(world))
    ours = open_tier(prefix="caches")
    config = parse_tier_config("s3", S3Config, {"bucket": "kv-cache", "prefix": "caches"})
    with TierDriver(S3Tier, config, num_blocks=16, block_bytes=BLOCK_BYTES) as theirs:
        ours.store(KEYS[:4])
        theirs.store(KEYS[4:8])
        assert theirs.resolve(KEYS[:4]) == [True] * 4
        assert ours.resolve(KEYS[4:8]) == [True] * 4
        assert theirs.load(KEYS[:4]).success
        assert theirs.loaded(KEYS[:4]) == list(KEYS[:4])
        assert ours.load(KEYS[4:8]).success
        assert ours.loaded(KEYS[4:8]) == list(KEYS[4:8])
