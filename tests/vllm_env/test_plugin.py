"""The general plugin, as a real vLLM loads it."""

from __future__ import annotations

import importlib
import inspect

import pytest
from vllm.plugins import load_plugins_by_group
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kv_core.vllm import _compat, register


@pytest.fixture(autouse=True)
def _loaded() -> None:
    for plugin in load_plugins_by_group("vllm.general_plugins").values():
        plugin()


def test_vllm_finds_the_plugin() -> None:
    """An installed kv-core is found by vLLM without any configuration."""
    assert load_plugins_by_group("vllm.general_plugins")["kv_core"] is register


def test_the_spec_has_a_name() -> None:
    """The engine mode needs no module path."""
    assert "KVCoreOffloadingSpec" in OffloadingSpecFactory._registry


@pytest.mark.parametrize("tier_type", ["fs", "example"])
def test_a_type_of_vllm_stays_its_own(tier_type: str) -> None:
    """Tiers of vLLM keep their names; ours have the prefix."""
    assert SecondaryTierFactory.get_tier_class({"type": tier_type}).__module__.startswith("vllm.")
    assert f"kv:{tier_type}" in SecondaryTierFactory._registry


def test_loading_again_changes_nothing() -> None:
    """Plugins may be loaded more than once."""
    before = dict(SecondaryTierFactory._registry), dict(OffloadingSpecFactory._registry)
    register()
    assert before == (SecondaryTierFactory._registry, OffloadingSpecFactory._registry)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["offloading_connector.Offloading", "multi_connector.Multi"])
def test_the_whole_configuration_is_where_it_is_looked_for(name: str) -> None:
    """Connectors have it in parameters of these names while they make their spec and tiers."""
    module, _, kind = name.partition(".")
    # Later than the others: it brings most of vLLM, and its warnings.
    found = importlib.import_module(f"vllm.distributed.kv_transfer.kv_connector.v1.{module}")
    parameters = inspect.signature(getattr(found, f"{kind}Connector")).parameters
    assert {"vllm_config", "kv_cache_config"} <= parameters.keys()


@pytest.mark.parametrize(
    ("version", "warnings"), [("0.99.0", 1), ("0.28.9", 1), ("0.33.1+cu130", 0), ("0.29.0rc1", 0)]
)
def test_an_untested_version_is_said_once(
    version: str,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may work, so it is a warning; and every process would say it again and again."""
    monkeypatch.setattr("vllm.__version__", version)
    monkeypatch.setattr(_compat, "_warned", False)
    _compat.warn_if_untested()
    _compat.warn_if_untested()
    assert len(caplog.records) == warnings
    assert all(version in record.getMessage() for record in caplog.records)
