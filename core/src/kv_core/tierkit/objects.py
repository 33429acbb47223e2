"""A block as one object of an object store: names, and the trailer that makes loads safe.

The format is the same for every tier over object storage, whatever client it uses, so that one
bucket can be read by any of them. ``docs/spec/object-format.md`` is its specification. Pure:
nothing here talks to a storage.

Needs ``xxhash`` (``pip install 'kv-core[objects]'``).
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import xxhash

from kv_core.errors import BlockDamagedError, NamespaceError, TierOpenError
from kv_core.keys import (
    Namespace,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FORMAT_VERSION",
    "MAGIC",
    "TRAILER_BYTES",
    "ObjectFormat",
    "ObjectNames",
    "ObjectTrailer",
    "check_description",
    "describe_namespace",
    "read_trailer",
]

MAGIC: Final = b"KVOBJECT"
FORMAT_VERSION: Final = 1

TRAILER_BYTES: Final = 256
"""Fixed, so that an object of the right kind has exactly one length."""

# Magic, version, key length, payload length, payload checksum, namespace fingerprint.
_FIELDS: Final = struct.Struct("<8sIIQQ32s")
_CHECKSUM: Final = struct.Struct("<Q")
_MOST_KEY_BYTES: Final = TRAILER_BYTES - _FIELDS.size - _CHECKSUM.size

# A longer key is represented by its digest. No key of 36 bytes or less is one by chance.
_DIGESTED: Final = 1 << 31

_FORMAT: Final = "kv-object"
_MOST_HASH_CHARS: Final = 200
_FANOUT_CHARS: Final = 3
_SUFFIX: Final = ".kv"


@final
class ObjectTrailer(NamedTuple):
    """What the trailer of an object says.

    Attributes:
        key: The block; ``None`` for a key that is too long to be kept whole.
        payload_bytes: Bytes before the trailer.
        checksum: XXH3-64 of the payload.
        fingerprint: Fingerprint of the namespace, 64 hex digits.
    """

    key: OffloadKey | None
    payload_bytes: int
    checksum: int
    fingerprint: str


@final
class ObjectFormat:
    """Makes and checks the trailers of one namespace.

    Args:
        namespace: What the blocks belong to.

    Attributes:
        payload_bytes: Bytes of a block.
        object_bytes: Bytes of its object: payload and trailer.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.payload_bytes = namespace.block_bytes
        self.object_bytes = namespace.block_bytes + TRAILER_BYTES
        self._fingerprint = bytes.fromhex(namespace.fingerprint)

    def trailer(self, key: OffloadKey, payload: memoryview) -> bytes:
        """Return what comes behind the payload of a block.

        Args:
            key: The block.
            payload: Flat, :attr:`payload_bytes` long.
        """
        return self._pack(key, xxhash.xxh3_64_intdigest(payload))

    def check(self, key: OffloadKey, payload: memoryview, trailer: bytes | memoryview) -> None:
        """Check that an object is the block of a key, bit by bit.

        Args:
            key: The block that was asked for.
            payload: What was read, flat, :attr:`payload_bytes` long.
            trailer: What was read behind it.

        Raises:
            BlockDamagedError: It is not.
        """
        checksum = self.check_trailer(key, trailer)
        actual = xxhash.xxh3_64_intdigest(payload)
        if actual != checksum:
            raise BlockDamagedError(
                f"block {key.hex()}: the payload has checksum {actual:016x}, stored was "
                f"{checksum:016x}"
            )

    def check_trailer(self, key: OffloadKey, trailer: bytes | memoryview) -> int:
        """Check that a trailer is that of a key, and return the checksum that it promises.

        Raises:
            BlockDamagedError: It is not.
        """
        found = bytes(trailer)
        if len(found) != TRAILER_BYTES or found[: len(MAGIC)] != MAGIC:
            raise BlockDamagedError(f"block {key.hex()}: no trailer where one belongs")
        _, version, _, _, checksum, fingerprint = _FIELDS.unpack_from(found)
        if version != FORMAT_VERSION:
            raise BlockDamagedError(
                f"block {key.hex()}: object format version {version}, expected {FORMAT_VERSION}"
            )
        # Comparing with the trailer that ought to be there catches every other difference.
        if found != self._pack(key, checksum):
            raise BlockDamagedError(
                f"block {key.hex()}: the trailer is damaged, or the object belongs to another key "
                f"or namespace (it names namespace {fingerprint.hex()[:12]})"
            )
        return int(checksum)

    def check_length(self, key: OffloadKey, found_bytes: int) -> None:
        """Check the length of an object.

        Raises:
            BlockDamagedError: It is not :attr:`object_bytes`.
        """
        if found_bytes != self.object_bytes:
            raise BlockDamagedError(
                f"block {key.hex()}: the object has {found_bytes} bytes, expected "
                f"{self.object_bytes}"
            )

    def _pack(self, key: OffloadKey, checksum: int) -> bytes:
        length, kept = len(key), bytes(key)
        if length > _MOST_KEY_BYTES:
            length, kept = _DIGESTED | hashlib.sha256().digest_size, hashlib.sha256(key).digest()
        fields = _FIELDS.pack(
            MAGIC, FORMAT_VERSION, length, self.payload_bytes, checksum, self._fingerprint
        )
        body = (fields + kept).ljust(TRAILER_BYTES - _CHECKSUM.size, b"\0")
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def read_trailer(trailer: bytes) -> ObjectTrailer | None:
    """Return what a trailer says, whoever wrote it; ``None`` when it is none of this version."""
    if len(trailer) != TRAILER_BYTES:
        return None
    magic, version, length, payload_bytes, checksum, fingerprint = _FIELDS.unpack_from(trailer)
    body, stored = trailer[: -_CHECKSUM.size], trailer[-_CHECKSUM.size :]
    if (
        (magic, version) != (MAGIC, FORMAT_VERSION)
        or (length & ~_DIGESTED) > _MOST_KEY_BYTES
        or stored != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))
    ):
        return None
    key = None
    if not length & _DIGESTED:
        key = OffloadKey(trailer[_FIELDS.size : _FIELDS.size + length])
    return ObjectTrailer(key, payload_bytes, checksum, fingerprint.hex())


