"""Which build of NIXL is loaded, how quietly, and what is said when there is none."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.errors import TierOpenError
from kv_tier_obj import _nixl

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "the-secret-of-the-test"


class NixlNotFoundError(Exception):
    """What NIXL raises for a plugin that it cannot load."""


class Builds:
    """Builds of NIXL in a folder, each with a plugin that names the libraries it needs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.installed: set[str] = set()
        self.imported: list[str] = []
        self.levels: list[str | None] = []
        self.environments: list[dict[str, str]] = []
        self.backend_error: Exception | None = None
        find, load = importlib.util.find_spec, importlib.import_module
        for build in _nixl._BUILDS:
            for module in (build, f"{build}._api"):
                monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.delitem(sys.modules, "torch", raising=False)

        def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
            if name not in _nixl._BUILDS:
                return find(name, package)
            if name not in self.installed:
                return None
            spec = ModuleSpec(name, None)
            spec.submodule_search_locations = [str(folder / name)]
            return spec

        def import_module(name: str, package: str | None = None) -> ModuleType:
            if not name.startswith(_nixl._BUILDS):
                return load(name, package)
            self.imported.append(name)
            self.levels.append(os.environ.get("NIXL_LOG_LEVEL"))
            logging.raiseExceptions = False
            module = self.api(name)
            monkeypatch.setitem(sys.modules, name, module)
            return module

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(importlib, "import_module", import_module)

    def install(self, build: str, needs: bytes = b"libc.so.6") -> None:
        """Install a build."""
        plugins = self.folder / f".{build}.mesonpy.libs" / "plugins"
        plugins.mkdir(parents=True)
        (plugins / "libplugin_OBJ.so").write_bytes(b"\x7fELF..." + needs + b"\0...")
        self.installed.add(build)

    def api(self, name: str) -> ModuleType:
        """Return the module of a build."""

        def create_backend(backend: str, parameters: dict[str, str]) -> None:
            self.environments.append(
                {name: text for name, text in os.environ.items() if name.startswith("AWS_")}
            )
            if self.backend_error is not None:
                raise self.backend_error

        def nixl_agent(name: str, config: Any) -> SimpleNamespace:
            return SimpleNamespace(name=name, create_backend=create_backend)

        module: Any = ModuleType(name)
        module.nixl_agent_config = dict
        module.nixl_agent = nixl_agent
        found: ModuleType = module
        return found


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    """Return a place for builds; those of this environment are not there."""
    for name in ("NIXL_LOG_LEVEL", "NIXL_PLUGIN_DIR", "AWS_RETRY_MODE", "AWS_MAX_ATTEMPTS"):
        monkeypatch.delenv(name, raising=False)
    return Builds(tmp_path, monkeypatch)


def open_agent(profile: str | None = None, **defaults: str) -> _nixl.Agent:
    """Open an agent."""
    environment = {} if profile is None else {"AWS_PROFILE": profile}
    return _nixl.open_agent(
        "agent", {"secret_key": SECRET}, defaults=defaults, environment=environment
    )


def test_without_nixl_it_is_said_what_to_install(builds: Builds) -> None:
    """The command is named."""
    with pytest.raises(TierOpenError, match=r"pip install 'kv-tier-obj\[nixl\]'"):
        open_agent()


def test_a_build_whose_plugin_cannot_be_loaded_is_passed_over(builds: Builds) -> None:
    """The newest build needs a library that is not there: the other one is taken."""
    builds.install("nixl_cu13", needs=b"libcuobjclient.so.1")
    builds.install("nixl_cu12")
    assert open_agent().name == "agent"
    assert builds.imported == ["nixl_cu12._api"]


def test_a_build_that_needs_nothing_else_comes_first(builds: Builds) -> None:
    """The newest is taken when it can be."""
    builds.install("nixl_cu13")
    builds.install("nixl_cu12")
    open_agent()
    assert builds.imported == ["nixl_cu13._api"]


def test_the_build_for_the_cuda_in_use_comes_first(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others in the process import NIXL, too, and it takes the build for torch's CUDA."""
    builds.install("nixl_cu13")
    builds.install("nixl_cu12")
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    helper: Any = ModuleType("nixl_meta_utils")
    helper.detect_cuda_major = lambda: 12
    monkeypatch.setitem(sys.modules, "nixl_meta_utils", helper)
    open_agent()
    assert builds.imported == ["nixl_cu12._api"]


def test_no_plugin_can_be_loaded(builds: Builds) -> None:
    """It is said what the plugin lacks, and which build does not need it."""
    builds.install("nixl_cu13", needs=b"libcuobjclient.so.1")
    with pytest.raises(TierOpenError, match=r"libcuobjclient\.so\.1.*pip install nixl-cu12"):
        open_agent()
    assert builds.imported == []


def test_what_is_loaded_already_is_used(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can have one build; whoever imported it has chosen."""
    builds.install("nixl_cu12")
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", builds.api("nixl_cu13._api"))
    open_agent()
    assert builds.imported == []


def test_a_plugin_that_is_not_there_is_said(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build that somebody else has loaded has no plugin that works."""
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", builds.api("nixl_cu13._api"))
    builds.backend_error = NixlNotFoundError("NIXL_ERR_NOT_FOUND")
    with pytest.raises(TierOpenError, match="pip uninstall nixl-cu13; pip install nixl-cu12"):
        open_agent()


def test_what_nixl_refuses_names_no_secret(builds: Builds) -> None:
    """An error of the plugin may repeat its parameters; ours does not."""
    builds.install("nixl_cu12")
    builds.backend_error = RuntimeError(f"cannot use {SECRET}")
    with pytest.raises(TierOpenError) as raised:
        open_agent()
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None


def test_nixl_is_quiet(builds: Builds) -> None:
    """It is loaded at the level that reports nothing, and the process's logging stays as it is."""
    builds.install("nixl_cu12")
    before = logging.raiseExceptions
    open_agent()
    assert builds.levels == ["FATAL"]
    assert logging.raiseExceptions is before
    assert "NIXL_LOG_LEVEL" not in os.environ


def test_the_operator_may_have_it_loud(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that is set is left alone."""
    builds.install("nixl_cu12")
    monkeypatch.setenv("NIXL_LOG_LEVEL", "ERROR")
    open_agent()
    assert builds.levels == ["ERROR"]
    assert os.environ["NIXL_LOG_LEVEL"] == "ERROR"


def test_the_environment_is_borrowed(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables for NIXL's client are there while it is made, and what is set comes first."""
    builds.install("nixl_cu12")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "9")
    open_agent(AWS_RETRY_MODE="standard", AWS_MAX_ATTEMPTS="2")
    assert builds.environments[0]["AWS_RETRY_MODE"] == "standard"
    assert builds.environments[0]["AWS_MAX_ATTEMPTS"] == "9"
    assert "AWS_RETRY_MODE" not in os.environ
    assert os.environ["AWS_MAX_ATTEMPTS"] == "9"


@pytest.mark.parametrize("exported", [None, "other"])
def test_a_profile_of_the_settings_comes_first(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, exported: str | None
) -> None:
    """Whatever is set, the client is made with that one; afterwards all is as it was."""
    builds.install("nixl_cu12")
    if exported is None:
        monkeypatch.delenv("AWS_PROFILE", raising=False)
    else:
        monkeypatch.setenv("AWS_PROFILE", exported)
    open_agent(profile="ops")
    assert builds.environments[0]["AWS_PROFILE"] == "ops"
    assert os.environ.get("AWS_PROFILE") == exported
