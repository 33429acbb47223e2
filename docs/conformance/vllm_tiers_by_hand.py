"""What docs/conformance/vllm-0.32.md says of vLLM's fs and example, seen without suite and adapter.

``python vllm_tiers_by_hand.py [NAME ...]`` in an environment that has vLLM; prints what was seen, a
line or two for each finding. Only vLLM's own classes are used, made with vLLM's own factory. Faults
of the storage come from ``kv_conformance.faults.fuse``, a folder that stalls or fails on demand
(``pip install 'kv-conformance[fuse]'``); it is no part of what is looked at.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_offload import base, config
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kv_conformance.faults.fuse import FaultyFolder
from kv_conformance.harness import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BLOCK_BYTES = 4096
NUM_BLOCKS = 64
PATIENCE_S = 20.0
NO_STEP = base.ScheduleEndContext(set(), set())

FINDINGS: dict[str, Any] = {}


def finding(function: Any, findings: dict[str, Any] = FINDINGS) -> Any:
    """Note a finding under the name of its function."""
    findings[function.__name__.replace("_", "-")] = function
    return function


# -- vLLM's tiers, as its tiering manager drives them ---------------------------------------------


def make_spec(**changes: Any) -> TieringOffloadingSpec:
    """Return the spec of a one-GPU engine; ``changes`` are fields of the offloading config."""
    settings = {
        "groups": (config.OffloadingGroupConfig(16, ("layers.0",), 0),),
        "worker_kv_bytes_per_block": BLOCK_BYTES,
        "enable_kv_cache_events": False,
        "extra_config": {"cpu_bytes_to_use": NUM_BLOCKS * BLOCK_BYTES, "secondary_tiers": []},
        "engine_id": "by-hand",
        "model": config.OffloadingModelConfig("acme/model", "bfloat16"),
        "cache": config.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        **changes,
    }
    return TieringOffloadingSpec(config.OffloadingConfig(**settings))


class Driven:
    """A tier and the memory that it works on, driven from one thread, step by step."""

    def __init__(self, tier: dict[str, Any], spec: TieringOffloadingSpec | None = None) -> None:
        self.memory = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES)
        self.rows = np.frombuffer(self.memory, np.int8).reshape(NUM_BLOCKS, BLOCK_BYTES)
        self.tier = SecondaryTierFactory.create_secondary_tier(
            tier, memoryview(self.rows), spec or make_spec()
        )
        self.results: dict[int, JobResult] = {}
        self._jobs = 0

    def request(self, name: str) -> base.ReqContext:
        """Announce a request."""
        context = base.ReqContext(name)
        self.tier.on_new_request(context)
        return context

    def step(self) -> None:
        """End a step and collect results."""
        self.tier.on_schedule_end(NO_STEP)
        self.results.update((result.job_id, result) for result in self.tier.get_finished_jobs())

    def lookup(self, keys: Sequence[bytes], request: base.ReqContext, steps: int = 400) -> str:
        """Ask step after step until the answers are known; return them."""
        for _ in range(steps):
            answers = [self.tier.lookup(key, request) for key in keys]
            if base.LookupResult.RETRY not in answers:
                break
            self.step()
            time.sleep(0.005)
        return " ".join(answer.name for answer in answers)

    def submit(self, keys: Sequence[bytes], slots: Sequence[int], *, load: bool = False) -> int:
        """Submit a job."""
        self._jobs += 1
        job = TransferJob(
            job_id=self._jobs,
            keys=list(keys),
            chunk_ids=np.array(slots, np.int32),
            is_promotion=load,
            req_context=base.ReqContext(f"job-{self._jobs}"),
        )
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self._jobs

    def wait(self, job: int, seconds: float = PATIENCE_S) -> str:
        """Step until a job is reported; return its outcome."""
        end = time.monotonic() + seconds
        while job not in self.results and time.monotonic() < end:
            self.step()
            time.sleep(0.005)
        found = self.results.get(job)
        return "not reported" if found is None else f"success={found.success}"

    def store(self, key: bytes, byte: int) -> str:
        """Store a block whose bytes are all the same."""
        self.rows[0] = byte
        return self.wait(self.submit([key], [0]))

    def load(self, key: bytes) -> str:
        """Load a block into another slot; return the outcome and the bytes of the slot."""
        self.rows[9] = -1
        outcome = self.wait(self.submit([key], [9], load=True))
        return f"{outcome}, bytes {sorted(set(self.rows[9].tolist()))}"

    def path(self, key: bytes) -> Path:
        """Return the file of a key (fs)."""
        return Path(self.tier.file_mapper.get_file_name(key))


def key_of(number: int) -> bytes:
    """Return a key."""
    return base.make_offload_key(number.to_bytes(32, "big"), 0)


def ends_within(call: Callable[[], object], seconds: float) -> tuple[bool, threading.Thread]:
    """Say whether a call that may hang returns in time."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive(), thread


