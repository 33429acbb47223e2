"""Settings of a vLLM tier under the suite, and the declarations that vLLM's tiers do not make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pydantic import ConfigDict, ModelWrapValidatorHandler, model_validator

from kv_core.contract import TierConfig, TierLimits

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Limits", "UncheckedConfig", "limits_of", "tier_settings"]

# More than any test stores: the tiers forget nothing by themselves.
_RETAINED_BLOCKS: Final = 1 << 20


class Limits(TierConfig):
    """The deadlines that the suite asks for. A vLLM tier has none to set."""

    job_deadline_s: float = 30.0
    lookup_deadline_s: float = 15.0
    error_backoff_s: float = 0.2


class UncheckedConfig(Limits):
    """Base of the settings of a vLLM tier: names and types for the suite to read, unchecked.

    The deadlines are the suite's and are checked. All other settings go to vLLM's factory as they
    were written, so that whatever is wrong with them is found by vLLM's tier, or not at all.
    """

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="wrap")
    @classmethod
    def _leave_to_vllm(
        cls,
        settings: Any,
        _check: ModelWrapValidatorHandler[Self],
    ) -> Self:
        own = {name: settings[name] for name in Limits.model_fields if name in settings}
        rest = {name: value for name, value in settings.items() if name not in own}
        # Required settings that are missing are missing for vLLM as well.
        return cls.model_construct(**dict(Limits(**own)), **rest)


def tier_settings(config: UncheckedConfig) -> dict[str, Any]:
    """Return what was written for vLLM's tier, and only that."""
    named = config.model_fields_set.difference(Limits.model_fields)
    return {**{name: getattr(config, name) for name in named}, **(config.model_extra or {})}


def limits_of(config: Limits) -> TierLimits:
    """Return limits that name the suite's deadlines.

    ``min_free_bytes`` is the least that can be said: neither tier has a capacity or looks at the
    free space, and kv-core would refuse to store to one that says so.
    """
    return TierLimits(
        job_deadline_s=config.job_deadline_s,
        lookup_deadline_s=config.lookup_deadline_s,
        error_backoff_s=config.error_backoff_s,
        min_retained_blocks=_RETAINED_BLOCKS,
        min_free_bytes=1,
    )
