"""How the suite reaches a tier, and what lies below the tier's code.

A tier package offers a :class:`Harness` through the hook ``kv_core_conformance_harness(workdir)``.
Most authors derive from :class:`BaseHarness`, which has everything but the four methods that only
the author can write: ``settings``, ``lose``, ``corrupt`` and ``list_keys``, and connects the faults
with a :class:`~kv_conformance.faults.FaultGate`.

This module imports without pytest.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from kv_core.contract import Namespace, OffloadKey, SecondaryTierManager, TierSpec

__all__ = [
    "SHORT_DEADLINES",
    "BaseHarness",
    "Corruption",
    "Deadlines",
    "Fault",
    "Harness",
    "HarnessError",
    "Opening",
    "Subject",
]


class HarnessError(Exception):
    """The harness cannot do what the suite needs: a server or a privilege is missing.

    Never a skip: the outcome of the run is ``error``.
    """


class Corruption(enum.Enum):
    """What can happen to a stored object without the tier."""

    TRUNCATED = "truncated"
    """Its last bytes are gone."""
    EMPTY = "empty"
    """It is there, with no bytes."""
    OVERLONG = "overlong"
    """Bytes were added at its end."""
    FLIPPED = "flipped"
    """One bit of one byte of the block has changed; the length is right."""

    def damage(self, content: bytes) -> bytes:
        """Return the content of an object after the damage, for harnesses that can rewrite one.

        Args:
            content: The object, block bytes only, or with less beside them than the block has.
        """
        middle = len(content) // 2
        match self:
            case Corruption.TRUNCATED:
                return content[:middle]
            case Corruption.EMPTY:
                return b""
            case Corruption.OVERLONG:
                return content + b"more"
            case Corruption.FLIPPED:
                flipped = content[middle] ^ 0b100
                return content[:middle] + bytes([flipped]) + content[middle + 1 :]


class Fault(enum.Enum):
    """What can happen to the storage as a whole."""

    STALL = "stall"
    """Nothing ends any more: reads, writes and questions hang until the fault is healed."""
    ERROR = "error"
    """Everything fails: an I/O error, a refused connection, status 500."""
    FULL = "full"
    """Writes fail for lack of space."""
    SHORT = "short"
    """Reads and writes move fewer bytes than asked, without an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """The limits that the suite asks for, in seconds. A harness sets them where it can.

    Attributes:
        job_s: Wish for ``TierLimits.job_deadline_s``.
        lookup_s: Wish for ``TierLimits.lookup_deadline_s``.
        error_backoff_s: Wish for ``TierLimits.error_backoff_s``.
    """

    job_s: float = 30.0
    lookup_s: float = 15.0
    error_backoff_s: float = 0.2


SHORT_DEADLINES: Final = Deadlines(job_s=0.3, lookup_s=0.2, error_backoff_s=0.1)
"""For the clauses that see deadlines pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the suite wants to open.

    Attributes:
        storage: Name of the storage: the same name is the same storage, another name another,
            empty one. A plain word, good as a folder, prefix or bucket name.
        block_bytes: Payload bytes of a block.
        deadlines: Limits to ask for.
        capacity_blocks: For tiers that declare BOUNDED: room for this many blocks of
            ``block_bytes``, give or take what the tier's own granularity asks for; ``None`` for
            the default.
        faults: Whether :meth:`Harness.inject` will be called while the tier is open: a harness
            may put a slower layer underneath then.
        retention_blocks: At least so many blocks must stay findable (``min_retained_blocks``).
    """

    storage: str
    block_bytes: int
    deadlines: Deadlines = Deadlines()
    capacity_blocks: int | None = None
    faults: bool = False
    retention_blocks: int = 64


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """An open tier, as the methods of a harness receive it.

    Attributes:
        tier: The tier. For storage that lives inside of it; otherwise of no interest.
        opening: What was asked for when it was opened.
        namespace: The namespace it was opened under.
    """

    tier: SecondaryTierManager
    opening: Opening
    namespace: Namespace


@runtime_checkable
class Harness(Protocol):
    """What the suite needs besides the tier itself.

    All methods act *behind the tier's back and below its code*: on the files, through the client
    library, by another connection; never by a flag that the tier looks at. They are called on the
    thread that calls the tier, and may block for a few seconds.

    Construction must be cheap: helper processes of the suite make a harness of their own for the
    same ``workdir``, to get :attr:`spec`, and call no other method.

    Attributes:
        spec: The tier's declaration, the same that ``kv_core_register_tier`` returns.
        stall_can_be_interrupted: Whether a call of the tier that hangs in a stall ends when the
            tier gives it up. ``False`` for a thread inside the kernel or a native library: then
            the job may stay unreported, counted in ``stalled_jobs``, until the fault is healed.
        faults: Which faults :meth:`inject` can make. STALL and ERROR must be among them; FULL
            and SHORT only where the storage knows such a thing.
    """

    spec: TierSpec
    stall_can_be_interrupted: bool
    faults: frozenset[Fault]

    def start(self) -> None:
        """Bring up what the tier needs, a server for example. Called once, before all else.

        Raises:
            HarnessError: Something is missing. The message says what to install or to set.
        """

    def stop(self) -> None:
        """Take down what :meth:`start` brought up. Idempotent."""

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings under which the tier opens a storage, JSON-like values."""

    def unusable_settings(self, opening: Opening) -> Mapping[str, Any] | None:
        """Return settings that are valid but cannot be opened: a path below a file, say.

        ``None`` where nothing can go wrong.
        """

    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Remove the object of a key from the storage.

        Raises:
            KeyError: There is no such object.
        """

    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        """Damage the object of a key in the storage.

        Raises:
            KeyError: There is no such object.
        """

    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys that have an object in the storage, under the subject's namespace."""

    def count_leftovers(self, subject: Subject) -> int:
        """Return how many objects of unfinished stores lie in the storage.

        Temporary files, multipart uploads; 0 where the storage knows no such thing.
        """

    def inject(self, subject: Subject, fault: Fault) -> None:
        """Make the storage misbehave from now on, until :meth:`heal`. One fault at a time."""

    def heal(self, subject: Subject) -> None:
        """End the fault. What hung goes on. Idempotent."""


class BaseHarness:
    """A harness with everything filled in that most tiers have in common.

    Args:
        workdir: Folder for the storage of the tier.
    """

    stall_can_be_interrupted: bool = False
    faults: frozenset[Fault] = frozenset({Fault.STALL, Fault.ERROR})

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def unusable_settings(self, opening: Opening) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Return ``None``: nothing is known that could not be opened."""
        return None

    def count_leftovers(self, subject: Subject) -> int:  # noqa: ARG002
        """Return 0."""
        return 0
