"""The last page of a region: what a process must agree with before it reads a row."""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kv_core.errors import RegionError

if TYPE_CHECKING:
    from kv_core.cpu._geometry import PrimaryGeometry

__all__ = ["NONCE_BYTES", "TRAILER_BYTES", "RegionTrailer"]

TRAILER_BYTES: Final = 4096
NONCE_BYTES: Final = 16

_MAGIC: Final = b"kvcorerg"
_VERSION: Final = 3
# Magic, version, workers, blocks, bytes of a worker's page, row stride, namespace, nonce.
_LAYOUT: Final = struct.Struct(f"<8sIIQQQ32s{NONCE_BYTES}s")
# Of the bytes before it. Others read while the creator writes: what fits is complete.
_CHECKSUM: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class RegionTrailer:
    """Identity and shape of a region.

    Attributes:
        num_workers: Pages in a row, and processes that will attach.
        num_blocks: Rows.
        worker_page_bytes: Bytes of one worker's page.
        row_stride: Bytes from one row to the next.
        namespace_fingerprint: What the bytes in the rows are: 64 hex digits.
        nonce: Drawn anew for each region, 16 bytes. A process whose config carries another one
            belongs to another generation of the engine.
    """

    num_workers: int
    num_blocks: int
    worker_page_bytes: int
    row_stride: int
    namespace_fingerprint: str
    nonce: bytes

    def __post_init__(self) -> None:
        if re.fullmatch(r"[0-9a-f]{64}", self.namespace_fingerprint) is None:
            raise RegionError(
                "the namespace fingerprint of a region must be 64 hex digits, found "
                f"{self.namespace_fingerprint!r}"
            )
        if len(self.nonce) != NONCE_BYTES:
            raise RegionError(
                f"the nonce of a region must have {NONCE_BYTES} bytes, found {len(self.nonce)}"
            )

    @classmethod
    def of(
        cls, geometry: PrimaryGeometry, namespace_fingerprint: str, nonce: bytes
    ) -> RegionTrailer:
        """Return the trailer of a region of a geometry."""
        return cls(
            num_workers=geometry.num_workers,
            num_blocks=geometry.num_blocks,
            worker_page_bytes=geometry.worker_page_bytes,
            row_stride=geometry.row_stride,
            namespace_fingerprint=namespace_fingerprint,
            nonce=nonce,
        )

    def pack(self) -> bytes:
        """Return the bytes of the trailer, without the zeros that fill its page."""
        fields = _LAYOUT.pack(
            _MAGIC,
            _VERSION,
            self.num_workers,
            self.num_blocks,
            self.worker_page_bytes,
            self.row_stride,
            bytes.fromhex(self.namespace_fingerprint),
            self.nonce,
        )
        return fields + _CHECKSUM.pack(zlib.crc32(fields))

    @classmethod
    def unpack(cls, page: bytes | memoryview) -> RegionTrailer | None:
        """Read a trailer.

        Returns:
            The trailer; ``None`` if its creator has not finished writing it.

        Raises:
            RegionError: These are not the bytes of a trailer of this version.
        """
        magic, version, workers, blocks, page_bytes, stride, namespace, nonce = _LAYOUT.unpack_from(
            page
        )
        if magic == bytes(len(_MAGIC)) or (magic == _MAGIC and version == 0):
            return None
        if magic != _MAGIC or version != _VERSION:
            raise RegionError(
                f"no region of version {_VERSION}: its last page begins with {magic!r}, version "
                f"{version}. Start all processes of the engine from one release, and anew."
            )
        (checksum,) = _CHECKSUM.unpack_from(page, _LAYOUT.size)
        if checksum != zlib.crc32(page[: _LAYOUT.size]):
            return None
        return cls(workers, blocks, page_bytes, stride, namespace.hex(), nonce)

    def require_equal(self, expected: RegionTrailer) -> None:
        """Refuse a region that is not the expected one.

        Raises:
            RegionError: Fields differ; each is named.
        """
        differences = [
            f"its {name} is {_text(found)}, expected {_text(wanted)}"
            for name in self.__slots__
            if (found := getattr(self, name)) != (wanted := getattr(expected, name))
        ]
        if differences:
            raise RegionError(
                f"the region is another one: {'; '.join(differences)}. It belongs to another start "
                "or another configuration of the engine; restart all of its processes together."
            )


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)
