"""What a replay refuses to start with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.errors import ConfigError, RequestTooLargeError, UnknownTierError
from kv_core.workload.replay import ReplayConfig, ReplayEngine, replay_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.workload import Trace


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu_blocks", 1),
        ("block_bytes", 0),
        ("block_size_factor", 0),
        ("max_seqs", 0),
        ("tokens_per_step", 0),
        ("decode_tokens_per_step", 0),
        ("max_output_tokens", -1),
        ("stall_deadline_s", 0.0),
        ("stall_deadline_s", float("nan")),
    ],
)
def test_numbers_out_of_range_are_named(field: str, value: Any) -> None:
    """The message names the setting and the value."""
    with pytest.raises(ConfigError, match=f"'{field}' must be .*{value}") as caught:
        ReplayConfig(**{field: value})
    assert caught.value.setting == field


def test_the_primary_holds_at_least_one_block() -> None:
    """Blocks are rounded up to pages: 5000 bytes times two take 12288."""
    with pytest.raises(ConfigError, match="takes 12288 bytes") as caught:
        ReplayConfig(cpu_bytes=12287, block_bytes=5000, block_size_factor=2)
    assert caught.value.setting == "cpu_bytes"
    assert ReplayConfig(cpu_bytes=12288, block_bytes=5000, block_size_factor=2).row_bytes == 12288


def test_engine_options_do_not_repeat_fields() -> None:
    """Two values for one thing would make the report a riddle."""
    with pytest.raises(ConfigError, match="must not set blocks_per_chunk") as caught:
        ReplayConfig(engine_options={"blocks_per_chunk": 2, "lease_share": 0.3})
    assert caught.value.setting == "engine_options.blocks_per_chunk"


def test_a_request_larger_than_the_pool_is_refused_at_once(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """Prompt and output must fit together; the message says what to do (KVC702)."""
    trace = letters("ab", "abcdef", output_tokens=17)
    assert replay_trace(trace, make_config(trace)).requests_finished == 2
    with pytest.raises(RequestTooLargeError, match="--gpu-blocks") as caught:
        ReplayEngine(trace, make_config(trace, spare_gpu_blocks=-1))
    assert caught.value.req_id == "1-abcdef"
    assert (caught.value.needed_blocks, caught.value.pool_blocks) == (8, 7)


def test_output_beyond_the_limit_is_cut(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """With a limit on the output, a request fits whose whole answer would not."""
    trace = letters("abcd", output_tokens=1000)
    config = make_config(trace, spare_gpu_blocks=-62, max_output_tokens=16)
    assert config.gpu_blocks == 1 + 5
    assert replay_trace(trace, config).problems() == []


def test_an_unknown_tier_is_refused(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """Nothing is started for a tier that does not exist."""
    trace = letters("ab")
    config = make_config(trace, secondary_tiers=[{"type": "no-such-tier"}])
    with pytest.raises(UnknownTierError, match="no-such-tier"):
        replay_trace(trace, config)


def test_an_unknown_policy_is_refused(
    letters: Callable[..., Trace], make_config: Callable[..., ReplayConfig]
) -> None:
    """A policy that does not exist is a configuration error."""
    trace = letters("ab")
    with pytest.raises(ConfigError, match="fifo"):
        replay_trace(trace, make_config(trace, policy="fifo"))
