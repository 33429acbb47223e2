"""Identity of blocks: keys and namespaces."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import HashSeedError, NamespaceError
from kv_core.keys import (
    ALL_RANKS,
    FORMAT_VERSION,
    GroupGeometry,
    Namespace,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

NAMESPACE = Namespace(
    model="acme/llm-7b",
    model_fingerprint="5f" * 32,
    revision="main@1234",
    dtype="bfloat16",
    kv_layout="nhd-v1",
    groups=(GroupGeometry(16, 65536, 32), GroupGeometry(16, 32768, 16, sliding_window=4096)),
    block_bytes=196608,
    tokens_per_hash=16,
    block_size_factor=2,
    tensor_parallel_size=2,
    pipeline_parallel_size=1,
    prefill_context_parallel_size=1,
    decode_context_parallel_size=1,
    rank=0,
    hash_algorithm="sha256_cbor",
    hash_seed="0",
    epoch_run="run-1",
)

# One other valid value for every field that decides whether bytes interchange.
CHANGES: dict[str, Any] = {
    "model_fingerprint": "60" * 32,
    "revision": "main@1235",
    "dtype": "float16",
    "kv_layout": "hnd-v1",
    "groups": NAMESPACE.groups[:1],
    "block_bytes": 196609,
    "tokens_per_hash": 32,
    "block_size_factor": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 2,
    "prefill_context_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "rank": ALL_RANKS,
    "layout_parallel_invariant": True,
    "hash_algorithm": "xxhash",
    "hash_seed": "1",
    "epoch": 1,
    "epoch_run": "run-2",
    "format_version": FORMAT_VERSION + 1,
}

PARALLEL_FIELDS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "rank",
)


def _changed(**fields: Any) -> Namespace:
    return dataclasses.replace(NAMESPACE, **fields)


# -- keys ---------------------------------------------------------------------------------------


def test_a_key_is_the_hash_and_a_big_endian_group() -> None:
    """Raw bytes: block hash, then four bytes of group index."""
    assert make_offload_key(b"hash", 258) == b"hash\x00\x00\x01\x02"


@given(block_hash=st.binary(max_size=64), group_idx=st.integers(0, 2**32 - 1))
def test_a_key_comes_apart_into_what_it_was_made_of(block_hash: bytes, group_idx: int) -> None:
    """Hash and group survive, whatever their bits."""
    key = make_offload_key(block_hash, group_idx)
    assert get_offload_block_hash(key) == block_hash
    assert get_offload_group_idx(key) == group_idx


@pytest.mark.parametrize("group_idx", [-1, 2**32])
def test_a_group_that_does_not_fit_is_refused(group_idx: int) -> None:
    """Nothing wraps around into another group."""
    with pytest.raises(OverflowError):
        make_offload_key(b"hash", group_idx)


# -- the fingerprint ----------------------------------------------------------------------------


def test_equal_namespaces_have_equal_fingerprints() -> None:
    """64 hex digits that depend on values only."""
    assert NAMESPACE.fingerprint == _changed().fingerprint
    assert len(bytes.fromhex(NAMESPACE.fingerprint)) == 32


def test_every_field_has_a_case_here() -> None:
    """A field added to the namespace cannot be left out of the fingerprint unnoticed."""
    assert {"model", *CHANGES} == {field.name for field in dataclasses.fields(Namespace)}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_changes_the_fingerprint(field: str) -> None:
    """Other bytes, other namespace (vllm#49261, vllm#55904, vllm#55191)."""
    assert _changed(**{field: CHANGES[field]}).fingerprint != NAMESPACE.fingerprint


@pytest.mark.parametrize("field", ["tokens_per_block", "bytes_per_block", "num_layers"])
def test_every_part_of_a_group_changes_the_fingerprint(field: str) -> None:
    """Geometry of every group counts, also at equal block size (vllm#49440)."""
    group = dataclasses.replace(
        NAMESPACE.groups[1], **{field: getattr(NAMESPACE.groups[1], field) + 1}
    )
    assert _changed(groups=(NAMESPACE.groups[0], group)).fingerprint != NAMESPACE.fingerprint
    windowless = dataclasses.replace(NAMESPACE.groups[1], sliding_window=None)
    assert _changed(groups=(NAMESPACE.groups[0], windowless)).fingerprint != NAMESPACE.fingerprint


def test_the_readable_name_does_not_count() -> None:
    """Two names of one set of weights share their blocks."""
    assert _changed(model="mirror/llm-7b").fingerprint == NAMESPACE.fingerprint


@pytest.mark.parametrize("field", PARALLEL_FIELDS)
def test_an_invariant_layout_drops_sizes_and_rank(field: str) -> None:
    """Certified layouts interchange between parallel configurations (vllm#55191)."""
    invariant = _changed(layout_parallel_invariant=True)
    other = dataclasses.replace(invariant, **{field: CHANGES[field]})
    assert other.fingerprint == invariant.fingerprint


@pytest.mark.parametrize("field", sorted({*CHANGES} - {*PARALLEL_FIELDS}))
def test_an_invariant_layout_keeps_everything_else(field: str) -> None:
    """Only sizes and rank are dropped."""
    invariant = _changed(layout_parallel_invariant=True)
    value: Any = False if field == "layout_parallel_invariant" else CHANGES[field]
    other = dataclasses.replace(invariant, **{field: value})
    assert other.fingerprint != invariant.fingerprint


def test_a_weight_update_is_another_namespace() -> None:
    """An epoch makes everything before it unreachable (vllm#9744)."""
    updated = NAMESPACE.with_epoch(3, "run-1")
    assert updated == _changed(epoch=3)
    assert updated.fingerprint != NAMESPACE.fingerprint


def test_an_epoch_of_another_run_is_another_namespace() -> None:
    """A restarted engine counts from the start again, over other weights."""
    first, second = (NAMESPACE.with_epoch(1, run).fingerprint for run in ("run-1", "run-2"))
    assert first != second


def test_an_epoch_needs_its_run() -> None:
    """A number alone does not say whose weights it counts."""
    with pytest.raises(NamespaceError, match="'epoch_run' is empty, but 'epoch' is 1") as caught:
        NAMESPACE.with_epoch(1, "")
    assert caught.value.field == "epoch_run"


# -- what is not known --------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", " ", "auto", "None", "UNKNOWN", "default", None, 7])
@pytest.mark.parametrize(
    "field", ["model", "model_fingerprint", "revision", "dtype", "kv_layout", "hash_algorithm"]
)
def test_unknown_values_are_refused(field: str, value: object) -> None:
    """A namespace that leaves something out serves wrong bytes one day."""
    with pytest.raises(NamespaceError, match=f"'{field}' is unknown") as caught:
        _changed(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_bytes", 0),
        ("tokens_per_hash", -1),
        ("block_size_factor", 1.0),
        ("tensor_parallel_size", True),
        ("pipeline_parallel_size", "2"),
        ("rank", ALL_RANKS - 1),
        ("epoch", -1),
        ("format_version", 0),
        ("hash_seed", 0),
        ("groups", ()),
        ("groups", (GroupGeometry(0, 1, 1),)),
        ("groups", (GroupGeometry(1, 1, -1),)),
        ("groups", (GroupGeometry(1, 1, 1, sliding_window=0),)),
        ("groups", (GroupGeometry(1, 1, 1, sliding_window=True),)),
        ("groups", [GroupGeometry(1, 1, 1)]),
        ("groups", ({"tokens_per_block": 1},)),
        ("layout_parallel_invariant", "false"),
        ("layout_parallel_invariant", 1),
    ],
)
def test_impossible_values_are_refused(field: str, value: object) -> None:
    """Sizes are positive integers, at least one group exists, and a word is no truth value."""
    with pytest.raises(NamespaceError, match=field) as caught:
        _changed(**{field: value})
    assert caught.value.field == field


