"""Rule 8, as far as tiers have a part in it: memory that somebody still touches stays mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiering.conftest import RealEngine

    from kv_core.contract import OffloadKey


def test_a_real_tier_lets_go_of_the_memory(
    start_real: Callable[..., RealEngine], keys: list[OffloadKey]
) -> None:
    """LIFE-2, ZC-3: stores are flushed, threads have ended, and the view is released."""
    engine = start_real()
    engine.store("x", *keys[:4])
    engine.manager.shutdown()
    assert set(engine.gated.objects) == set(keys[:4])
    assert engine.log == ["primary.shutdown"]


def test_a_real_tier_with_a_stalled_write_keeps_it_mapped(
    start_real: Callable[..., RealEngine], keys: list[OffloadKey]
) -> None:
    """LMCache#265: the shutdown returns within its bound, and nothing is unmapped under the I/O."""
    engine = start_real(shutdown_flush_s=0.05, quarantine_grace_s=0.1)
    engine.shut("write")
    engine.store("x", keys[0])
    engine.entered("write")
    engine.manager.shutdown()
    assert engine.log == []
    assert len(engine.primary.get_kv_memoryview().tobytes()) == 8 * 64
    engine.open_gates()
