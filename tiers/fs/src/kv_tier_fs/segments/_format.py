"""The index of a segment: a header, then frames. ``docs/spec/fs-format.md`` is its specification.

A segment is two files: payloads, block after block without anything between them, and an index
that says which slot of the payload file holds which key. Slot ``n`` begins at ``n * block_bytes``.
One store appends one frame for all its blocks (one for each length of key, strictly), after the
payloads are written. A frame is laid out in columns, so that a million blocks are read by numpy
and not one by one.

Everything is little-endian. Every frame ends with a checksum seeded with its place and with the
header's checksum: bytes of another file, or of an earlier attempt at the same place, never pass
for a frame. The first frame that is not whole ends the index.

Pure: nothing here touches the file system.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import numpy as np
import xxhash

from kv_core.contract import OffloadKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

__all__ = [
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "Frame",
    "FrameKind",
    "IndexFormatError",
    "IndexHeader",
    "WriterId",
    "checksum_of_pieces",
    "decode_frames",
    "encode_frames",
    "find_frames",
    "index_bytes",
    "payload_checksum",
]

FORMAT_VERSION: Final = 1
"""Version of the headers and of the frames. A reader refuses any other."""

_MAGIC: Final = b"KVSEGIDX"
# Magic, version, header bytes, writer, segment, slots, block bytes, namespace fingerprint.
_HEADER: Final = struct.Struct("<8sII16sIIQ32s")
_CHECKSUM: Final = struct.Struct("<Q")
HEADER_BYTES: Final = 128
"""Bytes before the first frame."""

_FRAME_MAGIC: Final = 0x4D52464B
_FRAME_BEGIN: Final = struct.pack("<I", _FRAME_MAGIC)
# Magic, kind, bytes of each key, number of blocks, bytes of the frame, segment, writer, reserved.
_FRAME: Final = struct.Struct("<IIIIII16sQ")
_BLOCK_BYTES: Final = 4 + 8
_MOST_BLOCKS: Final = 1 << 24

# What a block takes in an index, at most as a rule: a frame of its own, with a key of 64 bytes.
_MOST_BYTES_PER_BLOCK: Final = _FRAME.size + _BLOCK_BYTES + 64 + _CHECKSUM.size
_PAGE_BYTES: Final = 4096

WriterId = bytes
"""Sixteen random bytes. The folder of a writer bears their hex digits as its name."""


class IndexFormatError(ValueError):
    """The beginning of a file is not the header of an index that this version reads."""


def index_bytes(num_slots: int) -> int:
    """Return how long the index of a segment may become, in whole pages."""
    size = HEADER_BYTES + num_slots * _MOST_BYTES_PER_BLOCK
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


@final
class FrameKind:
    """What a frame says of its blocks."""

    STORED: Final = 1
    """The slots of the segment hold them."""
    REMOVED: Final = 2
    """What the slots of the segment hold does not count any more."""


def payload_checksum(payload: memoryview | bytes, key: OffloadKey) -> int:
    """Return the checksum of a payload under a key; under another key, the same bytes fail it."""
    return xxhash.xxh3_64_intdigest(payload) ^ xxhash.xxh3_64_intdigest(key)


def checksum_of_pieces(pieces: Iterable[memoryview], key: OffloadKey) -> int:
    """Return :func:`payload_checksum` of a payload that comes in pieces."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest() ^ xxhash.xxh3_64_intdigest(key)


@final
@dataclass(frozen=True, slots=True)
class IndexHeader:
    """What an index is of.

    Attributes:
        writer: The process that writes it.
        segment: Number of the segment, from 1 on; 0 is the index of removals, which has no
            payloads.
        num_slots: Most blocks that the segment holds.
        block_bytes: Payload bytes of every block.
        fingerprint: Fingerprint of the namespace, 64 hex digits.
    """

    writer: WriterId
    segment: int
    num_slots: int
    block_bytes: int
    fingerprint: str

    def encode(self) -> bytes:
        """Return the first :data:`HEADER_BYTES` bytes of the file."""
        fields = _HEADER.pack(
            _MAGIC,
            FORMAT_VERSION,
            HEADER_BYTES,
            self.writer,
            self.segment,
            self.num_slots,
            self.block_bytes,
            bytes.fromhex(self.fingerprint),
        )
        padded = fields.ljust(HEADER_BYTES - _CHECKSUM.size, b"\0")
        return padded + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(padded))

    @property
    def seed(self) -> int:
        """What the checksums of the frames are seeded with."""
        return int(_CHECKSUM.unpack(self.encode()[-_CHECKSUM.size :])[0])

    @classmethod
    def decode(cls, data: bytes | memoryview) -> IndexHeader:
        """Read a header.

        Raises:
            IndexFormatError: It is none, is damaged, or is of another version.
        """
        head = bytes(data[:HEADER_BYTES])
        if len(head) < HEADER_BYTES or not head.startswith(_MAGIC):
            raise IndexFormatError("no header of an index")
        _, version, size, writer, segment, num_slots, block_bytes, digest = _HEADER.unpack_from(
            head
        )
        if (version, size) != (FORMAT_VERSION, HEADER_BYTES):
            raise IndexFormatError(f"format version {version}, expected {FORMAT_VERSION}")
        body, checksum = head[: -_CHECKSUM.size], head[-_CHECKSUM.size :]
        if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)) != checksum:
            raise IndexFormatError("the header fails its checksum")
        return cls(writer, segment, num_slots, block_bytes, digest.hex())

    @staticmethod
    def is_of_another_version(data: bytes | memoryview) -> bool:
        """Say whether data begins like an index, but of a version that this one cannot read."""
        head = bytes(data[: len(_MAGIC) + 4])
        own = _MAGIC + struct.pack("<I", FORMAT_VERSION)
        return len(head) == len(own) and head.startswith(_MAGIC) and head != own


