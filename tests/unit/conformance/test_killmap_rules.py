"""The rules of the kill map: when the suite that is being tested has failed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kv_conformance import killmap
from kv_conformance.clauses import CLAUSES, Clause, ClauseKind
from kv_conformance.extremes import EXTREMES, Extreme
from kv_conformance.killmap import (
    FEWEST_EXTREMES,
    FEWEST_MUTANTS,
    REFERENCES,
    Subject,
    SuiteRun,
    clauses_of,
    draw_honest,
    find_gaps,
    find_problems,
    main,
    repeat_survivors,
    select,
)
from kv_conformance.mutants import MUTANTS, Mutant
from kv_conformance.run._subjects import load_harness

if TYPE_CHECKING:
    from pathlib import Path

DUTY = Clause(id="LOOK-1", sentence="s", reason="r")
OTHER_DUTY = Clause(id="JOB-1", sentence="s", reason="r")
ALLOWANCE = Clause(id="LOOK-5", sentence="s", reason="r", kind=ClauseKind.ALLOWANCE)
TABLE = (DUTY, OTHER_DUTY, ALLOWANCE)


def mutant(clause: str = "LOOK-1", also: frozenset[str] = frozenset()) -> Mutant:
    """Return a mutant of a clause."""
    return Mutant(
        name="liar", clause=clause, breaks="Lies.", source="x#1", reference="m:liar", also=also
    )


def extreme(relies_on: frozenset[str] = frozenset()) -> Extreme:
    """Return a legal extreme."""
    return Extreme(name="slow", does="Is slow.", relies_on=relies_on, reference="m:slow")


def run(verdict: str = "non-conformant", *failed: str, **outcomes: str) -> SuiteRun:
    """Return what the suite found: clauses that failed, and other outcomes."""
    return SuiteRun(
        verdict=verdict, outcomes={**dict.fromkeys(failed, "failed"), **outcomes}, seconds=1.0
    )


LIAR = Subject("liar", "m:liar", mutant(also=frozenset({"MET-1"})))
HONEST = Subject("slow", "m:slow", extreme())
REFERENCE = Subject("m:reference", "m:reference")


def test_a_mutant_that_is_caught() -> None:
    """A mutant that fails its clause, and others that it names, is as it should be."""
    assert find_problems(LIAR, run("non-conformant", "LOOK-1", "MET-1")) == []


@pytest.mark.parametrize("outcome", ["passed", "not run", "blocked", "undeclared", "error"])
def test_a_survivor(outcome: str) -> None:
    """Whatever its clause is besides failed, the mutant has survived."""
    (problem,) = find_problems(
        LIAR, SuiteRun(verdict="non-conformant", outcomes={"LOOK-1": outcome, "MET-1": "failed"})
    )
    assert problem == f"liar survives: LOOK-1 {outcome}. It lies."


def test_a_few_stray_clauses() -> None:
    """A broken promise may bring down a few others."""
    assert find_problems(LIAR, run("non-conformant", "LOOK-1", "JOB-1", "JOB-2")) == []


def test_many_stray_clauses() -> None:
    """A mutant that trips everything tests nothing."""
    found = run("non-conformant", "LOOK-1", "JOB-2", "JOB-1", "DATA-1")
    assert find_problems(LIAR, found) == [
        "liar is to break LOOK-1 and trips JOB-1, JOB-2, DATA-1 too"
    ]


@pytest.mark.parametrize("subject", [HONEST, REFERENCE])
def test_an_honest_tier(subject: Subject) -> None:
    """A legal extreme and a reference tier are conformant."""
    assert find_problems(subject, run("conformant")) == []


@pytest.mark.parametrize("subject", [HONEST, REFERENCE])
@pytest.mark.parametrize("verdict", ["partial", "non-conformant", "error"])
def test_a_false_alarm(subject: Subject, verdict: str) -> None:
    """The suite must not fail an honest tier, nor leave a clause of it out."""
    found = SuiteRun(
        verdict=verdict,
        outcomes={"LOOK-1": "failed", "JOB-1": "not run", "JOB-2": "passed"},
        messages={"LOOK-1": ("a hit",)},
    )
    assert find_problems(subject, found) == [
        f"{subject.name} is honest and {verdict}",
        "  LOOK-1 failed: a hit",
        "  not run: JOB-1",
    ]


def test_a_run_without_a_report() -> None:
    """A run that did not get to its end is a problem for every subject."""
    broken = SuiteRun(verdict="no report", problem="did not end within 3 s")
    for subject in (LIAR, HONEST, REFERENCE):
        assert find_problems(subject, broken) == [f"{subject.name}: did not end within 3 s"]


def many(table: tuple[Clause, ...] = TABLE, **left_out: str) -> list[str]:
    """Return the gaps of a table with enough parts, leaving out those of one clause."""
    duties = [clause.id for clause in table if clause.kind is ClauseKind.DUTY]
    duties = [name for name in duties if name != left_out.get("duty")]
    mutants = [mutant(duties[number % len(duties)]) for number in range(FEWEST_MUTANTS)]
    allowed = frozenset({"LOOK-5"} - {left_out.get("allowance", "")})
    return find_gaps(table, mutants, [extreme(allowed)] * FEWEST_EXTREMES)


def test_a_whole_table() -> None:
    """Every duty has a mutant and every allowance an extreme."""
    assert many() == []


def test_a_duty_that_nobody_breaks() -> None:
    """A duty without a mutant may have a test that cannot fail."""
    assert many(duty="JOB-1") == ["JOB-1 is a duty and no mutant breaks it"]


def test_an_allowance_that_nobody_uses() -> None:
    """An allowance without an extreme may be forbidden by a test."""
    assert many(allowance="LOOK-5") == ["LOOK-5 is an allowance and no extreme relies on it"]


def test_too_few_parts() -> None:
    """The map shrinks only on purpose."""
    gaps = find_gaps((DUTY,), [mutant()], [extreme()])
    assert gaps == ["1 mutants are fewer than 60", "1 extremes are fewer than 12"]


def test_clauses_that_do_not_exist() -> None:
    """A misspelt id in a mutant or an extreme is found."""
    mutants = [mutant(also=frozenset({"LOOK-77"}))] * FEWEST_MUTANTS
    gaps = find_gaps((DUTY,), mutants, [extreme(frozenset({"LOOK-88"}))] * FEWEST_EXTREMES)
    assert gaps == [
        "there is no clause 'LOOK-77', which is named",
        "there is no clause 'LOOK-88', which is named",
    ]


def test_everything_is_selected() -> None:
    """Without names the map is of every reference tier, extreme and mutant."""
    names = {subject.name for subject in select([])}
    assert names == {*REFERENCES, *EXTREMES, *MUTANTS}


def test_selection_by_name_and_clause() -> None:
    """A name is that of one subject, or of a clause for all of its mutants."""
    expected = [item.name for item in MUTANTS.values() if item.clause == "LOOK-1"]
    assert sorted(subject.name for subject in select(["LOOK-1"])) == sorted(expected)
    assert [subject.name for subject in select(["always_there", "always_there"])] == [
        "always_there"
    ]
    with pytest.raises(ValueError, match="nobody"):
        select(["nobody"])


@pytest.mark.parametrize("reference", REFERENCES)
def test_references_can_be_made(tmp_path: Path, reference: str) -> None:
    """Every reference tier has a harness of its name."""
    assert load_harness(reference, tmp_path).spec.type


@pytest.mark.parametrize("name", [*MUTANTS, *EXTREMES])
def test_every_part_can_be_made(tmp_path: Path, name: str) -> None:
    """Every mutant and extreme makes a harness, by the reference in its table."""
    part = MUTANTS.get(name) or EXTREMES[name]
    assert load_harness(part.reference, tmp_path).spec.type


@pytest.mark.parametrize("part", MUTANTS.values(), ids=lambda part: part.name)
def test_mutants_declare_what_they_break(tmp_path: Path, part: Mutant) -> None:
    """A mutant owes the clause that it breaks: otherwise nobody would ask."""
    clause = next(clause for clause in CLAUSES if clause.id == part.clause)
    assert clause.applies_to(load_harness(part.reference, tmp_path).spec.capabilities)


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The command prints a row for each subject, writes them to a file, and fails on a problem."""

    def found(subject: Subject, scratch: Path, *, limit_s: float, clauses: list[str]) -> SuiteRun:
        assert clauses == clauses_of(subject)
        assert scratch.is_dir()
        assert limit_s == 7.0
        return run("non-conformant", "LOOK-1", messages="passed")

    monkeypatch.setattr(killmap, "run_suite", found)
    file = tmp_path / "map.json"
    assert main(["always_there", "at_once", "--json", str(file), "--limit", "7"]) == 1
    text = capsys.readouterr().out
    assert "always_there  LOOK-1" in text
    assert "problem: at_once is honest and non-conformant" in text
    values = json.loads(file.read_text())
    assert [entry["name"] for entry in values["runs"]] == ["always_there", "at_once"]
    assert values["runs"][0]["tripped"] == ["LOOK-1"]
    assert "at_once is honest and non-conformant" in values["problems"]


