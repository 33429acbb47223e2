"""Reads the segments of a namespace, by code of its own: the tier's would agree with its mistakes.

Only what ``docs/spec/fs-format.md`` says is used, and nothing is kept from one call to the next.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import xxhash

from kv_core.contract import OffloadKey

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Place", "find_writers", "list_places", "read_frames"]

_HEADER: Final = struct.Struct("<8sII16sIIQ32s")
_HEADER_BYTES: Final = 128
_FRAME: Final = struct.Struct("<IIIIII16sQ")
_FRAME_MAGIC: Final = int.from_bytes(b"KFRM", "little")
_STORED: Final = 1
_REMOVED: Final = 2
_CHECKSUM_BYTES: Final = 8
_64_BITS: Final = (1 << 64) - 1


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where a block is.

    Attributes:
        path: File of the payloads.
        offset: Where in it the block begins.
        size: Bytes of the block.
        checksum: What its index says its bytes and its key amount to.
    """

    path: Path
    offset: int
    size: int
    checksum: int

    def read(self) -> bytes:
        """Return the bytes that are there: fewer than :attr:`size` where the file ends before."""
        with open(self.path, "rb") as file:
            return os.pread(file.fileno(), self.size, self.offset)

    def is_intact(self, key: OffloadKey) -> bool:
        """Say whether the bytes are what was stored under the key."""
        found = self.read()
        checksum = xxhash.xxh3_64_intdigest(found) ^ xxhash.xxh3_64_intdigest(key)
        return len(found) == self.size and checksum == self.checksum


def find_writers(root: Path, fingerprint: str) -> list[Path]:
    """Return the folders of all writers of a namespace."""
    pattern = f"*{fingerprint[:12]}/segments-v1/" + "[0-9a-f]" * 32
    return sorted(path for path in root.glob(pattern) if path.is_dir())


def list_places(root: Path, fingerprint: str) -> dict[OffloadKey, list[Place]]:
    """Return where blocks are that have not been removed."""
    stored: dict[tuple[bytes, int, int], tuple[OffloadKey, Place]] = {}
    removed: set[tuple[bytes, int, int]] = set()
    for writer in find_writers(root, fingerprint):
        for index in sorted(writer.glob("*.idx")):
            payloads = index.with_suffix(".seg")
            for kind, name, block_bytes, key, slot, checksum in _blocks(index, fingerprint):
                where = (*name, slot)
                if kind == _REMOVED:
                    removed.add(where)
                elif payloads.exists():
                    place = Place(payloads, slot * block_bytes, block_bytes, checksum)
                    stored[where] = (key, place)
    places: dict[OffloadKey, list[Place]] = {}
    for where, (key, place) in stored.items():
        if where not in removed:
            places.setdefault(key, []).append(place)
    return places


def _blocks(
    index: Path, fingerprint: str
) -> Iterator[tuple[int, tuple[bytes, int], int, OffloadKey, int, int]]:
    """Yield kind, segment, block size, key, slot and checksum of each block in an index."""
    try:
        data = index.read_bytes()
    except FileNotFoundError:
        return
    if len(data) < _HEADER_BYTES:
        return
    header = _HEADER.unpack_from(data)
    block_bytes, found = header[6], header[7]
    if found.hex() != fingerprint:
        return
    for kind, name, keys, slots, checksums in read_frames(data):
        for key, slot, checksum in zip(keys, slots, checksums, strict=True):
            yield kind, name, block_bytes, key, slot, checksum


def read_frames(
    data: bytes,
) -> Iterator[tuple[int, tuple[bytes, int], list[OffloadKey], list[int], list[int]]]:
    """Yield kind, segment, keys, slots and checksums of each whole frame of an index."""
    seed = int.from_bytes(data[_HEADER_BYTES - _CHECKSUM_BYTES : _HEADER_BYTES], "little")
    at = _HEADER_BYTES
    while at + _FRAME.size <= len(data):
        magic, kind, key_bytes, count, size, segment, writer, _ = _FRAME.unpack_from(data, at)
        end = at + size - _CHECKSUM_BYTES
        if magic != _FRAME_MAGIC or not 0 < size <= len(data) - at:
            return
        found = xxhash.xxh3_64_intdigest(data[at:end], seed=(seed + at) & _64_BITS)
        if data[end : at + size] != found.to_bytes(_CHECKSUM_BYTES, "little"):
            return
        checksums = struct.unpack_from(f"<{count}Q", data, at + _FRAME.size)
        slots = struct.unpack_from(f"<{count}I", data, at + _FRAME.size + 8 * count)
        first = at + _FRAME.size + 12 * count
        keys = [
            OffloadKey(data[first + n * key_bytes : first + (n + 1) * key_bytes])
            for n in range(count)
        ]
        yield kind, (writer, segment), keys, list(slots), list(checksums)
        at += size
