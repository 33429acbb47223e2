"""The plugin in the process of the tests: what it notices, orders and keeps out."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kv_conformance import plugin
from kv_conformance.harness import Fault, HarnessError
from kv_conformance.rig import Budget, SubjectType
from kv_conformance.run._integrity import (
    find_changes,
    find_strangers,
    foreign_plugins,
    snapshot,
)
from kv_conformance.run._journal import (
    JOURNAL_VARIABLE,
    SUPERVISED,
    journal_of_this_process,
    read_journal,
)
from kv_conformance.run._options import INI_OVERRIDES
from kv_conformance.run._subjects import find_subjects, refuse_strange_faults
from kv_conformance.suite import SUITE_FILES, load_suite

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "kv_conformance.reference:FolderHarness"


# -- a suite that is changed --------------------------------------------------------------------


def test_nothing_was_changed() -> None:
    """Two looks at an untouched suite are equal, also after the suite was loaded again."""
    load_suite()
    before = snapshot()
    load_suite()
    assert find_changes(before) == []


def test_the_suite_is_looked_at() -> None:
    """Tests, rig, journal and plugin are among what is watched; what is tested is not."""
    load_suite()
    names = snapshot().keys()
    assert "kv_conformance.rig._findings.Findings.add" in names
    assert "kv_conformance.run._journal.Journal.write" in names
    assert "kv_conformance.plugin.pytest_sessionstart" in names
    assert any(name.startswith("kv_conformance.suite.test_look.test_") for name in names)
    assert not any(name.startswith("kv_conformance.reference") for name in names)


def test_a_replaced_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method of the suite that was replaced is named."""
    before = snapshot()
    monkeypatch.setattr(Budget, "until", lambda *_, **__: 0.0)
    assert find_changes(before) == ["kv_conformance.rig._budget.Budget.until"]


def test_a_replaced_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that was replaced is named where it was."""
    load_suite()
    before = snapshot()
    monkeypatch.setattr("kv_conformance.suite.test_look.expect", lambda *_: None)
    assert find_changes(before) == ["kv_conformance.suite.test_look.expect"]


def test_a_replaced_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that got another body is not the same."""
    from kv_conformance.rig import expect

    def agree(condition: object, message: str, *, clause: str | None = None) -> None:
        """Agree."""

    before = snapshot()
    monkeypatch.setattr(expect, "__code__", agree.__code__)
    assert "kv_conformance.rig._findings.expect" in find_changes(before)


def test_a_property_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Properties are watched, too."""
    before = snapshot()
    monkeypatch.setattr(Budget, "grace_s", property(lambda _: 1e9))
    assert find_changes(before) == ["kv_conformance.rig._budget.Budget.grace_s"]


def test_a_constant_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """So are the limits that the suite measures against."""
    before = snapshot()
    monkeypatch.setattr("kv_conformance.rig._calls._WAITING_S", 1e9)
    assert find_changes(before) == ["kv_conformance.rig._calls._WAITING_S"]


def test_a_clock_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that stands, nobody blocks anything."""
    before = snapshot()
    monkeypatch.setattr("time.perf_counter", lambda: 1.0)
    assert find_changes(before) == ["time.perf_counter"]
    assert find_strangers() == ["time.perf_counter"]


def test_no_strangers() -> None:
    """All code of the suite comes from its own files and from what it is made with."""
    load_suite()
    assert find_strangers() == []


