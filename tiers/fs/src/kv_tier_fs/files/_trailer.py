"""The trailer behind the payload of every block file. ``docs/spec/fs-format.md`` is its spec."""

from __future__ import annotations

import struct
from typing import Final, final

import xxhash

from kv_core.contract import OffloadKey
from kv_core.errors import BlockDamagedError

__all__ = ["FORMAT_VERSION", "MAGIC", "TRAILER_BYTES", "TrailerFormat", "key_in_trailer"]

MAGIC: Final = b"KVCBLOCK"
FORMAT_VERSION: Final = 1

TRAILER_BYTES: Final = 4096
"""A whole page: direct I/O moves nothing smaller on disks with large sectors."""

# Magic, version, key length, payload length, payload checksum, namespace fingerprint.
_FIELDS: Final = struct.Struct("<8sIIQQ32s")
_CHECKSUM: Final = struct.Struct("<Q")
_MOST_KEY_BYTES: Final = TRAILER_BYTES - _FIELDS.size - _CHECKSUM.size


@final
class TrailerFormat:
    """Writes and checks trailers of one namespace and block size.

    Args:
        fingerprint: Fingerprint of the namespace, 64 hex digits.
        payload_bytes: Payload bytes of every block.
    """

    def __init__(self, fingerprint: str, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self._fingerprint = bytes.fromhex(fingerprint)

    def fill(self, trailer: memoryview, key: OffloadKey, payload: memoryview) -> None:
        """Write the trailer of a block into a buffer of :data:`TRAILER_BYTES`.

        Raises:
            ValueError: The key does not fit.
        """
        if len(key) > _MOST_KEY_BYTES:
            raise ValueError(
                f"a key of {len(key)} bytes does not fit the trailer; at most {_MOST_KEY_BYTES}"
            )
        head = self._head(key, xxhash.xxh3_64_intdigest(payload))
        end = len(head) + _CHECKSUM.size
        trailer[: len(head)] = head
        trailer[len(head) : end] = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))
        trailer[end:] = bytes(TRAILER_BYTES - end)

    def check(self, trailer: memoryview, key: OffloadKey) -> int:
        """Check all of a trailer and return the payload checksum that it promises.

        Raises:
            BlockDamagedError: It is not the trailer of this key in this format and namespace.
        """
        magic, version, key_bytes, payload_bytes, checksum, fingerprint = _FIELDS.unpack_from(
            trailer
        )
        if magic != MAGIC:
            raise BlockDamagedError(f"block {key.hex()}: no trailer where one belongs")
        if version != FORMAT_VERSION:
            raise BlockDamagedError(
                f"block {key.hex()}: format version {version}, expected {FORMAT_VERSION}"
            )
        # Comparing with the trailer that ought to be there catches every other difference.
        head = self._head(key, checksum)
        end = len(head) + _CHECKSUM.size
        if trailer[: len(head)] != head:
            raise BlockDamagedError(
                f"block {key.hex()}: the object belongs to another key or namespace (key of "
                f"{key_bytes} bytes, payload of {payload_bytes} bytes, namespace "
                f"{fingerprint.hex()[:12]})"
            )
        if trailer[len(head) : end] != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head)):
            raise BlockDamagedError(f"block {key.hex()}: the trailer fails its checksum")
        return int(checksum)

    def check_payload(self, payload: memoryview, key: OffloadKey, checksum: int) -> None:
        """Check a payload against the checksum of its trailer.

        Raises:
            BlockDamagedError: They differ.
        """
        found = xxhash.xxh3_64_intdigest(payload)
        if found != checksum:
            raise BlockDamagedError(
                f"block {key.hex()}: the payload has checksum {found:016x}, stored was "
                f"{checksum:016x}"
            )

    def _head(self, key: OffloadKey, checksum: int) -> bytes:
        fields = _FIELDS.pack(
            MAGIC, FORMAT_VERSION, len(key), self.payload_bytes, checksum, self._fingerprint
        )
        return fields + key


def key_in_trailer(trailer: bytes) -> OffloadKey | None:
    """Return the key that a trailer names, whoever wrote it; ``None`` when it is none."""
    if len(trailer) != TRAILER_BYTES:
        return None
    magic, version, key_bytes, _, _, _ = _FIELDS.unpack_from(trailer)
    if (magic, version) != (MAGIC, FORMAT_VERSION) or key_bytes > _MOST_KEY_BYTES:
        return None
    return OffloadKey(trailer[_FIELDS.size : _FIELDS.size + key_bytes])
