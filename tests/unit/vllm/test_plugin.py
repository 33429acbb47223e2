"""The general plugin where vLLM is not what it expects, or is not there at all."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import kv_core.vllm
from kv_core.vllm import register
from kv_core.vllm._logs import log_where_vllm_does

if TYPE_CHECKING:
    from collections.abc import Iterator


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


class _Factory:
    """Stands for one of vLLM's factories."""

    def __init__(self, *known: str) -> None:
        self.registry: dict[str, tuple[str, str]] = dict.fromkeys(known, ("vllm", "Own"))

    def register(self, name: str, module: str, class_name: str) -> None:
        """Refuse a name twice, as vLLM does."""
        if name in self.registry:
            raise ValueError(f"{name!r} is already registered")
        self.registry[name] = (module, class_name)


@pytest.fixture
def compat(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a made-up vLLM behind the compatibility module."""
    specs, tiers = _Factory("CPUOffloadingSpec"), _Factory("fs", "p2p")
    module: Any = ModuleType("kv_core.vllm._compat")
    module.warn_if_untested = lambda: None
    module.registered_specs = specs.registry.keys
    module.registered_tiers = tiers.registry.keys
    module.OffloadingSpecFactory = SimpleNamespace(register_spec=specs.register)
    module.SecondaryTierFactory = SimpleNamespace(register_tier=tiers.register)
    module.specs, module.tiers = specs.registry, tiers.registry
    monkeypatch.setitem(sys.modules, "kv_core.vllm._compat", module)
    monkeypatch.setattr(kv_core.vllm, "_compat", module, raising=False)
    return module


def _install(monkeypatch: pytest.MonkeyPatch, *types: str) -> None:
    claims = [SimpleNamespace(type=tier_type) for tier_type in types]
    registry = SimpleNamespace(installed=lambda: claims)
    monkeypatch.setattr("kv_core.vllm._plugin.TierRegistry", lambda: registry)


def test_importing_the_package_does_not_import_vllm() -> None:
    """Where vLLM is missing, or half installed, the package imports all the same."""
    done = _run(
        "import sys; sys.modules.update({'vllm': None, 'torch': None}); import kv_core.vllm; "
        "print(*sorted({'numpy.random', 'vllm', 'rich'} & set(sys.modules)))"
    )
    assert done.stderr == ""


def test_nothing_comes_out_of_the_plugin() -> None:
    """An unusable vLLM is logged, not raised: it may run fine without us."""
    done = _run(
        "import sys; sys.modules['vllm'] = None; from kv_core.vllm import register; register()"
    )
    assert done.returncode == 0
    assert "could not register with vLLM" in done.stderr


def test_registering_imports_no_tier(compat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken tier package is noticed by those only who use it."""
    _install(monkeypatch, "fs", "acme")
    before = set(sys.modules)
    register()
    assert not [name for name in set(sys.modules) - before if name.startswith("kv_tier")]


def test_free_names_are_ours_as_well(compat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the prefix always, without it where vLLM has no tier of that name."""
    _install(monkeypatch, "fs", "acme")
    register()
    ours = {name for name, (module, _) in compat.tiers.items() if module.startswith("kv_core")}
    assert ours == {"kv:fs", "kv:acme", "acme"}
    assert compat.tiers["fs"] == ("vllm", "Own")


def test_the_spec_is_registered_once(compat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins may be loaded again in one process."""
    _install(monkeypatch, "fs")
    register()
    register()
    assert compat.specs["KVCoreOffloadingSpec"] == ("kv_core.vllm._spec", "KVCoreOffloadingSpec")


def test_two_packages_of_one_type_are_one_name(
    compat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of them is meant is asked when the tier is opened."""
    _install(monkeypatch, "acme", "acme")
    register()
    assert "kv:acme" in compat.tiers


def test_the_prefix_is_public() -> None:
    """Configurations are written by programs, too."""
    assert kv_core.vllm.TIER_TYPE_PREFIX == "kv:"


def test_an_unknown_name_of_the_package_is_an_error() -> None:
    """Lazy names do not hide typing errors."""
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = kv_core.vllm.Nonsense


# -- logs ---------------------------------------------------------------------------------------


@pytest.fixture
def loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """Return fresh loggers of ours and of vLLM's."""
    ours, theirs = logging.getLogger("kv_core"), logging.getLogger("vllm")
    for logger in (ours, theirs):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
    levels = ours.level, theirs.level
    yield ours, theirs
    ours.setLevel(levels[0])
    theirs.setLevel(levels[1])


def test_our_lines_go_where_vllms_go(
    loggers: tuple[logging.Logger, logging.Logger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kv-core says at the start is to be seen where the operator looks."""
    ours, theirs = loggers
    handler = logging.NullHandler()
    theirs.addHandler(handler)
    theirs.setLevel(logging.DEBUG)
    # Here, not in the fixture: pytest puts its own there for the time of the test.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_where_vllm_does()
    log_where_vllm_does()
    assert (ours.handlers, ours.level, ours.propagate) == ([handler], logging.DEBUG, False)


def test_a_program_with_its_own_logging_keeps_it(
    loggers: tuple[logging.Logger, logging.Logger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has configured the root logger gets our lines there, once."""
    ours, theirs = loggers
    theirs.addHandler(logging.NullHandler())
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    log_where_vllm_does()
    assert (ours.handlers, ours.propagate) == ([], True)
