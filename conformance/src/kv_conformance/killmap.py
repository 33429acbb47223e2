"""The suite is tested here: which clause catches which mutant, worked out anew every time.

    python -m kv_conformance.killmap [NAME ...] [--jobs 3] [--json FILE] [--quick] [--honest N]

runs the whole suite on every mutant, every legal extreme and every reference tier, each in a
process and a folder of its own. It fails if a mutant survives or trips clauses that it does not
name, if an honest tier is not conformant, and if a clause has nobody who breaks it or relies on it.
A name is that of a mutant or an extreme, or the id of a clause for all of its mutants; with names,
the checks of the table as a whole are left out. With ``--quick`` a mutant is
asked for the clause that must catch it and no other: it finds survivors and false alarms, and not
what mutants trip besides. An honest tier runs the whole suite, which takes most of the time:
``--honest 9 --seed TEXT`` draws nine of them, others for every seed.

A mutant is not asked for clauses that cost processes (PERS, SHARE), unless it names one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kv_conformance.clauses import CLAUSES, ClauseKind
from kv_conformance.extremes import EXTREMES, Extreme
from kv_conformance.mutants import MUTANTS, Mutant
from kv_core.contract import Capability

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from kv_conformance.clauses import Clause

__all__ = [
    "FEWEST_EXTREMES",
    "FEWEST_MUTANTS",
    "MOST_STRAY",
    "REFERENCES",
    "Subject",
    "SuiteRun",
    "clauses_of",
    "draw_honest",
    "find_gaps",
    "find_problems",
    "main",
    "repeat_survivors",
    "run_suite",
    "select",
]

REFERENCES: Final = (
    "kv_conformance.reference:DictHarness",
    "kv_conformance.reference:FolderHarness",
)
"""Harnesses of the tiers that mutants and extremes are made from."""

FEWEST_MUTANTS: Final = 60
FEWEST_EXTREMES: Final = 12

MOST_STRAY: Final = 2
"""So many clauses a mutant may trip that it does not name. More, and it breaks something else."""

# Who waits in every drain takes four minutes for all clauses.
_LIMIT_S: Final = 400.0
_CONFORMANT: Final = "conformant"

_COSTLY: Final = frozenset({Capability.PERSISTENT, Capability.SHARED})
"""Their clauses start processes, which take half the time of a run."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What the suite is run on.

    Attributes:
        name: Its name in the table.
        reference: ``module:function`` of its harness.
        part: The mutant or the extreme; ``None`` for a reference tier.
    """

    name: str
    reference: str
    part: Mutant | Extreme | None = None

    @property
    def clause(self) -> str | None:
        """The clause that must catch it, if it is a mutant."""
        return self.part.clause if isinstance(self.part, Mutant) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRun:
    """What the suite found.

    Attributes:
        verdict: The verdict of the report; ``"no report"`` without one.
        outcomes: Outcome by clause id.
        messages: What was found, by clause id.
        seconds: Duration of the run.
        problem: Why there is no report; empty if there is one.
    """

    verdict: str
    outcomes: Mapping[str, str] = field(default_factory=dict)
    messages: Mapping[str, Sequence[str]] = field(default_factory=dict)
    seconds: float = 0.0
    problem: str = ""

    @property
    def tripped(self) -> frozenset[str]:
        """The clauses that were found broken."""
        return frozenset(name for name, outcome in self.outcomes.items() if outcome == "failed")


# -- the rules ----------------------------------------------------------------------------------


def find_gaps(
    clauses: Iterable[Clause],
    mutants: Collection[Mutant],
    extremes: Collection[Extreme],
) -> list[str]:
    """Return what the table lacks: clauses that nobody breaks or relies on, too few parts."""
    clauses = tuple(clauses)
    known = {clause.id for clause in clauses}
    broken = {mutant.clause for mutant in mutants}
    relied_on = {name for extreme in extremes for name in extreme.relies_on}
    gaps = [
        f"{clause.id} is a duty and no mutant breaks it"
        for clause in clauses
        if clause.kind is ClauseKind.DUTY and clause.id not in broken
    ]
    gaps += [
        f"{clause.id} is an allowance and no extreme relies on it"
        for clause in clauses
        if clause.kind is ClauseKind.ALLOWANCE and clause.id not in relied_on
    ]
    named = broken | relied_on | {name for mutant in mutants for name in mutant.also}
    gaps += [f"there is no clause {name!r}, which is named" for name in sorted(named - known)]
    if len(mutants) < FEWEST_MUTANTS:
        gaps.append(f"{len(mutants)} mutants are fewer than {FEWEST_MUTANTS}")
    if len(extremes) < FEWEST_EXTREMES:
        gaps.append(f"{len(extremes)} extremes are fewer than {FEWEST_EXTREMES}")
    return gaps


def find_problems(subject: Subject, run: SuiteRun) -> list[str]:
    """Return what is wrong with the suite, given what it found on a subject."""
    part = subject.part
    if run.problem:
        return [f"{subject.name}: {run.problem}"]
    if not isinstance(part, Mutant):
        if run.verdict == _CONFORMANT:
            return []
        return [f"{subject.name} is honest and {run.verdict}", *_what_is_missing(run)]
    problems = []
    if part.clause not in run.tripped:
        outcome = run.outcomes.get(part.clause, "unknown")
        problems.append(
            f"{subject.name} survives: {part.clause} {outcome}. It {_lower(part.breaks)}"
        )
    stray = run.tripped - {part.clause} - part.also
    if len(stray) > MOST_STRAY:
        problems.append(
            f"{subject.name} is to break {part.clause} and trips {', '.join(_ordered(stray))} too"
        )
    return problems


def _what_is_missing(run: SuiteRun) -> Iterator[str]:
    silent: dict[str, list[str]] = {}
    for name, outcome in run.outcomes.items():
        if outcome in ("passed", "undeclared", "declared"):
            continue
        if run.messages.get(name):
            yield f"  {name} {outcome}: {'; '.join(run.messages[name])}"
        else:
            silent.setdefault(outcome, []).append(name)
    yield from (f"  {outcome}: {', '.join(names)}" for outcome, names in silent.items())


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _ordered(names: Iterable[str]) -> list[str]:
    order = {clause.id: number for number, clause in enumerate(CLAUSES)}
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


# -- running ------------------------------------------------------------------------------------


def select(names: Sequence[str]) -> list[Subject]:
    """Return the subjects of the given names, or all.

    Raises:
        ValueError: A name is not known.
    """
    order = {clause.id: number for number, clause in enumerate(CLAUSES)}
    mutants = sorted(MUTANTS.values(), key=lambda mutant: order.get(mutant.clause, len(order)))
    subjects = [
        *(Subject(reference, reference) for reference in REFERENCES),
        *(Subject(name, part.reference, part) for name, part in EXTREMES.items()),
        *(Subject(part.name, part.reference, part) for part in mutants),
    ]
    if not names:
        return subjects
    chosen = []
    for name in names:
        found = [subject for subject in subjects if name in (subject.name, subject.clause)]
        if not found:
            raise ValueError(f"there is no mutant, extreme or clause with a mutant named {name!r}")
        chosen += [subject for subject in found if subject not in chosen]
    return chosen


def draw_honest(subjects: Sequence[Subject], count: int, seed: str) -> list[Subject]:
    """Return all mutants, and so many of the honest tiers, drawn by a seed.

    Args:
        subjects: What there is, in the order to keep.
        count: Honest tiers to draw; all when there are no more.
        seed: The same text draws the same tiers, in every process.
    """
    honest = [subject for subject in subjects if not isinstance(subject.part, Mutant)]
    drawn = random.Random(seed).sample(honest, min(count, len(honest)))  # noqa: S311 - no secret
    return [s for s in subjects if isinstance(s.part, Mutant) or s in drawn]


def clauses_of(subject: Subject, *, quick: bool = False) -> list[str]:
    """Return the clauses that are run on a subject; none stands for all.

    Args:
        subject: What to test.
        quick: Whether a mutant is asked for its own clause only.
    """
    part = subject.part
    if not isinstance(part, Mutant):
        return []
    if quick:
        return [part.clause]
    costly = {clause.id for clause in CLAUSES if clause.capability in _COSTLY and not clause.absent}
    if costly & {part.clause, *part.also}:
        return []
    return [clause.id for clause in CLAUSES if clause.id not in costly]


def run_suite(
    subject: Subject, scratch: Path, *, limit_s: float = _LIMIT_S, clauses: Sequence[str] = ()
) -> SuiteRun:
    """Run the suite on a subject, in a process of its own.

    Args:
        subject: What to test.
        scratch: An empty folder.
        limit_s: Seconds after which the run is ended.
        clauses: The clauses to run; by default all.
    """
    command = [sys.executable, "-m", "pytest", "--conformance", "-q", "-p", "no:cacheprovider"]
    command += ["--conformance-harness", subject.reference, "--conformance-workdir", str(scratch)]
    for clause in clauses:
        command += ["--conformance-clause", clause]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    start = time.monotonic()
    with (scratch / "output.txt").open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter
            command,
            cwd=scratch,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return SuiteRun(
                verdict="no report",
                seconds=time.monotonic() - start,
                problem=f"the run did not end within {limit_s:g} s",
            )
    seconds = time.monotonic() - start
    try:
        report = json.loads((scratch / "conformance-report.json").read_text(encoding="utf-8"))
        (tier,) = report["tiers"]
    except (OSError, ValueError) as error:
        tail = (scratch / "output.txt").read_text(encoding="utf-8", errors="replace")[-2000:]
        return SuiteRun(
            verdict="no report",
            seconds=seconds,
            problem=f"there is no report ({error}); the run said:\n{tail}",
        )
    return SuiteRun(
        verdict=tier["verdict"],
        outcomes={clause["id"]: clause["outcome"] for clause in tier["clauses"]},
        messages={clause["id"]: clause["messages"] for clause in tier["clauses"]},
        seconds=seconds,
    )


def _run_all(
    subjects: Sequence[Subject], jobs: int, limit_s: float, quick: bool
) -> dict[str, tuple[Subject, SuiteRun]]:
    """Run the suite on all subjects, and say so as they end."""
    results: dict[str, SuiteRun] = {}
    with (
        tempfile.TemporaryDirectory(prefix="kv-killmap-") as folder,
        ThreadPoolExecutor(jobs, thread_name_prefix="killmap") as pool,
    ):
        futures = {}
        for number, subject in enumerate(subjects):
            scratch = Path(folder, str(number))
            scratch.mkdir()
            clauses = clauses_of(subject, quick=quick)
            future = pool.submit(run_suite, subject, scratch, limit_s=limit_s, clauses=clauses)
            futures[future] = subject
        for future in as_completed(futures):
            subject, run = futures[future], future.result()
            results[subject.name] = run
            _, clause, outcome, _, seconds = _row(subject, run)
            line = f"{len(results)}/{len(subjects)} {subject.name} {clause}: {outcome}, {seconds} s"
            sys.stderr.write(line + "\n")
    return {subject.name: (subject, results[subject.name]) for subject in subjects}


def repeat_survivors(
    results: dict[str, tuple[Subject, SuiteRun]], limit_s: float, quick: bool
) -> list[str]:
    """Run the suite once more on mutants that survived, alone; return who was caught only then.

    Some mutants break their promise only when threads meet in a certain order, which a busy
    machine may prevent. An honest tier gets no second attempt: one false alarm is one too many.

    Args:
        results: What was found; changed where the second attempt caught the mutant.
        limit_s: Longest time of a run.
        quick: Whether mutants are asked for their own clauses only.
    """
    caught = []
    for name, (subject, run) in results.items():
        if subject.clause is None or subject.clause in run.tripped:
            continue
        with tempfile.TemporaryDirectory(prefix="kv-killmap-") as folder:
            clauses = clauses_of(subject, quick=quick)
            again = run_suite(subject, Path(folder), limit_s=limit_s, clauses=clauses)
        if subject.clause in again.tripped:
            caught.append(name)
            results[name] = subject, again
    return caught


# -- telling ------------------------------------------------------------------------------------


def _row(subject: Subject, run: SuiteRun) -> tuple[str, str, str, str, str]:
    part, seconds = subject.part, f"{run.seconds:.1f}"
    if isinstance(part, Mutant):
        stray = _ordered(run.tripped - {part.clause} - part.also)
        caught = "caught" if part.clause in run.tripped else "SURVIVES"
        return subject.name, part.clause, caught, ", ".join(stray), seconds
    relied_on = ", ".join(_ordered(part.relies_on)) if part is not None else ""
    return subject.name, relied_on, run.verdict, "", seconds


def _rows(results: Iterable[tuple[Subject, SuiteRun]]) -> list[tuple[str, ...]]:
    head = ("tier", "clause", "outcome", "trips besides", "seconds")
    return [head, *(_row(subject, run) for subject, run in results)]


def _format(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _as_values(
    results: Iterable[tuple[Subject, SuiteRun]], problems: Sequence[str]
) -> dict[str, Any]:
    return {
        "runs": [
            {
                "name": subject.name,
                "kind": type(subject.part).__name__.lower() if subject.part else "reference",
                "clause": subject.clause,
                "verdict": run.verdict,
                "tripped": _ordered(run.tripped),
                "messages": {
                    name: list(run.messages.get(name, ())) for name in _ordered(run.tripped)
                },
                "seconds": round(run.seconds, 2),
            }
            for subject, run in results
        ],
        "problems": list(problems),
    }


def _jobs() -> int:
    """Return how many runs to have at a time: one more than cores, as some of them wait."""
    return (os.cpu_count() or 1) + 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Work out the kill map and print it.

    Returns:
        Exit status: 0 if the suite is fine, 1 if not, 2 for a wrong command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kv_conformance.killmap",
        description="Run the conformance suite on every mutant and every legal extreme.",
    )
    parser.add_argument("names", nargs="*", help="mutants, extremes or clause ids (default: all)")
    parser.add_argument("--jobs", type=int, default=_jobs(), help="runs at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the map to a file, too")
    parser.add_argument("--limit", type=float, default=_LIMIT_S, metavar="SECONDS", help="per run")
    parser.add_argument("--quick", action="store_true", help="the mutants' own clauses only")
    parser.add_argument("--honest", type=int, metavar="N", help="so many honest tiers, drawn")
    parser.add_argument("--seed", default="", help="which honest tiers are drawn")
    options = parser.parse_args(arguments)
    try:
        subjects = select(options.names)
    except ValueError as error:
        parser.error(str(error))
    if options.honest is not None:
        if options.honest < 0:
            parser.error(f"--honest must be 0 or more, found {options.honest}")
        subjects = draw_honest(subjects, options.honest, options.seed)
    start = time.monotonic()
    results = _run_all(subjects, max(1, options.jobs), options.limit, options.quick)
    late = repeat_survivors(results, options.limit, options.quick)
    problems = [
        problem for subject, run in results.values() for problem in find_problems(subject, run)
    ]
    if not options.names:
        problems += find_gaps(CLAUSES, MUTANTS.values(), EXTREMES.values())
    if options.json is not None:
        values = _as_values(results.values(), problems)
        options.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    print(_format(_rows(results.values())))
    count = sum(isinstance(subject.part, Mutant) for subject in subjects)
    print(
        f"\n{count} mutants, {len(subjects) - count} honest tiers, {time.monotonic() - start:.0f} s"
    )
    if late:
        print(f"caught at the second attempt only: {', '.join(late)}")
    for problem in problems:
        print(f"problem: {problem}" if not problem.startswith(" ") else problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
