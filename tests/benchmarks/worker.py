"""Cost of the worker's side on the engine's thread, without the copies themselves.

Run ``python tests/benchmarks/worker.py`` (``--quick`` for a smoke run, ``--json`` for machines).
Each line is the median over repeats of CPU time of the calling thread: microseconds a page, where a
page is one GPU block in one tensor and has one descriptor, and microseconds a step. The copy
back end takes batches and does nothing. Budgets: 1 microsecond a page for transfers of at least
1000 pages, and 20 microseconds for a step with nothing to do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from kv_core.connector import ConnectorMetadata, OffloadingConnectorWorker
from kv_core.device import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CpuGpuOffloadingHandlers,
)
from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec, OffloadingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kv_core.device.copy import CopyBatch
    from kv_core.engine import LoadStoreSpec, OffloadingHandler, OffloadingManager

PAGE_BYTES = 64
PAGE_BUDGET_US = 1.0
STEP_BUDGET_US = 20.0


class Done:
    """A copy that has ended."""

    error = None
    elapsed_seconds = 0.0

    def done(self) -> bool:
        """It has."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class Nowhere:
    """A copy back end, and its stream, that copy nothing."""

    name = "nowhere"

    def open_stream(self, name: str) -> Nowhere:
        """Open a stream."""
        return self

    def submit(self, batch: CopyBatch) -> Done:
        """Take a batch."""
        return Done()

    def close(self) -> None:
        """Nothing to finish."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A transfer.

    Attributes:
        tensors: Canonical tensors, divided among the groups.
        blocks: GPU blocks of each group.
        groups: KV cache groups.
        factor: GPU blocks in one offloaded block; the first is left out if there are several.
    """

    tensors: int
    blocks: int
    groups: int = 1
    factor: int = 1

    @property
    def pages(self) -> int:
        """Descriptors of the transfer."""
        return self.tensors * self.blocks

    @property
    def skip(self) -> int:
        """GPU blocks left out at the start of the first offloaded block."""
        return min(1, self.factor - 1)

    @property
    def slots(self) -> int:
        """Offloaded blocks of each group."""
        return -(-(self.blocks + self.skip) // self.factor)


SHAPES = {
    "one tensor, 1000 blocks": Shape(1, 1000),
    "80 tensors, 16 blocks": Shape(80, 16),
    "80 tensors, 512 blocks": Shape(80, 512),
    "80 tensors, 512 blocks, factor 4": Shape(80, 512, factor=4),
    "8 groups of 8 tensors, 16 blocks, factor 4": Shape(64, 16, groups=8, factor=4),
}


def open_handlers(shape: Shape) -> CpuGpuOffloadingHandlers:
    """Make handlers over memory that has room for one transfer of a shape."""
    num_blocks, slots = shape.blocks * shape.groups, shape.slots * shape.groups
    per_group = shape.tensors // shape.groups
    return CpuGpuOffloadingHandlers(
        CanonicalKVCaches(
            tuple(
                CanonicalKVCacheTensor(np.zeros((num_blocks, PAGE_BYTES), np.int8), PAGE_BYTES)
                for _ in range(shape.tensors)
            ),
            tuple(
                tuple(
                    CanonicalKVCacheRef(group * per_group + i, PAGE_BYTES) for i in range(per_group)
                )
                for group in range(shape.groups)
            ),
        ),
        [np.zeros((slots, PAGE_BYTES * shape.factor), np.int8) for _ in range(shape.tensors)],
        shape.factor,
        Nowhere(),
    )


def prepare_load(shape: Shape) -> Callable[[], object]:
    """Return a function that submits a transfer and collects its result."""
    handler = open_handlers(shape).cpu_to_gpu
    random = np.random.default_rng(0)
    gpu = GPULoadStoreSpec(
        random.permutation(shape.blocks * shape.groups).astype(np.int32),
        [shape.blocks] * shape.groups,
        [shape.skip] * shape.groups,
    )
    cpu = CPULoadStoreSpec(random.permutation(shape.slots * shape.groups).astype(np.int32))

    def run() -> object:
        handler.transfer_async(1, (cpu, gpu))
        return handler.get_finished()

    return run


class ReadySpec(OffloadingSpec):
    """A spec of handlers that exist."""

    def __init__(self, handlers: CpuGpuOffloadingHandlers) -> None:
        self.handlers = handlers

    @override
    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError

    @override
    def get_handlers(
        self, kv_caches: object
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        yield GPULoadStoreSpec, CPULoadStoreSpec, self.handlers.gpu_to_cpu
        yield CPULoadStoreSpec, GPULoadStoreSpec, self.handlers.cpu_to_gpu


def prepare_idle_step() -> Callable[[], object]:
    """Return a function that does one step of a worker that has nothing to do."""
    worker = OffloadingConnectorWorker(ReadySpec(open_handlers(Shape(80, 16))))
    worker.register_kv_caches(CanonicalKVCaches((), ()))
    metadata = ConnectorMetadata()

    def run() -> object:
        worker.handle_preemptions(metadata)
        worker.start_load_kv(metadata)
        return worker.get_finished()

    return run


def measure(run: Callable[[], object], calls: int) -> float:
    """Return the microseconds of one call."""
    start = time.thread_time_ns()
    for _ in range(calls):
        run()
    return (time.thread_time_ns() - start) / calls / 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="few repeats: does it still run?")
    options = parser.parse_args(arguments)
    repeats, calls = (2, 3) if options.quick else (15, 50)
    shapes = {line: (shape.pages, prepare_load(shape)) for line, shape in SHAPES.items()}
    step = prepare_idle_step()
    samples: dict[str, list[float]] = {line: [] for line in (*shapes, "idle step")}
    for _ in range(repeats):
        for line, (pages, run) in shapes.items():
            samples[line].append(measure(run, calls) / pages)
        samples["idle step"].append(measure(step, 20 * calls))
    results = {line: round(statistics.median(values), 4) for line, values in samples.items()}
    if options.json:
        sys.stdout.write(json.dumps({"microseconds": results}, indent=2) + "\n")
        return 0
    width = max(map(len, results))
    for line, value in results.items():
        unit, budget = ("step", STEP_BUDGET_US) if line == "idle step" else ("page", PAGE_BUDGET_US)
        sys.stdout.write(
            f"{line:<{width}}  {value:8.4f} us a {unit}  {value / budget:7.3f} of the budget\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
