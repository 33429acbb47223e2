"""The page on costs says what the script computes, and the script what the tier does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Import the script, which is not part of any package."""
    spec = importlib.util.spec_from_file_location(
        "object_cost", ROOT / "tests" / "benchmarks" / "object_cost.py"
    )
    if spec is None or spec.loader is None:
        raise AssertionError("the script is a module")
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for their module.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_page_are_those_of_the_script(script: Any) -> None:
    """Every line, and nothing that somebody has typed."""
    page = (ROOT / "docs" / "object-cost.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in script.tables(script.MODELS) if line and line not in page] == []


def test_each_block_costs_one_request_of_a_kind(script: Any) -> None:
    """One HEAD for a lookup, one PUT for a store, one GET for a load, and nothing to remember."""
    found = script.count_requests(5)
    assert found["a lookup of a block that is not there"] == {"HEAD": 5}
    assert found["a store"] == {"PUT": 5}
    assert found["a lookup of a block that is there"] == {"HEAD": 5}
    assert found["the same lookup again, for the same request"] == {}
    assert found["a load"] == {"GET": 5}


def test_a_cost_is_computed_from_prices(script: Any) -> None:
    """Half found: 50 PUT, 100 HEAD and 50 GET, and half of the bytes kept for a month."""
    model = script.Geometry("test", 4096, "")
    traffic = script.Traffic(model, 10_000, 0.5)
    assert (traffic.blocks, traffic.puts, traffic.gets) == (100, 50, 50)
    stored = 50 * (4096 * 10_000 + 256) / 1e9
    assert traffic.cost(5.0, 0.4, 0.02) == pytest.approx(0.25 + 0.06 + stored * 0.02)


def test_a_block_is_rounded_up_to_a_row(script: Any) -> None:
    """As the primary tier does it."""
    assert script.Geometry("test", 100, "").block_bytes(50) == 8192
