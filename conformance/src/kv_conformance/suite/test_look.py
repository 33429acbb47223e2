"""LOOK: what a lookup promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_conformance.rig import expect
from kv_conformance.run._case import case

if TYPE_CHECKING:
    from kv_conformance.rig import Rigs


@case("LOOK-1")
def test_a_key_that_was_never_stored_is_absent(rigs: Rigs) -> None:
    """Not found before anything is stored, nor beside keys that are."""
    rig = rigs.open()
    before = rigs.keys(4)
    expect(not any(rig.resolve(before)), "a key was found in an empty storage")
    rig.stored(rigs.keys(4))
    beside = rigs.keys(8)
    expect(not any(rig.resolve(beside, rig.new_request())), "a key that was not stored was found")


@case("LOOK-3")
def test_a_stored_key_is_found(rigs: Rigs) -> None:
    """From the report of its store on, every request finds it."""
    rig = rigs.open()
    keys = rigs.keys(4)
    rig.stored(keys)
    expect(all(rig.resolve(keys)), "a stored key was not found")
    expect(all(rig.resolve(keys, rig.new_request())), "a new request did not find a stored key")