@final
@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """Blocks that one call stored or removed, all with keys of one length.

    Attributes:
        kind: One of :class:`FrameKind`.
        writer: Whose segment it speaks of.
        segment: Number of that segment.
        key_bytes: Bytes of each key.
        keys: All keys, one after the other.
        slots: Slots, ``uint32``, in the order of the keys.
        checksums: :func:`payload_checksum` of each, ``uint64``.
    """

    kind: int
    writer: WriterId
    segment: int
    key_bytes: int
    keys: bytes
    slots: npt.NDArray[np.uint32]
    checksums: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.slots)

    def split_keys(self) -> list[OffloadKey]:
        """Return the keys one by one."""
        step = self.key_bytes
        return [OffloadKey(self.keys[at * step : (at + 1) * step]) for at in range(len(self))]


def encode_frames(
    seed: int,
    offset: int,
    kind: int,
    writer: WriterId,
    segment: int,
    keys: Sequence[OffloadKey],
    slots: Sequence[int],
    checksums: Sequence[int],
) -> bytes:
    """Return the frames that say that some blocks were stored, or removed.

    Args:
        seed: :attr:`IndexHeader.seed` of the file that they are for.
        offset: Where in that file they will begin.
        kind: One of :class:`FrameKind`.
        writer: Whose segment the blocks are in.
        segment: Number of that segment.
        keys: The blocks; as many slots and checksums, in the same order.
        slots: Slot of each.
        checksums: Checksum of each.
    """
    if len(set(map(len, keys))) == 1:
        return _encode_frame(seed, offset, (kind, writer, segment), list(keys), slots, checksums)
    frames = b""
    for size in sorted(set(map(len, keys))):
        chosen = [index for index, key in enumerate(keys) if len(key) == size]
        frames += _encode_frame(
            seed,
            offset + len(frames),
            (kind, writer, segment),
            [keys[index] for index in chosen],
            [slots[index] for index in chosen],
            [checksums[index] for index in chosen],
        )
    return frames


def _encode_frame(
    seed: int,
    offset: int,
    about: tuple[int, WriterId, int],
    keys: list[OffloadKey],
    slots: Sequence[int],
    checksums: Sequence[int],
) -> bytes:
    kind, writer, segment = about
    count, key_bytes = len(keys), len(keys[0])
    size = _FRAME.size + count * (_BLOCK_BYTES + key_bytes) + _CHECKSUM.size
    body = b"".join(
        (
            _FRAME.pack(_FRAME_MAGIC, kind, key_bytes, count, size, segment, writer, 0),
            struct.pack(f"<{count}Q", *checksums),
            struct.pack(f"<{count}I", *slots),
            *keys,
        )
    )
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body, seed=_seed_at(seed, offset)))


def _seed_at(seed: int, offset: int) -> int:
    return (seed + offset) & 0xFFFF_FFFF_FFFF_FFFF


def decode_frames(data: memoryview, seed: int, offset: int) -> Iterator[tuple[Frame, int]]:
    """Read the frames that are whole.

    The arrays of a frame are views of ``data`` where that is possible.

    Args:
        data: What the file holds from ``offset`` on.
        seed: :attr:`IndexHeader.seed` of the file.
        offset: Where in the file ``data`` begins; where a frame begins, too.

    Yields:
        A frame and where in the file it ends: from there a later call goes on.
    """
    at = 0
    while len(data) - at >= _FRAME.size:
        magic, kind, key_bytes, count, size, segment, writer, _ = _FRAME.unpack_from(data, at)
        if (
            magic != _FRAME_MAGIC
            or not 0 < count <= _MOST_BLOCKS
            or size != _FRAME.size + count * (_BLOCK_BYTES + key_bytes) + _CHECKSUM.size
            or size > len(data) - at
        ):
            return
        end = at + size - _CHECKSUM.size
        found = xxhash.xxh3_64_intdigest(data[at:end], seed=_seed_at(seed, offset + at))
        if _CHECKSUM.unpack_from(data, end)[0] != found:
            return
        start = at + _FRAME.size
        checksums = np.frombuffer(data, dtype="<u8", count=count, offset=start)
        start += 8 * count
        slots = np.frombuffer(data, dtype="<u4", count=count, offset=start)
        keys = bytes(data[start + 4 * count : end])
        at += size
        yield Frame(kind, writer, segment, key_bytes, keys, slots, checksums), offset + at


def find_frames(data: memoryview, seed: int, offset: int) -> Iterator[Frame]:
    """Read the frames that are whole, whatever is before and between them.

    For whoever wants to know what is behind the end of an index, and not for a reader: the first
    frame that is not whole ends it.

    Args:
        data: What the file holds from ``offset`` on.
        seed: :attr:`IndexHeader.seed` of the file.
        offset: Where in the file ``data`` begins.
    """
    text = bytes(data)
    at = text.find(_FRAME_BEGIN)
    while at >= 0:
        end = at + 1
        for frame, frame_end in decode_frames(data[at:], seed, offset + at):
            yield frame
            end = frame_end - offset
        at = text.find(_FRAME_BEGIN, end)
