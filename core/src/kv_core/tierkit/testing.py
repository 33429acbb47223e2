"""What the tests of a tier need: a clock to turn and an engine in miniature.

Not the conformance suite, which asks whether a tier keeps the contract. This drives one tier by
hand, for the author's own tests of what is special about it.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import threading
import time
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from kv_core.contract import (
    JobId,
    JobMetadata,
    Namespace,
    NullMetrics,
    PrimaryView,
    ReqContext,
    ScheduleEndContext,
    TierContext,
    make_offload_key,
)
from kv_core.keys import GroupGeometry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from kv_core.contract import (
        Clock,
        JobResult,
        OffloadKey,
        SecondaryTierManager,
        TierConfig,
    )

__all__ = ["ManualClock", "TierDriver", "block_bytes_of", "example_key", "example_namespace"]

_POLL_S: Final = 0.0005


@final
class ManualClock:
    """A clock that stands still until it is turned.

    Attributes:
        now: Seconds.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def turn(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def example_key(number: int, group_idx: int = 0) -> OffloadKey:
    """Return one of many distinct keys."""
    return make_offload_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), group_idx)


def block_bytes_of(key: OffloadKey, count: int) -> bytes:
    """Return the bytes that :class:`TierDriver` stores under a key."""
    return hashlib.shake_128(key).digest(count)


def example_namespace(block_bytes: int, **changes: Any) -> Namespace:
    """Return a complete namespace, with the given fields changed."""
    fields: dict[str, Any] = {
        "model": "example/model",
        "model_fingerprint": "0123456789abcdef",
        "revision": "main",
        "dtype": "bfloat16",
        "kv_layout": "example",
        "groups": (GroupGeometry(tokens_per_block=16, bytes_per_block=block_bytes, num_layers=1),),
        "block_bytes": block_bytes,
        "tokens_per_hash": 16,
        "hash_algorithm": "sha256",
        "hash_seed": "0",
    }
    return Namespace(**{**fields, **changes})


