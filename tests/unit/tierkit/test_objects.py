"""The format of blocks in object storage: names, trailers, the description."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest
import xxhash

from kv_core.contract import OffloadKey, make_offload_key
from kv_core.errors import BlockDamagedError, TierOpenError
from kv_core.tierkit.objects import (
    TRAILER_BYTES,
    ObjectFormat,
    ObjectNames,
    check_description,
    describe_namespace,
    read_trailer,
)
from kv_core.tierkit.testing import example_namespace

NAMESPACE = example_namespace(block_bytes=1000)
OTHER = replace(NAMESPACE, model_fingerprint="other weights")
KEY = make_offload_key(bytes(range(32)), 7)
LONG_KEY = make_offload_key(b"k" * 400, 1)
PAYLOAD = bytes(i % 251 for i in range(1000))


def trailer(key: OffloadKey = KEY, payload: bytes = PAYLOAD) -> bytes:
    """Return the trailer of a block."""
    return ObjectFormat(NAMESPACE).trailer(key, memoryview(payload))


def check(key: OffloadKey, payload: bytes, found: bytes) -> None:
    """Check an object."""
    ObjectFormat(NAMESPACE).check(key, memoryview(payload), found)


# -- trailers -------------------------------------------------------------------------------------


def test_an_object_is_the_payload_and_a_trailer_of_fixed_length() -> None:
    """256 bytes, whatever the key, so one length is right."""
    assert ObjectFormat(NAMESPACE).object_bytes == 1256
    assert len(trailer()) == len(trailer(LONG_KEY)) == TRAILER_BYTES == 256


def test_the_bytes_of_a_trailer() -> None:
    """Field by field, as docs/spec/object-format.md has them."""
    found = trailer()
    assert found[:8] == b"KVOBJECT"
    assert struct.unpack_from("<IIQ", found, 8) == (1, 36, 1000)
    assert struct.unpack_from("<Q", found, 24) == (xxhash.xxh3_64_intdigest(PAYLOAD),)
    assert found[32:64].hex() == NAMESPACE.fingerprint
    assert found[64:100] == KEY
    assert found[100:248] == bytes(148)
    assert struct.unpack_from("<Q", found, 248) == (xxhash.xxh3_64_intdigest(found[:248]),)


@pytest.mark.parametrize("key", [KEY, LONG_KEY], ids=["usual", "long"])
def test_what_was_made_checks(key: OffloadKey) -> None:
    """Also with a key that does not fit, of which there is the digest."""
    check(key, PAYLOAD, trailer(key))


@pytest.mark.parametrize("offset", range(0, TRAILER_BYTES, 5))
def test_every_flipped_bit_of_a_trailer_is_damage(offset: int) -> None:
    """No byte of it goes unchecked."""
    damaged = bytearray(trailer())
    damaged[offset] ^= 0b100
    with pytest.raises(BlockDamagedError):
        check(KEY, PAYLOAD, bytes(damaged))


def test_a_flipped_bit_of_the_payload_is_damage() -> None:
    """The message has both checksums."""
    damaged = bytes([PAYLOAD[0] ^ 1]) + PAYLOAD[1:]
    with pytest.raises(BlockDamagedError, match=f"{xxhash.xxh3_64_intdigest(PAYLOAD):016x}"):
        check(KEY, damaged, trailer())


@pytest.mark.parametrize(
    "other",
    [make_offload_key(bytes(range(32)), 8), make_offload_key(b"k" * 400, 2)],
    ids=["group", "long key"],
)
def test_an_object_of_another_key_is_damage(other: OffloadKey) -> None:
    """Two objects that were swapped."""
    with pytest.raises(BlockDamagedError, match="another key"):
        check(KEY, PAYLOAD, trailer(other))


def test_an_object_of_another_namespace_is_damage() -> None:
    """Copied to the wrong folder, it names where it belongs."""
    foreign = ObjectFormat(OTHER).trailer(KEY, memoryview(PAYLOAD))
    with pytest.raises(BlockDamagedError, match=OTHER.fingerprint[:12]):
        check(KEY, PAYLOAD, foreign)


def test_an_object_of_a_later_format_says_so() -> None:
    """Version 2 is not version 1 gone bad."""
    later = bytearray(trailer())
    later[8] = 2
    with pytest.raises(BlockDamagedError, match="version 2, expected 1"):
        check(KEY, PAYLOAD, bytes(later))


@pytest.mark.parametrize("length", [0, 999, 1255, 1257])
def test_another_length_is_damage(length: int) -> None:
    """A truncated object and an over-long one; both lengths are in the message."""
    with pytest.raises(BlockDamagedError, match=f"{length} bytes, expected 1256"):
        ObjectFormat(NAMESPACE).check_length(KEY, length)


def test_a_trailer_tells_what_it_belongs_to() -> None:
    """To whoever lists a bucket."""
    found = read_trailer(trailer())
    assert found is not None
    assert found == (KEY, 1000, xxhash.xxh3_64_intdigest(PAYLOAD), NAMESPACE.fingerprint)


def test_a_trailer_with_the_digest_of_a_key_has_no_key() -> None:
    """But everything else."""
    found = read_trailer(trailer(LONG_KEY))
    assert found is not None
    assert (found.key, found.payload_bytes) == (None, 1000)


@pytest.mark.parametrize("content", [b"", bytes(256), trailer()[:-1], trailer() + b"x"])
def test_what_is_no_trailer_is_none(content: bytes) -> None:
    """Of any length."""
    assert read_trailer(content) is None


# -- names ----------------------------------------------------------------------------------------


def test_the_names_of_a_namespace() -> None:
    """Folder, description and blocks."""
    names = ObjectNames("bucket/prefix", NAMESPACE)
    folder = f"bucket/prefix/{NAMESPACE.folder_name}"
    assert names.description == f"{folder}/namespace.json"
    assert names.block(KEY) == f"{folder}/r0/000/{bytes(range(32)).hex()}_g7.kv"


def test_without_a_prefix_no_name_begins_with_a_slash() -> None:
    """A bucket of its own."""
    assert ObjectNames("", NAMESPACE).description == f"{NAMESPACE.folder_name}/namespace.json"


def test_names_of_distinct_keys_are_distinct() -> None:
    """Group, length, and hashes that need a digest (DATA-7)."""
    names = ObjectNames("b", NAMESPACE)
    keys = [
        KEY,
        make_offload_key(bytes(range(32)), 2**32 - 1),
        make_offload_key(b"", 7),
        make_offload_key(b"\0", 7),
        make_offload_key(b"k" * 200, 7),
        make_offload_key(b"k" * 201, 7),
        make_offload_key(b"k" * 201, 8),
    ]
    assert len({names.block(key).casefold() for key in keys}) == len(keys)


@pytest.mark.parametrize(
    "key", [KEY, make_offload_key(b"\xff", 0), make_offload_key(b"", 5)], ids=repr
)
def test_a_name_says_its_key(key: OffloadKey) -> None:
    """There and back, below any host that lists it."""
    names = ObjectNames("b", NAMESPACE)
    assert names.key_of(names.block(key)) == key


def test_a_name_that_is_no_block_says_no_key() -> None:
    """The description, a foreign object, and a block under a digest."""
    names = ObjectNames("b", NAMESPACE)
    for name in (names.description, f"{names.blocks}/000/zz_g1.kv", names.block(LONG_KEY)):
        assert names.key_of(name) is None


def test_a_rank_of_its_own_has_names_of_its_own() -> None:
    """Blocks of one rank never meet those of another."""
    rank = replace(NAMESPACE, rank=3, tensor_parallel_size=4)
    assert ObjectNames("b", rank).blocks.endswith("/r3")


# -- the description ------------------------------------------------------------------------------


def test_a_description_is_that_of_its_namespace() -> None:
    """What was written is accepted, under another name of the same model, too."""
    found = describe_namespace(NAMESPACE)
    check_description(found, NAMESPACE, where="x")
    check_description(found, replace(NAMESPACE, model="alias"), where="x")


def test_a_description_of_another_namespace_names_the_fields() -> None:
    """vllm#49176: two models in one folder."""
    with pytest.raises(TierOpenError, match="these fields differ: model_fingerprint"):
        check_description(describe_namespace(OTHER), NAMESPACE, where="b/namespace.json")


def test_a_description_of_a_later_format_is_refused() -> None:
    """And the version is in the message."""
    later = json.loads(describe_namespace(NAMESPACE))
    later["format_version"] = 2
    with pytest.raises(TierOpenError, match="version 2; this version of kv-core writes"):
        check_description(json.dumps(later).encode(), NAMESPACE, where="x")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"format": "kv-object"}'])
def test_what_is_no_description_is_refused(content: bytes) -> None:
    """Never overwritten: somebody else's object lies there."""
    with pytest.raises(TierOpenError, match="b/x is not a description"):
        check_description(content, NAMESPACE, where="b/x")
