"""Finds the whole of vLLM's configuration, of which a spec and a tier are handed a part.

The part, vLLM's ``OffloadingConfig``, says neither which revision of the model runs, nor how it is
quantised, nor how blocks are hashed: not enough to tell whose bytes a block holds. vLLM publishes
its configuration only around the construction of models. What is left is to read it off the
connector that is under construction further up the stack; nothing of vLLM is replaced or changed
for that.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["WholeConfig", "find_config"]

_VLLM_CONFIG: Final = "vllm_config"
_KV_CACHE_CONFIG: Final = "kv_cache_config"


@dataclass(frozen=True, slots=True, eq=False)
class WholeConfig:
    """What vLLM's connectors are constructed with.

    Attributes:
        vllm: The ``VllmConfig``.
        kv_cache: The ``KVCacheConfig``: groups of layers and what a page of each is.
    """

    vllm: Any
    kv_cache: Any


def find_config() -> WholeConfig:
    """Return the configuration of the connector on whose behalf the caller was called.

    Raises:
        EngineStateError: No connector is being constructed.
    """
    frame = inspect.currentframe()
    try:
        return _search(frame)
    finally:
        # A frame that holds itself is collected late, and with it everything it names.
        del frame


def _search(frame: FrameType | None) -> WholeConfig:
    while frame is not None:
        names = frame.f_locals
        vllm, kv_cache = names.get(_VLLM_CONFIG), names.get(_KV_CACHE_CONFIG)
        if _is_a(vllm, "VllmConfig") and _is_a(kv_cache, "KVCacheConfig"):
            return WholeConfig(vllm, kv_cache)
        frame = frame.f_back
    raise EngineStateError(
        "kv-core's specs and tiers can only be made by a connector of vLLM's that has "
        f"{_VLLM_CONFIG!r} and {_KV_CACHE_CONFIG!r}, such as OffloadingConnector: what they are "
        "handed does not say whose bytes a block holds"
    )


def _is_a(value: object, class_name: str) -> bool:
    # By name: this must not import vLLM, whose modules are still being imported at times.
    return any(base.__name__ == class_name for base in type(value).__mro__)