# -- descriptions -------------------------------------------------------------------------------


def test_a_description_survives_json() -> None:
    """What is written next to the blocks reads back as the same namespace."""
    text = json.dumps(NAMESPACE.describe())
    restored = Namespace.from_description(json.loads(text))
    assert restored == NAMESPACE
    assert restored.fingerprint == NAMESPACE.fingerprint


def test_a_description_with_an_unknown_field_is_refused() -> None:
    """A newer writer knows of a difference that this reader cannot judge."""
    with pytest.raises(NamespaceError, match="unknown namespace field 'quantum'") as caught:
        Namespace.from_description({**NAMESPACE.describe(), "quantum": 1})
    assert caught.value.field == "quantum"


@pytest.mark.parametrize("field", ["groups", "dtype", "hash_seed"])
def test_a_description_without_a_field_is_refused(field: str) -> None:
    """Missing is not the same as default."""
    description = NAMESPACE.describe()
    del description[field]
    with pytest.raises(NamespaceError, match=f"incomplete .*{field}"):
        Namespace.from_description(description)


# -- the hash seed ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, "", "random"])
def test_a_random_hash_seed_is_refused_where_keys_must_last(seed: str | None) -> None:
    """The message names what needs it and the variable to set (LMCache#1139)."""
    with pytest.raises(HashSeedError, match=r"tier 'fs' keeps .*PYTHONHASHSEED") as caught:
        _changed(hash_seed=seed).require_reproducible_keys(needed_by="tier 'fs'")
    assert caught.value.field == "hash_seed"


def test_a_fixed_hash_seed_is_fine() -> None:
    """A seed that every process shares makes equal keys."""
    NAMESPACE.require_reproducible_keys(needed_by="tier 'fs'")