@final
class TierDriver:
    """One tier over anonymous memory, called the way an engine calls it.

    A context manager: leaving it shuts the tier down and unmaps the memory, which fails when
    the tier has kept an export of it.

    Args:
        factory: Makes the tier.
        config: Its validated settings.
        num_blocks: Slots of the primary tier.
        block_bytes: Payload bytes of a block.
        row_stride: Bytes from slot to slot; default ``block_bytes``.
        namespace: Namespace; default :func:`example_namespace`.
        clock: Clock; default the real one.
        tier_name: Name of the tier.

    Attributes:
        tier: The tier.
        primary: Its view of the memory.
        request: The request on whose behalf calls are made unless another is given.
    """

    def __init__(
        self,
        factory: Callable[[TierContext], SecondaryTierManager],
        config: TierConfig,
        *,
        num_blocks: int = 16,
        block_bytes: int = 512,
        row_stride: int | None = None,
        namespace: Namespace | None = None,
        clock: Clock = time.monotonic,
        tier_name: str = "tier",
    ) -> None:
        stride = row_stride or block_bytes
        self._memory = mmap.mmap(-1, num_blocks * stride)
        view = memoryview(self._memory).cast("B", (num_blocks, stride))
        self._clock = clock
        self._job_ids = itertools.count(1)
        self._results: dict[JobId, JobResult] = {}
        self.primary = PrimaryView(view, block_bytes)
        self.request = ReqContext("request")
        try:
            self.tier = factory(
                TierContext(
                    namespace=namespace or example_namespace(block_bytes),
                    block_bytes=block_bytes,
                    num_blocks=num_blocks,
                    primary=self.primary,
                    tier_type=tier_name,
                    tier_name=tier_name,
                    config=config,
                    clock=clock,
                    metrics=NullMetrics(),
                )
            )
        except BaseException:
            self._unmap()
            raise
        self.tier.on_new_request(self.request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Shut the tier down and unmap the memory. Idempotent.

        Raises:
            BufferError: The tier still holds an export of the memory.
        """
        self.tier.shutdown()
        self._unmap()

    def _unmap(self) -> None:
        self.primary.release()
        self._memory.close()

    # -- memory ---------------------------------------------------------------------------------

    def fill(self, block_id: int, key: OffloadKey) -> None:
        """Write the bytes that belong to a key into a slot."""
        with self.primary.block(block_id) as block:
            block[:] = block_bytes_of(key, len(block))

    def poison(self, block_id: int, value: int = 0xEE) -> None:
        """Overwrite a slot."""
        with self.primary.block(block_id) as block:
            block[:] = bytes([value]) * len(block)

    def holds(self, block_id: int, key: OffloadKey) -> bool:
        """Say whether a slot holds the bytes that belong to a key."""
        with self.primary.block(block_id) as block:
            return bytes(block) == block_bytes_of(key, len(block))

    # -- jobs -----------------------------------------------------------------------------------

    def submit(
        self,
        keys: Sequence[OffloadKey],
        block_ids: Sequence[int],
        *,
        load: bool,
        request: ReqContext | None = None,
    ) -> JobId:
        """Submit a job as it is."""
        job = JobMetadata(
            job_id=JobId(next(self._job_ids)),
            keys=tuple(keys),
            block_ids=np.array(block_ids, dtype=np.int32),
            is_promotion=load,
            req_context=request or self.request,
            submit_time=self._clock(),
        )
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return job.job_id

    def submit_store(self, keys: Sequence[OffloadKey], request: ReqContext | None = None) -> JobId:
        """Fill slots from 0 on and submit a store of them."""
        for block_id, key in enumerate(keys):
            self.fill(block_id, key)
        return self.submit(keys, range(len(keys)), load=False, request=request)

    def submit_load(self, keys: Sequence[OffloadKey], request: ReqContext | None = None) -> JobId:
        """Poison the last slots and submit a load into them: the last key to the last slot."""
        first = self.primary.num_blocks - len(keys)
        block_ids = range(first, self.primary.num_blocks)
        for block_id in block_ids:
            self.poison(block_id)
        return self.submit(keys, block_ids, load=True, request=request)

    def store(self, keys: Sequence[OffloadKey], request: ReqContext | None = None) -> JobResult:
        """Store keys and wait for the result."""
        return self.wait(self.submit_store(keys, request))

    def load(self, keys: Sequence[OffloadKey], request: ReqContext | None = None) -> JobResult:
        """Load keys and wait for the result."""
        return self.wait(self.submit_load(keys, request))

    def loaded(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the keys of the last :meth:`load` whose slots hold the right bytes."""
        first = self.primary.num_blocks - len(keys)
        return [key for index, key in enumerate(keys) if self.holds(first + index, key)]

    # -- steps ----------------------------------------------------------------------------------

    def poll(self) -> list[JobResult]:
        """Collect results, and return those that are new.

        Raises:
            AssertionError: A job was reported twice.
        """
        results = list(self.tier.get_finished_jobs())
        for result in results:
            if result.job_id in self._results:
                raise AssertionError(f"job {result.job_id} was reported twice")
            self._results[result.job_id] = result
        return results

    def step(self) -> list[JobResult]:
        """End a step, then collect results."""
        self.tier.on_schedule_end(ScheduleEndContext())
        return self.poll()

    def wait(self, job_id: JobId, timeout_s: float = 20.0) -> JobResult:
        """Go through steps until a job is reported.

        Raises:
            TimeoutError: It is not, within ``timeout_s`` real seconds.
        """
        self._until(lambda: job_id in self._results, f"job {job_id}", timeout_s)
        return self._results[job_id]

    def resolve(
        self,
        keys: Sequence[OffloadKey],
        request: ReqContext | None = None,
        timeout_s: float = 20.0,
    ) -> list[bool]:
        """Look keys up, step after step, until all answers are known.

        Raises:
            TimeoutError: They are not, within ``timeout_s`` real seconds.
        """
        answers: list[bool | None] = []

        def known() -> bool:
            answers[:] = self.tier.lookup_many(keys, request or self.request)
            return None not in answers

        self._until(known, "the lookups", timeout_s)
        return [bool(answer) for answer in answers]

    def _until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        pause = threading.Event()
        while not condition():
            self.step()
            if time.monotonic() > end:
                raise TimeoutError(f"{what} did not end within {timeout_s:g} s")
            pause.wait(_POLL_S)