def fs(root: Path, **settings: Any) -> dict[str, Any]:
    """Return the configuration of an fs tier."""
    return {"type": "fs", "root_dir": str(root), **settings}


@contextmanager
def faulty(root: Path) -> Iterator[FaultyFolder]:
    """Mount a folder that fails on demand."""
    with FaultyFolder(root / "disk", root / "seen") as folder:
        yield folder


# -- fs -------------------------------------------------------------------------------------------


@finding
def a_store_after_a_miss(root: Path) -> Iterator[str]:
    """LOOK-7, LOOK-9, DATA-10."""
    driven = Driven(fs(root))
    key, first = key_of(1), driven.request("first")
    yield f"before the store, the first request: {driven.lookup([key], first)}"
    yield f"the store: {driven.store(key, 7)}"
    yield f"after it, the first request: {driven.lookup([key], first)}"
    second = driven.request("second")
    yield f"after it, a second, new request: {driven.lookup([key], second)}"
    for request in (first, second):
        driven.tier.on_request_finished(request)
    yield f"once both have finished, a third request: {driven.lookup([key], driven.request('3'))}"
    driven.tier.shutdown()


@finding
def an_error_of_the_storage(root: Path) -> Iterator[str]:
    """LOOK-6, DATA-11."""
    with faulty(root) as folder:
        driven = Driven(fs(folder.mountpoint))
        key = key_of(1)
        driven.store(key, 7)
        folder.inject(Fault.ERROR)
        request = driven.request("alive")
        yield f"the storage answers everything with EIO: {driven.lookup([key], request)}"
        folder.heal()
        time.sleep(1.0)
        yield f"a second after it works again, the same request: {driven.lookup([key], request)}"
        other = driven.request("other")
        yield f"and another, new request: {driven.lookup([key], other)}"
        for each in (request, other):
            driven.tier.on_request_finished(each)
        yield f"once both have finished: {driven.lookup([key], driven.request('late'))}"
        driven.tier.shutdown()


@finding
def a_failed_load_in_an_outage(root: Path) -> Iterator[str]:
    """LOOK-4."""
    with faulty(root) as folder:
        driven = Driven(fs(folder.mountpoint))
        key = key_of(1)
        driven.store(key, 7)
        request = driven.request("alive")
        before = driven.lookup([key], request)
        folder.inject(Fault.ERROR)
        yield f"found ({before}), then EIO, the load: {driven.load(key).partition(',')[0]}"
        yield f"the same request afterwards: {driven.lookup([key], request)}"
        folder.heal()
        driven.tier.on_request_finished(request)
        answer = driven.lookup([key], driven.request("new"))
        yield f"after it works again, at once, a new request: {answer}"
        driven.tier.shutdown()


@finding
def a_storage_that_hangs(root: Path) -> Iterator[str]:
    """LOOK-2, JOB-5, DRAIN-1, DRAIN-3, DRAIN-4, DRAIN-5, LIFE-3."""
    with faulty(root) as folder:
        driven = Driven(fs(folder.mountpoint))
        key = key_of(1)
        driven.store(key, 7)
        folder.inject(Fault.STALL)
        answer = driven.lookup([key], driven.request("alive"), steps=600)
        yield f"a lookup, after 3 s and more of steps: {answer}"
        jobs = [driven.submit([key_of(100 + n)], [n % 32]) for n in range(200)]
        outcomes = {driven.wait(jobs[0], 3.0), driven.wait(jobs[-1], 3.0)}
        yield f"200 stores, the first and the last after 3 s each: {' '.join(outcomes)}"
        returned, drain = ends_within(driven.tier.drain_jobs, 5.0)
        yield f"drain_jobs returned within 5 s: {returned}"
        folder.heal()
        drain.join(PATIENCE_S)
        yield f"after the storage works again, drain_jobs has returned: {not drain.is_alive()}"
        driven.step()
        folder.inject(Fault.STALL)
        driven.submit([key], [9], load=True)
        time.sleep(0.2)
        returned, shutdown = ends_within(driven.tier.shutdown, 5.0)
        yield f"shutdown with a load in flight returned within 5 s: {returned}"
        folder.heal()
        shutdown.join(PATIENCE_S)
        yield f"after the storage works again, shutdown has returned: {not shutdown.is_alive()}"


