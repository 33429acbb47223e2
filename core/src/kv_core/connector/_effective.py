"""The configuration in effect, for people: complete, and without secrets."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final

from kv_core.tiering import TieringConfig, TierMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kv_core.connector._settings import OffloadingSettings
    from kv_core.plugins import CheckedTier, TierSettings

__all__ = ["effective_config", "log_start"]

_LOGGER: Final = logging.getLogger("kv_core.connector")


def effective_config(settings: OffloadingSettings, tiers: Iterable[CheckedTier]) -> dict[str, Any]:
    """Return every setting with its value in effect, as plain values that JSON can hold.

    Args:
        settings: What the user wrote.
        tiers: Its secondary tiers, as far as they could be checked. Of the others only the names
            of their settings are shown: without the tier nobody knows which are secret.
    """
    values = settings.model_dump(mode="json")
    # Ours first, those of the tiering engine after them.
    names = sorted(values, key=lambda name: name in TieringConfig.model_fields)
    checked = {tier.name: tier for tier in tiers}
    entries = [_entry(entry, checked.get(entry.name)) for entry in settings.secondary_tiers]
    return {**{name: values[name] for name in names}, "secondary_tiers": entries}


def log_start(settings: OffloadingSettings, tiers: Sequence[CheckedTier]) -> None:
    """Write the configuration to the log, one line."""
    _LOGGER.info(
        "effective configuration: %s", json.dumps(effective_config(settings, tiers), default=str)
    )


def _entry(entry: TierSettings, tier: CheckedTier | None) -> dict[str, Any]:
    mode = TierMode.READ_ONLY if entry.read_only else TierMode.READ_WRITE
    return {
        "type": entry.type,
        "name": entry.name,
        "mode": mode.value,
        "fill_on_promotion": entry.fill_on_promotion,
        "settings": sorted(entry.settings) if tier is None else tier.shown_settings(),
    }
