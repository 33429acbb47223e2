"""DATA: the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_conformance.run._case import case

if TYPE_CHECKING:
    from kv_conformance.rig import Rigs


@case("DATA-1")
def test_what_was_stored_is_what_is_loaded(rigs: Rigs) -> None:
    """Into other slots than it was stored from, in another order, and in parts."""
    rig = rigs.open(num_blocks=64)
    keys = rigs.keys(12)
    rig.stored(keys)
    rig.expect_loads(keys[::-1])
    rig.expect_loads(keys[3:5])
    rig.expect_loads(keys[:1])
