"""The longest prefix that every group can serve from CPU memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.engine import KVCacheGroupConfig
from kv_core.keys import get_offload_group_idx
from kv_core.simple._matching import BlockNames, blocks_to_load, match_prefix

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.keys import OffloadKey


def group(tokens: int, window: int | None = None) -> KVCacheGroupConfig:
    """Return a group."""
    return KVCacheGroupConfig(tokens_per_block=tokens, layer_names=("l",), sliding_window=window)


@pytest.mark.parametrize(
    ("groups", "present", "computed", "expected"),
    [
        # Full attention: up to the first miss, from where the GPU ends.
        ([group(4)], ["111111"], 0, 24),
        ([group(4)], ["110111"], 0, 8),
        ([group(4)], ["011111"], 0, 0),
        ([group(4)], ["001110"], 8, 20),
        # Every group must agree, down to its own block size.
        ([group(4), group(8)], ["111111", "110"], 0, 16),
        ([group(4), group(8)], ["111110", "111"], 0, 16),
        ([group(4), group(4)], ["111111", "000000"], 0, 0),
        # A window needs the blocks before the end only; one that reaches the GPU's is enough.
        ([group(4, 5)], ["000010"], 0, 20),
        ([group(4, 9)], ["110110"], 0, 20),
        ([group(4, 9)], ["010010"], 4, 8),
        ([group(4, 9)], ["000000"], 4, 4),
        # Shortened by one group, the other has to look again.
        ([group(4), group(4, 5)], ["111110", "010001"], 0, 8),
        ([group(4), group(4, 5)], ["111110", "000001"], 0, 0),
    ],
)
def test_the_longest_common_prefix(
    make_request: Callable[..., Any],
    groups: list[KVCacheGroupConfig],
    present: list[str],
    computed: int,
    expected: int,
) -> None:
    """``present`` has one digit for each block of each group."""
    names = BlockNames(make_request("r", "abcdef"), groups, 4)
    there: set[OffloadKey] = set()
    for group_idx, digits in enumerate(present):
        keys = names.keys(group_idx, 0, len(digits))
        there |= {key for key, digit in zip(keys, digits, strict=True) if digit == "1"}
    assert match_prefix(names, groups, computed, there.__contains__) == expected


def test_a_block_is_named_by_its_last_hash(
    make_request: Callable[..., Any], key: Callable[..., Any]
) -> None:
    """Hashes are chained; the group is part of the name."""
    names = BlockNames(make_request("r", "abcdef"), [group(4), group(8)], 4)
    assert names.num_hashed_tokens == 24
    assert names.keys(1, 1, 3) == [key("abcd", 1), key("abcdef", 1)]
    assert {get_offload_group_idx(name) for name in names.keys(0, 0, 6)} == {0}
    assert names.all_keys == {*names.keys(0, 0, 6), *names.keys(1, 0, 3)}


@pytest.mark.parametrize(
    ("window", "start", "stop", "expected"),
    [
        (None, 0, 16, range(4)),
        (None, 4, 15, range(1, 4)),
        (5, 0, 16, range(3, 4)),
        (6, 0, 16, range(2, 4)),
        (99, 4, 16, range(1, 4)),
    ],
)
def test_a_partial_last_block_is_loaded_whole(
    window: int | None, start: int, stop: int, expected: range
) -> None:
    """Of a window, only what the next token can see."""
    assert blocks_to_load(group(4, window), start, stop) == expected
