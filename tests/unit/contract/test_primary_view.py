"""PrimaryView: zero-copy access to the slots, padding, read-only views, and letting go."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.contract import PrimaryView

NUM_BLOCKS, STRIDE, BLOCK_BYTES = 4, 4096, 1000


def _memory(num_blocks: int = NUM_BLOCKS, stride: int = STRIDE) -> memoryview:
    return memoryview(bytearray(num_blocks * stride)).cast("B", (num_blocks, stride))


def _view() -> PrimaryView:
    return PrimaryView(_memory(), BLOCK_BYTES)


def test_geometry_comes_from_the_view() -> None:
    """Slots and stride are those of the memory; the payload is what was said."""
    view = _view()
    assert (view.num_blocks, view.row_stride, view.block_bytes) == (4, 4096, 1000)
    assert view.readonly is False
    assert view.view.shape == (4, 4096)


def test_a_block_is_a_flat_writable_view_of_its_payload() -> None:
    """What is written through a block is in the memory at its row, and nowhere else."""
    view = _view()
    block = view.block(2)
    assert (block.ndim, block.format, block.nbytes) == (1, "B", BLOCK_BYTES)
    block[:] = b"x" * BLOCK_BYTES
    rows = np.asarray(view.view)
    assert rows[2, :BLOCK_BYTES].tobytes() == b"x" * BLOCK_BYTES
    assert not rows[2, BLOCK_BYTES:].any()
    assert not rows[[0, 1, 3]].any()


def test_blocks_keep_the_given_order() -> None:
    """Several blocks at once, also of numpy integers."""
    view = _view()
    view.block(3)[0] = 33
    view.block(1)[0] = 11
    assert [block[0] for block in view.blocks(np.array([3, 1, 3], dtype=np.int32))] == [33, 11, 33]


def test_an_address_is_that_of_the_payload() -> None:
    """A native engine that writes to the address writes the block."""
    view = _view()
    ctypes.memmove(view.address(3), b"native", 6)
    assert bytes(view.block(3)[:6]) == b"native"
    assert view.address(3) - view.address(0) == 3 * STRIDE


@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS, 2**31])
def test_slots_that_are_not_there_are_refused(block_id: int) -> None:
    """No index wraps around: a negative one would be somebody else's block."""
    view = _view()
    with pytest.raises(IndexError, match=r"0\.\.3"):
        view.block(block_id)
    with pytest.raises(IndexError, match=r"0\.\.3"):
        view.address(block_id)
    with pytest.raises(IndexError, match=r"0\.\.3"):
        view.blocks([0, block_id])


def test_a_readonly_view_refuses_writes_and_shares_memory() -> None:
    """Stores work on such a view: they see the pages and cannot change them (DATA-4)."""
    view = _view()
    readonly = view.as_readonly()
    view.block(1)[:3] = b"abc"
    assert readonly.readonly is True
    assert bytes(readonly.block(1)[:3]) == b"abc"
    assert readonly.address(1) == view.address(1)
    with pytest.raises(TypeError):
        readonly.block(1)[0] = 0
    with pytest.raises(TypeError):
        readonly.view[0, 0] = 0


def test_a_view_of_readonly_memory_is_readonly() -> None:
    """The property follows the memory."""
    memory = memoryview(bytes(2 * STRIDE)).cast("B", (2, STRIDE))
    assert PrimaryView(memory, STRIDE).readonly is True


@pytest.mark.parametrize("block_bytes", [0, -1, STRIDE + 1])
def test_a_block_fits_its_row(block_bytes: int) -> None:
    """The payload is positive and no longer than the stride."""
    with pytest.raises(ValueError, match="between 1 and the row stride 4096"):
        PrimaryView(_memory(), block_bytes)


@pytest.mark.parametrize(
    "memory",
    [
        memoryview(bytearray(STRIDE)),
        memoryview(bytearray(2 * STRIDE)).cast("b", (2, STRIDE)),
        memoryview(bytearray(2 * STRIDE)).cast("B", (2, 2, STRIDE // 2)),
        np.zeros((2, 2 * STRIDE), dtype=np.uint8)[:, ::2].data,
    ],
    ids=["flat", "signed", "three dimensions", "strided"],
)
def test_other_memory_is_refused(memory: memoryview) -> None:
    """Only rows of plain bytes, side by side."""
    with pytest.raises(ValueError, match=r"shape \(num_blocks, row_stride\)"):
        PrimaryView(memory, 16)


def test_release_lets_the_mapping_close() -> None:
    """After release() the owner can unmap, also beside a read-only twin (ZC-3)."""
    mapping = mmap.mmap(-1, 2 * STRIDE)
    view = PrimaryView(memoryview(mapping).cast("B", (2, STRIDE)), BLOCK_BYTES)
    twin = view.as_readonly()
    with pytest.raises(BufferError):
        mapping.close()
    twin.release()
    view.release()
    mapping.close()
    assert mapping.closed


def test_release_is_idempotent_and_ends_access() -> None:
    """A released view is of no use; releasing it again is fine."""
    view = _view()
    view.release()
    view.release()
    with pytest.raises(ValueError, match="released"):
        view.block(0)


def test_a_block_that_is_held_keeps_the_mapping() -> None:
    """An export that a tier forgot is noticed, not freed under its feet (ZC-3)."""
    mapping = mmap.mmap(-1, 2 * STRIDE)
    view = PrimaryView(memoryview(mapping).cast("B", (2, STRIDE)), BLOCK_BYTES)
    held = view.block(1)
    view.release()
    with pytest.raises(BufferError):
        mapping.close()
    held.release()
    mapping.close()


def test_the_repr_has_the_geometry() -> None:
    """Enough to recognise the view in a log."""
    expected = "PrimaryView(num_blocks=4, row_stride=4096, block_bytes=1000, readonly=False)"
    assert repr(_view()) == expected


@given(
    num_blocks=st.integers(1, 6),
    block_bytes=st.integers(1, 700),
    padding=st.integers(0, 50),
    data=st.data(),
)
def test_blocks_tile_the_memory(
    num_blocks: int, block_bytes: int, padding: int, data: st.DataObject
) -> None:
    """Any geometry: each byte of the memory is in one block or in the padding (ZC-4)."""
    stride = block_bytes + padding
    view = PrimaryView(_memory(num_blocks, stride), block_bytes)
    order = data.draw(st.permutations(range(num_blocks)))
    for block_id, block in zip(order, view.blocks(order), strict=True):
        block[:] = bytes([block_id + 1]) * block_bytes
    expected = b"".join(
        bytes([block_id + 1]) * block_bytes + bytes(padding) for block_id in range(num_blocks)
    )
    assert view.view.tobytes() == expected
