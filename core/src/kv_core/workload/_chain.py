"""Chained block hashes: of ids that name blocks, and of sections that are cut into blocks.

Both routes give the property that everything else relies on: the hash of a block covers the
whole prefix, so equal hashes mean equal prefixes and one hash has one parent.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MAX_ID", "IdChain", "SectionChain", "root_hash"]

MAX_ID: Final = 2**63 - 1
"""Largest id of a block or section."""

_ID: Final = struct.Struct(">q")
# Kind, id, first token, end token. All of one length, so pieces laid side by side stay
# unambiguous.
_PIECE: Final = struct.Struct(">cqQQ")


def root_hash(*scope: str) -> bytes:
    """Return the parent of all first blocks of a scope; different scopes share no block."""
    return hashlib.sha256("\0".join(("kv-core trace", *scope)).encode(errors="replace")).digest()


@final
class IdChain:
    """Block hashes for formats that give each block an id.

    The id alone would do where ids are prefix-unique. Chaining makes the promise hold for any
    file: an id that follows two different parents becomes two different hashes.

    Args:
        root: Parent of the first block of every request.
    """

    __slots__ = ("_known", "_root")

    def __init__(self, root: bytes) -> None:
        self._root = root
        # id -> (parent, hash). One bytes object a block instead of one a reference.
        self._known: dict[int, tuple[bytes, bytes]] = {}

    def hashes(self, ids: Iterable[int]) -> list[bytes]:
        """Return the hashes of one request's ids (each 0 to :data:`MAX_ID`), in order."""
        known = self._known
        parent = self._root
        result = []
        for block_id in ids:
            entry = known.get(block_id)
            if entry is None or entry[0] != parent:
                entry = (parent, hashlib.sha256(parent + _ID.pack(block_id)).digest())
                known[block_id] = entry
            parent = entry[1]
            result.append(parent)
        return result

    def tail(self, hashes: list[bytes], label: str) -> bytes:
        """Return a hash for the block after ``hashes`` that only ``label`` has."""
        parent = hashes[-1] if hashes else self._root
        return hashlib.sha256(parent + b"tail" + label.encode(errors="replace")).digest()


@final
class SectionChain:
    """Block hashes of a prompt that is put together from sections.

    A section is a run of tokens known only by (kind, id); its token number *n* is the triple
    (kind, id, *n*). Laid side by side the sections form the token stream of the prompt, which is
    cut into blocks of fixed length. So a prefix is shared exactly as far as the streams agree,
    wherever the section borders fall.

    Args:
        root: Parent of the first block.
        block_tokens: Tokens in a block.
    """

    __slots__ = ("_block_tokens", "_hashes", "_pieces", "_room", "_root", "num_tokens")

    def __init__(self, root: bytes, block_tokens: int) -> None:
        self._root = root
        self._block_tokens = block_tokens
        self._hashes: list[bytes] = []
        self._pieces = b""
        self._room = block_tokens
        self.num_tokens = 0

    def append(self, kind: bytes, ident: int, tokens: int) -> None:
        """Add a section at the end.

        Args:
            kind: One byte.
            ident: 0 to :data:`MAX_ID`.
            tokens: Length of the section; 0 adds nothing.
        """
        self.num_tokens += tokens
        start = 0
        while start < tokens:
            end = min(tokens, start + self._room)
            self._pieces += _PIECE.pack(kind, ident, start, end)
            self._room -= end - start
            start = end
            if not self._room:
                self._hashes.append(self._close())
                self._pieces = b""
                self._room = self._block_tokens

    def block_hashes(self) -> tuple[bytes, ...]:
        """Return the hashes of the blocks so far, the partial last one included."""
        if not self._pieces:
            return tuple(self._hashes)
        return (*self._hashes, self._close())

    def _close(self) -> bytes:
        parent = self._hashes[-1] if self._hashes else self._root
        return hashlib.sha256(parent + self._pieces).digest()
