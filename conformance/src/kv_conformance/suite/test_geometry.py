"""GEO: block sizes and groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_conformance.rig._rigs import namespace_of
from kv_conformance.run._case import case
from kv_conformance.suite._sizes import opened_with_blocks
from kv_core.keys import GroupGeometry

if TYPE_CHECKING:
    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import OffloadKey

_MIB: Final = 1 << 20

# The last is that of a model: a multiple of 512, and not of 4096.
_USUAL_BYTES: Final = (512, 4096, 65_536, 2 * _MIB, 3_098_112)
_ODD_BYTES: Final = (513, 1000, 5000, 12_345, 100_003, _MIB + 1)
_LARGEST_BYTES: Final = 64 * _MIB


def _expect_round_trip(rig: Rig, keys: list[OffloadKey]) -> None:
    rig.blame_bytes = "GEO-1"
    rig.stored(keys, clause="GEO-1")
    rig.expect_loads(keys)


@case("GEO-1")
def test_usual_sizes_work(rigs: Rigs) -> None:
    """Multiples of 512."""
    for block_bytes in _USUAL_BYTES:
        rig = opened_with_blocks(rigs, block_bytes, num_blocks=4)
        _expect_round_trip(rig, rigs.keys(2))
        rig.close()


@case("GEO-1")
def test_odd_sizes_work(rigs: Rigs) -> None:
    """Sizes that no alignment fits."""
    for block_bytes in _ODD_BYTES:
        rig = opened_with_blocks(rigs, block_bytes, num_blocks=8)
        _expect_round_trip(rig, rigs.keys(4))
        rig.close()


@case("GEO-1")
def test_the_largest_blocks_work(rigs: Rigs) -> None:
    """Blocks of 64 MiB, or of the size that is declared as the largest."""
    rig = opened_with_blocks(rigs, _LARGEST_BYTES, num_blocks=2)
    _expect_round_trip(rig, rigs.keys(2))


@case("GEO-1")
def test_several_groups_work(rigs: Rigs) -> None:
    """Blocks of several groups, of one hash and of others, side by side in one job."""
    block_bytes = 4096
    groups = tuple(
        GroupGeometry(
            tokens_per_block=16,
            bytes_per_block=block_bytes // (1 + number),
            num_layers=1 + number,
            sliding_window=number * 128 or None,
        )
        for number in range(4)
    )
    rig = rigs.open(num_blocks=64, namespace=namespace_of(block_bytes, groups=groups))
    _expect_round_trip(rig, [key for group in range(4) for key in rigs.keys(2, group)])