@finding
def jobs_queued_at_shutdown(root: Path) -> Iterator[str]:
    """No clause: the contract allows it."""
    with faulty(root) as folder:
        driven = Driven(fs(folder.mountpoint, n_read_threads=1, n_write_threads=1))
        folder.inject(Fault.STALL)
        for number in range(20):
            driven.submit([key_of(number)], [number])
        while len(driven.tier._pool._store_q) > 18:
            time.sleep(0.01)
        _, shutdown = ends_within(driven.tier.shutdown, 0.5)
        folder.heal()
        shutdown.join(PATIENCE_S)
        driven.step()
        stored = sum(driven.path(key_of(number)).exists() for number in range(20))
        yield (
            f"20 stores on 2 threads, then shutdown: {len(driven.results)} reported, "
            f"{stored} in the storage"
        )


@finding
def a_store_over_a_damaged_object(root: Path) -> Iterator[str]:
    """No clause by itself: the contract asks for the repair after a failed load (DATA-10)."""
    driven = Driven(fs(root))
    key = key_of(1)
    driven.store(key, 7)
    os.truncate(driven.path(key), 100)
    yield f"truncated to 100 bytes, stored again: {driven.store(key, 7)}"
    yield f"the file has {driven.path(key).stat().st_size} bytes"
    yield f"a lookup: {driven.lookup([key], driven.request('a'))}"
    yield f"the load: {driven.load(key)}"
    yield f"the file is there: {driven.path(key).exists()}"
    yield f"stored once more: {driven.store(key, 7)}; loaded: {driven.load(key)}"
    driven.tier.shutdown()


@finding
def a_longer_object(root: Path) -> Iterator[str]:
    """DATA-10 allows it: the block itself is whole."""
    driven = Driven(fs(root))
    key = key_of(1)
    driven.store(key, 7)
    with driven.path(key).open("ab") as file:
        file.write(bytes(BLOCK_BYTES))
    yield f"a file of two blocks, loaded: {driven.load(key)}"
    driven.tier.shutdown()


@finding
def flipped_bits(root: Path) -> Iterator[str]:
    """INT-1, a capability that the tier does not claim."""
    driven = Driven(fs(root))
    key = key_of(1)
    driven.store(key, 7)
    with driven.path(key).open("r+b") as file:
        file.seek(2000)
        file.write(bytes([7 ^ 0b100]))
    yield f"one bit of the file flipped, loaded: {driven.load(key)}"
    yield f"stored again: {driven.store(key, 7)}; loaded: {driven.load(key)}"
    driven.tier.shutdown()


@finding
def capacity(root: Path) -> Iterator[str]:
    """CAP-1 to CAP-4, a capability that the tier does not claim; and a floor of free space."""
    tier = SecondaryTierFactory.get_tier_class({"type": "fs"})
    names = list(inspect.signature(tier.__init__).parameters)
    yield f"settings: {', '.join(names[4:])}"
    with faulty(root) as folder:
        driven = Driven(fs(folder.mountpoint))
        folder.inject(Fault.FULL)
        yield f"a store on a full disk: {driven.store(key_of(1), 7)}"
        folder.heal()
        yield f"with room again: {driven.store(key_of(1), 7)}"
        driven.tier.shutdown()


@finding
def what_names_a_file(root: Path) -> Iterator[str]:
    """NS-1."""
    fields = [field.name for field in dataclasses.fields(config.OffloadingModelConfig)]
    yield f"what a tier is told of the model: {', '.join(fields)}"
    usual = Driven(fs(root))
    usual.store(key_of(1), 7)
    for what, changes in {
        "another dtype": {"model": config.OffloadingModelConfig("acme/model", "float16")},
        "another kv_cache_layout": {"kv_cache_layout": "HND"},
        "twice the bytes of a block": {"worker_kv_bytes_per_block": 2 * BLOCK_BYTES},
    }.items():
        other = Driven(fs(root), make_spec(**{"kv_cache_layout": "NHD", **changes}))
        yield f"{what}: {other.lookup([key_of(1)], other.request('a'))}"
        other.tier.shutdown()
    usual.tier.shutdown()


