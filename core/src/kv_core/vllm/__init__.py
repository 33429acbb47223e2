"""Doors into vLLM: its engine with our tiering engine, or its tiering engine with our tiers.

A vLLM that has kv-core installed beside it finds the doors by itself, through the entry point of
:func:`register`: ``spec_name: "KVCoreOffloadingSpec"`` is our engine, and every installed tier is
a tier type of vLLM's own ``TieringOffloadingSpec``. Nothing else in kv-core imports this package,
and importing it does not import vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from kv_core.vllm._plugin import TIER_TYPE_PREFIX, register

__all__ = ["TIER_TYPE_PREFIX", "KVCoreOffloadingSpec", "TierBridge", "register"]

# What needs vLLM, and where it is.
_LAZY: Final = {
    "KVCoreOffloadingSpec": "kv_core.vllm._spec",
    "TierBridge": "kv_core.vllm._tier_bridge",
}


def __getattr__(name: str) -> Any:
    """Import what needs vLLM when it is asked for."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
