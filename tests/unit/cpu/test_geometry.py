"""How the primary tier is cut into slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.contract import Namespace
from kv_core.cpu import PrimaryGeometry
from kv_core.engine import KVCacheGroupConfig, OffloadingConfig
from kv_core.errors import ConfigError
from kv_core.keys import GroupGeometry

if TYPE_CHECKING:
    from collections.abc import Mapping


def _config(
    extra_config: Mapping[str, Any], *, worker_block_bytes: int = 5000, num_workers: int = 3
) -> OffloadingConfig:
    namespace = Namespace(
        model="m",
        model_fingerprint="f",
        revision="r",
        dtype="bfloat16",
        kv_layout="nhd",
        groups=(GroupGeometry(16, worker_block_bytes, 2),),
        block_bytes=worker_block_bytes * num_workers,
        tokens_per_hash=16,
        hash_algorithm="sha256",
        hash_seed="0",
    )
    return OffloadingConfig(
        groups=(KVCacheGroupConfig(tokens_per_block=16, layer_names=("a", "b")),),
        worker_block_bytes=worker_block_bytes,
        tokens_per_cache_block=16,
        namespace=namespace,
        engine_id="e",
        num_workers=num_workers,
        extra_config=extra_config,
    )


def test_rows_hold_all_workers_and_end_on_a_page() -> None:
    """``row_stride = round_up(page x workers, 4096)``; what does not fill a row is left over."""
    geometry = PrimaryGeometry.from_config(_config({"cpu_bytes_to_use": 16384 * 10 + 16383}))
    assert geometry == PrimaryGeometry(
        num_blocks=10,
        num_workers=3,
        worker_page_bytes=5000,
        row_stride=16384,
        block_bytes=16384,
    )


def test_an_offloaded_block_holds_several_gpu_blocks() -> None:
    """The factor multiplies each worker's page, not the padding."""
    config = _config({"cpu_bytes_to_use": 10**6, "block_size": 48})
    geometry = PrimaryGeometry.from_config(config)
    assert (geometry.worker_page_bytes, geometry.row_stride) == (15000, 45056)
    assert geometry.num_blocks == 10**6 // 45056


def test_a_row_that_fills_its_pages_has_no_padding() -> None:
    """Rounding up leaves multiples alone."""
    config = _config({"cpu_bytes_to_use": 8192}, worker_block_bytes=4096, num_workers=2)
    assert PrimaryGeometry.from_config(config).row_stride == 8192


@pytest.mark.parametrize(
    ("extra_config", "message"),
    [
        ({}, "'cpu_bytes_to_use' is missing.*one block needs 16384 bytes"),
        ({"cpu_bytes_to_use": 0}, "must be a positive integer, found 0"),
        ({"cpu_bytes_to_use": -1}, "must be a positive integer, found -1"),
        ({"cpu_bytes_to_use": True}, "must be a positive integer, found True"),
        ({"cpu_bytes_to_use": 1e9}, "must be a positive integer, found 1000000000.0"),
        ({"cpu_bytes_to_use": "50GiB"}, "must be a positive integer, found '50GiB'"),
        ({"cpu_bytes_to_use": 16383}, "is 16383 bytes, but one block needs 16384 bytes"),
    ],
)
def test_a_useless_budget_names_the_setting(extra_config: dict[str, Any], message: str) -> None:
    """Missing, not a positive integer, or too little for one block."""
    with pytest.raises(ConfigError, match=message) as caught:
        PrimaryGeometry.from_config(_config(extra_config))
    assert caught.value.setting == "cpu_bytes_to_use"
