"""From the journal to a verdict.

What counts is which tests of the suite's own list ran to their end, not what pytest says of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kv_conformance.clauses import CLAUSES, clause_of
from kv_conformance.harness import Fault
from kv_conformance.run._case import CASES
from kv_core.contract import Capability

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kv_conformance.clauses import Clause
    from kv_conformance.run._deviations import Deviation

__all__ = ["ClauseOutcome", "ClauseResult", "TierVerdict", "Verdict", "judge"]


class Verdict(enum.Enum):
    """The outcome of a run for one tier."""

    CONFORMANT = "conformant"
    """Every clause that the tier owes ran to its end and held."""
    PARTIAL = "partial"
    """Nothing unexpected failed, but not everything ran, or there are known deviations."""
    NON_CONFORMANT = "non-conformant"
    """A clause is broken."""
    ERROR = "error"
    """The suite could not judge: a server is missing, the harness failed."""


class ClauseOutcome(enum.Enum):
    """The outcome of one clause."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    DEVIATION = "deviation"
    """It failed, as the list of known deviations says."""
    UNEXPECTED_PASS = "unexpected pass"  # noqa: S105 - no password
    """It passed, although it is listed as a deviation."""
    BLOCKED = "blocked"
    """Its test broke off because another clause was broken."""
    SKIPPED = "skipped"
    NOT_RUN = "not run"
    UNDECLARED = "undeclared"
    """The tier does not declare the capability."""
    DECLARED = "declared"
    """A clause on the lack of a capability that the tier declares."""


# What every storage can be made to do. The others only where it knows such a thing.
_NEEDED_FAULTS: Final = frozenset({Fault.ERROR.value, Fault.STALL.value})

# The most telling first: what a clause is when its tests differ.
_RANKING: Final = (
    ClauseOutcome.FAILED,
    ClauseOutcome.ERROR,
    ClauseOutcome.BLOCKED,
    ClauseOutcome.SKIPPED,
    ClauseOutcome.NOT_RUN,
    ClauseOutcome.PASSED,
)


@dataclass(frozen=True, slots=True)
class ClauseResult:
    """What became of one clause.

    Attributes:
        clause: The clause.
        outcome: Its outcome.
        seconds: Time its tests took.
        messages: What was found.
        deviation: The known deviation, if there is one.
    """

    clause: Clause
    outcome: ClauseOutcome
    seconds: float = 0.0
    messages: tuple[str, ...] = ()
    deviation: Deviation | None = None


@dataclass(frozen=True, slots=True)
class TierVerdict:
    """What became of one tier.

    Attributes:
        tier: Its type.
        origin: Package and version it comes from.
        capabilities: What it declares.
        verdict: The outcome.
        results: Outcome per clause, in the order of the specification.
        problems: What kept the suite from judging.
        faults: Which faults of its storage its harness makes.
    """

    tier: str
    origin: str
    capabilities: tuple[str, ...]
    verdict: Verdict
    results: tuple[ClauseResult, ...]
    problems: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(slots=True)