def test_replaced_before_anybody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function from elsewhere shows without a look at what was there before."""
    load_suite()
    monkeypatch.setattr("kv_conformance.run._verdict._overall", lambda *_: None)
    monkeypatch.setattr(Budget, "grace_s", property(lambda _: 1e9))
    assert find_strangers() == [
        "kv_conformance.rig._budget.Budget.grace_s",
        "kv_conformance.run._verdict._overall",
    ]


# -- what else is loaded ------------------------------------------------------------------------


class Packaged:
    """The package of a plugin, as pytest describes it."""

    project_name = "pytest-other"
    version = "3.1"


def test_other_plugins_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins besides pytest's own and this one are listed, with versions where known."""
    local = types.ModuleType("my_plugin")
    packaged = types.ModuleType("pytest_other.plugin")
    monkeypatch.setitem(sys.modules, packaged.__name__, packaged)
    part: Any = type("Part", (), {"__module__": "pytest_other.parts"})()
    manager = pytest.PytestPluginManager()
    manager.register(local)
    manager.register(plugin, "kv_conformance")
    manager.register(types.ModuleType("_pytest.something"))
    manager.register(types.ModuleType(SUPERVISED))
    manager.register(packaged, "other")
    manager.register(part, "part")
    monkeypatch.setattr(manager, "list_plugin_distinfo", lambda: [(packaged, Packaged())])
    config: Any = SimpleNamespace(pluginmanager=manager)
    assert foreign_plugins(config) == ["my_plugin", "pytest-other 3.1"]


# -- whose process it is ------------------------------------------------------------------------


def start(monkeypatch: pytest.MonkeyPatch, *, conformance: bool, supervised: bool) -> Any:
    """Let the plugin see a fresh process; return pytest's early options."""
    manager = pytest.PytestPluginManager()
    if supervised:
        manager.register(types.ModuleType(SUPERVISED))
    known = SimpleNamespace(conformance=conformance, file_or_dir=["acme"], noconftest=False)
    config: Any = SimpleNamespace(known_args_namespace=known, pluginmanager=manager)
    monkeypatch.setattr("kv_conformance.run._journal._opened", {})
    plugin.pytest_load_initial_conftests(config)
    return known


def test_a_forged_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A journal that the environment names, without a supervisor, is not taken for one."""
    journal = tmp_path / "journal"
    monkeypatch.setenv(JOURNAL_VARIABLE, str(journal))
    start(monkeypatch, conformance=True, supervised=False)
    assert journal_of_this_process() is None
    assert not journal.exists()


def test_a_supervised_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process that the supervisor starts keeps its journal."""
    monkeypatch.setenv(JOURNAL_VARIABLE, str(tmp_path / "journal"))
    start(monkeypatch, conformance=True, supervised=True)
    journal = journal_of_this_process()
    assert journal is not None
    journal.write("start")
    assert [event["event"] for event in read_journal(journal.path)] == ["start"]


def test_tier_names_are_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is collected is the installed suite, without a conftest of the surroundings."""
    known = start(monkeypatch, conformance=True, supervised=False)
    assert known.file_or_dir == [str(file) for file in SUITE_FILES]
    assert known.noconftest


def test_nothing_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """A project's own tests are left alone."""
    monkeypatch.setenv(JOURNAL_VARIABLE, "kept")
    known = start(monkeypatch, conformance=False, supervised=False)
    assert known.file_or_dir == ["acme"]
    assert not known.noconftest


@pytest.mark.parametrize(("numprocesses", "dist"), [(2, "load"), (None, "each"), ("auto", "no")])
def test_several_processes_are_refused(numprocesses: object, dist: str) -> None:
    """pytest-xdist is told what to do instead."""
    config: Any = SimpleNamespace(option=SimpleNamespace(numprocesses=numprocesses, dist=dist))
    with pytest.raises(pytest.UsageError, match="-n 0"):
        plugin._refuse_xdist(config)


@pytest.mark.parametrize("option", [{}, {"numprocesses": 0, "dist": "no"}, {"dist": "no"}])
def test_one_process_is_fine(option: dict[str, Any]) -> None:
    """Without pytest-xdist, or with none of its workers, the run goes on."""
    config: Any = SimpleNamespace(option=SimpleNamespace(**option))
    plugin._refuse_xdist(config)


def test_a_clause_without_the_suite() -> None:
    """The option would be ignored, and nothing but the author's own tests be run."""
    option = SimpleNamespace(
        conformance=False,
        conformance_explain=None,
        conformance_clause=["LOOK-1"],
        help=False,
        version=0,
        markers=False,
    )
    config: Any = SimpleNamespace(option=option)
    with pytest.raises(pytest.UsageError, match="only with --conformance"):
        plugin.pytest_cmdline_main(config)


