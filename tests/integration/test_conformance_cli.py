"""``pytest --conformance`` as its users run it: in their projects, and trying to get around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree as ET

import pytest

from kv_conformance.run._integrity import suite_digest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DICT: Final = "--conformance-harness=kv_conformance.reference:DictHarness"
LIAR: Final = "--conformance-harness=kv_conformance.mutants:always_there"
ONE_CLAUSE: Final = "--conformance-clause=LOOK-1"
_DEADLINE_S: Final = 110


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder, which is searched for modules."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CI"))
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(folder), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )


def conformance(
    folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the conformance suite in a folder."""
    return run(folder, "--conformance", "-q", *arguments, **environment)


def report(folder: Path) -> dict[str, Any]:
    """Read the report of the run in a folder."""
    found: dict[str, Any] = json.loads((folder / "conformance-report.json").read_text())
    return found


def verdict(folder: Path) -> str:
    """Read the verdict on the one tier of a run."""
    (tier,) = report(folder)["tiers"]
    return str(tier["verdict"])


# -- fits in ------------------------------------------------------------------------------------

_UNFRIENDLY: Final = {
    "pyproject.toml": """
        [tool.pytest.ini_options]
        addopts = "--strict-markers --strict-config --import-mode=importlib -ra"
        testpaths = ["tests"]
        python_files = "check_*.py"
        python_functions = "check_*"
        python_classes = "Check*"
        norecursedirs = "*"
        usefixtures = "not_there"
        filterwarnings = ["error"]
        xfail_strict = true
        empty_parameter_set_mark = "fail_at_collect"
        timeout = 1
    """,
    "conftest.py": """
        raise RuntimeError("a conftest.py of the project was loaded")
    """,
    "dict/conftest.py": """
        def pytest_collection_modifyitems(items):
            items.clear()
    """,
    "example/conftest.py": """
        raise RuntimeError("a folder was taken for a tier")
    """,
    "tests/check_own.py": """
        def check_own():
            raise RuntimeError("a test of the project was run")
    """,
    # Named like modules that the suite imports.
    "hypothesis_settings.py": "raise RuntimeError",
}


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files below a folder, without the indentation of this one."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        path.write_text("\n".join(line[indent:] for line in lines) + "\n")


def test_in_a_project_that_suits_it_badly(tmp_path: Path) -> None:
    """Whatever a project asks of its own tests, a conformant tier is found conformant there."""
    write(tmp_path, _UNFRIENDLY)
    done = conformance(tmp_path, DICT, "--junitxml=out/junit.xml")
    assert done.returncode == 0, done.stdout
    assert "dict (kv_conformance.reference:DictHarness): conformant" in done.stdout
    assert verdict(tmp_path) == "conformant"
    found = report(tmp_path)
    assert found["suite_sha256"] == suite_digest()
    assert found["problems"] == []
    assert (tmp_path / "conformance-report.md").is_file()
    badge = json.loads((tmp_path / "conformance-badge-dict.json").read_text())
    assert badge["message"] == "conformant"
    root = ET.parse(tmp_path / "out" / "junit.xml").getroot()  # noqa: S314 - our own file
    clauses = [item.get("value") for item in root.iter("property") if item.get("name") == "clause"]
    assert clauses == [clause["id"] for clause in found["tiers"][0]["clauses"]]


def test_without_assertions(tmp_path: Path) -> None:
    """The suite finds under ``python -O`` what it finds without, and says so."""
    done = conformance(tmp_path, LIAR, ONE_CLAUSE, PYTHONOPTIMIZE="1")
    assert (done.returncode, verdict(tmp_path)) == (1, "non-conformant")
    assert report(tmp_path)["environment"]["optimized"] is True


def test_a_folder_named_like_the_tier(tmp_path: Path) -> None:
    """An installed tier is found by its name, although a folder of that name is there."""
    write(tmp_path, _UNFRIENDLY)
    done = conformance(tmp_path, "example", ONE_CLAUSE)
    assert "example (kv-tier-example" in done.stdout
    (tier,) = report(tmp_path)["tiers"]
    outcomes = {clause["id"]: clause["outcome"] for clause in tier["clauses"]}
    assert outcomes["LOOK-1"] == "passed"


def test_without_the_option(tmp_path: Path) -> None:
    """The plugin leaves a project's own tests alone."""
    write(tmp_path, {"test_own.py": "def test_own(): pass", "conftest.py": "print('loaded')"})
    done = run(tmp_path, "-q")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert [path for path in tmp_path.iterdir() if "conformance" in path.name] == []


