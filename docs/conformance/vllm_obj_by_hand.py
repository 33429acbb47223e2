"""What docs/conformance/vllm-0.32.md says of vLLM's obj, seen without suite and adapter.

``python vllm_obj_by_hand.py [NAME ...]`` in an environment that has vLLM, NIXL (builds that can
load their plugin OBJ: see the page) and ``kv-tier-s3[conformance]``; prints what was seen, a line
or two for each finding. Only vLLM's own classes are used, made with vLLM's own factory and driven
as in vllm_tiers_by_hand.py. The server, SeaweedFS or with ``KV_SERVER=rgw`` Ceph's RGW, and the
proxy that makes faults are those of the tier ``s3``'s tests; they are no part of what is looked at.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

# ruff: noqa: E402 - NIXL and the AWS SDK within it read these when they are loaded.
# They are what the harness sets; the page says why.
for name, value in {
    "NIXL_TELEMETRY_ENABLE": "y",
    "NIXL_LOG_LEVEL": "FATAL",
    "AWS_RETRY_MODE": "standard",
    "AWS_MAX_ATTEMPTS": "1",
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
}.items():
    os.environ.setdefault(name, value)

import vllm_tiers_by_hand as by_hand
from vllm_tiers_by_hand import Driven, ends_within, key_of

from kv_conformance.harness import Fault
from kv_tier_s3._harness import FaultProxy, Rgw, S3Access, SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kv_tier_s3._harness import S3Server

BUCKET = "by-hand"
BATCH = 32

FINDINGS: dict[str, Callable[[Storage], Iterator[str]]] = {}
finding: Any = partial(by_hand.finding, findings=FINDINGS)


@dataclass(frozen=True)
class Storage:
    """A bucket, and a proxy in front of its server.

    Attributes:
        access: The server itself.
        proxy: What makes faults; only in the process that started it.
        proxy_url: Its address.
        prefix: What the finding may fill.
    """

    access: S3Access
    proxy: FaultProxy | None
    proxy_url: str
    prefix: str

    def obj(self, *, faults: bool = False, **store_config: str) -> dict[str, Any]:
        """Return the configuration of an obj tier."""
        place = {
            "bucket": BUCKET,
            "endpoint_override": self.proxy_url if faults else self.access.endpoint_url,
            "scheme": "http",
            "region": self.access.region,
            "access_key": self.access.access_key,
            "secret_key": self.access.secret_key,
        }
        return {"type": "obj", "store_config": {**place, **store_config}, "prefix": self.prefix}

    def inject(self, fault: Fault) -> None:
        """Set a fault."""
        if self.proxy is not None:
            self.proxy.inject(fault)

    def heal(self) -> None:
        """End it."""
        if self.proxy is not None:
            self.proxy.heal()

    def replace(self, driven: Driven, key: bytes, content: bytes) -> None:
        """Put something else in the place of an object."""
        name = driven.tier._file_mapper.get_file_name(key)
        self.access.client().put_object(Bucket=BUCKET, Key=name, Body=content)

    def has(self, driven: Driven, key: bytes) -> bool:
        """Say whether there is an object."""
        name = driven.tier._file_mapper.get_file_name(key).rpartition("/")[2]
        found = self.access.client().list_objects_v2(Bucket=BUCKET, Prefix=f"{self.prefix}/")
        return any(item["Key"].endswith(name) for item in found.get("Contents", ()))


def elsewhere(work: Callable[..., list[str]], storage: Storage, **environment: str) -> list[str]:
    """Run something in a new process, with other variables in its environment."""
    before = {name: os.environ[name] for name in environment}
    os.environ.update(environment)
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(work, (replace(storage, proxy=None),))
    finally:
        os.environ.update(before)


def bytes_of(driven: Driven, slots: range) -> list[int]:
    """Return the bytes that there are in some slots."""
    return sorted(set(driven.rows[slots.start : slots.stop].ravel().tolist()))


# -- what it needs --------------------------------------------------------------------------------


@finding
def obj_without_telemetry(storage: Storage) -> Iterator[str]:
    """vllm#55576: nothing of the suite can be judged without the variable."""
    yield from elsewhere(_store_without_telemetry, storage, NIXL_TELEMETRY_ENABLE="n")


