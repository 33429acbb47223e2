"""Do copies on this GPU work, and how close do they come to the peak of its copy engine?

Run ``python tests/benchmarks/gpu_check.py`` (``--quick`` for a smoke run, ``--json`` for machines).
Runs the tests marked ``gpu`` first, then measures: pages of 4 KiB to 2 MiB between random places
of a pool on the device and of pinned host memory, in both directions, through each way to copy,
against one asynchronous copy of as many bytes. Ways alternate; medians. Two figures for each: the
bandwidth by the device's clock, and what the call that submits a batch costs the host, per page.
Takes less than eight minutes on one GPU. Without a device it says so and is content.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kv_core.device import tensor_address
from kv_core.device.copy import (
    CopyBatch,
    CudaCopyBackend,
    CudaDriver,
    MemoryKind,
    PinnedRows,
    TorchCopyBackend,
    choose_route,
    host_registrar_of,
)
from kv_core.device.copy._triton import TritonCopier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kv_core.device.copy import CopyStream, CopyTicket

    Submit = Callable[[CopyBatch], CopyTicket]

ROOT = Path(__file__).parents[2]
PAGE_SIZES = tuple(2**bits for bits in range(12, 22))
KERNEL_PAGE_SIZES = (2**12, 2**13)  # larger pages are copied in chunks of 8 KiB
MEASURE_BUDGET_S = 240
TESTS_BUDGET_S = 180


@dataclass(frozen=True, slots=True)
class Line:
    """One way to copy pages of one size in one direction.

    Attributes:
        direction: "load" or "store".
        page_bytes: Bytes of a page.
        way: Name of the way; "chosen" is the back end, which chooses by itself.
        gb_per_s: Median bandwidth, by the device's clock.
        of_peak: The same, as a part of that of one copy of all bytes, measured just before.
        host_us_per_page: Median cost of submitting, on the calling thread.
        is_chosen: Whether the rule chooses this way.
    """

    direction: str
    page_bytes: int
    way: str
    gb_per_s: float
    of_peak: float
    host_us_per_page: float
    is_chosen: bool


class Memory:
    """Pinned host memory and a pool on the device, of the same size."""

    def __init__(self, torch: Any, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._mapping = mmap.mmap(-1, num_bytes)
        self.host = np.frombuffer(self._mapping, dtype=np.int8)
        self.host[:] = 1
        self.pool = torch.zeros(num_bytes, dtype=torch.int8, device="cuda")
        registrar = host_registrar_of(self.pool)
        if registrar is None:
            raise RuntimeError("torch does not say that its CUDA tensor is on a CUDA device")
        self._rows = PinnedRows(registrar, self.host.ctypes.data, num_bytes // 2**21, 2**21)

    def close(self) -> None:
        """Unpin."""
        self._rows.release()

    def batch(self, page_bytes: int, num_bytes: int, *, is_load: bool) -> CopyBatch:
        """Return copies between random places on both sides."""
        random = np.random.default_rng(page_bytes)
        count = num_bytes // page_bytes
        host, pool = (
            start + random.permutation(self.num_bytes // page_bytes)[:count] * page_bytes
            for start in (self.host.ctypes.data, tensor_address(self.pool))
        )
        sizes = np.full(count, page_bytes, dtype=np.int64)
        return CopyBatch(*((host, pool) if is_load else (pool, host)), sizes)

    def whole(self, num_bytes: int, *, is_load: bool) -> CopyBatch:
        """Return one copy of as many bytes."""
        host, pool = np.array([self.host.ctypes.data]), np.array([tensor_address(self.pool)])
        return CopyBatch(*((host, pool) if is_load else (pool, host)), np.array([num_bytes]))


class Ways:
    """Streams that copy in one way each, and the rule's own choice beside them."""

    def __init__(self, torch: Any, memory: Memory) -> None:
        from kv_core.device._streams import OrderedStream

        self.driver = CudaDriver()
        self._device = memory.pool.device
        self._stream = OrderedStream(torch.cuda, self._device)
        self._kernel: TritonCopier | None = None
        try:
            self._kernel = TritonCopier(torch.cuda, self._device, KERNEL_PAGE_SIZES)
        except Exception as error:  # noqa: BLE001 - measured without it, and said so
            sys.stderr.write(f"without the kernel: {type(error).__name__}: {error}\n")
        tensors = [memory.pool, torch.from_numpy(memory.host)]
        self._torch: CopyStream = TorchCopyBackend(tensors).open_stream("torch")
        self._chosen = CudaCopyBackend(
            self.driver, torch.cuda, self._device, KERNEL_PAGE_SIZES
        ).open_stream("chosen")

    def close(self) -> None:
        """Close the streams."""
        for stream in (self._stream, self._torch, self._chosen):
            stream.close()

    def single(self, batch: CopyBatch) -> CopyTicket:
        """Copy with one call for each page."""
        return self._stream.run(lambda stream: self.driver.copy_each(batch, stream.cuda_stream))

    def _batch(self, batch: CopyBatch, *, is_load: bool) -> CopyTicket:
        ordinal = self._device.index or 0
        return self._stream.run(
            lambda stream: self.driver.copy_batch(
                batch, stream.cuda_stream, from_host=is_load, device=ordinal
            )
        )

    def of(self, page_bytes: int, *, is_load: bool) -> Iterator[tuple[str, Submit]]:
        """Yield the ways that pages of a size can take, by name."""
        yield "single", self.single
        if self.driver.has_batch_copy:
            yield "batch", lambda batch: self._batch(batch, is_load=is_load)
        kernel = self._kernel
        if kernel is not None and is_load and page_bytes <= 2**16:
            yield "kernel", lambda batch: self._stream.run(lambda s: kernel.copy(batch, s))
        if page_bytes >= 2**14:
            # A call of torch for each page takes minutes with smaller ones.
            yield "torch", self._torch.submit
        yield "chosen", self._chosen.submit

    def choice(self, batch: CopyBatch, *, is_load: bool) -> str:
        """Return the name of the way that the rule chooses."""
        kinds = (MemoryKind.PINNED, MemoryKind.DEVICE)
        route = choose_route(
            batch,
            *(kinds if is_load else kinds[::-1]),
            has_kernel=self._kernel is not None,
            has_batch_copy=self.driver.has_batch_copy,
        )
        return route.value


