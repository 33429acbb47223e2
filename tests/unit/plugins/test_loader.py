"""What a plugin can get wrong, and that each mistake is named and contained."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from kv_core.errors import BrokenPluginError, TierOpenError, UnsupportedError
from kv_core.plugins import TierRegistry

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.plugins.conftest import FakeSite


def _broken(site: FakeSite, tier_type: str = "acme") -> BrokenPluginError:
    with pytest.raises(BrokenPluginError) as caught:
        site.registry().spec(tier_type)
    assert caught.value.plugin == tier_type
    assert caught.value.distribution == f"kv-tier-{tier_type} 1.0"
    assert f"kv-tier-{tier_type} 1.0" in str(caught.value)
    return caught.value


def test_import_failure_is_chained_and_names_the_package(site: FakeSite) -> None:
    """The original exception is the cause."""
    site.add("acme", "import a_library_that_is_not_there")
    error = _broken(site)
    assert isinstance(error.__cause__, ModuleNotFoundError)
    assert "a_library_that_is_not_there" in str(error)
    assert "pip uninstall kv-tier-acme" in str(error)


@pytest.mark.parametrize(
    "statement",
    ["raise SystemExit(3)", "raise GeneratorExit", "class Odd(BaseException): pass\nraise Odd"],
)
def test_even_an_exit_at_import_is_contained(site: FakeSite, statement: str) -> None:
    """A plugin that exits at import ends only itself."""
    site.add("acme", statement)
    assert _broken(site).__cause__ is not None


def test_an_interrupt_at_import_passes_through(site: FakeSite) -> None:
    """Ctrl-C during an import is the user's, not the plugin's."""
    site.add("acme", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.registry().spec("acme")


def test_a_syntax_error_is_contained(site: FakeSite) -> None:
    """A module that does not compile is a broken plugin."""
    site.add("acme", "def (:")
    assert isinstance(_broken(site).__cause__, SyntaxError)


def test_a_module_without_the_hook_is_broken(site: FakeSite) -> None:
    """The required hook is asked for by name."""
    site.add("acme", "x = 1")
    assert "no hook 'kv_core_register_tier'" in str(_broken(site))


def test_the_entry_point_names_a_module() -> None:
    """An entry point that names a function is refused."""
    point = metadata.EntryPoint("acme", "json:loads", "kv_core.tiers")
    with pytest.raises(BrokenPluginError, match="names a function, expected a module"):
        TierRegistry([point]).spec("acme")


def test_an_unmarked_hook_is_an_error(site: FakeSite) -> None:
    """A hook without the marker would be ignored by pluggy: it is named instead."""
    site.add("acme", "def kv_core_register_tier(): ...")
    assert "without marking it with @kv_core.hookimpl" in str(_broken(site))


@pytest.mark.parametrize("marker", ["", "@kv_core.hookimpl\n"])
def test_a_misspelt_hook_is_an_error_with_a_suggestion(site: FakeSite, marker: str) -> None:
    """A name that only looks like a hook is refused, marked or not."""
    site.add("acme", also=f"{marker}def kv_core_register_comands(app): ...")
    message = str(_broken(site))
    assert "'kv_core_register_comands', which is no hook" in message
    assert "Did you mean 'kv_core_register_commands'" in message


def test_a_marked_function_that_is_no_hook_is_an_error(site: FakeSite) -> None:
    """Whatever carries the marker must be a hook."""
    site.add("acme", also="@kv_core.hookimpl\ndef something_else(): ...")
    message = str(_broken(site))
    assert "something_else" in message
    assert "kv_core_register_tier" in message


def test_an_unknown_parameter_is_an_error(site: FakeSite) -> None:
    """A hook with a parameter that the specification does not have is refused."""
    site.add(
        "acme", also="@kv_core.hookimpl\ndef kv_core_conformance_harness(workdir, colour): ..."
    )
    assert "colour" in str(_broken(site))


def test_a_failing_hook_is_contained(site: FakeSite) -> None:
    """An exception in the hook is chained."""
    site.add("acme", "import kv_core\n@kv_core.hookimpl\ndef kv_core_register_tier(): 1 / 0")
    error = _broken(site)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert ".py:3)" in str(error), "the author wants to know where"


def test_a_hook_that_returns_no_spec_is_an_error(site: FakeSite) -> None:
    """The tier must be declared with a TierSpec."""
    site.add(
        "acme", "import kv_core\n@kv_core.hookimpl\ndef kv_core_register_tier(): return 'acme'"
    )
    assert "returned 'acme'" in str(_broken(site))


def test_the_entry_point_and_the_type_have_one_name(site: FakeSite) -> None:
    """A type that differs from the name of the entry point is refused."""
    module = site.add("other")
    site.add("acme", f"from {module} import kv_core_register_tier")
    message = str(_broken(site))
    assert "'other'" in message
    assert "'acme'" in message


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("config_model=dict", "no subclass of TierConfig"),
        ("capabilities=frozenset({'PERSISTENT'})", "unknown capabilities"),
        ("capabilities=None", "the capabilities None, expected a frozenset"),
        (
            "capabilities=type('Mute', (), {'__repr__': lambda self: 1 / 0})()",
            "the capabilities an object of type Mute, expected a frozenset",
        ),
        ("factory=None", "a factory that cannot be called"),
        ("limits=3", "a limits that cannot be called"),
        ("refine=frozenset()", "a refine that cannot be called"),
        ("contract='1.0'", "contract version '1.0'"),
        ("contract=(1, 0, 0)", "contract version (1, 0, 0)"),
        (
            "config_model=type('C', (TierConfig,), {'__annotations__': {'mode': str}})",
            "a setting named 'mode'",
        ),
    ],
)
def test_impossible_declarations_are_refused(site: FakeSite, change: str, problem: str) -> None:
    """What a plugin declares is checked before it is used."""
    site.add(
        "acme",
        also=f"""
