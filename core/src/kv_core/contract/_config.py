"""Typed configuration of a tier."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Secret, SecretBytes, SecretStr, ValidationError

from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["TierConfig", "parse_tier_config"]

_MASK: Final = "**********"


class TierConfig(BaseModel):
    """Base of every tier's configuration model.

    Unknown keys are refused, instances are frozen, and a validation error never repeats the
    offending input, which could be a secret. Declare secrets as ``pydantic.SecretStr``. The
    docstring below a field is what ``kv-core tiers`` shows of it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    def hide_secrets(self, text: str) -> str:
        """Return a text with the secrets of this configuration masked (CONF-2).

        For what a client library says: many repeat the credentials that were refused.
        """
        # The longest first: one secret may be a part of another.
        for secret in sorted(set(_secrets(self)), key=len, reverse=True):
            text = text.replace(secret, _MASK)
        return text


def _secrets(value: object) -> Iterator[str]:
    """Yield the secrets in a configuration, however deep, also as they look in a URL."""
    if isinstance(value, (SecretStr, SecretBytes, Secret)):
        found = value.get_secret_value()
        secret = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
        yield from filter(None, [secret, quote(secret, safe="")])
    elif isinstance(value, BaseModel):
        for _, item in value:
            yield from _secrets(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _secrets(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _secrets(item)


ConfigT = TypeVar("ConfigT", bound=TierConfig)


def _reason(message: str, setting: str) -> str:
    """Leave out what the message around it says as well: what it is about, and a code."""
    message = message.removeprefix("Value error, ").removeprefix(f"{setting}: ")
    return re.sub(r" \[KVC\d+\]$", "", message)


def parse_tier_config(tier_name: str, model: type[ConfigT], settings: Mapping[str, Any]) -> ConfigT:
    """Validate the settings of one tier.

    Args:
        tier_name: Name of the tier, for the message.
        model: The tier's configuration model.
        settings: What the user wrote, without ``type`` and ``name``.

    Raises:
        ConfigError: Settings are missing, unknown or invalid. All of them are named at once;
            values are not repeated.
    """
    try:
        return model.model_validate(dict(settings))
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False, include_context=False, include_input=False):
            setting = ".".join(str(part) for part in item["loc"])
            if item["type"] == "missing":
                problems.append(f"{setting!r} is required but missing")
            elif item["type"] == "extra_forbidden":
                known = sorted(model.model_fields)
                close = difflib.get_close_matches(setting, known, n=1)
                meant = f"did you mean {close[0]!r}? " if close else ""
                problems.append(f"{setting!r} is not a setting ({meant}known: {', '.join(known)})")
            else:
                problems.append(f"{setting!r}: {_reason(item['msg'], setting)}")
        first = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ConfigError(
            f"tier {tier_name!r}: " + "; ".join(problems), setting=f"{tier_name}.{first}"
        ) from None
