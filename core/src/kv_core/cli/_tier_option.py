"""The options ``--tier`` and ``--set``: a secondary tier, or a setting, in one word."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kv_core.errors import ConfigError

__all__ = ["parse_setting_options", "parse_tier_options"]

_FORM = "TYPE:KEY=VALUE,KEY=VALUE"


def parse_tier_options(options: Sequence[str]) -> list[dict[str, Any]]:
    """Turn the values of ``--tier`` into the form of ``secondary_tiers``.

    Args:
        options: Each ``TYPE``, ``TYPE:KEY=VALUE,...`` or a JSON object, which also takes values
            with commas in them.

    Raises:
        ConfigError: A value has another form, or a key twice.
    """
    return [_parse(option) for option in options]


def parse_setting_options(options: Sequence[str]) -> dict[str, Any]:
    """Turn the values of ``--set`` into settings of the engine.

    Args:
        options: Each ``KEY=VALUE``. A value that reads as JSON is what it says, any other a word.

    Raises:
        ConfigError: A value has another form, or a key comes twice.
    """
    settings: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise ConfigError(
                f"'--set': expected KEY=VALUE, found {option!r}. docs/configuration.md lists the "
                "settings",
                setting="--set",
            )
        if key in settings:
            raise ConfigError(f"'--set': {key!r} is given twice", setting=f"--set {key}")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def _parse(option: str) -> dict[str, Any]:
    if option.lstrip().startswith("{"):
        return _parse_json(option)
    tier_type, _, rest = option.partition(":")
    if not tier_type:
        raise ConfigError(
            f"'--tier': expected {_FORM} or TYPE alone, found no type. 'kv-core tiers' lists the "
            "types that are installed",
            setting="--tier",
        )
    entry = {"type": tier_type}
    for number, part in enumerate(rest.split(",") if rest else (), start=1):
        key, _, value = part.partition("=")
        if not key or not value:
            # Not repeated in the message: it may be the second half of a secret.
            raise ConfigError(
                f"'--tier {tier_type}:...': expected {_FORM}, but part {number} after the colon "
                "has no key or no value. Write values that are empty or have commas in them as "
                'JSON: --tier \'{"type": "fs", "root_dir": "a,b"}\'',
                setting="--tier",
            )
        if key in entry:
            raise ConfigError(
                f"'--tier {tier_type}:...': {key!r} is given twice", setting=f"--tier {key}"
            )
        entry[key] = value
    return entry


def _parse_json(option: str) -> dict[str, Any]:
    try:
        # What starts with a brace and parses is an object.
        return dict(json.loads(option, object_pairs_hook=_without_repetition))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"'--tier' begins like JSON but is not: {error}. Expected an object such as "
            '{"type": "fs", "root_dir": "cache"}',
            setting="--tier",
        ) from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for key, value in pairs:
        if key in entry:
            raise ConfigError(f"'--tier': {key!r} is given twice", setting=f"--tier {key}")
        entry[key] = value
    return entry