import dataclasses
_original = kv_core_register_tier
@kv_core.hookimpl
def kv_core_register_tier():
    return dataclasses.replace(_original(), {change})
del _original.kv_core_impl
""",
    )
    assert problem in str(_broken(site))


def test_an_error_of_kv_core_in_a_hook_keeps_its_kind(site: FakeSite) -> None:
    """A plugin that explains itself with an error of kv-core is not wrapped."""
    site.add(
        "acme",
        """
import kv_core
from kv_core.errors import TierOpenError
@kv_core.hookimpl
def kv_core_register_tier(): raise TierOpenError("this platform has no such disk")
""",
    )
    with pytest.raises(TierOpenError, match="no such disk"):
        site.registry().spec("acme")


def test_the_harness_hook_gets_the_folder(site: FakeSite, tmp_path: Path) -> None:
    """The harness is whatever the plugin makes of the folder."""
    site.add(
        "acme",
        also="@kv_core.hookimpl\n"
        "def kv_core_conformance_harness(workdir): return ['harness', workdir]",
    )
    harness = site.registry().conformance_harness("acme", tmp_path)
    assert harness == ["harness", tmp_path]


def test_a_tier_without_harness_is_usable_but_not_testable(site: FakeSite, tmp_path: Path) -> None:
    """The harness is optional; asking for a missing one names the hook."""
    site.add("acme")
    registry = site.registry()
    assert registry.spec("acme").type == "acme"
    with pytest.raises(UnsupportedError, match="kv_core_conformance_harness"):
        registry.conformance_harness("acme", tmp_path)


def test_a_failing_harness_names_the_package(site: FakeSite, tmp_path: Path) -> None:
    """A failure while making the harness is the plugin's."""
    site.add(
        "acme", also="@kv_core.hookimpl\ndef kv_core_conformance_harness(workdir): return 1 / 0"
    )
    with pytest.raises(BrokenPluginError, match=r"kv-tier-acme 1\.0") as caught:
        site.registry().conformance_harness("acme", tmp_path)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
