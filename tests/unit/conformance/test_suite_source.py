"""What the source of the suite's tests must not hold."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kv_conformance.rig
import kv_conformance.suite
from kv_conformance.reference import dict_spec, folder_spec
from kv_core.plugins import TierRegistry

SOURCES = [
    file
    for package in (kv_conformance.suite, kv_conformance.rig)
    for folder in package.__path__
    for file in sorted(Path(folder).glob("*.py"))
]


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_no_test_knows_a_tier_by_its_name(file: Path) -> None:
    """Whose tier it is makes no difference: nothing is compared with the name of one."""
    names = {claim.type for claim in TierRegistry().installed()}
    assert names >= {"example", "fs", "s3"}
    names |= {dict_spec().type, folder_spec().type}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not found & names
