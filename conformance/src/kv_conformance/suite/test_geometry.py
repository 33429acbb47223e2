"""GEO: block sizes and groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_conformance.harness import HarnessError
from kv_conformance.rig import Broken
from kv_conformance.rig._rigs import namespace_of
from kv_conformance.run._case import case
from kv_core.keys import GroupGeometry

if TYPE_CHECKING:
    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import OffloadKey

_MIB: Final = 1 << 20

# The last is that of a model: a multiple of 512, and not of 4096.
_USUAL_BYTES: Final = (512, 4096, 65_536, 2 * _MIB, 3_098_112)
_ODD_BYTES: Final = (513, 1000, 5000, 12_345, 100_003, _MIB + 1)
_LARGEST_BYTES: Final = 64 * _MIB


def _opened(rigs: Rigs, block_bytes: int, num_blocks: int) -> Rig:
    """Open a tier with blocks of a size, or of the largest one that it declares."""
    most = rigs.limits().max_block_bytes
    if most is not None:
        block_bytes = min(block_bytes, most)
    try:
        rig = rigs.open(num_blocks=num_blocks, block_bytes=block_bytes)
    except HarnessError as error:
        raise Broken(f"blocks of {block_bytes} bytes are refused: {error}") from error
    rig.blame_bytes = "GEO-1"
    return rig


def _expect_round_trip(rig: Rig, keys: list[OffloadKey]) -> None:
    rig.stored(keys, clause="GEO-1")
    rig.expect_loads(keys)


@case("GEO-1")
def test_usual_sizes_work(rigs: Rigs) -> None:
    """Multiples of 512."""
    for block_bytes in _USUAL_BYTES:
        rig = _opened(rigs, block_bytes, num_blocks=4)
        _expect_round_trip(rig, rigs.keys(2))
        rig.close()


@case("GEO-1")
def test_odd_sizes_work(rigs: Rigs) -> None:
    """Sizes that no alignment fits."""
    for block_bytes in _ODD_BYTES:
        rig = _opened(rigs, block_bytes, num_blocks=8)
        _expect_round_trip(rig, rigs.keys(4))
        rig.close()


@case("GEO-1")
def test_the_largest_blocks_work(rigs: Rigs) -> None:
    """Blocks of 64 MiB, or of the size that is declared as the largest."""
    rig = _opened(rigs, _LARGEST_BYTES, num_blocks=2)
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
    rig.blame_bytes = "GEO-1"
    _expect_round_trip(rig, [key for group in range(4) for key in rigs.keys(4, group)])