def _store_without_telemetry(storage: Storage) -> list[str]:
    logging.disable(logging.CRITICAL)
    driven = Driven(storage.obj())
    driven.submit([key_of(1)], [0])
    end = time.monotonic() + by_hand.PATIENCE_S
    while not storage.has(driven, key_of(1)) and time.monotonic() < end:
        time.sleep(0.05)
    seen = [
        f"a store, NIXL_TELEMETRY_ENABLE not set: the object is there: {time.monotonic() < end}"
    ]
    for time_of in ("at the next step", "and at the one after it"):
        try:
            time.sleep(0.2)
            driven.step()
            seen.append(f"{time_of} get_finished_jobs returns {driven.results}")
        except Exception as error:  # noqa: BLE001 - whatever it is, is what is to be seen
            seen.append(f"{time_of} get_finished_jobs raises {type(error).__name__}")
    return seen


# -- memory ---------------------------------------------------------------------------------------


@finding
def obj_a_failed_load_writes_on(storage: Storage) -> Iterator[str]:
    """DATA-3, DATA-5, DATA-1."""
    driven = Driven(storage.obj())
    keys = [key_of(number) for number in range(BATCH)]
    driven.rows[:BATCH] = 7
    driven.wait(driven.submit(keys, range(BATCH)))
    outcome, late = "", 0
    for _ in range(20):
        driven.rows[:] = -1
        job = driven.submit([key_of(1000), *keys[1:]], range(BATCH), load=True)
        while job not in driven.results:
            driven.step()
        outcome = f"success={driven.results[job].success}"
        # From here on the slots are others'.
        driven.rows[:] = -2
        time.sleep(0.3)
        late = sum(row.min() > -2 or row.max() > -2 for row in driven.rows)
        if late:
            break
    yield f"a load of {BATCH} keys, of which the first is missing: {outcome}"
    yield f"slots are written after it was reported, in one of 20 such loads: {late > 0}"
    driven.tier.shutdown()


@finding
def obj_shutdown_with_a_load_in_flight(storage: Storage) -> Iterator[str]:
    """LIFE-3, DRAIN-4."""
    driven = Driven(storage.obj(faults=True))
    keys = [key_of(number) for number in range(BATCH)]
    driven.rows[:BATCH] = 7
    driven.wait(driven.submit(keys, range(BATCH)))
    driven.rows[:] = -1
    storage.inject(Fault.STALL)
    driven.submit(keys, range(BATCH), load=True)
    time.sleep(0.3)
    returned, _ = ends_within(driven.tier.shutdown, 2.0)
    yield f"shutdown with a load in flight returned within 2 s: {returned}"
    yield f"the slots after it: {bytes_of(driven, range(BATCH))}"
    storage.heal()
    time.sleep(1.0)
    yield f"once the server works again: {bytes_of(driven, range(BATCH))}"


# -- bytes ----------------------------------------------------------------------------------------


@finding
def obj_damaged_objects(storage: Storage) -> Iterator[str]:
    """DATA-10; INT-1, a capability that the tier does not claim."""
    driven = Driven(storage.obj())
    key, whole = key_of(1), bytes([7]) * by_hand.BLOCK_BYTES
    driven.store(key, 7)
    for what, content in {
        "cut to 100 bytes": whole[:100],
        "one bit flipped": whole[:2000] + bytes([7 ^ 0b100]) + whole[2001:],
        "twice as long": whole * 2,
    }.items():
        storage.replace(driven, key, content)
        yield f"{what}, loaded into a slot full of -1: {driven.load(key)}"
    storage.replace(driven, key, b"")
    yield f"emptied: {driven.load(key).partition(',')[0]}"
    yield f"stored again: {driven.store(key, 7)}; loaded: {driven.load(key)}"
    driven.tier.shutdown()


@finding
def obj_a_missing_object(storage: Storage) -> Iterator[str]:
    """JOB-9, LOOK-4."""
    driven = Driven(storage.obj())
    keys = [key_of(number) for number in (1, 2, 3)]
    for key in keys:
        driven.store(key, 7)
    first = driven.request("first")
    yield f"three keys are stored, and a request asks for them: {driven.lookup(keys, first)}"
    name = driven.tier._file_mapper.get_file_name(keys[2])
    storage.access.client().delete_object(Bucket=BUCKET, Key=name)
    job = driven.submit(keys, [10, 11, 12], load=True)
    yield f"the third is removed, the three are loaded: {driven.wait(job)}"
    time.sleep(0.5)
    yield f"successful_keys: {driven.results[job].successful_keys}"
    yield f"the slot of the third begins with {driven.rows[12][:5].tobytes()!r}"
    yield f"the request asks again: {driven.lookup(keys, first)}"
    yield f"another asks: {driven.lookup(keys, driven.request('second'))}"
    driven.tier.on_request_finished(first)
    driven.tier.shutdown()


