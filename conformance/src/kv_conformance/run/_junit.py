"""The report in JUnit's form, as continuous integration servers read it.

It is made from the journal and not by pytest: a run may take several processes, and pytest's own
file would hold the tests of the last one only, with whatever outcomes other plugins gave them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

from kv_conformance.run._verdict import ClauseOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kv_conformance.run._verdict import ClauseResult, TierVerdict

__all__ = ["write_junit"]

_KIND: Final = {
    ClauseOutcome.PASSED: None,
    ClauseOutcome.FAILED: "failure",
    ClauseOutcome.UNEXPECTED_PASS: "failure",
    ClauseOutcome.ERROR: "error",
}
"""The element of an outcome; what is missing here is ``skipped``."""


def write_junit(path: Path, verdicts: Sequence[TierVerdict], problems: Sequence[str]) -> None:
    """Write one test suite for each tier, with one test case for each clause.

    Args:
        path: The file; its folder is made where it does not exist.
        verdicts: One per tier.
        problems: What kept the suite from judging.
    """
    root = ET.Element("testsuites", name="conformance")
    if problems or not verdicts:
        suite = ET.SubElement(root, "testsuite", name="conformance", tests="1", errors="1")
        test = ET.SubElement(suite, "testcase", classname="conformance", name="run")
        message = "\n".join(problems) or "nothing was tested"
        ET.SubElement(test, "error", message=_printable(message))
    for verdict in verdicts:
        root.append(_suite(verdict))
    path.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _suite(verdict: TierVerdict) -> ET.Element:
    kinds = [_kind(result) for result in verdict.results]
    suite = ET.Element(
        "testsuite",
        name=f"conformance.{verdict.tier}",
        tests=str(len(kinds)),
        failures=str(kinds.count("failure")),
        errors=str(kinds.count("error")),
        skipped=str(kinds.count("skipped")),
        time=f"{sum(result.seconds for result in verdict.results):.3f}",
    )
    _properties(suite, tier=verdict.tier, origin=verdict.origin, verdict=verdict.verdict.value)
    for result in verdict.results:
        suite.append(_case(verdict, result))
    return suite


def _case(verdict: TierVerdict, result: ClauseResult) -> ET.Element:
    test = ET.Element(
        "testcase",
        classname=f"conformance.{verdict.tier}",
        name=result.clause.id,
        time=f"{result.seconds:.3f}",
    )
    _properties(
        test, clause=result.clause.id, outcome=result.outcome.value, link=result.clause.link
    )
    kind = _kind(result)
    if kind is not None:
        summary = f"{result.outcome.value}: {result.clause.sentence}"
        element = ET.SubElement(test, kind, message=_printable(summary))
        element.text = _printable("\n".join(result.messages))
    return test


def _kind(result: ClauseResult) -> str | None:
    if result.clause.provisional and result.outcome is not ClauseOutcome.PASSED:
        return "skipped"
    return _KIND.get(result.outcome, "skipped")


def _properties(parent: ET.Element, **values: str) -> None:
    properties = ET.SubElement(parent, "properties")
    for name, value in values.items():
        ET.SubElement(properties, "property", name=name, value=_printable(value))


def _printable(text: str) -> str:
    """Leave out what XML cannot hold."""
    return "".join(c if c in "\n\t" or c.isprintable() else "?" for c in text)