# -- cannot be thinned --------------------------------------------------------------------------

_PLUGINS: Final = {
    "drops_tests": """
        def pytest_collection_modifyitems(items):
            del items[3:]
    """,
    "drops_tests_last": """
        import pytest
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_collection_modifyitems(items):
            yield
            del items[3:]
    """,
    "skips_tests": """
        import pytest
        def pytest_runtest_setup(item):
            pytest.skip("no time")
    """,
    "expects_failures": """
        import pytest
        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.xfail(run=False, reason="known"))
    """,
    "runs_nothing": """
        import pytest
        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(pyfuncitem):
            return True
    """,
    "protocol_of_its_own": """
        import pytest
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_protocol(item, nextitem):
            return True
    """,
    "stops_early": """
        def pytest_runtest_logreport(report):
            if report.when == "teardown":
                stops_early.session.shouldstop = "enough"
        class stops_early: pass
        def pytest_sessionstart(session):
            stops_early.session = session
    """,
}


@pytest.mark.parametrize(
    "arguments",
    [
        "-k nothing_has_this_name",
        "-m slow",
        "--deselect=::test_",
        "--collect-only",
        "--setup-plan",
        "--setup-only",
        "--fixtures",
        "-o python_functions=other",
        "-p cacheprovider --lf --lfnf=none",
        "--conformance-clause=LOOK-1",
        *(f"-p {name}" for name in _PLUGINS),
    ],
)
def test_what_leaves_tests_out(tmp_path: Path, arguments: str) -> None:
    """Every way to leave tests out makes the run partial, and its exit status is not 0."""
    write(tmp_path, {f"{name}.py": text for name, text in _PLUGINS.items()})
    done = conformance(tmp_path, DICT, *arguments.split())
    assert done.returncode == 1, done.stdout
    assert "dict (kv_conformance.reference:DictHarness): partial" in done.stdout
    assert verdict(tmp_path) == "partial"
    assert "not run: " in done.stdout


def test_addopts_of_the_environment(tmp_path: Path) -> None:
    """Options that come from the environment count like those on the command line."""
    done = conformance(tmp_path, DICT, PYTEST_ADDOPTS="-k nothing_has_this_name")
    assert (done.returncode, verdict(tmp_path)) == (1, "partial")


def test_addopts_of_the_project(tmp_path: Path) -> None:
    """So do those of a configuration file."""
    write(tmp_path, {"pytest.ini": "[pytest]\naddopts = --maxfail=1 -k nothing_has_this_name"})
    done = conformance(tmp_path, DICT)
    assert (done.returncode, verdict(tmp_path)) == (1, "partial")


def test_stopped_at_the_first_failure(tmp_path: Path) -> None:
    """A run that stops early has found what it found, and the rest has not run."""
    done = conformance(tmp_path, LIAR, "-x", "-k", "look", "--maxfail=1")
    assert (done.returncode, verdict(tmp_path)) == (1, "non-conformant")
    outcomes = [clause["outcome"] for clause in report(tmp_path)["tiers"][0]["clauses"]]
    assert "not run" in outcomes


# -- cannot be talked into a good verdict -------------------------------------------------------

_CHEATS: Final = {
    "turns_failures_into_passes": """
        import pytest
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_makereport(item, call):
            report = yield
            report.outcome = "passed"
            return report
        def pytest_sessionfinish(session):
            session.exitstatus = 0
    """,
    "swallows_failures": """
        import pytest
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_pyfunc_call(pyfuncitem):
            try:
                return (yield)
            except BaseException:
                return True
    """,
    "expects_failures": """
        import pytest
        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.xfail(strict=False, reason="known"))
    """,
    "tries_again": """
        import pytest
        from _pytest.runner import runtestprotocol
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_protocol(item, nextitem):
            runtestprotocol(item, nextitem=nextitem, log=False)
            item.funcargs = {}
            item._initrequest()
            runtestprotocol(item, nextitem=nextitem)
            return True
    """,
}


@pytest.mark.parametrize("name", _CHEATS)
def test_plugins_that_change_outcomes(tmp_path: Path, name: str) -> None:
    """What a plugin makes of an outcome does not count, and the plugin is named in the report."""
    write(tmp_path, {f"{name}.py": _CHEATS[name]})
    done = conformance(tmp_path, LIAR, ONE_CLAUSE, "-p", name)
    assert done.returncode == 1, done.stdout
    assert verdict(tmp_path) == "non-conformant"
    assert name in report(tmp_path)["environment"]["pytest_plugins"]


