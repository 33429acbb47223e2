"""The engine-neutral configuration of offloading."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.engine import OffloadingConfig

    MakeConfig = Callable[..., OffloadingConfig]


def test_a_hash_covers_a_cache_block_of_all_context_ranks(make_config: MakeConfig) -> None:
    """Hash block size = cache block size x decode x prefill context parallel size."""
    config = make_config(96, decode_context_parallel_size=2, prefill_context_parallel_size=3)
    assert config.tokens_per_hash == 96


def test_every_group_must_be_divisible_into_hash_blocks(make_config: MakeConfig) -> None:
    """The message has the sizes and the product they come from."""
    with pytest.raises(
        ConfigError, match=r"block size 48 of KV cache group 1 .* hash block size 32"
    ) as caught:
        make_config(32, 48, decode_context_parallel_size=2)
    assert caught.value.setting == "groups[1].tokens_per_block"


@pytest.mark.parametrize("hosts", [2, 0])
def test_ranks_on_several_hosts_are_refused(make_config: MakeConfig, hosts: int) -> None:
    """The primary tier is the memory of one host; the message says what to do instead."""
    with pytest.raises(ConfigError, match=r"one host.*run one engine on each host") as caught:
        make_config(16, num_hosts=hosts)
    assert caught.value.setting == "num_hosts"


@pytest.mark.parametrize("tokens", [0, -16])
def test_a_group_without_tokens_is_refused(make_config: MakeConfig, tokens: int) -> None:
    """Zero is divisible by everything, and still no block size."""
    with pytest.raises(ConfigError, match="KV cache group 0"):
        make_config(tokens)


def test_no_group_is_refused(make_config: MakeConfig) -> None:
    """There is nothing to offload."""
    with pytest.raises(ConfigError, match="at least one KV cache group"):
        make_config()


@pytest.mark.parametrize(
    ("extra_config", "factor"),
    [({}, 1), ({"block_size": 16}, 1), ({"block_size": 48}, 3), ({"blocks_per_chunk": 4}, 4)],
)
def test_the_factor_comes_from_one_of_two_settings(
    make_config: MakeConfig, extra_config: dict[str, int], factor: int
) -> None:
    """Tokens of an offloaded block, or GPU blocks in it; default one GPU block."""
    config = make_config(16, 16, extra_config=extra_config)
    assert config.block_size_factor == factor
    assert config.tokens_per_offloaded_block(1) == 16 * factor


@pytest.mark.parametrize(
    ("extra_config", "setting", "message"),
    [
        ({"block_size": 32, "blocks_per_chunk": 2}, "block_size", "in two ways; set one"),
        ({"block_size": 24}, "block_size", "24 is not a multiple of the GPU block size 16"),
        ({"block_size": 0}, "block_size", "positive integer, found 0"),
        ({"block_size": "32"}, "block_size", "positive integer, found '32'"),
        ({"blocks_per_chunk": True}, "blocks_per_chunk", "positive integer, found True"),
    ],
)
def test_a_wrong_factor_is_refused_at_construction(
    make_config: MakeConfig, extra_config: dict[str, object], setting: str, message: str
) -> None:
    """The error names the setting; it does not wait for the first use."""
    with pytest.raises(ConfigError, match=message) as caught:
        make_config(16, extra_config=extra_config)
    assert caught.value.setting == setting


def test_a_block_size_needs_groups_that_agree(make_config: MakeConfig) -> None:
    """With groups of 16 and 32 tokens only the other setting has a meaning."""
    with pytest.raises(ConfigError, match=r"one block size, found \[16, 32\]"):
        make_config(16, 32, extra_config={"block_size": 64})
    config = make_config(16, 32, extra_config={"blocks_per_chunk": 2})
    assert [config.tokens_per_offloaded_block(group) for group in (0, 1)] == [32, 64]


def test_only_prompts_are_offloaded_by_default(make_config: MakeConfig) -> None:
    """``offload_prompt_only`` is true unless set otherwise."""
    assert make_config(16).offload_prompt_only is True
    assert make_config(16, extra_config={"offload_prompt_only": False}).offload_prompt_only is False


def test_a_prompt_setting_that_is_no_boolean_is_refused(make_config: MakeConfig) -> None:
    """The string "false" is true in Python, and not what was meant."""
    config = make_config(16, extra_config={"offload_prompt_only": "false"})
    with pytest.raises(ConfigError, match="must be true or false, found 'false'"):
        _ = config.offload_prompt_only
