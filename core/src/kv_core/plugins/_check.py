"""Checks what a user wrote for a tier, without opening it, and shows it without its secrets."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import to_jsonable_python

from kv_core.contract import TierConfig, TierLimits, TierSpec, parse_tier_config
from kv_core.errors import BrokenPluginError, KVCoreError
from kv_core.plugins._contract_version import check_contract_version
from kv_core.plugins._foreign import describe_foreign, show_foreign
from kv_core.plugins._loader import find_problem
from kv_core.plugins._registry import TierRegistry

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CheckedTier", "broken_tier", "check_tier", "describe_error", "harmless_cause"]

_HIDDEN: Final = "**********"

# user:password@ of an address: written into plain settings more often than into secret ones.
_PASSWORD: Final = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+@")


@dataclass(frozen=True, slots=True, eq=False)
class CheckedTier:
    """A tier whose settings are valid. Nothing of its storage has been touched.

    Attributes:
        name: Unique name of the instance.
        spec: What its type declares for these settings.
        origin: Name and version of the package it comes from.
        config: Its validated settings.
        limits: The limits that follow from them.
    """

    name: str
    spec: TierSpec
    origin: str
    config: TierConfig = field(repr=False)
    limits: TierLimits

    def shown_settings(self) -> dict[str, Any]:
        """Return the settings as plain values for people and logs: no secret is among them."""
        shown: dict[str, Any] = to_jsonable_python(
            self.config,
            by_alias=True,
            bytes_mode="base64",
            # What a foreign object says of itself is not known to be harmless.
            fallback=lambda value: f"<{type(value).__name__}>",
        )
        return {name: _hide(value, self.config) for name, value in shown.items()}


def check_tier(
    tier: TierSpec | str,
    *,
    name: str,
    settings: Mapping[str, Any],
    registry: TierRegistry | None = None,
) -> CheckedTier:
    """Validate a tier's settings; compute what it declares for them, and its limits.

    Imports the tier's package and opens nothing. This is the one place where a declaration is
    refined: whoever has a :class:`CheckedTier` has the declaration that holds.

    Args:
        tier: The tier's type, to be found among the installed ones, or its spec.
        name: Unique name of the instance.
        settings: The tier's own settings, as the user wrote them.
        registry: Where to look for a type; by default what is installed in this environment.

    Raises:
        UnknownTierError: No installed package provides the type.
        DuplicateTierError: Several packages claim the type.
        BrokenPluginError: The plugin cannot be used.
        IncompatibleTierError: The tier is written for another contract version.
        ConfigError: Settings are missing, unknown or invalid.
    """
    if isinstance(tier, str):
        registry = TierRegistry() if registry is None else registry
        spec = registry.spec(tier)
        origin = next(claim.origin for claim in registry.installed() if claim.type == tier)
    else:
        spec, origin = tier, "this program"
        check_contract_version(spec, None)
    config = _parse(spec, origin, name, settings)
    spec = _refine(spec, origin, config)
    return CheckedTier(name, spec, origin, config, _limits(spec, origin, config))


def _parse(spec: TierSpec, origin: str, name: str, settings: Mapping[str, Any]) -> TierConfig:
    try:
        return parse_tier_config(name, spec.config_model, settings)
    except KVCoreError:
        raise
    except Exception as error:  # noqa: BLE001 - a validator of the plugin may raise anything
        # Neither its words nor its traceback: which of the settings are secrets is not known yet.
        raise broken_tier(
            spec, origin, f"fails while it validates its settings ({type(error).__name__})"
        ) from None


# What is known before there are settings cannot follow from them.
_FIXED: Final = ("type", "contract", "factory", "config_model")


def _refine(spec: TierSpec, origin: str, config: TierConfig) -> TierSpec:
    """Return the declaration that holds for these settings; it has no ``refine`` any more."""
    if spec.refine is None:
        return spec
    try:
        refined: object = spec.refine(config)
    except (KVCoreError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - an exit, too, ends this plugin only
        raise broken_tier(
            spec,
            origin,
            f"cannot say what holds for its settings ({describe_error(error, config)})",
        ) from harmless_cause(error, config)
    if not isinstance(refined, TierSpec):
        raise broken_tier(
            spec, origin, f"refines its declaration to {show_foreign(refined)}, expected a TierSpec"
        )
    changed = [name for name in _FIXED if getattr(refined, name) != getattr(spec, name)]
    if changed:
        raise broken_tier(
            spec,
            origin,
            f"changes {', '.join(changed)} when it refines its declaration. Settings may decide "
            "about the capabilities, the limits and the summary only: return "
            "dataclasses.replace(spec, capabilities=...)",
        )
    problem = find_problem(refined)
    if problem is not None:
        raise broken_tier(spec, origin, f"{problem}, for these settings")
    return replace(refined, refine=None)


def _limits(spec: TierSpec, origin: str, config: TierConfig) -> TierLimits:
    try:
        limits: object = spec.limits(config)
    except (KVCoreError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - an exit, too, ends this plugin only
        raise broken_tier(
            spec, origin, f"cannot compute its limits ({describe_error(error, config)})"
        ) from harmless_cause(error, config)
    if not isinstance(limits, TierLimits):
        raise broken_tier(
            spec, origin, f"computes its limits as {show_foreign(limits)}, expected a TierLimits"
        )
    return limits


def broken_tier(spec: TierSpec, origin: str, problem: str) -> BrokenPluginError:
    """Return the error for a tier that breaks its own declarations."""
    return BrokenPluginError(
        f"tier type {spec.type!r} of {origin} {problem}", plugin=spec.type, distribution=origin
    )


def describe_error(error: BaseException, config: TierConfig) -> str:
    """Describe a foreign error without the secrets that client libraries like to repeat."""
    return config.hide_secrets(describe_foreign(error))


def harmless_cause(error: BaseException, config: TierConfig) -> BaseException | None:
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


def _hide(value: Any, config: TierConfig) -> Any:
    if isinstance(value, str):
        return _PASSWORD.sub(rf"\1:{_HIDDEN}@", config.hide_secrets(value))
    if isinstance(value, dict):
        return {name: _hide(item, config) for name, item in value.items()}
    if isinstance(value, list):
        return [_hide(item, config) for item in value]
    return value
