"""Which prefix can be loaded: lookups, groups, windows, and what is still unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.engine import KVCacheGroupConfig, LookupResult
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.connector.conftest import Connector, Request

    from kv_core.connector import Transfer
    from kv_core.contract import OffloadKey, ReqContext
    from kv_core.engine import OffloadingConfig

    GpuSide = Callable[[Transfer], tuple[list[int], tuple[int, ...], tuple[int, ...]]]

FULL = KVCacheGroupConfig(tokens_per_block=16, layer_names=("full",))


def window(tokens: int, tokens_per_block: int = 16) -> KVCacheGroupConfig:
    """Return a group with a sliding window."""
    return KVCacheGroupConfig(
        tokens_per_block=tokens_per_block, layer_names=("window",), sliding_window=tokens
    )


# -- full attention -----------------------------------------------------------------------------


def test_the_scan_stops_at_the_first_miss(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """What lies behind a hole is of no use, and is not asked for."""
    connector.manager.hits(key("A"), key("B"), key("D"))
    assert connector.find(request_of("r", "A B C D E")) == 32
    assert connector.manager.of("lookup") == [(key("A"),), (key("B"),), (key("C"),)]


def test_blocks_that_the_gpu_has_are_not_asked_for(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """The number counts from what is computed."""
    connector.manager.hits(key("B"), key("C"))
    assert connector.find(request_of("r", "A B C D"), 16) == 32
    assert connector.manager.of("lookup") == [(key("B"),), (key("C"),), (key("D"),)]


@pytest.mark.parametrize("answer", [LookupResult.PENDING, LookupResult.RETRY])
def test_the_scan_goes_on_past_unknown_answers(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
    answer: LookupResult,
) -> None:
    """All probes start in one step; the answer is ``None`` until all are known."""
    connector.manager.hits(key("A"), key("C"))
    connector.manager.answers[key("B")] = answer
    request = request_of("r", "A B C D E")
    assert connector.find(request) is None
    assert len(connector.manager.of("lookup")) == 4
    connector.manager.hits(key("B"))
    assert connector.find(request) == 48


def test_an_unknown_answer_behind_the_first_miss_does_not_matter(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Nobody waits for what could not be used."""
    connector.manager.hits(key("A"))
    connector.manager.answers[key("C")] = LookupResult.RETRY
    assert connector.find(request_of("r", "A B C")) == 16


def test_at_least_the_last_token_is_computed(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
    gpu_side: GpuSide,
) -> None:
    """Its block is loaded whole, but the token is not promised: the engine must sample."""
    connector.manager.hits(key("A"), key("B"))
    request = request_of("r", "A B")
    assert connector.find(request) == 31
    connector.scheduler.update_state_after_alloc(request, ([5, 6],), 31)
    (load,) = connector.step().loads
    assert gpu_side(load) == ([5, 6], (2,), (0,))