# -- lookups --------------------------------------------------------------------------------------


@finding
def obj_a_store_after_a_miss(storage: Storage) -> Iterator[str]:
    """LOOK-7, LOOK-9, DATA-10."""
    driven = Driven(storage.obj())
    key, first, second = key_of(1), driven.request("first"), driven.request("second")
    yield f"before the store, a request: {driven.lookup([key], first)}"
    yield f"the store: {driven.store(key, 7)}"
    yield f"after it, the request and a new one: {driven.lookup([key], first)}"
    yield f"{driven.lookup([key], second)} for the new one"
    for request in (first, second):
        driven.tier.on_request_finished(request)
    yield f"once both have finished, a third: {driven.lookup([key], driven.request('third'))}"
    driven.tier.shutdown()


@finding
def obj_an_error_of_the_server(storage: Storage) -> Iterator[str]:
    """LOOK-6, LOOK-4, DATA-11."""
    driven = Driven(storage.obj(faults=True))
    key, request = key_of(1), driven.request("alive")
    driven.store(key, 7)
    storage.inject(Fault.ERROR)
    yield f"the server answers everything with 500: {driven.lookup([key], request)}"
    storage.heal()
    yield f"after it works again, the same request: {driven.lookup([key], request)}"
    driven.tier.on_request_finished(request)
    yield f"once it has finished, another: {driven.lookup([key], driven.request('new'))}"
    driven.tier.shutdown()


# -- time -----------------------------------------------------------------------------------------


@finding
def obj_a_server_that_hangs(storage: Storage) -> Iterator[str]:
    """LOOK-2, JOB-5, DRAIN-1, DRAIN-3, DRAIN-4, DRAIN-5."""
    driven = Driven(storage.obj(faults=True))
    key = key_of(1)
    driven.store(key, 7)
    storage.inject(Fault.STALL)
    load = driven.submit([key], [9], load=True)
    answer = driven.lookup([key], driven.request("alive"), steps=200)
    yield f"a lookup, after 1 s and more of steps: {answer}"
    yield f"a load, each request tried once, within 15 s: {driven.wait(load, 15.0)}"
    driven.submit([key], [9], load=True)
    returned, drain = ends_within(driven.tier.drain_jobs, 1.0)
    yield f"drain_jobs with a load in flight returned within 1 s: {returned}"
    drain.join(15.0)
    yield f"within 15 s: {not drain.is_alive()}"
    storage.heal()
    # The lookup is in flight, and the load of its key has failed: its answer breaks an assertion,
    # if it is there before the end.
    with suppress(AssertionError):
        driven.tier.shutdown()
    for fault in (Fault.ERROR, Fault.STALL):
        yield from _with_defaults(storage, fault)


def _with_defaults(storage: Storage, fault: Fault) -> Iterator[str]:
    """Load in another process, in which the SDK tries requests as often as it does by itself."""
    context = multiprocessing.get_context("spawn")
    opened, broken, answers = context.Event(), context.Event(), context.Queue()
    arguments = (replace(storage, proxy=None), opened, broken, answers)
    os.environ["AWS_RETRY_MODE"] = "legacy"
    process = context.Process(target=_load_with_defaults, args=arguments, daemon=True)
    process.start()
    os.environ["AWS_RETRY_MODE"] = "standard"
    try:
        if not opened.wait(60.0):
            raise TimeoutError("the other process did not open the tier")
        storage.inject(fault)
        broken.set()
        what = {Fault.ERROR: "answers 500", Fault.STALL: "hangs"}[fault]
        answer = answers.get(timeout=120)
        yield f"with the SDK's defaults, the server {what}, a load within 10 s: {answer}"
    finally:
        storage.heal()
        process.kill()


def _load_with_defaults(storage: Storage, opened: Any, broken: Any, answers: Any) -> None:
    logging.disable(logging.CRITICAL)
    driven = Driven(storage.obj(faults=True))
    driven.store(key_of(1), 7)
    opened.set()
    broken.wait()
    answers.put(driven.wait(driven.submit([key_of(1)], [9], load=True), 10.0))


# -- processes ------------------------------------------------------------------------------------


@finding
def obj_memory_that_is_gone(storage: Storage) -> Iterator[str]:
    """What the process of an engine does after shutdown: it unmaps the memory."""
    pid = os.fork()
    if not pid:
        _unmap_after_shutdown(storage)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    how = signal.Signals(-code).name if code < 0 else f"status {code}"
    yield f"shutdown with a load in flight, the memory is unmapped, the server goes on: {how}"