def test_overrides_are_settings_of_pytest(pytestconfig: pytest.Config) -> None:
    """Each overridden setting is one that pytest knows, so that ``--strict-config`` is content."""
    for setting in INI_OVERRIDES:
        pytestconfig.getini(setting.partition("=")[0])


# -- what is tested -----------------------------------------------------------------------------


def refusal(tmp_path: Path, *tiers: str, harnesses: tuple[str, ...] = ()) -> str:
    """Return why subjects cannot be found."""
    with pytest.raises(HarnessError) as caught:
        find_subjects(tiers, harnesses, tmp_path)
    return str(caught.value)


@pytest.mark.parametrize("name", ["tests/", "./acme", "test_acme.py", "acme::test_it"])
def test_a_path_as_argument(tmp_path: Path, name: str) -> None:
    """A path is refused, with what to write instead."""
    message = refusal(tmp_path, name)
    assert "is a path" in message
    assert "--conformance-harness module:function" in message


def test_a_misspelt_tier(tmp_path: Path) -> None:
    """The nearest installed tier is named."""
    assert "Did you mean 'example'" in refusal(tmp_path, "exmaple")


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("acme", "module:function"),
        ("acme:", "module:function"),
        ("kv_conformance.none:make", "cannot be imported"),
        ("kv_conformance.reference:none", "cannot be imported"),
        ("kv_conformance.reference:FolderStore", "without"),
        ("pathlib:NotThere", "cannot be imported"),
    ],
)
def test_a_wrong_harness(tmp_path: Path, reference: str, words: str) -> None:
    """What is wrong with a reference is said."""
    assert words in refusal(tmp_path, harnesses=(reference,))


def test_one_tier_twice(tmp_path: Path) -> None:
    """A tier that is named twice would be judged by the sum of two runs."""
    assert "2 times" in refusal(tmp_path, harnesses=(FOLDER, FOLDER))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "../acme"}, "a type is a word of letters"),
        ({"name": "a" * 65}, "at most 64 characters"),
        ({"name": "acme\x1b[2J"}, "a type is a word of letters"),
        ({"capabilities": ()}, "as tuple: make it a frozenset"),
        ({"capabilities": None}, "as NoneType: make it a frozenset"),
        ({"capabilities": type("Set", (frozenset,), {})()}, "as Set: make it a frozenset"),
    ],
)
def test_a_strange_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    """A type that can name no file, and a set of capabilities that may lie, are refused."""
    from kv_conformance.reference import DictHarness, dict_spec

    module: Any = types.ModuleType("strange_tier")
    module.make = lambda workdir: DictHarness(workdir, dict_spec(**changes))
    monkeypatch.setitem(sys.modules, "strange_tier", module)
    assert words in refusal(tmp_path, harnesses=("strange_tier:make",))


@pytest.mark.parametrize("faults", [None, [Fault.ERROR], frozenset({"error", "stall"})])
def test_strange_faults(tmp_path: Path, faults: object) -> None:
    """Faults that are no set of the suite's are refused, not taken for none."""
    from kv_conformance.reference import DictHarness, dict_spec

    harness: Any = DictHarness(tmp_path, dict_spec())
    harness.faults = faults
    subject = SubjectType("dict", "here", harness.spec, harness, "here", tmp_path)
    with pytest.raises(HarnessError, match="expected a frozenset of members of"):
        refuse_strange_faults(subject)


def test_an_unknown_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capability that is no member of the contract's is refused."""
    from kv_conformance.reference import FolderHarness, folder_spec

    wrong: Any = frozenset({"teleport"})

    def make(workdir: Path) -> FolderHarness:
        return FolderHarness(workdir, folder_spec(capabilities=wrong))

    module = types.ModuleType("wrong_tier")
    monkeypatch.setattr(module, "make", make, raising=False)
    monkeypatch.setitem(sys.modules, "wrong_tier", module)
    message = refusal(tmp_path, harnesses=("wrong_tier:make",))
    assert "'teleport'" in message
    assert "WITHDRAWS_IO" in message
