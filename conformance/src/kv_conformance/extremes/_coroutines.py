"""A tier of coroutines in memory: the other half of the kit."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

from kv_conformance.extremes._extreme import extreme
from kv_conformance.harness import BaseHarness, Corruption, Fault, HarnessError
from kv_core.contract import Capability, ContractVersion, TierSpec
from kv_core.errors import BlockDamagedError, BlockMissingError
from kv_core.tierkit import AsyncioTier, TierKitConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from kv_conformance.harness import Harness, Opening, Subject
    from kv_core.contract import OffloadKey, TierLimits

# How often a coroutine looks whether the stall is over.
_POLL_S = 0.001


@final
class _MemoryTier(AsyncioTier):
    """Blocks in a dictionary that belongs to the loop's thread."""

    withdraws_io = True
    config: TierKitConfig

    @override
    async def open(self) -> None:
        self.objects: dict[OffloadKey, bytes] = {}
        self.fault: Fault | None = None

    @override
    async def close(self) -> None:
        self.objects.clear()

    async def _enter(self) -> None:
        # Even a client that has the answer lets others run first.
        await asyncio.sleep(0)
        while self.fault is Fault.STALL:
            await asyncio.sleep(_POLL_S)
        if self.fault is Fault.ERROR:
            raise OSError(errno.EIO, "the store fails")

    @override
    async def exists(self, key: OffloadKey) -> bool:
        await self._enter()
        return key in self.objects

    @override
    async def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        await self._enter()
        data = self.objects.get(key)
        if data is None:
            raise BlockMissingError("there is no such object")
        if len(data) != len(buffer):
            raise BlockDamagedError(f"the object has {len(data)} bytes, not {len(buffer)}")
        buffer[:] = data

    @override
    async def write_block(self, key: OffloadKey, data: memoryview) -> None:
        await self._enter()
        self.objects[key] = bytes(data)

    @override
    async def retire(self, key: OffloadKey) -> None:
        await self._enter()
        self.objects.pop(key, None)


def _limits(config: TierKitConfig) -> TierLimits:
    return config.limits(min_retained_blocks=1_000_000, min_free_bytes=1)


@final
class _MemoryHarness(BaseHarness):
    spec = TierSpec(
        type="coroutines",
        summary="Blocks in memory, behind an event loop.",
        contract=ContractVersion(1, 0),
        factory=_MemoryTier,
        config_model=TierKitConfig,
        limits=_limits,
        capabilities=frozenset({Capability.WITHDRAWS_IO}),
    )
    stall_can_be_interrupted = True

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        return {
            "job_deadline_s": opening.deadlines.job_s,
            "lookup_deadline_s": opening.deadlines.lookup_s,
            "error_backoff_s": opening.deadlines.error_backoff_s,
        }

    def _tier(self, subject: Subject) -> _MemoryTier:
        if not isinstance(subject.tier, _MemoryTier):
            raise HarnessError(f"expected a tier of coroutines, found {subject.tier!r}")
        return subject.tier

    def lose(self, subject: Subject, key: OffloadKey) -> None:
        del self._tier(subject).objects[key]

    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        objects = self._tier(subject).objects
        data = bytearray(objects[key])
        if how is Corruption.TRUNCATED:
            del data[-100:]
        elif how is Corruption.EMPTY:
            data.clear()
        elif how is Corruption.OVERLONG:
            data += b"more"
        else:
            data[len(data) // 2] ^= 0x10
        objects[key] = bytes(data)

    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        return tuple(self._tier(subject).objects)

    def inject(self, subject: Subject, fault: Fault) -> None:
        self._tier(subject).fault = fault

    def heal(self, subject: Subject) -> None:
        self._tier(subject).fault = None


@extreme(does="Runs every block as a coroutine on one event loop, and withdraws what is late.")
def coroutines(workdir: Path) -> Harness:
    """Make the harness."""
    return _MemoryHarness(workdir)
