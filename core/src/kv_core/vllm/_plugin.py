"""The general plugin: makes vLLM know our spec and our tiers, without any module path.

vLLM calls :func:`register` in each of its processes, also where kv-core is not used at all. So
nothing may come out of it, whatever is installed, and it imports neither a tier nor a door.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kv_core.plugins import TierRegistry
from kv_core.vllm._logs import log_where_vllm_does

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["SPEC_NAME", "TIER_TYPE_PREFIX", "register"]

_LOGGER: Final = logging.getLogger(__name__)

SPEC_NAME: Final = "KVCoreOffloadingSpec"
"""``spec_name`` of the engine mode."""

TIER_TYPE_PREFIX: Final = "kv:"
"""Comes before our tier types inside vLLM's own spec; needed where vLLM has a tier of that type."""


def register() -> None:
    """Register the spec and all installed tiers with vLLM's factories. Never raises.

    Every tier is registered under its type with the prefix, and under the plain type as well unless
    vLLM has a tier of that name itself. May be called again.
    """
    try:
        _register()
    except Exception:
        _LOGGER.exception(
            "kv-core could not register with vLLM; only configurations that name it are affected"
        )


def _register() -> None:
    from kv_core.vllm import _compat

    log_where_vllm_does()
    _compat.warn_if_untested()
    if SPEC_NAME not in _compat.registered_specs():
        _compat.OffloadingSpecFactory.register_spec(SPEC_NAME, "kv_core.vllm._spec", SPEC_NAME)
    known = _compat.registered_tiers()
    for tier_type in _types_to_register(known):
        _compat.SecondaryTierFactory.register_tier(
            tier_type, "kv_core.vllm._tier_bridge", "TierBridge"
        )


def _types_to_register(known: Collection[str]) -> list[str]:
    """Return the names under which installed tiers are to be found and are not yet."""
    types = {claim.type for claim in TierRegistry().installed()}
    names = types | {f"{TIER_TYPE_PREFIX}{tier_type}" for tier_type in types}
    return sorted(names.difference(known))
