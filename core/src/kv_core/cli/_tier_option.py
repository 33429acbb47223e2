"""The option ``--tier``: one secondary tier in one word."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kv_core.errors import ConfigError

__all__ = ["parse_tier_options"]

_FORM = "TYPE:KEY=VALUE,KEY=VALUE"


def parse_tier_options(options: Sequence[str]) -> list[dict[str, Any]]:
    """Turn the values of ``--tier`` into the form of ``secondary_tiers``.

    Args:
        options: Each ``TYPE``, ``TYPE:KEY=VALUE,...`` or a JSON object, which also takes values
            with commas in them.

    Raises:
        ConfigError: A value has another form.
    """
    return [_parse(option) for option in options]


def _parse(option: str) -> dict[str, Any]:
    if option.lstrip().startswith("{"):
        try:
            entry = json.loads(option)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"'--tier' begins like JSON but is not: {error}. Expected an object such as "
                '{"type": "fs", "root_dir": "cache"}',
                setting="--tier",
            ) from None
        # What starts with a brace and parses is an object.
        return dict(entry)
    tier_type, _, rest = option.partition(":")
    entry = {"type": tier_type}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"'--tier {tier_type}:...': expected {_FORM}, found {part!r} where KEY=VALUE "
                "should be. Write values with commas as JSON: "
                '--tier \'{"type": "fs", "root_dir": "a,b"}\'',
                setting="--tier",
            )
        if key in entry:
            raise ConfigError(
                f"'--tier {tier_type}:...': {key!r} is given twice", setting=f"--tier {key}"
            )
        entry[key] = value
    return entry