@finding
def leftovers_of_a_killed_process(root: Path) -> Iterator[str]:
    """PERS-3."""
    with faulty(root) as folder:
        pid = os.fork()
        if not pid:
            _store_for_ever(folder)
        marker = root / "stalled"
        while not marker.exists():
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        folder.heal()
        os.waitpid(pid, 0)
        yield f"killed while it stored, temporary files are left: {_temporary_files(folder) > 0}"
    for _ in range(2):
        driven = Driven(fs(root / "disk"))
        driven.store(key_of(1000), 7)
        driven.tier.shutdown()
    left = _temporary_files(root / "disk") > 0
    yield f"after the tier was opened and closed twice more, they are left: {left}"


def _store_for_ever(folder: FaultyFolder) -> None:
    driven = Driven(fs(folder.mountpoint, n_read_threads=1, n_write_threads=1))
    number = 0
    while not _temporary_files(folder.backing):
        number += 1
        driven.submit([key_of(number * 16 + n) for n in range(16)], range(16))
        driven.step()
    folder.inject(Fault.STALL)
    if not _temporary_files(folder.backing):
        os._exit(1)
    (folder.backing.parent / "stalled").touch()
    signal.pause()


def _temporary_files(folder: FaultyFolder | Path) -> int:
    top = folder if isinstance(folder, Path) else folder.backing
    return sum(1 for _ in top.rglob("*.tmp"))


@finding
def a_constructor_that_fails(root: Path) -> Iterator[str]:
    """LIFE-4, CONF-1."""
    before = threading.active_count()
    try:
        Driven(fs(root, n_write_threads="16"))
    except TypeError as error:
        yield f"n_write_threads='16': TypeError: {error}"
    yield f"threads left: {threading.active_count() - before}"
    os.chdir(root)
    driven = Driven({"type": "fs", "root_dir": {"path": "/data"}})
    folders = sorted(str(path) for path in Path().iterdir() if path.is_dir())
    yield f"root_dir={{'path': '/data'}}: opens, and makes {folders}"
    driven.tier.shutdown()


@finding
def a_fork(root: Path) -> Iterator[str]:
    """LIFE-6."""
    driven = Driven(fs(root))
    driven.store(key_of(1), 7)
    pid = os.fork()
    if not pid:
        answer = driven.lookup([key_of(1)], driven.request("child"), steps=600)
        os._exit(0 if answer == "HIT" else 1)
    _, status = os.waitpid(pid, 0)
    found = os.waitstatus_to_exitcode(status) == 0
    yield f"a lookup in a forked child is answered within 3 s: {found}"
    driven.tier.shutdown()


@finding
def what_a_result_can_say(root: Path) -> Iterator[str]:
    """JOB-9, MET-1."""
    yield f"JobResult: {', '.join(field.name for field in dataclasses.fields(JobResult))}"
    yield f"LookupResult: {', '.join(base.LookupResult.__members__)}"
    driven = Driven(fs(root))
    yield f"get_stats of the tier: {driven.tier.get_stats()}"
    driven.tier.shutdown()


@finding
def rows_that_are_no_pages(_: Path) -> Iterator[str]:
    """GEO-1, ZC-4: what vLLM itself makes."""
    spec = make_spec(worker_kv_bytes_per_block=1000)
    yield f"a block of 1000 bytes gets a row of {spec.kv_bytes_per_chunk} bytes"


# -- example --------------------------------------------------------------------------------------


@finding
def example_copies_no_bytes(_: Path) -> Iterator[str]:
    """DATA-1 and what follows from it."""
    driven = Driven({"type": "example"})
    key = key_of(1)
    yield f"the store: {driven.store(key, 7)}"
    yield f"the load into a slot full of -1: {driven.load(key)}"
    for number in range(1000):
        driven.wait(driven.submit([key_of(number)], [0]))
    keys = driven.tier.get_num_chunks()
    yield f"keys after 1000 stores, with {NUM_BLOCKS} slots of memory: {keys}"
    driven.tier.shutdown()


def main(names: Sequence[str]) -> None:
    """Print what is seen."""
    logging.disable(logging.CRITICAL)
    unknown = sorted(set(names) - FINDINGS.keys())
    if unknown:
        sys.exit(f"no such finding: {', '.join(unknown)}; there are {', '.join(FINDINGS)}")
    home = Path.cwd()
    for name in names or FINDINGS:
        print(name)
        with tempfile.TemporaryDirectory() as root:
            for line in FINDINGS[name](Path(root)):
                print(f"    {line}", flush=True)
            os.chdir(home)


if __name__ == "__main__":
    main(sys.argv[1:])