def test_the_command_without_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with 0 when every mutant asked for is caught."""
    monkeypatch.setattr(killmap, "run_suite", lambda *_, **__: run("non-conformant", "LOOK-1"))
    assert main(["always_there"]) == 0


def test_the_quick_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick map asks each mutant for its own clause, and honest tiers for everything."""
    asked: dict[str, list[str]] = {}

    def found(subject: Subject, _: Path, *, limit_s: float, clauses: list[str]) -> SuiteRun:
        asked[subject.name] = clauses
        return run("conformant", "LOOK-1")

    monkeypatch.setattr(killmap, "run_suite", found)
    assert main(["always_there", "at_once", "--quick"]) == 0
    assert asked == {"always_there": ["LOOK-1"], "at_once": []}


def test_clauses_that_cost_processes() -> None:
    """A mutant that is about another clause is not asked for those that start processes."""
    asked = set(clauses_of(LIAR))
    assert {clause.id for clause in CLAUSES} - asked == {
        "PERS-1",
        "PERS-2",
        "PERS-3",
        "SHARE-1",
        "SHARE-2",
    }
    assert clauses_of(Subject("liar", "m:liar", mutant("PERS-2"))) == []
    assert clauses_of(Subject("liar", "m:liar", mutant(also=frozenset({"SHARE-1"})))) == []
    assert clauses_of(HONEST) == clauses_of(REFERENCE) == []


