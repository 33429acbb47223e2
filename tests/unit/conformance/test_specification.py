"""The specification for people and the table of the suite say the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from kv_conformance.checker import GUARANTEES
from kv_conformance.clauses import CLAUSES, ClauseKind, UnknownClauseError, clause_of
from kv_conformance.run._case import CASES
from kv_conformance.suite import load_suite
from kv_core.contract import Capability

DOCS: Final = Path(__file__).parents[3] / "docs"
TEXT: Final = (DOCS / "spec" / "tier-contract.md").read_text(encoding="utf-8")
SECTION: Final = re.compile(
    r'^### <a id="(?P<anchor>[^"]+)"></a>(?P<id>[A-Z0-9-]+)(?P<tag> \(allowance\))?\n\n'
    r"(?P<body>.*?)(?=^#|\Z)",
    re.MULTILINE | re.DOTALL,
)


def _sections() -> dict[str, re.Match[str]]:
    return {match["id"]: match for match in SECTION.finditer(TEXT)}


def test_every_clause_has_its_section_in_order() -> None:
    """The guarantees, then the clauses, in the order of the table, and no others."""
    expected = [*GUARANTEES, *(clause.id for clause in CLAUSES)]
    assert list(_sections()) == expected


def test_anchors_are_what_links_point_to() -> None:
    """The link that a failure prints ends at an anchor of the page."""
    for clause in CLAUSES:
        assert clause.link.endswith(
            f"docs/spec/tier-contract.md#{_sections()[clause.id]['anchor']}"
        )


def test_sentences_are_equal() -> None:
    """The normative sentence is the first paragraph, in bold."""
    for clause in CLAUSES:
        body = _sections()[clause.id]["body"]
        first = " ".join(body.split("\n\n")[0].split())
        assert first == f"**{clause.sentence}**", clause.id


def test_reasons_and_reports_are_named() -> None:
    """The page gives the reason, and every public report behind the clause."""
    for clause in CLAUSES:
        body = " ".join(_sections()[clause.id]["body"].split())
        assert clause.reason in body, clause.id
        assert [report for report in clause.reports if report not in body] == [], clause.id


def test_allowances_are_marked() -> None:
    """Who reads the page sees what is a duty and what is not."""
    for clause in CLAUSES:
        marked = _sections()[clause.id]["tag"] is not None
        assert marked is (clause.kind is ClauseKind.ALLOWANCE), clause.id


def test_ids_are_unique() -> None:
    """An id stands for one clause."""
    assert len({clause.id for clause in CLAUSES}) == len(CLAUSES)


def test_every_capability_has_a_clause() -> None:
    """What can be declared is tested."""
    tested = {clause.capability for clause in CLAUSES if not clause.absent}
    assert set(Capability) - tested == set()


def test_every_clause_has_a_test() -> None:
    """No clause passes by not being tested."""
    load_suite()
    tested = {case.clause.id for case in CASES.values()}
    assert [clause.id for clause in CLAUSES if clause.id not in tested] == []


def test_pages_link_to_sections_that_exist() -> None:
    """Every link from the documentation into the specification has a target."""
    anchors = {match["anchor"] for match in SECTION.finditer(TEXT)}
    dangling = [
        f"{page.relative_to(DOCS)}: {anchor}"
        for page in DOCS.rglob("*.md")
        for anchor in re.findall(r"tier-contract\.md#([\w-]+)", page.read_text(encoding="utf-8"))
        if anchor not in anchors
    ]
    assert dangling == []


def test_an_unknown_id_is_refused_with_a_hint() -> None:
    """A typing error is found, and the nearest id named."""
    with pytest.raises(UnknownClauseError, match=r"no clause 'LOOK-44'. Did you mean LOOK-4\?"):
        clause_of("LOOK-44")
    assert clause_of("look-4").id == "LOOK-4"
