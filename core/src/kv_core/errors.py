"""Every error that kv-core raises on purpose.

One base class, one stable code a kind, data as attributes. A message says what was found, what
was expected and what to do; ``docs/errors.md`` has a section for each code. Each class also
inherits the builtin that fits, so ``except ValueError`` keeps working for callers that know
nothing of kv-core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BlockDamagedError",
    "BlockDeclinedError",
    "BlockMissingError",
    "BrokenPluginError",
    "ConfigError",
    "CopyError",
    "DuplicateTierError",
    "EngineStateError",
    "HashSeedError",
    "IncompatibleTierError",
    "InsufficientSpaceError",
    "KVCoreError",
    "NamespaceError",
    "RegionError",
    "RequestTooLargeError",
    "TierClosedError",
    "TierError",
    "TierOpenError",
    "TraceFormatError",
    "UnknownTierError",
    "UnsupportedError",
    "WorkerError",
]


class KVCoreError(Exception):
    """Base of all errors of kv-core.

    Attributes:
        code: Stable identifier of the kind, for example ``"KVC101"``. Codes are never reused.
        message: The text without the code.
    """

    code: ClassVar[str] = "KVC000"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @override
    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


# -- configuration: 1xx -------------------------------------------------------------------------


class ConfigError(KVCoreError, ValueError):
    """A setting is missing, unknown or has a value that cannot be used.

    Attributes:
        setting: Dotted name of the setting, as the user wrote or should have written it.
    """

    code = "KVC101"

    def __init__(self, message: str, *, setting: str, problems: Sequence[ConfigError] = ()) -> None:
        super().__init__(message)
        self.setting = setting
        self._problems = tuple(problems)

    @property
    def problems(self) -> tuple[ConfigError, ...]:
        """Each problem by itself: several when they were found together, else this error."""
        return self._problems or (self,)

    @classmethod
    def joined(cls, problems: Sequence[ConfigError]) -> ConfigError:
        """Return one error for several, at least one, so that all are said at once."""
        if len(problems) == 1:
            return problems[0]
        return cls(
            "; ".join(problem.message for problem in problems),
            setting=problems[0].setting,
            problems=problems,
        )


# -- plugins: 2xx -------------------------------------------------------------------------------


class UnknownTierError(KVCoreError, LookupError):
    """No installed package provides the tier type that was asked for.

    Attributes:
        tier_type: The type that was asked for.
        installed: The types that are installed, sorted.
    """

    code = "KVC201"

    def __init__(self, message: str, *, tier_type: str, installed: Sequence[str]) -> None:
        super().__init__(message)
        self.tier_type = tier_type
        self.installed = tuple(installed)


class DuplicateTierError(KVCoreError, ValueError):
    """Two installed distributions claim one tier type.

    Attributes:
        tier_type: The contested type.
        distributions: Names and versions of the claimants.
    """

    code = "KVC202"

    def __init__(self, message: str, *, tier_type: str, distributions: Sequence[str]) -> None:
        super().__init__(message)
        self.tier_type = tier_type
        self.distributions = tuple(distributions)


class BrokenPluginError(KVCoreError, ImportError):
    """A plugin is installed but cannot be used: it does not import, or its hooks are wrong.

    Attributes:
        plugin: Name of the entry point.
        distribution: Name and version of the package it comes from.
    """

    code = "KVC203"

    def __init__(self, message: str, *, plugin: str, distribution: str) -> None:
        super().__init__(message)
        self.plugin = plugin
        self.distribution = distribution


class IncompatibleTierError(KVCoreError, RuntimeError):
    """A tier was written for a contract version that this core does not speak.

    Attributes:
        tier_type: Type of the tier.
        tier_contract: ``(major, minor)`` the tier was written for.
        core_contract: ``(major, minor)`` of this core.
    """

    code = "KVC204"

    def __init__(
        self,
        message: str,
        *,
        tier_type: str,
        tier_contract: tuple[int, int],
        core_contract: tuple[int, int],
    ) -> None:
        super().__init__(message)
        self.tier_type = tier_type
        self.tier_contract = tier_contract
        self.core_contract = core_contract


# -- namespace: 3xx -----------------------------------------------------------------------------


class NamespaceError(KVCoreError, ValueError):
    """Something that decides whether bytes are interchangeable is unknown or contradictory.

    Attributes:
        field: Name of the namespace field.
    """

    code = "KVC301"

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class HashSeedError(NamespaceError):
    """Block hashes differ from process to process, so a persistent tier could never hit."""

    code = "KVC302"

    def __init__(self, message: str) -> None:
        super().__init__(message, field="hash_seed")


# -- memory: 4xx --------------------------------------------------------------------------------


class RegionError(KVCoreError, OSError):
    """The shared CPU region cannot be created, attached or closed."""

    code = "KVC401"


class InsufficientSpaceError(RegionError):
    """Too little space for the shared CPU region.

    Attributes:
        needed_bytes: What the region needs.
        available_bytes: What the file system has free.
    """

    code = "KVC402"

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


# -- tiers: 5xx ---------------------------------------------------------------------------------


class TierError(KVCoreError, OSError):
    """A storage backend failed. Raised by a tier, contained by the engine."""

    code = "KVC501"


class TierOpenError(TierError):
    """A tier cannot be opened: its storage is absent, not writable, or not what it should be."""

    code = "KVC502"


class TierClosedError(TierError):
    """A tier was used after its shutdown, or in a process forked from the one that opened it."""

    code = "KVC503"


class BlockMissingError(TierError):
    """The object of a block is not there."""

    code = "KVC504"


class BlockDamagedError(TierError):
    """The object of a block is there, but is truncated, over-long or has wrong bytes."""

    code = "KVC505"


class BlockDeclinedError(TierError):
    """A store was refused because the tier is full or throttled. Does not degrade the tier."""

    code = "KVC506"


class UnsupportedError(KVCoreError, NotImplementedError):
    """An optional method was called on a tier that does not declare its capability."""

    code = "KVC507"


# -- engine: 6xx --------------------------------------------------------------------------------


class EngineStateError(KVCoreError, RuntimeError):
    """The engine was called out of order, or with keys that are not in the asked-for state."""

    code = "KVC601"


class CopyError(KVCoreError, RuntimeError):
    """The driver of a device refused to copy.

    Attributes:
        error_name: The driver's name for the reason, such as ``CUDA_ERROR_INVALID_VALUE``.
    """

    code = "KVC602"

    def __init__(self, message: str, *, error_name: str) -> None:
        super().__init__(message)
        self.error_name = error_name


# -- workload: 7xx ------------------------------------------------------------------------------


class TraceFormatError(KVCoreError, ValueError):
    """A file is not a request trace of a known format.

    Attributes:
        path: The file.
        line: One-based line, or ``None`` when the whole file is at fault.
    """

    code = "KVC701"

    def __init__(self, message: str, *, path: str, line: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


class RequestTooLargeError(KVCoreError, ValueError):
    """One request needs more GPU blocks than the pool has.

    Attributes:
        req_id: The request.
        needed_blocks: Blocks the request needs.
        pool_blocks: Blocks the pool has for requests.
    """

    code = "KVC702"

    def __init__(self, message: str, *, req_id: str, needed_blocks: int, pool_blocks: int) -> None:
        super().__init__(message)
        self.req_id = req_id
        self.needed_blocks = needed_blocks
        self.pool_blocks = pool_blocks


class WorkerError(KVCoreError, RuntimeError):
    """A worker process of a replay could not start, failed, ended, or did not answer.

    Attributes:
        rank: The worker, or ``None`` when it is not known which.
    """

    code = "KVC703"

    def __init__(self, message: str, *, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank
