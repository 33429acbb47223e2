"""Tests of block contents and of the checker that judges them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.keys import make_offload_key
from kv_core.workload import POISON_BYTE, BlockChecker, _checker, _content, fill_block, poison

MIB = 1 << 20
KEY = make_offload_key(hashlib.sha256(b"block").digest(), 0)
NEIGHBOUR = make_offload_key(hashlib.sha256(b"block").digest(), 1)

Octets = npt.NDArray[np.uint8]


def content(key: bytes, length: int) -> Octets:
    """Return the content of a block."""
    out = np.zeros(length, dtype=np.uint8)
    fill_block(key, out)
    return out


def word_by_definition(key: bytes, number: int) -> int:
    """Compute one word with Python integers, step by step as the definition says."""
    mask = 2**64 - 1
    digest = hashlib.blake2b(key, digest_size=16, person=b"kv-core block").digest()
    a, b = (int.from_bytes(digest[start : start + 8], "little") for start in (0, 8))
    state = (number % 2**18 + 1) * 0x9E3779B97F4A7C15 & mask
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    lane = state ^ (state >> 31)
    page = a + number // 2**18 * 0x9E3779B97F4A7C15 & mask
    return (lane ^ page) * (b | 1) & mask


@pytest.mark.parametrize("number", [0, 1, 511, 2**18 - 1, 2**18, 2**18 + 1])
def test_words_follow_the_definition(number: int) -> None:
    """The content is what the module says it is, on both sides of a 2 MiB border."""
    found = content(KEY, 2 * MIB + 64).view("<u8")
    assert int(found[number]) == word_by_definition(KEY, number)


def test_content_has_fixed_values() -> None:
    """Blocks that one version wrote are checked by the next."""
    assert bytes(content(b"key", 24)).hex() == "a9e08a677043839426cd7edbf502b9a34925fca3c9526e01"
    assert bytes(content(b"key", 2 * MIB + 13)[-13:]).hex() == "40f16c4a8ac35b9f2734906b72"


@given(key=st.binary(max_size=64), length=st.integers(0, 5000), offset=st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_checker_accepts_what_was_filled(key: bytes, length: int, offset: int) -> None:
    """Both computations of the content agree for any key, length and alignment."""
    memory = np.full(length + 20, 7, dtype=np.uint8)
    fill_block(key, memory[offset : offset + length])
    assert BlockChecker().count_wrong_bytes(key, memory[offset : offset + length]) == 0
    assert set(memory[:offset]) | set(memory[offset + length :]) == {7}


@pytest.mark.parametrize("length", [512, 4096, 32_768 + 3, 2 * MIB, 2 * MIB + 8, 5 * MIB + 1])
def test_checker_accepts_large_blocks(length: int) -> None:
    """Both computations agree beyond one table of words, with one checker for all sizes."""
    checker = BlockChecker()
    for key in (KEY, NEIGHBOUR, b""):
        assert checker.count_wrong_bytes(key, content(key, length)) == 0
        assert checker.count_wrong_bytes(key, content(key, 64)) == 0


@pytest.mark.parametrize("length", [1, 7, 8, 517, 1024])
def test_checker_counts_every_single_flipped_byte(length: int) -> None:
    """One wrong byte is one wrong byte, wherever it is."""
    checker = BlockChecker()
    data = content(KEY, length)
    for position in range(length):
        data[position] ^= 1 << position % 8
        assert checker.count_wrong_bytes(KEY, data) == 1
        data[position] ^= 1 << position % 8
    assert checker.count_wrong_bytes(KEY, data) == 0


@given(positions=st.sets(st.integers(0, 2 * MIB + 4095), max_size=20))
@settings(max_examples=10, deadline=None)
def test_checker_counts_exactly(positions: set[int]) -> None:
    """The count is the number of bytes that differ."""
    data = content(KEY, 2 * MIB + 4096)
    for position in positions:
        data[position] ^= 0xFF
    assert BlockChecker().count_wrong_bytes(KEY, data) == len(positions)


@pytest.mark.parametrize("shift", [1, 2, 4, 8, 512, 4096, MIB, 2 * MIB])
def test_checker_sees_shifted_content(shift: int) -> None:
    """Bytes of the right block at the wrong place are wrong, in nearly every byte."""
    length = 64 * 1024
    whole = content(KEY, length + shift)
    wrong = BlockChecker().count_wrong_bytes(KEY, whole[shift:])
    assert wrong > 0.98 * length


@pytest.mark.parametrize("unit", [8, 512, 4096])
def test_checker_sees_swapped_parts(unit: int) -> None:
    """Two parts of a block that changed places are both wrong."""
    data = content(KEY, 16 * unit)
    parts = data.reshape(16, unit)
    parts[[3, 11]] = parts[[11, 3]]
    assert BlockChecker().count_wrong_bytes(KEY, data) > 1.8 * unit


def test_checker_sees_every_other_block() -> None:
    """The content of another group, another hash or a key with one more bit is wrong."""
    checker = BlockChecker()
    others = [NEIGHBOUR, b"", KEY[:-1], KEY + b"\0"]
    others += [
        bytes(byte ^ (1 << bit if index == 20 else 0) for index, byte in enumerate(KEY))
        for bit in range(8)
    ]
    for other in others:
        assert checker.count_wrong_bytes(KEY, content(other, 4096)) > 0.98 * 4096


def test_checker_sees_a_torn_block() -> None:
    """A block whose end is another's has that many wrong bytes, less chance agreements."""
    data = content(KEY, 8192)
    data[4096:] = content(NEIGHBOUR, 8192)[4096:]
    assert 0.98 * 4096 < BlockChecker().count_wrong_bytes(KEY, data) <= 4096


