"""A tier of layout ``files`` for the tests of that layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.contract import parse_tier_config
from kv_core.tierkit.testing import TierDriver, example_namespace
from kv_tier_fs import kv_core_register_tier
from kv_tier_fs.files._layout import FileLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_core.contract import OffloadKey


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., TierDriver]]:
    """Return a function that opens a tier; keyword arguments are settings or the driver's.

    All tiers share one root unless told otherwise, and are closed at the end of the test.
    """
    drivers: list[TierDriver] = []

    def run(
        root_dir: Path | None = None,
        *,
        direct_io: bool = True,
        io_threads: int = 4,
        block_bytes: int = 4096,
        min_free_bytes: int | str = 1,
        **driver_options: Any,
    ) -> TierDriver:
        spec = kv_core_register_tier()
        settings = {
            "root_dir": root_dir or tmp_path / "root",
            "layout": "files",
            "direct_io": direct_io,
            "io_threads": io_threads,
            "min_free_bytes": min_free_bytes,
        }
        config = parse_tier_config("fs", spec.config_model, settings)
        driver = TierDriver(
            spec.factory, config, block_bytes=block_bytes, tier_name="fs", **driver_options
        )
        drivers.append(driver)
        return driver

    yield run
    for driver in drivers:
        driver.close()


@pytest.fixture
def path_of(tmp_path: Path) -> Callable[[OffloadKey], Path]:
    """Return a function that says where a block of 4096 bytes lies."""
    layout = FileLayout(tmp_path / "root", example_namespace(4096))
    return lambda key: Path(layout.block_path(key))
