"""Opens a tier: from the settings a user wrote to a running manager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_core.contract import (
    Capability,
    SecondaryTierManager,
    TierContext,
    TierLimits,
    TierSpec,
    parse_tier_config,
)
from kv_core.errors import (
    BrokenPluginError,
    ConfigError,
    KVCoreError,
    NamespaceError,
    TierOpenError,
)
from kv_core.plugins._contract_version import check_contract_version
from kv_core.plugins._foreign import describe_foreign, show_foreign
from kv_core.plugins._registry import TierRegistry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_core.contract import Clock, MetricsSink, Namespace, PrimaryView, TierConfig

__all__ = ["OpenTier", "open_tier"]


@dataclass(frozen=True, slots=True, eq=False)
class OpenTier:
    """A tier that is ready for use.

    Attributes:
        name: Unique name of the instance.
        spec: What its type declares.
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
) -> OpenTier:
    """Validate everything that can be validated, then construct the tier.

    May block up to the tier's ``open_deadline_s``, as its constructor may.

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

    Raises:
        UnknownTierError: No installed package provides the type.
        DuplicateTierError: Several packages claim the type.
        BrokenPluginError: The plugin cannot be used, or its factory returns no tier.
        IncompatibleTierError: The tier is written for another contract version.
        ConfigError: Settings are missing, unknown or invalid, or the blocks are too large.
        NamespaceError: The namespace and the primary disagree on the block size.
        HashSeedError: The tier is persistent, but keys differ from process to process.
        TierOpenError: The constructor failed.
    """
    if isinstance(tier, str):
        registry = TierRegistry() if registry is None else registry
        spec = registry.spec(tier)
        origin = next(claim.origin for claim in registry.installed() if claim.type == tier)
    else:
        spec, origin = tier, "this program"
        check_contract_version(spec, None)
    config = _parse(spec, origin, name, settings)
    limits = _limits(spec, origin, config)
    if namespace.block_bytes != primary.block_bytes:
        raise NamespaceError(
            f"the namespace says that a block has {namespace.block_bytes} bytes, but the blocks "
            f"of the primary tier have {primary.block_bytes}",
            field="block_bytes",
        )
    if limits.max_block_bytes is not None and primary.block_bytes > limits.max_block_bytes:
        raise ConfigError(
            f"tier {name!r} takes blocks of at most {limits.max_block_bytes} bytes, but a block "
            f"has {primary.block_bytes}. Offload smaller blocks (set a lower 'blocks_per_chunk') "
            "or use another tier",
            setting="blocks_per_chunk",
        )
    if Capability.PERSISTENT in spec.capabilities:
        namespace.require_reproducible_keys(needed_by=f"tier {name!r}")
    context = TierContext(
        namespace=namespace,
        block_bytes=primary.block_bytes,
        num_blocks=primary.num_blocks,
        primary=primary,
        tier_type=spec.type,
        tier_name=name,
        config=config,
        clock=clock,
        metrics=metrics,
    )
    return OpenTier(name, spec, limits, _construct(spec, origin, context))


def _parse(spec: TierSpec, origin: str, name: str, settings: Mapping[str, Any]) -> TierConfig:
    try:
        return parse_tier_config(name, spec.config_model, settings)
    except KVCoreError:
        raise
    except Exception as error:  # noqa: BLE001 - a validator of the plugin may raise anything
        # Neither its words nor its traceback: which of the settings are secrets is not known yet.
        raise _broken(
            spec, origin, f"fails while it validates its settings ({type(error).__name__})"
        ) from None


def _limits(spec: TierSpec, origin: str, config: TierConfig) -> TierLimits:
    try:
        limits: object = spec.limits(config)
    except (KVCoreError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - an exit, too, ends this plugin only
        raise _broken(
            spec, origin, f"cannot compute its limits ({_without_secrets(error, config)})"
        ) from _harmless(error, config)
    if not isinstance(limits, TierLimits):
        raise _broken(
            spec, origin, f"computes its limits as {show_foreign(limits)}, expected a TierLimits"
        )
    return limits


def _construct(spec: TierSpec, origin: str, context: TierContext) -> SecondaryTierManager:
    try:
        manager: object = spec.factory(context)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        cause = _harmless(error, context.config)
        if isinstance(error, KVCoreError) and cause is not None:
            raise
        raise TierOpenError(
            f"tier {context.tier_name!r} of type {spec.type!r} cannot be opened: "
            f"{_without_secrets(error, context.config)}"
        ) from cause
    if not isinstance(manager, SecondaryTierManager):
        raise _broken(
            spec, origin, f"makes a {type(manager).__name__}, which is no SecondaryTierManager"
        )
    return manager


def _broken(spec: TierSpec, origin: str, problem: str) -> BrokenPluginError:
    return BrokenPluginError(
        f"tier type {spec.type!r} of {origin} {problem}", plugin=spec.type, distribution=origin
    )


def _without_secrets(error: BaseException, config: TierConfig) -> str:
    """Describe a foreign error without the secrets that client libraries like to repeat."""
    return config.hide_secrets(describe_foreign(error))


def _harmless(error: BaseException, config: TierConfig) -> BaseException | None:
    """Return an error that may be chained, or ``None``: a traceback would print a secret."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        text = describe_foreign(link)
        if config.hide_secrets(text) != text:
            return None
        todo += (link.__cause__, link.__context__)
    return error