def test_a_tier_that_replaces_a_part_of_the_suite(tmp_path: Path) -> None:
    """A module that patches the suite when it is imported makes the run an error."""
    write(
        tmp_path,
        {
            "patching.py": """
                from kv_conformance.rig import Rig
                from kv_conformance.mutants import always_there

                Rig.lookup = Rig.finds = Rig.ask = lambda *_, **__: False
            """
        },
    )
    done = conformance(tmp_path, "--conformance-harness=patching:always_there", ONE_CLAUSE)
    assert done.returncode != 0, done.stdout
    (problem,) = report(tmp_path)["problems"]
    assert "kv_conformance.rig._rig.Rig.finds" in problem
    assert "error: the suite was changed" in done.stdout


def test_a_plugin_that_replaces_the_verdict(tmp_path: Path) -> None:
    """A plugin that was there before the suite is found in the process that judges, too."""
    write(
        tmp_path,
        {
            "lenient.py": """
                from kv_conformance.run import _verdict

                _verdict._overall = lambda results, problems: _verdict.Verdict.CONFORMANT
            """
        },
    )
    done = conformance(tmp_path, LIAR, ONE_CLAUSE, "-p", "lenient")
    assert done.returncode == 3, done.stdout
    (problem,) = report(tmp_path)["problems"]
    assert "kv_conformance.run._verdict._overall" in problem


def test_a_plugin_that_hands_out_another_tier(tmp_path: Path) -> None:
    """A fixture of the suite that a plugin replaces ends the run, and the plugin is named."""
    write(
        tmp_path,
        {
            "generous.py": """
                import pytest

                @pytest.fixture
                def rigs(request):
                    return request.param
            """
        },
    )
    done = conformance(tmp_path, LIAR, ONE_CLAUSE, PYTEST_PLUGINS="generous")
    assert done.returncode == 3, done.stdout
    (problem,) = report(tmp_path)["problems"]
    assert "generous replaces the fixture 'rigs'" in problem


def test_a_tier_that_stops_the_clock(tmp_path: Path) -> None:
    """A clock of Python that was replaced makes the run an error."""
    write(
        tmp_path,
        {
            "timeless.py": """
                import time
                from kv_conformance.mutants import always_there

                time.perf_counter = lambda: 1.0
            """
        },
    )
    done = conformance(tmp_path, "--conformance-harness=timeless:always_there", ONE_CLAUSE)
    assert done.returncode != 0, done.stdout
    (problem,) = report(tmp_path)["problems"]
    assert "time.perf_counter" in problem


def test_a_tier_that_removes_the_notes_of_the_run(tmp_path: Path) -> None:
    """There is a report, and it says what happened."""
    write(
        tmp_path,
        {
            "tidy.py": """
                import os
                import shutil
                from pathlib import Path
                from kv_conformance.mutants import always_there

                shutil.rmtree(Path(os.environ["KV_CONFORMANCE_JOURNAL"]).parent)
            """
        },
    )
    done = conformance(tmp_path, "--conformance-harness=tidy:always_there", ONE_CLAUSE)
    assert done.returncode == 3, done.stdout
    (problem,) = report(tmp_path)["problems"]
    assert "the notes of the run were removed" in problem


@pytest.mark.parametrize("option", ["--version", "--help", "--markers"])
def test_an_option_that_only_prints(tmp_path: Path, option: str) -> None:
    """It tests nothing with status 0, so it must be typed and not come from the environment."""
    done = conformance(tmp_path, LIAR, ONE_CLAUSE, PYTEST_ADDOPTS=option)
    assert done.returncode == 4, done.stdout
    assert "nothing would be tested" in done.stdout
    assert conformance(tmp_path, option).returncode == 0


def test_a_journal_from_outside(tmp_path: Path) -> None:
    """A journal in the environment neither replaces the supervisor nor its own journal."""
    forged = tmp_path / "journal.jsonl"
    forged.write_text('{"event": "subject", "tier": "dict"}\n')
    done = conformance(
        tmp_path,
        DICT,
        "-k",
        "nothing_has_this_name",
        KV_CONFORMANCE_JOURNAL=str(forged),
        KV_CONFORMANCE_WORKDIR=str(tmp_path),
    )
    assert (done.returncode, verdict(tmp_path)) == (1, "partial")
    assert forged.read_text().count("\n") == 1


