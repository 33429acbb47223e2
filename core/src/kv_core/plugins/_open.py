"""Opens a tier: from the settings a user wrote to a running manager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_core.contract import Capability, SecondaryTierManager, TierContext
from kv_core.errors import KVCoreError, NamespaceError, TierOpenError
from kv_core.plugins._check import (
    broken_tier,
    check_tier,
    describe_error,
    harmless_cause,
)
from kv_core.plugins._construct import construct_tier
from kv_core.plugins._demands import require_block_size, require_space_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_core.contract import (
        Clock,
        MetricsSink,
        Namespace,
        PrimaryView,
        TierLimits,
        TierSpec,
    )
    from kv_core.plugins._check import CheckedTier
    from kv_core.plugins._registry import TierRegistry

__all__ = ["OpenTier", "open_tier"]


@dataclass(frozen=True, slots=True, eq=False)
class OpenTier:
    """A tier that is ready for use.

    Attributes:
        name: Unique name of the instance.
        spec: What its type declares for its settings.
        limits: The limits that follow from its settings.
        manager: The tier. Whoever opened it shuts it down.
    """

    name: str
    spec: TierSpec
    limits: TierLimits
    manager: SecondaryTierManager


def open_tier(
    tier: TierSpec | str,
    *,
    name: str,
    settings: Mapping[str, Any],
    namespace: Namespace,
    primary: PrimaryView,
    clock: Clock,
    metrics: MetricsSink,
    registry: TierRegistry | None = None,
    read_only: bool = False,
) -> OpenTier:
    """Validate everything that can be validated, then construct the tier.

    May block up to the tier's ``open_deadline_s``, in real seconds. The constructor runs on a
    thread of its own, so one that hangs is an error and not a hang; the memory of the primary
    tier then stays mapped until the constructor comes back.

    Args:
        tier: The tier's type, to be found among the installed ones, or its spec.
        name: Unique name of the instance.
        settings: The tier's own settings, as the user wrote them.
        namespace: Identity of the bytes.
        primary: The shared memory that the tier reads and writes. The caller keeps it mapped
            until the tier's ``shutdown()`` has returned.
        clock: Monotonic seconds.
        metrics: Where the tier reports its own measurements.
        registry: Where to look for a type; by default what is installed in this environment.
        read_only: Whether nothing is ever going to be stored to the tier.

    Raises:
        UnknownTierError: No installed package provides the type.
        DuplicateTierError: Several packages claim the type.
        BrokenPluginError: The plugin cannot be used, or its factory returns no tier.
        IncompatibleTierError: The tier is written for another contract version.
        ConfigError: Settings are missing, unknown or invalid, the blocks are too large, or the
            tier is stored to and has neither a capacity nor a floor of free space.
        NamespaceError: The namespace and the primary disagree on the block size.
        HashSeedError: The tier is persistent, but keys differ from process to process.
        TierOpenError: The constructor failed, or took longer than it declares.
    """
    checked = check_tier(tier, name=name, settings=settings, registry=registry)
    spec, limits = checked.spec, checked.limits
    if namespace.block_bytes != primary.block_bytes:
        raise NamespaceError(
            f"the namespace says that a block has {namespace.block_bytes} bytes, but the blocks "
            f"of the primary tier have {primary.block_bytes}",
            field="block_bytes",
        )
    require_block_size(checked, primary.block_bytes)
    require_space_limit(checked, read_only=read_only)
    if Capability.PERSISTENT in spec.capabilities:
        namespace.require_reproducible_keys(needed_by=f"tier {name!r}")
    context = TierContext(
        namespace=namespace,
        block_bytes=primary.block_bytes,
        num_blocks=primary.num_blocks,
        primary=primary,
        tier_type=spec.type,
        tier_name=name,
        config=checked.config,
        clock=clock,
        metrics=metrics,
    )
    return OpenTier(name, spec, limits, _construct(checked, context))


def _construct(checked: CheckedTier, context: TierContext) -> SecondaryTierManager:
    spec = checked.spec
    try:
        manager = construct_tier(spec.factory, context, checked.limits.open_deadline_s)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        cause = harmless_cause(error, context.config)
        if isinstance(error, KVCoreError) and cause is not None:
            raise
        raise TierOpenError(
            f"tier {context.tier_name!r} of type {spec.type!r} cannot be opened: "
            f"{describe_error(error, checked.config)}"
        ) from cause
    if not isinstance(manager, SecondaryTierManager):
        raise broken_tier(
            spec,
            checked.origin,
            f"makes a {type(manager).__name__}, which is no SecondaryTierManager",
        )
    return manager
