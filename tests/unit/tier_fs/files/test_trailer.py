"""The bytes behind every payload. Fixed: files outlive the program that wrote them."""

from __future__ import annotations

import struct

import pytest
import xxhash

from kv_core.contract import OffloadKey
from kv_core.errors import BlockDamagedError
from kv_core.tierkit.testing import block_bytes_of, example_key
from kv_tier_fs.files._trailer import TRAILER_BYTES, TrailerFormat

FINGERPRINT = "ab" * 32
KEY = example_key(1)
PAYLOAD = memoryview(block_bytes_of(KEY, 1000))


@pytest.fixture
def trailer() -> memoryview:
    """Return the trailer of a block."""
    buffer = memoryview(bytearray(b"\xff" * TRAILER_BYTES))
    TrailerFormat(FINGERPRINT, 1000).fill(buffer, KEY, PAYLOAD)
    return buffer


def test_the_bytes_are_those_of_the_specification(trailer: memoryview) -> None:
    """Every field is where docs/spec/fs-format.md puts it; the rest is zeros."""
    head = bytes(trailer[:100])
    assert head[:8] == b"KVCBLOCK"
    assert struct.unpack_from("<IIQQ", head, 8) == (
        1,
        36,
        1000,
        xxhash.xxh3_64_intdigest(PAYLOAD),
    )
    assert head[32:64] == bytes.fromhex(FINGERPRINT)
    assert head[64:100] == KEY
    assert struct.unpack_from("<Q", trailer, 100) == (xxhash.xxh3_64_intdigest(head),)
    assert bytes(trailer[108:]) == bytes(TRAILER_BYTES - 108)


def test_a_trailer_is_accepted_by_its_own_format(trailer: memoryview) -> None:
    """What was written checks, and yields the checksum of the payload."""
    accepted = TrailerFormat(FINGERPRINT, 1000)
    checksum = accepted.check(trailer, KEY)
    accepted.check_payload(PAYLOAD, KEY, checksum)


def test_every_flipped_bit_of_the_head_is_found(trailer: memoryview) -> None:
    """No bit of the fields, the key or their checksum can change unnoticed (INT-1)."""
    accepted = TrailerFormat(FINGERPRINT, 1000)
    for bit in range(108 * 8):
        trailer[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlockDamagedError):
            accepted.check_payload(PAYLOAD, KEY, accepted.check(trailer, KEY))
        trailer[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    ("format_", "key"),
    [
        (TrailerFormat("cd" * 32, 1000), KEY),
        (TrailerFormat(FINGERPRINT, 1001), KEY),
        (TrailerFormat(FINGERPRINT, 1000), example_key(2)),
        (TrailerFormat(FINGERPRINT, 1000), example_key(1, group_idx=1)),
    ],
    ids=["namespace", "size", "key", "group"],
)
def test_trailers_of_others_are_refused(
    trailer: memoryview, format_: TrailerFormat, key: OffloadKey
) -> None:
    """Another namespace, size, key or group is damage (vllm#49440)."""
    with pytest.raises(BlockDamagedError, match="belongs to another key or namespace"):
        format_.check(trailer, key)


def test_zeros_are_no_trailer() -> None:
    """A file that was extended by zeros is refused."""
    with pytest.raises(BlockDamagedError, match="no trailer where one belongs"):
        TrailerFormat(FINGERPRINT, 1000).check(memoryview(bytes(TRAILER_BYTES)), KEY)


def test_other_versions_are_refused(trailer: memoryview) -> None:
    """A later format is not guessed at."""
    trailer[8:12] = (2).to_bytes(4, "little")
    with pytest.raises(BlockDamagedError, match="format version 2, expected 1"):
        TrailerFormat(FINGERPRINT, 1000).check(trailer, KEY)


def test_a_key_too_long_is_refused() -> None:
    """A key that would not fit is an error, not a trailer cut off."""
    with pytest.raises(ValueError, match="a key of 5000 bytes does not fit"):
        TrailerFormat(FINGERPRINT, 1000).fill(
            memoryview(bytearray(TRAILER_BYTES)), OffloadKey(bytes(5000)), PAYLOAD
        )
