"""The index of a segment: what is written is what is read, and nothing else is."""

from __future__ import annotations

import struct

import pytest
import xxhash

from kv_core.contract import OffloadKey
from kv_core.tierkit.testing import example_key
from kv_tier_fs.segments._format import (
    FORMAT_VERSION,
    HEADER_BYTES,
    Frame,
    FrameKind,
    IndexFormatError,
    IndexHeader,
    decode_frames,
    encode_frames,
    find_frames,
    payload_checksum,
)

_WRITER = bytes(range(16))
_HEADER = IndexHeader(_WRITER, 3, 64, 4096, "ab" * 32)
_KEYS = [example_key(number) for number in range(3)]


def _encode(offset: int = HEADER_BYTES, kind: int = FrameKind.STORED) -> bytes:
    return encode_frames(
        _HEADER.seed, offset, kind, _WRITER, 3, _KEYS, [5, 6, 9], [1, 2, 2**64 - 1]
    )


def _decode(data: bytes, offset: int = HEADER_BYTES) -> list[tuple[Frame, int]]:
    return list(decode_frames(memoryview(data), _HEADER.seed, offset))


def test_a_header_comes_back() -> None:
    """Every field of a header is read as it was written."""
    assert IndexHeader.decode(_HEADER.encode()) == _HEADER


def test_a_header_has_its_size() -> None:
    """Frames begin at one place in every index."""
    assert len(_HEADER.encode()) == HEADER_BYTES


@pytest.mark.parametrize("at", [0, 9, 20, 40, 60, 120, 127])
def test_a_changed_header_is_refused(at: int) -> None:
    """A flipped bit anywhere in the header is found."""
    data = bytearray(_HEADER.encode())
    data[at] ^= 1
    with pytest.raises(IndexFormatError):
        IndexHeader.decode(bytes(data))


def test_a_short_header_is_refused() -> None:
    """What ends within the header is no index."""
    with pytest.raises(IndexFormatError, match="no header"):
        IndexHeader.decode(_HEADER.encode()[:-1])


def test_another_version_is_refused_by_name() -> None:
    """An intact header of another version is refused, and the message names both versions."""
    data = bytearray(_HEADER.encode())
    struct.pack_into("<I", data, 8, FORMAT_VERSION + 1)
    data[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:-8])))
    with pytest.raises(IndexFormatError, match=r"version 2, expected 1"):
        IndexHeader.decode(bytes(data))
    assert IndexHeader.is_of_another_version(bytes(data))
    assert not IndexHeader.is_of_another_version(_HEADER.encode())


def test_a_frame_comes_back() -> None:
    """Every field of a frame is read as it was written, and so is where it ends."""
    data = _encode(kind=FrameKind.REMOVED)
    ((frame, end),) = _decode(data)
    assert (frame.kind, frame.writer, frame.segment) == (FrameKind.REMOVED, _WRITER, 3)
    assert frame.split_keys() == _KEYS
    assert frame.slots.tolist() == [5, 6, 9]
    assert frame.checksums.tolist() == [1, 2, 2**64 - 1]
    assert (len(frame), end) == (3, HEADER_BYTES + len(data))


def test_keys_of_each_length_have_a_frame() -> None:
    """Keys of several lengths, the empty one among them, keep their slots and checksums."""
    keys = [example_key(0), *map(OffloadKey, (b"", b"odd", b"two")), example_key(1)]
    data = encode_frames(1, 0, FrameKind.STORED, _WRITER, 1, keys, range(5), range(10, 15))
    found = {}
    for frame, _ in decode_frames(memoryview(data), 1, 0):
        for key, slot, checksum in zip(
            frame.split_keys(), frame.slots.tolist(), frame.checksums.tolist(), strict=True
        ):
            found[key] = slot, checksum
    assert found == {key: (at, at + 10) for at, key in enumerate(keys)}


@pytest.mark.parametrize("cut", [1, 8, 9, 100, 200])
def test_a_torn_tail_ends_an_index(cut: int) -> None:
    """A frame that is not whole is not there, and those before it are."""
    whole = _encode()
    data = whole + _encode(HEADER_BYTES + len(whole))
    assert [end for _, end in _decode(data[:-cut])] == [HEADER_BYTES + len(whole)]


@pytest.mark.parametrize("at", [0, 5, 30, 60, 75, 120, -1])
def test_a_flipped_bit_ends_an_index(at: int) -> None:
    """A frame with a wrong bit anywhere is not believed."""
    data = bytearray(_encode())
    data[at] ^= 8
    assert _decode(bytes(data)) == []


def test_a_frame_of_another_place_is_not_believed() -> None:
    """An intact frame written for another offset does not count: leftovers of a failed append."""
    assert _decode(_encode(HEADER_BYTES + 8)) == []


def test_a_frame_of_another_index_is_not_believed() -> None:
    """An intact frame of another segment's index does not count."""
    other = IndexHeader(_WRITER, 4, 64, 4096, "ab" * 32)
    assert list(decode_frames(memoryview(_encode()), other.seed, HEADER_BYTES)) == []


def test_reading_goes_on_where_it_ended() -> None:
    """A follower that reads what was appended since gets that and nothing twice."""
    first = _encode()
    second = _encode(HEADER_BYTES + len(first))
    ((_, end),) = _decode(first)
    ((frame, _),) = _decode((first + second)[end - HEADER_BYTES :], end)
    assert frame.split_keys() == _KEYS


def test_whole_frames_are_found_behind_what_is_none() -> None:
    """Wherever they begin, also behind bytes that only look like a beginning; torn ones are not."""
    data = bytearray()
    for _ in range(5):
        data += _encode(HEADER_BYTES + len(data))
    step = len(data) // 5
    data[9] ^= 1
    data[2 * step :] = data[:4] + data[2 * step + 4 :]
    data[3 * step + 50] ^= 1
    found = list(find_frames(memoryview(data[:-1]), _HEADER.seed, HEADER_BYTES))
    assert [frame.split_keys() for frame in found] == [_KEYS, _KEYS]
    assert list(find_frames(memoryview(data[step:-1]), _HEADER.seed, HEADER_BYTES)) == []
    assert list(find_frames(memoryview(b""), _HEADER.seed, HEADER_BYTES)) == []


def test_a_payload_under_another_key_fails_its_checksum() -> None:
    """Files that were swapped give no wrong block: equal bytes have a checksum for each key."""
    payload = b"payload"
    assert payload_checksum(payload, _KEYS[0]) == payload_checksum(memoryview(payload), _KEYS[0])
    assert payload_checksum(payload, _KEYS[0]) != payload_checksum(payload, _KEYS[1])
    assert payload_checksum(payload, _KEYS[0]) != payload_checksum(b"paxload", _KEYS[0])
