"""What a tier declares about itself."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from typing_extensions import override

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable

    from kv_core.contract._config import TierConfig
    from kv_core.contract._context import TierContext
    from kv_core.contract._manager import SecondaryTierManager

__all__ = [
    "CONTRACT_VERSION",
    "Capability",
    "ContractVersion",
    "TierLimits",
    "TierSpec",
    "TierUsage",
]


class ContractVersion(NamedTuple):
    """Version of the contract: a tier runs on the same major and the same or a later minor."""

    major: int
    minor: int

    @override
    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


CONTRACT_VERSION: Final = ContractVersion(1, 0)
"""The contract version of this core."""


class Capability(enum.Enum):
    """What a tier promises beyond the core clauses.

    Declared once, used by the engine at run time and checked by the conformance suite. The
    optional method behind an undeclared capability is inert or raises ``UnsupportedError``.
    """

    PERSISTENT = "persistent"
    """A tier reopened under the same namespace finds its blocks, also after ``kill -9``."""
    SHARED = "shared"
    """Instances over the same storage see each other's blocks."""
    BOUNDED = "bounded"
    """The tier keeps to a configured capacity and evicts by recency of use."""
    INTEGRITY = "integrity"
    """Wrong bytes are found at load: the load fails, the object is retired."""
    EVENTS = "events"
    """``take_events`` tells what became present and what left."""
    DELETE = "delete"
    """``delete`` removes blocks."""
    USAGE = "usage"
    """``usage`` reports blocks, bytes and capacity."""
    TOUCH = "touch"
    """``touch`` makes blocks outlive untouched ones."""
    WITHDRAWS_IO = "withdraws_io"
    """Running I/O can be withdrawn, so every job ends within its deadline without exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLimits:
    """Numbers that the engine acts on.

    Attributes:
        job_deadline_s: A job is reported within this many seconds of its submission.
        lookup_deadline_s: A lookup resolves within this many seconds of its first question.
        open_deadline_s: The constructor returns or raises within this many seconds.
        error_backoff_s: After a transient error of the backend, how long the tier may answer
            "absent" before it asks the backend again.
        visibility_delay_s: Instances see each other's blocks within this many seconds (SHARED).
        min_retained_blocks: The N blocks that were stored or used last stay findable.
        max_block_bytes: Largest block the tier takes, or ``None``.
        max_job_keys: Most keys in one job; the engine splits. ``None``: any number.
        staging_bytes: Most extra memory in flight; 0 means zero-copy.
        min_free_bytes: The tier declines stores while its storage has less free space than this;
            0: it does not look. The engine demands it, or ``BOUNDED``, of every tier that it
            stores to. Where space has no end that the tier could see, as in an object store, any
            floor is kept: declare 1.
    """

    job_deadline_s: float
    lookup_deadline_s: float
    open_deadline_s: float = 30.0
    error_backoff_s: float = 1.0
    visibility_delay_s: float = 0.0
    min_retained_blocks: int = 1
    max_block_bytes: int | None = None
    max_job_keys: int | None = None
    staging_bytes: int = 0
    min_free_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers that no deadline or size can have: the engine would wait for ever.

        Raises:
            ValueError: A number is out of range, or is none.
        """
        for name in ("job_deadline_s", "lookup_deadline_s", "open_deadline_s"):
            self._check(name, float, above=0)
        for name in ("error_backoff_s", "visibility_delay_s"):
            self._check(name, float, least=0)
        for name in ("min_retained_blocks", "staging_bytes", "min_free_bytes"):
            self._check(name, int, least=0)
        for name in ("max_block_bytes", "max_job_keys"):
            if getattr(self, name) is not None:
                self._check(name, int, least=1)

    def _check(
        self,
        name: str,
        kind: type[int | float],
        *,
        least: int = 0,
        above: int | None = None,
    ) -> None:
        number: Any = getattr(self, name)
        if (
            isinstance(number, (int, kind))
            and not isinstance(number, bool)
            and math.isfinite(number)
            and number >= least
            and (above is None or number > above)
        ):
            return
        sort = "an integer" if kind is int else "a number"
        bound = f">= {least}" if above is None else f"> {above}"
        raise ValueError(f"limit {name!r} must be {sort} {bound}, found {number!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUsage:
    """What a tier holds.

    Attributes:
        blocks: Blocks present.
        bytes: Bytes they take in the storage, overhead included.
        capacity_blocks: Most blocks, or ``None`` when not limited in blocks.
        capacity_bytes: Most bytes, or ``None`` when not limited in bytes.
    """

    blocks: int
    bytes: int
    capacity_blocks: int | None = None
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """A tier type, as its package registers it.

    Attributes:
        type: Name of the type; equals the name of the entry point.
        summary: One line for ``kv-core tiers``.
        contract: Version of the contract the tier was written for. Write the numbers out:
            ``ContractVersion(1, 0)``. Passing on ``CONTRACT_VERSION`` would claim every future
            version.
        factory: Makes the tier. Import heavy libraries inside, so that asking for the spec
            stays cheap.
        config_model: The settings of the tier.
        capabilities: What the tier promises beyond the core clauses; of a tier with ``refine``,
            what it promises with its default settings.
        limits: Computes the limits from the validated settings.
        refine: Returns the declaration that holds for given validated settings, for a tier whose
            capabilities depend on them: ``dataclasses.replace(spec, capabilities=...)``. The
            engine asks once, before it opens the tier, and from then on knows nothing else. The
            type, contract, factory and config model stay as they are. ``None``: the declaration
            holds whatever is set.
    """

    type: str
    summary: str
    contract: ContractVersion
    factory: Callable[[TierContext], SecondaryTierManager]
    config_model: builtins.type[TierConfig]
    limits: Callable[[Any], TierLimits]
    capabilities: frozenset[Capability] = frozenset()
    refine: Callable[[Any], TierSpec] | None = None
