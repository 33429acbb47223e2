"""What a tier over object storage needs of a client: eight coroutines, and errors told apart.

:class:`ObjectTier` makes a tier of any :class:`ObjectStore`. A package for one kind of storage
writes a store, which knows its client and what its errors mean, and gets everything else: format,
integrity, bounded memory, the description of the namespace, what an operator reads when it cannot
be opened. :class:`MaskedLogs` keeps secrets out of what the client logs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kv_tier_fsspec._masked_logs import MaskedLogs, hide_what_looks_secret
from kv_tier_fsspec._object_tier import ObjectTier
from kv_tier_fsspec._scatter import copy_bytes, scatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

__all__ = [
    "MaskedLogs",
    "ObjectStore",
    "ObjectTier",
    "copy_bytes",
    "hide_what_looks_secret",
    "scatter",
]


class ObjectStore(Protocol):
    """A client of one storage. All methods are called on one event loop, many at a time.

    An object that is not there is :class:`~kv_core.errors.BlockMissingError` or
    :class:`FileNotFoundError`, and nothing else is: what is refused, throttled, too late or not
    understood is an error of another type, whose text may be shown to an operator.
    """

    async def open(self) -> None:
        """Connect. Called once, before anything else."""

    async def close(self) -> None:
        """Let go of everything; also after an ``open`` that failed half way."""

    async def length(self, name: str) -> int:
        """Return the length of an object in bytes.

        Raises:
            FileNotFoundError: There is none.
        """

    async def get(self, name: str, most_bytes: int) -> Buffer:
        """Return an object; of one that is longer than ``most_bytes``, so much of its beginning.

        Raises:
            FileNotFoundError: There is none.
        """

    async def get_into(self, name: str, parts: Sequence[memoryview]) -> int:
        """Read an object into several buffers, one behind the other, and return its length.

        The buffers are written between two awaits only, never by another thread: a call that is
        cancelled has let go of them. What an object has more than they hold need not be read, and
        of a shorter one the rest of them is left as it is. :func:`scatter` does it with an object
        that is in memory.

        Raises:
            FileNotFoundError: There is none.
        """

    async def get_range(self, name: str, start: int, end: int) -> Buffer:
        """Return the bytes of an object from ``start`` to ``end``, as far as there are any.

        Raises:
            FileNotFoundError: There is no such object.
        """

    async def put(self, name: str, data: bytes | bytearray) -> None:
        """Store an object, so that readers see all of it or what was there before.

        The data are of the caller, who may write other data over them once the call has succeeded.
        """

    async def put_new(self, name: str, data: bytes | bytearray) -> bool:
        """Store an object unless there is one, as :meth:`put` does; ``False``: there is one.

        In one request where the storage has conditional ones. Where it has none, asking before is
        fine, and so is to store over what is there: of several writers of one name, each brings
        the same bytes.
        """

    async def remove(self, name: str) -> None:
        """Remove an object; one that is not there is removed already."""
