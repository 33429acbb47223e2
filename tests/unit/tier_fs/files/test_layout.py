"""Where blocks lie."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.contract import make_offload_key
from kv_core.tierkit.testing import example_namespace
from kv_tier_fs.files._layout import FileLayout

if TYPE_CHECKING:
    from kv_core.contract import Namespace

ROOT = Path("/root-dir")
HASH = bytes.fromhex("0123456789abcdef" * 4)


def layout(**changes: Any) -> FileLayout:
    """Return the layout of a namespace with some fields changed."""
    return FileLayout(ROOT, example_namespace(4096, **changes))


def test_blocks_lie_by_their_hash() -> None:
    """``<model>_<12 hex>_r<rank>/<hex 1-3>/<hex 4-5>_g<group>/<hash>.bin``."""
    fingerprint = example_namespace(4096).fingerprint[:12]
    assert layout().block_path(make_offload_key(HASH, 7)) == (
        f"/root-dir/example_model_{fingerprint}_r0/012/34_g7/{HASH.hex()}.bin"
    )


def test_the_description_lies_with_the_namespace() -> None:
    """``config.json`` is shared by the ranks."""
    fingerprint = example_namespace(4096).fingerprint[:12]
    assert str(layout().config_path) == f"/root-dir/example_model_{fingerprint}/config.json"


def test_ranks_have_folders_of_their_own() -> None:
    """A rank's blocks are not those of all ranks (sglang#26670)."""
    assert layout(rank=3).blocks_dir.name.endswith("_r3")
    assert layout(rank=0).blocks_dir != layout().blocks_dir


def test_certified_layouts_are_shared_by_ranks() -> None:
    """With a layout that is the same for every rank, ranks find each other's blocks."""
    one = layout(rank=1, layout_parallel_invariant=True)
    two = layout(rank=2, tensor_parallel_size=4, layout_parallel_invariant=True)
    assert one.blocks_dir == two.blocks_dir


@pytest.mark.parametrize(
    "changes",
    [
        {"model_fingerprint": "fedcba9876543210"},
        {"revision": "other"},
        {"dtype": "float16"},
        {"kv_layout": "other"},
        {"tokens_per_hash": 32},
        {"block_size_factor": 2},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"hash_algorithm": "other"},
        {"hash_seed": "1"},
        {"epoch": 1, "epoch_run": "run"},
        {"format_version": 2},
    ],
)
def test_every_namespace_field_moves_the_blocks(changes: dict[str, Any]) -> None:
    """A change of any field makes every earlier block unreachable (NS-1, vllm#49261)."""
    key = make_offload_key(HASH, 0)
    assert layout(**changes).block_path(key) != layout().block_path(key)


@pytest.mark.parametrize(
    "model",
    [
        "..",
        "../../etc",
        "/etc/passwd",
        "a/../../b",
        ".hidden",
        "nul\0byte",
        "x" * 500,
        "模型/七",
        "-",
    ],
)
def test_no_model_name_escapes_the_root(model: str) -> None:
    """Whatever a model is called, its folders are plain folders of the root."""
    namespace: Namespace = example_namespace(4096, model=model)
    made = FileLayout(ROOT, namespace)
    for folder in (made.namespace_dir, made.blocks_dir):
        assert folder.parent == ROOT
        assert len(folder.name) < 200
        assert not folder.name.startswith(".")
        assert folder.name.isascii()
        assert "\0" not in folder.name


KEYS = st.builds(
    make_offload_key, st.binary(max_size=160), st.integers(min_value=0, max_value=2**32 - 1)
)


@given(KEYS, KEYS)
def test_distinct_keys_have_distinct_files(one: Any, two: Any) -> None:
    """No two keys share a file, on file systems that ignore case either (DATA-7)."""
    made = layout()
    paths = made.block_path(one).lower(), made.block_path(two).lower()
    assert (paths[0] == paths[1]) is (one == two)


@given(KEYS)
def test_every_key_has_a_usable_name(key: Any) -> None:
    """Short and long hashes fit the folders and the limits of file names."""
    path = Path(layout().block_path(key))
    assert path.parent.parent.parent == layout().blocks_dir
    assert all(0 < len(part) <= 255 for part in path.parts)
    assert len(path.parent.parent.name) == 3