# -- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("exmaple", 3, "Did you mean 'example'"),
        ("tests/", 3, "'tests/' is a path"),
        ("--conformance-explain=LOOK-44", 4, "Did you mean LOOK-4"),
        ("--conformance-deviations=none.toml", 4, "none.toml cannot be read"),
        ("--conformance-time-scale=0", 4, "a number above 0"),
        ("--conformance-report=/dev/null", 4, "no report can be written to '/dev/null'"),
        ("--conformance-workdir=/dev/null", 4, "no folder for the storages"),
    ],
)
def test_mistakes_on_the_command_line(
    tmp_path: Path, arguments: str, status: int, words: str
) -> None:
    """A mistake is an error with a hint, and an old report is not left for a new one."""
    (tmp_path / "conformance-report.json").write_text("{}")
    done = conformance(tmp_path, *arguments.split())
    assert done.returncode == status, done.stdout
    assert words in done.stdout
    if status == 3:
        assert report(tmp_path)["tiers"] == []
        assert words in report(tmp_path)["problems"][0]


def test_a_tier_that_cannot_be_opened(tmp_path: Path) -> None:
    """One test says so for all: the other hundred would say the same."""
    write(
        tmp_path,
        {
            "wrong.py": """
                from kv_conformance.reference import DictHarness

                class Harness(DictHarness):
                    def settings(self, opening):
                        return {"foldr": "/"}
            """
        },
    )
    done = conformance(tmp_path, "--conformance-harness=wrong:Harness")
    assert (done.returncode, verdict(tmp_path)) == (3, "error")
    (tier,) = report(tmp_path)["tiers"]
    (judged,) = (entry for entry in tier["clauses"] if entry["outcome"] == "error")
    assert "'foldr' is not a setting" in judged["messages"][0]
    assert "1 failed" in done.stdout
    assert "no other test of" in done.stdout


def test_an_old_report_does_not_outlive_a_mistake(tmp_path: Path) -> None:
    """When nothing can be run, there is no report that says otherwise."""
    (tmp_path / "conformance-report.json").write_text('{"verdict": "conformant"}')
    done = conformance(tmp_path, DICT, "--conformance-clause=LOOK-44")
    assert done.returncode == 4
    assert not (tmp_path / "conformance-report.json").exists()


def deviations(folder: Path, clause: str, expiry: str = "2999-12-31") -> None:
    """Write a list of one known deviation, where it is found."""
    lines = ["[[deviation]]", f'clause = "{clause}"', 'reason = "r"', 'issue = "i"']
    text = "\n".join([*lines, f"expiry = {expiry}"])
    (folder / "conformance-deviations.toml").write_text(text + "\n")


def test_a_known_deviation(tmp_path: Path) -> None:
    """A listed failure still runs, is told, and leaves the verdict partial."""
    deviations(tmp_path, "LOOK-1")
    done = conformance(tmp_path, LIAR, ONE_CLAUSE)
    assert (done.returncode, verdict(tmp_path)) == (1, "partial")
    assert "LOOK-1 deviation" in done.stdout


def test_a_deviation_that_passes(tmp_path: Path) -> None:
    """A listed clause that holds makes the run fail until it is taken off the list."""
    deviations(tmp_path, "LOOK-1")
    done = conformance(tmp_path, DICT, ONE_CLAUSE)
    assert (done.returncode, verdict(tmp_path)) == (1, "non-conformant")
    assert "LOOK-1 unexpected pass" in done.stdout


@pytest.mark.parametrize(
    ("clause", "expiry", "words"),
    [("LOOK-44", "2999-12-31", "no clause 'LOOK-44'"), ("LOOK-1", "2020-01-31", "expired")],
)
def test_a_list_that_is_wrong(tmp_path: Path, clause: str, expiry: str, words: str) -> None:
    """A list with an unknown id or an expired entry stops the run before it begins."""
    deviations(tmp_path, clause, expiry)
    done = conformance(tmp_path, DICT)
    assert done.returncode == 4
    assert words in done.stdout
    assert not (tmp_path / "conformance-report.json").exists()


def test_a_deviation_that_matches_nothing(tmp_path: Path) -> None:
    """An entry on a clause that the tier does not owe is an error."""
    deviations(tmp_path, "PERS-1")
    done = conformance(tmp_path, DICT, ONE_CLAUSE)
    assert (done.returncode, verdict(tmp_path)) == (3, "error")
    assert "PERS-1 matches nothing" in done.stdout


def test_an_explanation(tmp_path: Path) -> None:
    """A clause is explained in the terminal, without a run."""
    done = run(tmp_path, "--conformance-explain=look-4")
    assert done.returncode == 0
    assert done.stdout.startswith("LOOK-4 (duty)")
    assert "broken by" in done.stdout
    assert "#look-4" in done.stdout
    assert list(tmp_path.iterdir()) == []
