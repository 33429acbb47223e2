"""Reads what a user wrote for one of our tiers in a configuration of vLLM's own spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from kv_core.contract import Capability
from kv_core.errors import ConfigError
from kv_core.plugins import (
    CheckedTier,
    TierRegistry,
    TierSettings,
    check_tier,
    parse_secondary_tiers,
    require_space_limit,
)
from kv_core.tiering import EngineReset, TieringConfig
from kv_core.units import parse_bytes
from kv_core.vllm._plugin import SPEC_NAME, TIER_TYPE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LOCALITY_SETTING", "BridgedTierSettings", "read_settings"]

LOCALITY_SETTING: Final = "locality"
"""vLLM's own key of a tier: where its storage is, ``LOCAL`` or ``REMOTE``."""

_ENTRY: Final = "secondary_tiers[0]"


@dataclass(frozen=True, slots=True, eq=False)
class BridgedTierSettings:
    """One of our tiers as it is to be opened under vLLM's tiering manager.

    Attributes:
        entry: Its entry, split into what the engine and what the tier reads.
        checked: Its validated settings and limits.
        engine: Deadlines, health and back-pressure, from ``kv_connector_extra_config``.
        locality: vLLM's word for where its storage is, or ``None``.
        registry: Where its type was found.
    """

    entry: TierSettings
    checked: CheckedTier
    engine: TieringConfig
    locality: str | None
    registry: TierRegistry

    @property
    def is_lasting(self) -> bool:
        """Whether the tier keeps blocks beyond the engine, or shares them with others."""
        lasting = {Capability.PERSISTENT, Capability.SHARED}
        return not lasting.isdisjoint(self.checked.spec.capabilities)


def read_settings(
    tier_type: str,
    settings: Mapping[str, Any],
    extra_config: Mapping[str, Any],
) -> BridgedTierSettings:
    """Validate a tier's settings, and ours beside them. Opens nothing.

    Args:
        tier_type: The type as vLLM knows it, with the prefix or without.
        settings: The other keys of the tier's entry.
        extra_config: ``kv_connector_extra_config``.

    Raises:
        KVCoreError: Settings are missing, unknown or invalid, or ask for what vLLM's own spec
            cannot do. The message names the key.
    """
    plain_type = tier_type.removeprefix(TIER_TYPE_PREFIX)
    own = {name: value for name, value in settings.items() if name != LOCALITY_SETTING}
    [entry] = parse_secondary_tiers([{"type": plain_type, **own}])
    if entry.fill_on_promotion:
        raise ConfigError(
            f"tier {entry.name!r}: 'fill_on_promotion' needs kv-core's tiering engine. Leave it "
            f'out, or set "spec_name": "{SPEC_NAME}"',
            setting=f"{entry.name}.fill_on_promotion",
        )
    registry = TierRegistry()
    checked = check_tier(entry.type, name=entry.name, settings=entry.settings, registry=registry)
    require_space_limit(checked, read_only=entry.read_only)
    return BridgedTierSettings(
        entry, checked, _engine_settings(extra_config), _locality(settings, entry.name), registry
    )


def _engine_settings(extra_config: Mapping[str, Any]) -> TieringConfig:
    """Return those of our engine's settings that stand beside vLLM's own."""
    given = {
        name: _number(name, extra_config[name])
        for name in TieringConfig.model_fields
        if name in extra_config
    }
    try:
        config = TieringConfig(**given)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in details["loc"])
        raise ConfigError(
            f"{name!r}: {details['msg'][:1].lower()}{details['msg'][1:]}, found "
            f"{details['input']!r}",
            setting=name,
        ) from None
    if config.engine_reset is not EngineReset.CACHE:
        raise ConfigError(
            "'engine_reset' can only be 'cache' with vLLM's own spec, whose tiers keep their "
            "blocks over a reset. For weight updates change 'model_id' and restart, or set "
            f'"spec_name": "{SPEC_NAME}"',
            setting="engine_reset",
        )
    return config


def _number(name: str, value: Any) -> Any:
    return parse_bytes(value, setting=name) if name.endswith("_bytes") else value


def _locality(settings: Mapping[str, Any], tier_name: str) -> str | None:
    value = settings.get(LOCALITY_SETTING)
    if value is None or value in ("LOCAL", "REMOTE"):
        return value
    raise ConfigError(
        f"tier {tier_name!r}: 'locality' must be 'LOCAL' or 'REMOTE', found {value!r}",
        setting=f"{tier_name}.locality",
    )