class _Seen:
    outcomes: dict[str, ClauseOutcome] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    messages: dict[str, list[str]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    strange: list[str] = field(default_factory=list)

    def note(self, case_name: str, outcome: ClauseOutcome) -> None:
        # A test that is repeated until it passes has failed.
        before = self.outcomes.get(case_name, outcome)
        self.outcomes[case_name] = min(before, outcome, key=_RANKING.index)

    def tell(self, clause_id: str, message: str) -> None:
        messages = self.messages.setdefault(clause_id, [])
        if message and message not in messages:
            messages.append(message)


def judge(events: Sequence[dict[str, Any]], deviations: Sequence[Deviation]) -> list[TierVerdict]:
    """Judge every tier of a run."""
    subjects = {event["tier"]: event for event in events if event["event"] == "subject"}
    problems = [event["message"] for event in events if event["event"] == "problem"]
    problems += _without_effect(deviations, subjects)
    return [
        _judge(subject, _read(events, tier), deviations, problems)
        for tier, subject in subjects.items()
    ]


def _without_effect(
    deviations: Iterable[Deviation], subjects: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """Yield a problem for each deviation from a clause that no tier of the run owes."""
    for deviation in deviations:
        concerned = {
            tier: _declared(subject)
            for tier, subject in subjects.items()
            if deviation.tier in (None, tier)
        }
        clause = clause_of(deviation.clause)
        if concerned and not any(clause.applies_to(declared) for declared in concerned.values()):
            yield (
                f"the deviation from {clause.id} matches nothing: {', '.join(concerned)} does not "
                "owe that clause. Remove the entry"
            )


def _declared(subject: dict[str, Any]) -> frozenset[Capability]:
    known = {member.value: member for member in Capability}
    return frozenset(known[name] for name in subject["capabilities"] if name in known)


def _read(events: Iterable[dict[str, Any]], tier: str) -> _Seen:
    seen = _Seen()
    for event in events:
        if event.get("tier") != tier:
            continue
        match event["event"]:
            case "begin":
                seen.begun.add(event["case"])
            case "end" if event["case"] not in seen.begun or event["case"] not in CASES:
                seen.strange.append(event["case"])
            case "end":
                seen.note(event["case"], ClauseOutcome(event["outcome"]))
                seen.seconds[event["case"]] = event["seconds"]
                # A broken promise has come as a violation already.
                if event["outcome"] in ("error", "skipped"):
                    seen.tell(CASES[event["case"]].clause.id, event["message"])
            case "died":
                seen.note(event["case"], ClauseOutcome.FAILED)
                seen.tell(event["clause"], event["message"])
                seen.broken.add(event["clause"])
            case "violation":
                seen.tell(event["clause"], f"{event['message']} (seen by {event['case']})")
                seen.broken.add(event["clause"])
    return seen


def _judge(
    subject: dict[str, Any],
    seen: _Seen,
    deviations: Sequence[Deviation],
    problems: Sequence[str],
) -> TierVerdict:
    capabilities = _declared(subject)
    problems = (*problems, *_doubts(subject, seen))
    relevant = {
        deviation.clause: deviation
        for deviation in deviations
        if deviation.tier in (None, subject["tier"])
    }
    results = tuple(
        _clause_result(clause, capabilities, seen, relevant.get(clause.id)) for clause in CLAUSES
    )
    return TierVerdict(
        tier=subject["tier"],
        origin=subject["origin"],
        capabilities=tuple(subject["capabilities"]),
        verdict=_overall(results, problems),
        results=results,
        problems=problems,
        faults=tuple(subject["faults"]),
    )


def _doubts(subject: dict[str, Any], seen: _Seen) -> Iterator[str]:
    """Yield why what the tests say is not to be trusted."""
    lacking = sorted(_NEEDED_FAULTS - set(subject["faults"]))
    if lacking:
        yield (
            f"the harness of {subject['tier']} does not make the fault(s) {', '.join(lacking)}, "
            "without which several clauses are not tested. Have 'inject' make them, and name them "
            "in 'faults'"
        )
    unknown = sorted(set(subject["capabilities"]) - {member.value for member in Capability})
    if unknown:
        yield (
            f"{subject['tier']} declares {', '.join(unknown)}, which the contract does not know. "
            "Declare members of kv_core.contract.Capability"
        )
    if seen.strange:
        yield (
            f"the journal has results of {', '.join(sorted(set(seen.strange)))}, which the suite "
            "did not begin: something else in the process has written to it"
        )


def _clause_result(
    clause: Clause,
    capabilities: frozenset[Capability],
    seen: _Seen,
    deviation: Deviation | None,
) -> ClauseResult:
    names = [case.name for case in CASES.values() if case.clause.id == clause.id]
    outcomes = [seen.outcomes.get(name, ClauseOutcome.NOT_RUN) for name in names]
    if clause.id in seen.broken:
        outcomes.append(ClauseOutcome.FAILED)
    if not clause.applies_to(capabilities) and ClauseOutcome.FAILED not in outcomes:
        lacking = ClauseOutcome.DECLARED if clause.absent else ClauseOutcome.UNDECLARED
        return ClauseResult(clause, lacking, deviation=deviation)
    # A clause without a test would pass by saying nothing.
    outcome = min(outcomes or [ClauseOutcome.NOT_RUN], key=_RANKING.index)
    if deviation is not None and outcome is ClauseOutcome.FAILED:
        outcome = ClauseOutcome.DEVIATION
    elif deviation is not None and outcome is ClauseOutcome.PASSED:
        outcome = ClauseOutcome.UNEXPECTED_PASS
    return ClauseResult(
        clause,
        outcome,
        seconds=round(sum(seen.seconds.get(name, 0.0) for name in names), 3),
        messages=tuple(seen.messages.get(clause.id, ())),
        deviation=deviation,
    )


def _overall(results: Iterable[ClauseResult], problems: Sequence[str]) -> Verdict:
    outcomes = {result.outcome for result in results if not result.clause.provisional}
    if outcomes & {ClauseOutcome.FAILED, ClauseOutcome.UNEXPECTED_PASS}:
        return Verdict.NON_CONFORMANT
    if problems or ClauseOutcome.ERROR in outcomes:
        return Verdict.ERROR
    if outcomes - {ClauseOutcome.PASSED, ClauseOutcome.UNDECLARED, ClauseOutcome.DECLARED}:
        return Verdict.PARTIAL
    return Verdict.CONFORMANT
