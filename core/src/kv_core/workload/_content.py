"""Bytes of a block, derived from its key: a wrong, shifted, stale or torn block is seen.

Definition, with words of 8 bytes in little-endian order and arithmetic modulo 2**64:

* ``digest = blake2b(key, digest_size=16, person=b"kv-core block")``; ``a`` is its first word and
  ``b`` its second with the lowest bit set;
* ``lane(j)`` is the *j*-th output of SplitMix64 started at 0, for *j* from 0;
* ``word(i) = (lane(i % 2**18) ^ (a + (i // 2**18) * 0x9E3779B97F4A7C15)) * b``;
* the block is the words in order; a length that is no multiple of 8 cuts the last one.

Within each 2 MiB all words differ (every step is a bijection), and two keys agree in a word only
by chance. :mod:`kv_core.workload._checker` computes the same definition by a route of its own.
"""

from __future__ import annotations

import hashlib
import struct
from functools import cache
from typing import TYPE_CHECKING, Final, cast

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Buffer

__all__ = ["POISON_BYTE", "fill_block", "poison"]

POISON_BYTE: Final = 0xDB
"""Every byte of poisoned memory. No key yields two equal words in a row."""

_SEEDS: Final = struct.Struct("<QQ")
_PERSON: Final = b"kv-core block"
_GAMMA: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1
_LANES: Final = 2**18


def fill_block(key: bytes, out: Buffer | npt.NDArray[np.uint8]) -> None:
    """Write the content of a block.

    Args:
        key: Any bytes, for example an ``OffloadKey``.
        out: Writable, contiguous memory of any length and alignment.

    Raises:
        ValueError: ``out`` is read-only or not contiguous.
    """
    target = _writable(out)
    first, second = _SEEDS.unpack(hashlib.blake2b(key, digest_size=16, person=_PERSON).digest())
    factor = second | 1
    lanes = _lanes()
    num_words, rest = divmod(target.size, 8)
    words = target[: num_words * 8].view("<u8")
    multiplier = np.uint64(factor)
    for start in range(0, num_words, _LANES):
        part = words[start : start + _LANES]
        page = np.uint64((first + start // _LANES * _GAMMA) & _MASK)
        np.bitwise_xor(lanes[: part.size], page, out=part)
        np.multiply(part, multiplier, out=part)
    if rest:
        page_number, lane = divmod(num_words, _LANES)
        last = (int(lanes[lane]) ^ ((first + page_number * _GAMMA) & _MASK)) * factor & _MASK
        target[-rest:] = np.frombuffer(last.to_bytes(8, "little"), dtype=np.uint8)[:rest]


def poison(out: Buffer | npt.NDArray[np.uint8]) -> None:
    """Fill memory with :data:`POISON_BYTE`, which no key yields: what is read later was written.

    Args:
        out: Writable, contiguous memory of any length.

    Raises:
        ValueError: ``out`` is read-only or not contiguous.
    """
    _writable(out).fill(POISON_BYTE)


def _writable(out: Buffer | npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    # frombuffer refuses empty memory and, with a message about buffers, memory with gaps.
    view = memoryview(cast("Buffer", out))  # an array is one, which its types say from 3.12 on
    if view.readonly or not view.c_contiguous:
        raise ValueError(
            "a block is written into writable, contiguous memory; found "
            f"{'read-only' if view.readonly else 'strided'} memory"
        )
    if not view.nbytes:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(view, dtype=np.uint8)


@cache
def _lanes() -> npt.NDArray[np.uint64]:
    """Return the first words of SplitMix64: 2 MiB, made once a process."""
    state: npt.NDArray[np.uint64] = np.arange(1, _LANES + 1, dtype=np.uint64)
    state *= np.uint64(_GAMMA)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state