def measure_batch(
    submits: dict[str, Submit], batch: CopyBatch, repeats: int
) -> dict[str, tuple[float, float]]:
    """Return the median seconds of each way, on the device and of the call that submits."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in submits}
    for _ in range(repeats + 1):
        for name, submit in submits.items():
            start = time.perf_counter()
            ticket = submit(batch)
            submitting = time.perf_counter() - start
            ticket.wait()
            if ticket.error is not None:
                raise ticket.error
            samples[name].append((ticket.elapsed_seconds, submitting))
    # The first of each only warms up.
    return {
        name: (statistics.median(d for d, _ in rows[1:]), statistics.median(h for _, h in rows[1:]))
        for name, rows in samples.items()
    }


def measure(torch: Any, num_bytes: int, repeats: int, page_sizes: Sequence[int]) -> Iterator[Line]:
    """Measure every way alternately, and yield a line for each."""
    memory = Memory(torch, 2 * num_bytes)
    ways = Ways(torch, memory)
    deadline = time.monotonic() + MEASURE_BUDGET_S
    for page_bytes, is_load in itertools.product(page_sizes, (True, False)):
        if time.monotonic() > deadline:
            sys.stderr.write("the time is up; the rest is left out\n")
            break
        batch = memory.batch(page_bytes, num_bytes, is_load=is_load)
        choice = ways.choice(batch, is_load=is_load)
        whole = memory.whole(num_bytes, is_load=is_load)
        peak_seconds, _ = measure_batch({"peak": ways.single}, whole, repeats)["peak"]
        submits = dict(ways.of(page_bytes, is_load=is_load))
        for name, (seconds, submitting) in measure_batch(submits, batch, repeats).items():
            yield Line(
                "load" if is_load else "store",
                page_bytes,
                name,
                num_bytes / seconds / 1e9,
                peak_seconds / seconds,
                submitting / len(batch.sizes) * 1e6,
                name == choice,
            )
    ways.close()
    memory.close()


def run_tests() -> int:
    """Run the tests that need a device, and return pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/unit/device"]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=TESTS_BUDGET_S, check=False).returncode
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"the tests took more than {TESTS_BUDGET_S} s\n")
        return 1


def _device_module() -> Any:
    """Return torch where it sees a CUDA device, else ``None``."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Test, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="small and few: does it still run?")
    parser.add_argument("--without-tests", action="store_true", help="measure only")
    options = parser.parse_args(arguments)
    torch = _device_module()
    if torch is None:
        sys.stdout.write("no CUDA device, nothing to check\n")
        return 0
    status = 0 if options.quick or options.without_tests else run_tests()
    num_bytes, repeats = (2**24, 1) if options.quick else (2**28, 7)
    page_sizes = PAGE_SIZES[::3] if options.quick else PAGE_SIZES
    driver = CudaDriver()
    sys.stderr.write(
        f"{torch.cuda.get_device_name()}, driver for CUDA {driver.version}, "
        f"torch {torch.__version__}\n"
    )
    for line in measure(torch, num_bytes, repeats, page_sizes):
        if options.json:
            sys.stdout.write(json.dumps(asdict(line)) + "\n")
        else:
            mark = "  <- the rule's choice" if line.is_chosen else ""
            sys.stdout.write(
                f"{line.direction:5} {line.page_bytes // 1024:5} KiB  {line.way:6} "
                f"{line.gb_per_s:7.2f} GB/s {line.of_peak:5.0%}  "
                f"{line.host_us_per_page:8.2f} us/page{mark}\n"
            )
        sys.stdout.flush()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
