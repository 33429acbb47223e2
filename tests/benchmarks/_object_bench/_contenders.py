"""What is measured: a tier, or a client library that does the same work without one."""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import numpy as np

from kv_core.contract import (
    JobId,
    JobMetadata,
    NullMetrics,
    PrimaryView,
    ReqContext,
    ScheduleEndContext,
)
from kv_core.plugins import open_tier
from kv_core.tierkit.testing import example_key, example_namespace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from _fs_bench._memory import Batch, Memory

    from kv_core.contract import SecondaryTierManager, TierSpec

__all__ = ["GETS", "HEADS", "PUTS", "Contender", "Pace", "TierContender", "new_prefix"]

GETS: Final = 32
"""Reads at a time: what the tier does by default, and so the client library here."""

PUTS: Final = 16
"""Writes at a time."""

HEADS: Final = 128
"""Lookups at a time."""

_POLL_S: Final = 0.002
_UNWATCHED_SHARE: Final = 0.5
# To ask for a thousand keys is work; an engine does it once a step.
_STEP_S: Final = 0.01
_serial: Final = itertools.count()


class Contender(Protocol):
    """Somebody who moves blocks between memory and objects of a bucket."""

    name: str

    def open(self, block_bytes: int) -> None:
        """Connect, below a prefix of its own."""

    def put(self, batches: Sequence[Batch]) -> float:
        """Store all, and return the seconds from the first call to the last answer."""

    def get(self, batches: Sequence[Batch]) -> float:
        """Load all, and return the seconds."""

    def find(self, keys: Sequence[int]) -> tuple[float, int]:
        """Look keys up; return the seconds, and how many are there."""

    def close(self) -> None:
        """End all connections."""


def new_prefix(name: str) -> str:
    """Return a prefix that nothing else uses."""
    return f"{name.replace(' ', '-')}-{os.getpid()}-{next(_serial)}"


@final
class Pace:
    """When to look for results: not before half of the time that it took before.

    A look takes the interpreter from those that move blocks; an engine has other work meanwhile.
    """

    def __init__(self) -> None:
        self._block_s: dict[object, float] = {}

    def sleep(self, kind: object, num_blocks: int) -> None:
        """Wait until then."""
        time.sleep(_UNWATCHED_SHARE * num_blocks * self._block_s.get(kind, 0.0))

    def note(self, kind: object, num_blocks: int, seconds: float) -> None:
        """Note how long it took."""
        self._block_s[kind] = seconds / num_blocks


@final
class TierContender:
    """A tier of kv-core, called the way an engine calls it.

    Args:
        name: In reports.
        spec: The tier.
        settings: Its settings, without the prefix.
        memory: What is stored from and loaded into.

    Attributes:
        tier: The open tier.
    """

    tier: SecondaryTierManager

    def __init__(
        self, name: str, spec: TierSpec, settings: Mapping[str, Any], memory: Memory
    ) -> None:
        self.name = name
        self._spec = spec
        self._settings = settings
        self._memory = memory
        self._job_ids = itertools.count(1)
        self._pace = Pace()

    def open(self, block_bytes: int) -> None:
        """Open the tier below a prefix of its own."""
        self._pace = Pace()
        self._primary = PrimaryView(self._memory.view(block_bytes), block_bytes)
        self.tier = open_tier(
            self._spec,
            name=self._spec.type,
            settings={**self._settings, "prefix": new_prefix(self.name)},
            namespace=example_namespace(block_bytes),
            primary=self._primary,
            clock=time.monotonic,
            metrics=NullMetrics(),
        ).manager

    def put(self, batches: Sequence[Batch]) -> float:
        """Store all, and return the seconds."""
        return self._move(batches, load=False)

    def get(self, batches: Sequence[Batch]) -> float:
        """Load all, and return the seconds."""
        return self._move(batches, load=True)

    def find(self, keys: Sequence[int]) -> tuple[float, int]:
        """Look keys up for a new request, step by step, until every answer is known."""
        request = ReqContext(f"lookup-{next(self._job_ids)}")
        wanted = [example_key(key) for key in keys]
        start = time.perf_counter()
        self.tier.on_new_request(request)
        while None in (answers := self.tier.lookup_many(wanted, request)):
            self.tier.on_schedule_end(ScheduleEndContext())
            time.sleep(_STEP_S)
        seconds = time.perf_counter() - start
        self.tier.on_request_finished(request)
        return seconds, sum(map(bool, answers))

    def job(self, batch: Batch, *, load: bool) -> JobMetadata:
        """Return a job of a request of its own, not submitted."""
        number = next(self._job_ids)
        return JobMetadata(
            job_id=JobId(number),
            keys=tuple(map(example_key, batch.keys)),
            block_ids=np.array(batch.slots, dtype=np.int32),
            is_promotion=load,
            req_context=ReqContext(f"job-{number}"),
            submit_time=time.monotonic(),
        )

    def close(self) -> None:
        """Shut the tier down."""
        self.tier.shutdown()
        self._primary.release()

    def _move(self, batches: Sequence[Batch], *, load: bool) -> float:
        jobs = [self.job(batch, load=load) for batch in batches]
        submit = self.tier.submit_load if load else self.tier.submit_store
        start = time.perf_counter()
        for job in jobs:
            self.tier.on_new_request(job.req_context)
            submit(job)
        waiting = len(jobs)
        num_blocks = sum(len(batch.keys) for batch in batches)
        self._pace.sleep(load, num_blocks)
        while waiting:
            results = list(self.tier.get_finished_jobs())
            for result in results:
                if not result.success:
                    raise RuntimeError(f"{self.name}: a job failed: {result.error}")
            waiting -= len(results)
            if not results:
                time.sleep(_POLL_S)
        seconds = time.perf_counter() - start
        self._pace.note(load, num_blocks, seconds)
        for job in jobs:
            self.tier.on_request_finished(job.req_context)
        return seconds