def _unmap_after_shutdown(storage: Storage) -> None:
    # NIXL's loader prints a trace of its own.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # With a proxy of its own: that of the parent has no thread here.
    parts = urlsplit(storage.access.endpoint_url)
    proxy = FaultProxy(str(parts.hostname), int(parts.port or 0))
    mine = replace(storage, proxy=proxy, proxy_url=f"http://127.0.0.1:{proxy.port}")
    driven = Driven(mine.obj(faults=True))
    keys = [key_of(number) for number in range(BATCH)]
    driven.wait(driven.submit(keys, range(BATCH)))
    mine.inject(Fault.STALL)
    driven.submit(keys, range(BATCH), load=True)
    time.sleep(0.3)
    driven.tier.shutdown()
    address = driven.rows.ctypes.data
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(driven.rows.nbytes))
    mine.heal()
    time.sleep(by_hand.PATIENCE_S)
    os._exit(0)


@finding
def obj_a_fork(storage: Storage) -> Iterator[str]:
    """LIFE-6."""
    driven = Driven(storage.obj())
    driven.store(key_of(1), 7)
    pid = os.fork()
    if not pid:
        answer = driven.lookup([key_of(1)], driven.request("child"), steps=600)
        os._exit(0 if answer == "HIT" else 1)
    _, status = os.waitpid(pid, 0)
    found = os.waitstatus_to_exitcode(status) == 0
    yield f"a lookup in a forked child is answered within 3 s: {found}"
    driven.tier.shutdown()


# -- settings -------------------------------------------------------------------------------------


@finding
def obj_a_bucket_that_is_not_there(storage: Storage) -> Iterator[str]:
    """No clause by itself: a wrong name is seen at the first store."""
    driven = Driven(storage.obj(bucket="no-such-bucket"))
    answer = driven.lookup([key_of(1)], driven.request("a"))
    yield f"no such bucket: opens, a lookup: {answer}, a store: {driven.store(key_of(1), 7)}"
    driven.tier.shutdown()
    try:
        Driven(storage.obj(secret_key="wrong"))  # noqa: S106 - on purpose
    except RuntimeError as error:
        yield f"a wrong secret: RuntimeError: {str(error).partition(',')[0]}"


@finding
def obj_constructors(storage: Storage) -> Iterator[str]:
    """CONF-1."""
    try:
        Driven({**storage.obj(), "io_threads": "many"})
    except Exception as error:  # noqa: BLE001 - whatever it is, is what is to be seen
        yield f"io_threads='many': {type(error).__name__}: {error}"
    driven = Driven({**storage.obj(), "prefix": {"path": "kv"}})
    yield f"prefix={{'path': 'kv'}}: opens, and names objects {driven.tier._file_mapper.base_path}"
    driven.tier.shutdown()


@finding
def obj_names(storage: Storage) -> Iterator[str]:
    """NS-1."""
    usual = Driven(storage.obj())
    usual.store(key_of(1), 7)
    for what, changes in {
        "another kv_cache_layout": {"kv_cache_layout": "HND"},
        "twice the bytes of a block": {"worker_kv_bytes_per_block": 2 * by_hand.BLOCK_BYTES},
    }.items():
        spec = by_hand.make_spec(**{"kv_cache_layout": "NHD", **changes})
        other = Driven(storage.obj(), spec)
        yield f"{what}: {other.lookup([key_of(1)], other.request('a'))}"
        other.tier.shutdown()
    usual.tier.shutdown()


@contextmanager
def serve(folder: Path) -> Iterator[Storage]:
    """Start a server with a bucket, and a proxy."""
    server: S3Server = (Rgw if os.environ.get("KV_SERVER") == "rgw" else SeaweedServer)(folder)
    with server:
        server.make_bucket(BUCKET)
        parts = urlsplit(server.endpoint_url)
        proxy = FaultProxy(str(parts.hostname), int(parts.port or 0))
        try:
            yield Storage(server.access, proxy, f"http://127.0.0.1:{proxy.port}", "")
        finally:
            proxy.close()


def main(names: Sequence[str]) -> None:
    """Print what is seen."""
    logging.disable(logging.CRITICAL)
    unknown = sorted(set(names) - FINDINGS.keys())
    if unknown:
        sys.exit(f"no such finding: {', '.join(unknown)}; there are {', '.join(FINDINGS)}")
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as storage:
        for name in names or FINDINGS:
            print(name)
            for line in FINDINGS[name](replace(storage, prefix=name)):
                print(f"    {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