def test_an_unknown_name() -> None:
    """A misspelt name is a wrong command line."""
    with pytest.raises(SystemExit) as ended:
        main(["nobody"])
    assert ended.value.code == 2


# -- drawing honest tiers --------------------------------------------------------------------------


def test_a_draw_keeps_every_mutant() -> None:
    """Only honest tiers are left out; the order stays."""
    subjects = select([])
    drawn = draw_honest(subjects, 3, "a")
    assert [s for s in drawn if isinstance(s.part, Mutant)] == [
        s for s in subjects if isinstance(s.part, Mutant)
    ]
    assert len(drawn) == len(MUTANTS) + 3
    assert drawn == [subject for subject in subjects if subject in drawn]


def test_a_draw_is_repeatable_and_depends_on_the_seed() -> None:
    """The same seed draws the same tiers; ten seeds draw more than one set."""
    subjects = select([])
    draws = [tuple(s.name for s in draw_honest(subjects, 3, str(seed))) for seed in range(10)]
    assert draws[4] == tuple(s.name for s in draw_honest(subjects, 3, "4"))
    assert len(set(draws)) > 1


def test_a_draw_of_more_than_there_are_takes_all() -> None:
    """A large number means every honest tier."""
    subjects = select([])
    assert draw_honest(subjects, 1000, "a") == subjects


# -- second attempts -------------------------------------------------------------------------------


@pytest.mark.parametrize(("second", "late"), [("LOOK-1", ["liar"]), ("JOB-1", [])])
def test_a_mutant_that_survived_gets_a_second_attempt(
    second: str, late: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clause must catch it then, and who was caught so late is told."""
    again = run("non-conformant", second)
    monkeypatch.setattr(killmap, "run_suite", lambda *_, **__: again)
    results = {"liar": (LIAR, run("conformant"))}
    assert repeat_survivors(results, 1.0, quick=True) == late
    assert (results["liar"][1] is again) == bool(late)


def test_nobody_else_gets_a_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a mutant that was caught, nor an honest tier with a false alarm."""
    monkeypatch.setattr(killmap, "run_suite", lambda *_, **__: pytest.fail("was run again"))
    results = {
        "liar": (LIAR, run("non-conformant", "LOOK-1")),
        "slow": (HONEST, run("non-conformant", "JOB-1")),
    }
    assert repeat_survivors(results, 1.0, quick=True) == []
