"""Typed configuration of a tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TierConfig", "parse_tier_config"]


class TierConfig(BaseModel):
    """Base of every tier's configuration model.

    Unknown keys are refused, instances are frozen, and a validation error never repeats the
    offending input, which could be a secret. Declare secrets as ``pydantic.SecretStr``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


ConfigT = TypeVar("ConfigT", bound=TierConfig)


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
                known = ", ".join(sorted(model.model_fields))
                problems.append(f"{setting!r} is not a setting (known: {known})")
            else:
                problems.append(f"{setting!r}: {item['msg']}")
        first = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ConfigError(
            f"tier {tier_name!r}: " + "; ".join(problems), setting=f"{tier_name}.{first}"
        ) from None
