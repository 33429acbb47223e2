"""The whole of vLLM's configuration is found above whoever asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kv_core.errors import EngineStateError
from kv_core.vllm._vllm_config import WholeConfig, find_config


class VllmConfig(SimpleNamespace):
    """Has the name of vLLM's."""


class KVCacheConfig(SimpleNamespace):
    """Has the name of vLLM's."""


class _Derived(VllmConfig):
    """Somebody's extension."""


def _connector(vllm_config: Any, kv_cache_config: Any) -> WholeConfig:
    """Stand for the constructor of a connector of vLLM's, some calls up."""

    def spec() -> WholeConfig:
        return find_config()

    return spec()


@pytest.mark.parametrize("kind", [VllmConfig, _Derived])
def test_it_is_that_of_the_connector(kind: type[VllmConfig]) -> None:
    """Both parts come from one frame, however deep the question is asked."""
    vllm_config, kv_cache = kind(), KVCacheConfig()
    found = _connector(vllm_config, kv_cache)
    assert (found.vllm, found.kv_cache) == (vllm_config, kv_cache)
    assert found.vllm is vllm_config


def test_the_nearest_counts() -> None:
    """A connector among several (MultiConnector) has its own configuration."""
    outer, inner = VllmConfig(name="outer"), VllmConfig(name="inner")

    def multi(vllm_config: Any, kv_cache_config: Any) -> WholeConfig:
        return _connector(inner, kv_cache_config)

    assert multi(outer, KVCacheConfig()).vllm is inner


@pytest.mark.parametrize(
    ("vllm_config", "kv_cache_config"),
    [(None, KVCacheConfig()), (VllmConfig(), None), ("text", "text")],
)
def test_half_of_it_is_none(vllm_config: Any, kv_cache_config: Any) -> None:
    """Variables that happen to have these names are not taken for it."""
    with pytest.raises(EngineStateError, match="OffloadingConnector"):
        _connector(vllm_config, kv_cache_config)
