"""The pytest plugin. Without ``--conformance`` it does nothing.

Two processes load it. The one the user started only supervises
(:mod:`~kv_conformance.run._supervisor`); the one it starts collects the installed suite and runs
it. Both take the place of whatever the user's project would have collected: tier names are no
paths, and no ``conftest.py`` is loaded.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_conformance.clauses import CLAUSES, UnknownClauseError, clause_of
from kv_conformance.harness import HarnessError
from kv_conformance.rig import Broken, Budget, CannotOpenError, OutOfTime, Rigs, SubjectType
from kv_conformance.run._case import CASES
from kv_conformance.run._complete import find_untested
from kv_conformance.run._deviations import read_deviations
from kv_conformance.run._explain import explain
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
from kv_conformance.run._junit import write_junit
from kv_conformance.run._options import add_options, read_options
from kv_conformance.run._report import make_room, write_report
from kv_conformance.run._stacks import catch_crashes
from kv_conformance.run._subjects import find_subjects, refuse_strange_faults
from kv_conformance.run._summary import show
from kv_conformance.run._supervisor import WORKDIR_VARIABLE, supervise
from kv_conformance.run._verdict import Verdict, judge
from kv_conformance.suite import SUITE_FILES, load_suite

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from kv_conformance.rig import Violation
    from kv_conformance.run._case import Case
    from kv_conformance.run._options import Options
    from kv_conformance.run._verdict import TierVerdict

# pytest finds the hooks by their names.
__all__ = ["rigs"]

_SUBJECTS: Final = pytest.StashKey[dict[str, SubjectType]]()
_BUDGETS: Final = pytest.StashKey[dict[str, Budget]]()
_OPENED: Final = pytest.StashKey[set[str]]()
_GIVEN_UP: Final = pytest.StashKey[set[str]]()
_SUITE: Final = pytest.StashKey[dict[str, object]]()
_POSITIONAL: Final = pytest.StashKey[tuple[str, ...]]()

_PRINTING: Final = ("-h", "--help", "-V", "--version", "--markers", "--conformance-explain")

_EXIT: Final = {
    Verdict.CONFORMANT: 0,
    Verdict.PARTIAL: 1,
    Verdict.NON_CONFORMANT: 1,
    Verdict.ERROR: 3,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Keep the project's ``conftest.py`` out, and keep tier names from being taken for paths."""
    known = early_config.known_args_namespace
    if known.conformance:
        if not early_config.pluginmanager.hasplugin(SUPERVISED):
            # Set by somebody else: what nobody judges must not look like a run.
            os.environ.pop(JOURNAL_VARIABLE, None)
        known.file_or_dir = [str(file) for file in SUITE_FILES]
        known.noconftest = True


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Supervise the run instead of collecting anything."""
    option = config.option
    if option.conformance_explain or option.help or option.version or option.markers:
        _refuse_unless_typed(config)
        return _explain(option.conformance_explain) if option.conformance_explain else None
    if option.conformance_clause and not option.conformance:
        raise pytest.UsageError(
            "--conformance-clause chooses among the tests of the suite, which runs only with "
            "--conformance: add that"
        )
    if not option.conformance:
        return None
    positional = tuple(option.file_or_dir)
    config.stash[_POSITIONAL] = positional
    config.args = [str(file) for file in SUITE_FILES]
    option.importmode = "prepend"
    _refuse_xdist(config)
    if journal_of_this_process() is not None:
        # The supervisor writes it, from what the journal says.
        option.xmlpath = None
        return None
    return _supervised(config, read_options(config, positional))


def _explain(clause_id: str) -> int:
    try:
        print(explain(clause_of(clause_id)))
    except UnknownClauseError as error:
        raise pytest.UsageError(str(error)) from error
    return 0


def _refuse_unless_typed(config: pytest.Config) -> None:
    """Refuse to print something instead of a run, with status 0, unless that is what was typed."""
    typed = [str(argument) for argument in config.invocation_params.args]
    # pytest reads no further than to --help.
    asked_for = config.option.conformance or "--conformance" in typed
    if asked_for and not any(argument.startswith(_PRINTING) for argument in typed):
        raise pytest.UsageError(
            "PYTEST_ADDOPTS or a configuration file has an option that prints something instead of "
            f"running tests ({', '.join(_PRINTING)}), so nothing would be tested: remove it there"
        )


def _refuse_xdist(config: pytest.Config) -> None:
    option = config.option
    if getattr(option, "numprocesses", None) or getattr(option, "dist", "no") != "no":
        raise pytest.UsageError(
            "the conformance suite measures threads, descriptors and memory of one process and "
            "cannot be spread over several: run it with '-n 0' (or '-p no:xdist')"
        )


# -- the supervising process ---------------------------------------------------------------------


def _supervised(config: pytest.Config, options: Options) -> int:
    load_suite()
    before = snapshot()
    untested = find_untested(CLAUSES, CASES.values())
    if untested:
        raise pytest.UsageError(
            f"the suite has no test of {', '.join(untested)}, so it can judge nobody: its "
            "installation is not complete. Install kv-conformance again"
        )
    try:
        make_room(options.report_dir)
        for clause_id in options.clauses:
            clause_of(clause_id)
        # In the user's time zone: an expiry is a day of theirs.
        today = dt.datetime.now().astimezone().date()
        deviations = read_deviations(options.deviations, today) if options.deviations else []
        status, events = supervise(options, config.invocation_params.args)
    except (HarnessError, UnknownClauseError) as error:
        raise pytest.UsageError(str(error)) from error
    if status == pytest.ExitCode.USAGE_ERROR and not events:
        return status
    told = {event["message"] for event in events if event["event"] == "problem"}
    events += [
        {"event": "problem", "message": message}
        for message in _what_was_changed(before)
        if message not in told
    ]
    verdicts = judge(events, deviations)
    problems = [event["message"] for event in events if event["event"] == "problem"]
    problems += _not_reached(options, verdicts)
    for verdict in verdicts:
        problems += [problem for problem in verdict.problems if problem not in problems]
    plugins = set(foreign_plugins(config)).union(
        *(event["names"] for event in events if event["event"] == "plugins")
    )
    files: list[Path] = []
    try:
        files += write_report(
            options.report_dir,
            verdicts,
            time_scale=options.time_scale,
            problems=problems,
            plugins=sorted(plugins),
        )
        if options.junit is not None:
            write_junit(options.junit, verdicts, problems)
            files.append(options.junit)
    except OSError as error:
        problems.append(f"the report of this run cannot be written: {error}")
        files = []
        with contextlib.suppress(HarnessError):
            # Half of it is none.
            make_room(options.report_dir)
    show(verdicts, problems, files)
    verdict_of_the_run = [_EXIT[verdict.verdict] for verdict in verdicts]
    if problems or not verdicts:
        verdict_of_the_run.append(_EXIT[Verdict.ERROR])
    return max(verdict_of_the_run)


def _not_reached(options: Options, verdicts: list[TierVerdict]) -> list[str]:
    """Say that tiers were asked for and never came to be tested."""
    tiers = {verdict.tier for verdict in verdicts}
    missing = [tier for tier in options.tiers if tier not in tiers]
    if not verdicts or not missing:
        return []
    return [f"the run ended before {', '.join(missing)} was tested"]


def _what_was_changed(before: Mapping[str, object]) -> Iterator[str]:
    """Say what of the suite is not what was installed. Both processes ask."""
    changed = sorted({*find_changes(before), *find_strangers()})
    if changed:
        yield (
            f"the suite was changed: {', '.join(changed)} is not what was installed. Something "
            "that was imported has replaced it; no result of this run counts"
        )


# -- the process that runs the tests --------------------------------------------------------------


def _is_running_the_suite(config: pytest.Config) -> bool:
    return bool(config.option.conformance) and journal_of_this_process() is not None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Find the tiers and bring up what their harnesses need."""
    config = session.config
    journal = journal_of_this_process()
    if not config.option.conformance or journal is None:
        return
    journal.write("start")
    catch_crashes(journal)
    options = read_options(config, config.stash[_POSITIONAL])
    load_suite()
    config.stash[_SUITE] = snapshot()
    config.stash[_SUBJECTS] = subjects = {}
    config.stash[_BUDGETS] = budgets = {}
    config.stash[_OPENED] = set()
    config.stash[_GIVEN_UP] = set()
    try:
        found = find_subjects(options.tiers, options.harnesses, Path(os.environ[WORKDIR_VARIABLE]))
        for subject in found:
            subject.harness.start()
            refuse_strange_faults(subject)
            subjects[subject.name] = subject
    except HarnessError as error:
        journal.write("problem", message=str(error))
        journal.write("finished")
        pytest.exit("the suite cannot start, as said below", returncode=3)
    for subject in found:
        budgets[subject.name] = Budget(scale=options.time_scale)
        journal.write(
            "subject",
            tier=subject.name,
            origin=subject.origin,
            capabilities=sorted(
                str(getattr(item, "value", item)) for item in subject.spec.capabilities
            ),
            faults=sorted(fault.value for fault in subject.harness.faults),
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Take down what was brought up."""
    journal = journal_of_this_process()
    if not session.config.option.conformance or journal is None:
        return
    journal.write("stopping")
    for subject in session.config.stash.get(_SUBJECTS, {}).values():
        try:
            subject.harness.stop()
        except Exception as error:  # noqa: BLE001 - of one harness; the others are to stop, too
            journal.write(
                "problem", message=f"the harness of {subject.name} does not stop: {error!r}"
            )
    journal.write("plugins", names=foreign_plugins(session.config))
    before = session.config.stash.get(_SUITE, None)
    for message in _what_was_changed(before or {}):
        journal.write("problem", message=message)
    journal.write("finished")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test once for each tier that owes its clause."""
    found: Case | None = getattr(metafunc.function, "conformance_case", None)
    if found is None or not _is_running_the_suite(metafunc.config):
        return
    names = [
        name
        for name, subject in metafunc.config.stash[_SUBJECTS].items()
        if found.clause.applies_to(subject.spec.capabilities)
    ]
    metafunc.parametrize("rigs", names, indirect=True, ids=names)


@pytest.fixture
def rigs(request: pytest.FixtureRequest) -> Generator[Rigs, None, None]:
    """What a test of the suite opens tiers with."""
    config, name = request.config, request.param
    found: Case = request.function.conformance_case
    journal = journal_of_this_process()

    def report(violation: Violation) -> None:
        if journal is not None:
            journal.write(
                "violation",
                tier=name,
                case=found.name,
                clause=violation.clause,
                message=violation.message,
            )

    test = found.name.rpartition("::")[2]
    found_rigs = Rigs(config.stash[_SUBJECTS][name], test, config.stash[_BUDGETS][name], report)
    yield found_rigs
    if found_rigs.has_opened:
        config.stash[_OPENED].add(name)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> None:
    """End the run when the tests would be given another tier than the one they are about."""
    journal = journal_of_this_process()
    if fixturedef.argname != "rigs" or not _is_running_the_suite(request.config) or not journal:
        return
    origin = fixturedef.func.__module__
    if origin != __name__:
        message = f"{origin} replaces the fixture 'rigs' of the suite: run without that plugin"
        journal.write("problem", message=message)
        pytest.exit(message, returncode=3)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what ran before the process was restarted, and what was not asked for."""
    journal = journal_of_this_process()
    if not config.option.conformance or journal is None:
        return
    begun = {
        (event["tier"], event["case"])
        for event in read_journal(journal.path)
        if event["event"] == "begin"
    }
    wanted = set(read_options(config, ()).clauses)
    subjects = config.stash[_SUBJECTS]
    tiers, names = list(subjects), list(CASES)
    kept: dict[tuple[int, int], pytest.Item] = {}
    left_out = []
    for item in items:
        found, tier = _case_of(item), _tier_of(item)
        if (
            found is None
            or tier is None
            or (tier, found.name) in begun
            or (wanted and found.clause.id not in wanted)
        ):
            left_out.append(item)
            continue
        if config.pluginmanager.hasplugin("timeout"):
            # The suite has limits of its own, which follow from what the tier declares.
            item.add_marker(pytest.mark.timeout(0))
        kept[tiers.index(tier), names.index(found.name)] = item
    # In one order, whatever plugins do to it, so that a run can be repeated.
    items[:] = [kept[place] for place in sorted(kept)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    # Tests collect garbage to see what a tier leaves. What is there before any of them is not its
    # doing, and there is a lot of it: pytest, Hypothesis and their objects.
    gc.collect()
    gc.freeze()


def _case_of(item: pytest.Item) -> Case | None:
    function = getattr(item, "function", None)
    found: Case | None = getattr(function, "conformance_case", None)
    return found if found is not None and CASES.get(found.name) is found else None


def _tier_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    name: Any = callspec.params.get("rigs") if callspec is not None else None
    return name if isinstance(name, str) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run no further test of a tier that cannot even be opened: all would say the same."""
    return True if _tier_of(item) in item.config.stash.get(_GIVEN_UP, ()) else None


def _is_hopeless(item: pytest.Item, error: BaseException) -> bool:
    tier, opener = _tier_of(item), getattr(item, "funcargs", {}).get("rigs")
    return (
        isinstance(error, CannotOpenError)
        and isinstance(opener, Rigs)
        and not opener.has_opened
        and tier not in item.config.stash[_OPENED]
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say which promise was broken instead of where the suite stood."""
    report = yield
    found = _case_of(item)
    if found is None or call.excinfo is None or not _is_running_the_suite(item.config):
        return report
    error = call.excinfo.value
    if isinstance(error, (Broken, OutOfTime)):
        clause = clause_of(error.clause) if error.clause else found.clause
        report.longrepr = (
            f"{clause.id}: {clause.sentence}\n  found: {error.message}\n  {clause.link}"
        )
    elif isinstance(error, HarnessError):
        report.longrepr = f"the harness cannot do what {found.clause.id} needs: {error}"
        tier = _tier_of(item)
        if tier is not None and _is_hopeless(item, error):
            item.config.stash[_GIVEN_UP].add(tier)
            report.longrepr += f"\n  So no other test of {tier} is run."
    return report
