"""CPU memory of a rank: exact sizes, pinned whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_core.errors import ConfigError
from kv_core.simple import CpuMemory

if TYPE_CHECKING:
    from collections.abc import Callable


class Registrar:
    """Pins by writing it down; refuses from some number of ranges on."""

    def __init__(self, refuse_from: int = 99) -> None:
        self.pinned: dict[int, int] = {}
        self._refuse_from = refuse_from

    def register(self, address: int, num_bytes: int) -> str | None:
        """Pin a range."""
        if len(self.pinned) >= self._refuse_from:
            return "no more"
        self.pinned[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        """Unpin a range."""
        del self.pinned[address]


def clock_of(*times: float) -> Callable[[], float]:
    """Return a clock that says these times, one after another."""
    remaining = list(times)
    return lambda: remaining.pop(0) if len(remaining) > 1 else remaining[0]


def test_memory_has_exactly_the_bytes_it_needs() -> None:
    """No rounding up to powers of two: nine blocks are nine blocks (vllm#55424)."""
    registrar = Registrar()
    memory = CpuMemory(9, [4096, 3_098_112], registrar)
    assert [tensor.shape for tensor in memory.tensors] == [(9, 4096), (9, 3_098_112)]
    assert memory.num_bytes == sum(registrar.pinned.values()) == 9 * (4096 + 3_098_112)
    assert all(tensor.flags.writeable and not tensor[::4].any() for tensor in memory.tensors)
    memory.release()


def test_release_unpins_everything() -> None:
    """Twice is fine."""
    registrar = Registrar()
    memory = CpuMemory(4, [64], registrar, part_bytes=128)
    assert list(registrar.pinned.values()) == [128, 128]
    assert memory.is_pinned
    memory.release()
    memory.release()
    assert registrar.pinned == {}
    assert not memory.is_pinned


def test_a_refused_part_leaves_nothing_pinned(caplog: pytest.LogCaptureFixture) -> None:
    """Memory works unpinned, after one warning."""
    registrar = Registrar(refuse_from=2)
    memory = CpuMemory(4, [64, 64], registrar, part_bytes=64)
    assert registrar.pinned == {}
    assert not memory.is_pinned
    assert memory.tensors[1].shape == (4, 64)
    assert len(caplog.records) == 1
    memory.release()


def test_slow_pinning_ends_by_a_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """The start does not take for ever; memory is used unpinned, and says so (vllm#42632)."""
    registrar = Registrar()
    memory = CpuMemory(
        8, [64], registrar, part_bytes=64, pin_deadline_s=10, clock=clock_of(0, 1, 5, 9.5, 11)
    )
    assert registrar.pinned == {}
    assert not memory.is_pinned
    (record,) = caplog.records
    assert record.getMessage().startswith("CPU memory is not pinned: after 10 s only 192 of 512")
    memory.release()


def test_pinning_says_how_far_it_has_got(caplog: pytest.LogCaptureFixture) -> None:
    """Part by part, so that a long start can be told from a hanging one (vllm#42632)."""
    caplog.set_level("INFO", logger="kv_core.simple")
    CpuMemory(3, [64], Registrar(), part_bytes=64).release()
    assert [record.getMessage() for record in caplog.records] == [
        f"pinned {done} of 192 bytes of CPU memory" for done in (64, 128, 192)
    ]


def test_memory_that_cannot_be_had_is_refused() -> None:
    """The message names the size and the setting."""
    with pytest.raises(ConfigError, match="take 4611686018427387904 bytes") as caught:
        CpuMemory(2**30, [2**32])
    assert caught.value.setting == "cpu_bytes"
