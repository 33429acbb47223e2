"""What both kinds of filesystem share: names, format, errors, and what an operator reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from kv_core.errors import BlockDamagedError, BlockMissingError, TierOpenError
from kv_core.tierkit.objects import TRAILER_BYTES, ObjectFormat, ObjectNames
from kv_tier_fsspec._scatter import copy_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kv_core.contract import OffloadKey, TierContext
    from kv_tier_fsspec._config import ObjectConfig
    from kv_tier_fsspec.store import ObjectStore

__all__ = ["ABSENT_ERRORS", "Blocks", "open_error"]

ABSENT_ERRORS = (FileNotFoundError, NotADirectoryError)
"""What filesystems raise when there is no object of a name. Everything else is no miss."""


@final
@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one namespace below one folder of a filesystem.

    Attributes:
        names: Names of their objects.
        format: Format of their objects.
    """

    names: ObjectNames
    format: ObjectFormat

    @classmethod
    def of(cls, context: TierContext, root: str) -> Blocks:
        """Return the blocks of a tier below a folder, as the filesystem names it."""
        return cls(
            ObjectNames(root.rstrip("/"), context.namespace), ObjectFormat(context.namespace)
        )

    def missing(self, key: OffloadKey) -> BlockMissingError:
        """Return the error for a block that has no object."""
        return BlockMissingError(f"block {key.hex()} has no object {self.names.block(key)}")

    def take(self, key: OffloadKey, found: Buffer, buffer: memoryview) -> None:
        """Check what was read and put the payload into a slot.

        Args:
            key: The block.
            found: The whole object.
            buffer: The slot. Undefined after an error.

        Raises:
            BlockDamagedError: The object is not the block.
        """
        with memoryview(found) as view:
            self.format.check_length(key, view.nbytes)
            with view[: self.format.payload_bytes] as payload:
                copy_bytes(buffer, payload)
            # In the slot: what is checked is what will be used.
            self.format.check(key, buffer, view[self.format.payload_bytes :])

    async def read(self, key: OffloadKey, store: ObjectStore, buffer: memoryview) -> None:
        """Read a block into a slot and check it there. Errors as for :meth:`take`."""
        trailer = bytearray(TRAILER_BYTES)
        found_bytes = await store.get_into(self.names.block(key), (buffer, memoryview(trailer)))
        self.format.check_length(key, found_bytes)
        self.format.check(key, buffer, bytes(trailer))

    def give(self, key: OffloadKey, payload: memoryview) -> bytes:
        """Return the whole object of a block: a copy of the payload, and its trailer."""
        # One after the other: the slot does not change, so the checksum is that of the copy.
        return b"".join((payload, self.format.trailer(key, payload)))

    def give_into(self, key: OffloadKey, payload: memoryview, whole: bytearray) -> None:
        """Make the whole object of a block in a buffer of its length."""
        with memoryview(whole) as view, view[: self.format.payload_bytes] as target:
            copy_bytes(target, payload)
            # Of the copy, which the processor has at hand.
            view[self.format.payload_bytes :] = self.format.trailer(key, target)

    def tail_range(self) -> tuple[int, int]:
        """Return the range of an object that says whether it is whole: its trailer, and no more.

        One byte more than there should be is asked for, so that a longer object shows.
        """
        return self.format.payload_bytes, self.format.object_bytes + 1

    def is_tail(self, key: OffloadKey, tail: bytes) -> bool:
        """Say whether what :meth:`tail_range` gave belongs to a whole object of this block."""
        if len(tail) != TRAILER_BYTES:
            return False
        try:
            self.format.check_trailer(key, tail)
        except BlockDamagedError:
            return False
        return True


def open_error(config: ObjectConfig, error: BaseException, doing: str) -> TierOpenError:
    """Return what an operator reads when the storage cannot be used.

    Args:
        config: Settings of the tier.
        error: What the filesystem raised.
        doing: What was tried, as in "writing 'x' failed".
    """
    text = " ".join(config.hide_secrets(str(error)).split()) or "no message"
    advice = (
        "Check where the settings point to, and their credentials, and that the storage answers"
    )
    if isinstance(error, PermissionError):
        advice = "The storage refuses access: check the credentials, and what they are allowed to "
        advice += "do"
        if config.is_local:
            advice = "Choose a folder that this process can make and write"
    elif isinstance(error, NotADirectoryError):
        advice = "A file is where a folder should be: choose another place, or move it away"
    elif isinstance(error, ABSENT_ERRORS):
        advice = "The place that the settings name does not exist and cannot be made"
    elif isinstance(error, TimeoutError):
        advice = "The storage does not answer: check the host, and the network"
    return TierOpenError(f"{doing} failed: {type(error).__name__}: {text}. {advice}")