def test_checker_sees_zeros_and_poison() -> None:
    """Memory that was never written is wrong."""
    checker = BlockChecker()
    data = np.zeros(4096, dtype=np.uint8)
    assert checker.count_wrong_bytes(KEY, data) > 0.98 * 4096
    poison(data)
    assert set(data) == {POISON_BYTE}
    assert checker.count_wrong_bytes(KEY, data) > 0.98 * 4096


def test_all_words_of_a_block_differ() -> None:
    """Within 2 MiB no word occurs twice."""
    words = content(KEY, 2 * MIB).view(np.uint64)
    assert np.unique(words).size == words.size


@pytest.mark.parametrize("memory", ["bytearray", "memoryview", "two-dimensional"])
def test_fills_any_writable_memory(memory: str) -> None:
    """Whatever exports a contiguous buffer can be filled and checked."""
    out: Any
    if memory == "bytearray":
        out = bytearray(4096)
    elif memory == "memoryview":
        out = memoryview(bytearray(8192))[1000:5096]
    else:
        out = np.zeros((4, 1024), dtype=np.uint8)
    fill_block(KEY, out)
    assert memoryview(out).tobytes() == content(KEY, 4096).tobytes()
    assert BlockChecker().count_wrong_bytes(KEY, out) == 0


def test_checker_reads_read_only_memory() -> None:
    """Checking needs no right to write."""
    assert BlockChecker().count_wrong_bytes(KEY, content(KEY, 100).tobytes()) == 0


def test_refuses_memory_that_cannot_be_filled() -> None:
    """Read-only and strided memory is refused instead of filled elsewhere."""
    with pytest.raises(ValueError, match="found read-only memory"):
        fill_block(KEY, bytes(64))
    with pytest.raises(ValueError, match="found strided memory"):
        poison(np.zeros(64, dtype=np.uint8)[::2])
    with pytest.raises(ValueError, match="found strided memory"):
        BlockChecker().count_wrong_bytes(KEY, np.zeros(64, dtype=np.uint8)[::2])


def test_empty_memory_is_right() -> None:
    """A block of no bytes has nothing to fill and nothing to find."""
    fill_block(KEY, bytearray())
    poison(bytearray())
    assert BlockChecker().count_wrong_bytes(KEY, b"") == 0


def test_checker_shares_no_code_with_the_content() -> None:
    """A mistake in the content cannot hide in the checker: neither imports the other."""
    for module in (_checker, _content):
        functions = {
            value.__module__ for value in vars(module).values() if hasattr(value, "__module__")
        }
        own = {name for name in functions if name and name.startswith("kv_core")}
        assert own == {module.__name__}