@final
class ObjectNames:
    """Names of the objects of one namespace.

    Args:
        prefix: What all names begin with, without a slash at its end; may be empty.
        namespace: What the blocks belong to.

    Attributes:
        folder: ``<prefix>/<model>_<12 hex>``: everything of the namespace lies below.
        blocks: What the names of all blocks begin with.
        description: The object that describes the namespace, as JSON.
    """

    def __init__(self, prefix: str, namespace: Namespace) -> None:
        lead = f"{prefix}/" if prefix else ""
        self.folder = f"{lead}{namespace.folder_name}"
        self.description = f"{self.folder}/namespace.json"
        self.blocks = f"{self.folder}/r{namespace.stored_rank}"

    def block(self, key: OffloadKey) -> str:
        """Return the name of a block: ``<blocks>/<hex 1-3>/<hash>_g<group>.kv``.

        The hash comes early, so that a store which splits its load by prefixes can.
        """
        name = get_offload_block_hash(key).hex()
        if len(name) > _MOST_HASH_CHARS:
            # No hex name begins with an x, so nothing aliases.
            name = "x" + hashlib.sha256(key).hexdigest()
        fanout = name[:_FANOUT_CHARS].ljust(_FANOUT_CHARS, "_")
        return f"{self.blocks}/{fanout}/{name}_g{get_offload_group_idx(key)}{_SUFFIX}"

    def key_of(self, name: str) -> OffloadKey | None:
        """Return the key that a name says; ``None`` when it is no block, or has a long hash."""
        stem, _, group = name.rpartition("/")[2].removesuffix(_SUFFIX).rpartition("_g")
        try:
            key = make_offload_key(bytes.fromhex(stem), int(group))
        except (ValueError, OverflowError):
            return None
        return key if name.endswith(self.block(key)) else None


# -- the description ------------------------------------------------------------------------------


def describe_namespace(namespace: Namespace) -> bytes:
    """Return the contents of the object that describes a namespace."""
    description = {
        "format": _FORMAT,
        "format_version": FORMAT_VERSION,
        "fingerprint": namespace.fingerprint,
        "namespace": namespace.describe(),
    }
    return (json.dumps(description, indent=2) + "\n").encode()


def check_description(found: bytes, namespace: Namespace, *, where: str) -> None:
    """Check that a description which is there already is that of a namespace.

    Args:
        found: Contents of the object.
        namespace: The own one.
        where: Address of the object, for the message.

    Raises:
        TierOpenError: It describes another one, or is no description.
    """
    remedy = "Use another prefix, or remove everything below it"
    try:
        description: Mapping[str, Any] = json.loads(found)
        kind, version = description["format"], description["format_version"]
        stored = Namespace.from_description(dict(description["namespace"]))
    except (ValueError, KeyError, TypeError, NamespaceError) as error:
        raise TierOpenError(f"{where} is not a description written by kv-core. {remedy}") from error
    if (kind, version) != (_FORMAT, FORMAT_VERSION):
        raise TierOpenError(
            f"{where} describes {kind!r} of version {version!r}; this version of kv-core writes "
            f"{_FORMAT!r} of version {FORMAT_VERSION}. {remedy}"
        )
    # Names for people may differ; everything that decides about bytes may not.
    if stored.fingerprint != namespace.fingerprint:
        ours, theirs = namespace.describe(), stored.describe()
        fields = ", ".join(field for field in ours if ours[field] != theirs[field])
        raise TierOpenError(
            f"{where} describes another namespace under the same name; these fields differ: "
            f"{fields}. {remedy}"
        )