def test_tokens_without_a_full_block_are_computed(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """A partial last block has no hash, and so no key."""
    connector.manager.hits(key("A"))
    assert connector.find(request_of("r", "A", prompt_tokens=25)) == 16
    assert connector.find(request_of("s", "", prompt_tokens=7)) == 0


def test_everything_on_the_gpu_needs_no_lookup(
    connector: Connector, request_of: Callable[..., Request]
) -> None:
    """No tokens, not asynchronous."""
    assert connector.find(request_of("r", "A B", prompt_tokens=40), 32) == 0
    assert connector.manager.of("lookup") == []


def test_a_use_is_reported_once_per_request(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """All full blocks, those on the GPU included, before the first lookup."""
    request = request_of("r", "A B C")
    connector.find(request, 16)
    connector.find(request, 16)
    assert connector.manager.calls[0] == ("touch", "r", (key("A"), key("B"), key("C")))
    assert len(connector.manager.of("touch")) == 1


# -- several GPU blocks in one ------------------------------------------------------------------


def test_an_offloaded_block_is_named_by_its_last_hash(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Hashes are chained, so the last one covers all of it; half a block has no name."""
    connector = connect(config(blocks_per_chunk=2))
    connector.manager.hits(key("B"))
    assert connector.find(request_of("r", "A B C")) == 32
    assert connector.manager.of("lookup") == [(key("B"),)]


def test_a_gpu_prefix_that_ends_within_a_block_skips_its_first_part(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
    gpu_side: GpuSide,
) -> None:
    """Factor 2, start index 1: the block is loaded but for one sub-block."""
    connector = connect(config(blocks_per_chunk=2))
    connector.manager.hits(key("B"), key("D"))
    request = request_of("r", "A B C D E")
    assert connector.find(request, 16) == 48
    connector.scheduler.update_state_after_alloc(request, ([1, 2, 3, 4, 5],), 48)
    (load,) = connector.step().loads
    assert gpu_side(load) == ([2, 3, 4], (3,), (1,))
    assert connector.manager.of("prepare_load") == [(key("B"), key("D"))]


# -- sliding windows ----------------------------------------------------------------------------


def test_a_window_is_matched_from_the_end(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """A window of 33 tokens needs the two blocks before the position, no others."""
    connector = connect(config(window(33)))
    connector.manager.hits(key("C"), key("D"))
    assert connector.find(request_of("r", "A B C D", prompt_tokens=70)) == 64
    assert connector.manager.of("lookup") == [(key("D"),), (key("C"),)]


def test_a_window_with_a_hole_falls_back_to_the_last_run_that_is_long_enough(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """E alone is too short; B and C fill the window at 48 tokens."""
    connector = connect(config(window(33)))
    connector.manager.hits(key("B"), key("C"), key("E"))
    assert connector.find(request_of("r", "A B C D E", prompt_tokens=90)) == 48


def test_the_start_of_the_request_needs_no_full_window(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """There is nothing before the first block."""
    connector = connect(config(window(1000)))
    connector.manager.hits(key("A"), key("B"))
    assert connector.find(request_of("r", "A B C", prompt_tokens=50)) == 32


def test_a_window_that_reaches_what_the_gpu_has_is_filled(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Blocks on the GPU are neither asked for nor missed."""
    connector = connect(config(window(65)))
    connector.manager.hits(key("C"), key("D"))
    assert connector.find(request_of("r", "A B C D", prompt_tokens=70), 32) == 32
    assert connector.manager.of("lookup") == [(key("D"),), (key("C"),)]


def test_an_unknown_block_in_a_run_that_is_too_short_does_not_matter(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """The miss before it decides; an unknown in the run that counts does matter."""
    connector = connect(config(window(33)))
    connector.manager.hits(key("A"), key("B"))
    connector.manager.answers[key("D")] = LookupResult.RETRY
    request = request_of("r", "A B C D", prompt_tokens=70)
    assert connector.find(request) == 32
    connector.manager.answers[key("B")] = LookupResult.PENDING
    assert connector.find(request) is None


def test_only_the_window_is_loaded(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
    gpu_side: GpuSide,
) -> None:
    """Full attention loads all four blocks, the window the last two, each from its index."""
    connector = connect(config(FULL, window(33)))
    connector.manager.hits(*(key(name) for name in "ABCD"), key("C", 1), key("D", 1))
    request = request_of("r", "A B C D", prompt_tokens=70)
    assert connector.find(request) == 64
    connector.scheduler.update_state_after_alloc(request, ([1, 2, 3, 4], [0, 0, 7, 8]), 64)
    (load,) = connector.step().loads
    assert gpu_side(load) == ([1, 2, 3, 4, 7, 8], (4, 2), (0, 2))


def test_groups_shrink_each_other_until_all_agree(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """vllm#43884: the window can serve 48 tokens at most; there full attention agrees."""
    connector = connect(config(FULL, window(33)))
    connector.manager.hits(*(key(name) for name in "ABCD"))
    connector.manager.hits(key("B", 1), key("C", 1))
    assert connector.find(request_of("r", "A B C D", prompt_tokens=70)) == 48


def test_a_group_that_agreed_is_asked_again_when_another_shrinks_the_prefix(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """vllm#50454: a window that is filled at 64 tokens is not at 48, but again at 16."""
    connector = connect(config(window(33), FULL))
    connector.manager.hits(key("A"), key("C"), key("D"))
    connector.manager.hits(*(key(name, 1) for name in "ABC"))
    assert connector.find(request_of("r", "A B C D", prompt_tokens=70)) == 16


def test_groups_that_never_agree_load_nothing(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Full attention has one block; no window ends there."""
    connector = connect(config(FULL, window(33)))
    connector.manager.hits(key("A"), key("B", 1), key("C", 1))
    assert connector.find(request_of("r", "A B C", prompt_tokens=50)) == 0


def test_groups_of_different_block_sizes_meet_at_a_common_end(
    connect: Callable[..., Connector],
    config: Callable[..., OffloadingConfig],
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """48 tokens are no whole number of 32-token blocks."""
    large = KVCacheGroupConfig(tokens_per_block=32, layer_names=("large",))
    connector = connect(config(FULL, large))
    connector.manager.hits(key("A"), key("B"), key("C"), key("B", 1))
    assert connector.find(request_of("r", "A B C", prompt_tokens=60)) == 32


# -- the load -----------------------------------------------------------------------------------


def test_no_tokens_to_load_releases_what_was_promised(
    connector: Connector, request_of: Callable[..., Request]
) -> None:
    """vllm#35931: the engine runs the request without."""
    request = request_of("r", "A")
    connector.find(request)
    connector.scheduler.update_state_after_alloc(request, ([1],), 0)
    assert connector.manager.calls[-1] == ("release", "r", ())
    assert connector.step().loads == ()


def test_a_block_table_that_is_too_short_is_refused_and_changes_nothing(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
) -> None:
    """Nothing is pinned; the blocks are still offered when they are computed."""
    connector.manager.hits(key("A"), key("B"))
    request = request_of("r", "A B", prompt_tokens=40)
    connector.find(request)
    with pytest.raises(EngineStateError, match="needs 2 GPU blocks of group 0"):
        connector.scheduler.update_state_after_alloc(request, ([1],), 32)
    assert connector.manager.of("prepare_load") == []
    connector.compute(request, 32, [1, 2])
    assert connector.offered == [(key("A"), key("B"))]


def test_a_loads_levels_are_those_of_its_blocks(
    connector: Connector,
    request_of: Callable[..., Request],
    key: Callable[..., OffloadKey],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One level a block, in load order, while the load is in flight."""
    levels = {key("A"): "cpu", key("B"): "fs"}

    def hit_level(block: OffloadKey, _: ReqContext) -> str:
        return levels[block]

    monkeypatch.setattr(connector.manager, "hit_level", hit_level)
    connector.manager.hits(*levels)
    request = request_of("r", "A B", prompt_tokens=40)
    connector.find(request)
    assert connector.scheduler.hit_levels(request) == []
    connector.scheduler.update_state_after_alloc(request, ([1, 2],), 32)
    assert connector.scheduler.hit_levels(request) == ["cpu", "fs"]
    connector.report(*connector.step().loads)
    assert connector.scheduler.hit_levels(request) == []
