"""The suite changes every field of a namespace, each in ways that make another namespace of it."""

from __future__ import annotations

import dataclasses

import pytest

from kv_conformance.suite.test_namespace import _STORED, _changes, _shifted
from kv_core.contract import Namespace
from kv_core.keys import GroupGeometry

CHANGES = list(_changes())


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Namespace)])
def test_every_field_is_changed_by_itself(name: str) -> None:
    """NS-1: for each field there is a namespace that differs in it and in nothing else."""
    changed = [
        namespace
        for _, namespace in CHANGES
        if getattr(namespace, name) != getattr(_STORED, name)
        and dataclasses.replace(namespace, **{name: getattr(_STORED, name)}) == _STORED
    ]
    assert changed


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(GroupGeometry)])
def test_every_field_of_a_group_is_changed_by_itself(name: str) -> None:
    """NS-1: the geometry of a group counts, each number of it."""
    group = _STORED.groups[0]
    assert any(
        getattr(namespace.groups[0], name) != getattr(group, name) for _, namespace in CHANGES
    )


def test_only_a_name_for_people_leaves_the_blocks_in_reach() -> None:
    """All changes but those of ``model`` change the fingerprint, and no two lead to the same."""
    others = [namespace.fingerprint for _, namespace in CHANGES if namespace.model == _STORED.model]
    assert _STORED.fingerprint not in others
    assert len(set(others)) == len(others)


def test_shifted_fields_read_the_same_without_separators() -> None:
    """vllm#55191: the texts differ only in where one field ends and the next begins."""

    def joined(namespace: Namespace) -> str:
        return "".join(str(value) for value in namespace.describe().values())

    shifted = [namespace for _, namespace in _shifted()]
    neighbours = [namespace for namespace in shifted if joined(namespace) == joined(_STORED)]
    assert len(shifted) == 7
    assert len(neighbours) >= 4
    assert _STORED.fingerprint not in {namespace.fingerprint for namespace in shifted}
