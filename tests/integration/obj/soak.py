"""Many jobs through NIXL, on a real store: nothing leaks, and no byte is ever wrong.

Run ``python tests/integration/obj/soak.py --jobs 100000 --seed 1``, or ``make obj-soak``. Stores,
loads and lookups of a few blocks each are drawn, many in flight at a time; some loads ask for
blocks that were never stored, and fail. Resident memory, descriptors and threads are looked at
after a tenth of the jobs and at the end. The last line of the output is a JSON object; the exit
status is 1 when something has grown, was lost, or was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_core.contract import (
    JobId,
    JobMetadata,
    ReqContext,
    ScheduleEndContext,
    parse_tier_config,
)
from kv_core.tierkit.testing import TierDriver, block_bytes_of, example_key
from kv_tier_obj import ObjConfig
from kv_tier_obj._tier import ObjTier
from kv_tier_s3._harness import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.contract import JobResult, OffloadKey

__all__ = ["Report", "soak"]

BLOCK_BYTES: Final = 4096
BLOCKS: Final = 512
STORED: Final = tuple(map(example_key, range(2000)))
NEVER_STORED: Final = tuple(map(example_key, range(10_000, 10_050)))
IN_FLIGHT: Final = 48
IO_THREADS: Final = 16
BUCKET: Final = "kv-soak"
# On a machine that is busy with something else, late is not lost.
PATIENT: Final = {"job_deadline_s": 600, "lookup_deadline_s": 120, "request_timeout_s": 300}

_MOST_GROWN_BYTES: Final = 16 << 20
"""What allocators keep for themselves comes and goes; a leak of 100 bytes a job would be 9 MB."""


@dataclass
class Report:
    """What a run has seen.

    Attributes:
        jobs: Jobs that were reported.
        seconds: How long it took.
        stored: Blocks stored.
        loaded: Blocks loaded.
        missing: Blocks that were asked for and never stored.
        grown_bytes: Growth of resident memory from a tenth of the run to its end.
        grown_descriptors: Growth of open descriptors.
        grown_threads: Growth of threads.
        resident_bytes: Resident memory, ten times.
        wrong: What should not be.
    """

    jobs: int = 0
    seconds: float = 0.0
    stored: int = 0
    loaded: int = 0
    missing: int = 0
    grown_bytes: int = 0
    grown_descriptors: int = 0
    grown_threads: int = 0
    resident_bytes: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@final
class _Run:
    def __init__(self, driver: TierDriver, seed: int) -> None:
        self.report = Report()
        self._driver = driver
        self._tier = driver.tier
        self._draw = random.Random(seed)
        self._free = list(range(BLOCKS))
        self._jobs: dict[JobId, JobMetadata] = {}
        self._submitted = 0
        self._present: set[OffloadKey] = set()
        self._busy: set[OffloadKey] = set()

    def go(self, jobs: int) -> Report:
        """Run so many jobs."""
        began = time.monotonic()
        marks = [jobs * tenth // 10 for tenth in range(1, 11)]
        first: tuple[int, int, int] | None = None
        while self.report.jobs < jobs:
            while len(self._jobs) < IN_FLIGHT and self._submitted < jobs:
                self._submit()
            if self._submitted % 7 == 0:
                self._tier.lookup_many(self._draw.sample(STORED, 4), self._driver.request)
            self._tier.on_schedule_end(ScheduleEndContext())
            done = list(self._tier.get_finished_jobs())
            for result in done:
                self._settle(result)
            if not done:
                time.sleep(0.0005)
            while marks and self.report.jobs >= marks[0]:
                marks.pop(0)
                found = _process()
                first = first or found
                self.report.resident_bytes.append(found[0])
        self.report.seconds = round(time.monotonic() - began, 1)
        last = _process()
        first = first or last
        self.report.grown_bytes = last[0] - first[0]
        self.report.grown_descriptors = last[1] - first[1]
        self.report.grown_threads = last[2] - first[2]
        self._judge()
        return self.report

    def _submit(self) -> None:
        count = self._draw.randrange(1, 5)
        load = self._draw.random() < 0.5
        if load and self._draw.random() < 0.1:
            keys = self._draw.sample(NEVER_STORED, count)
        else:
            from_keys = sorted(self._present) if load and len(self._present) < 8 else STORED
            count = min(count, len(from_keys))
            keys = [
                key for key in self._draw.sample(from_keys, count) if self._is_usable(key, load)
            ]
        if not keys:
            return
        block_ids = [self._free.pop() for _ in keys]
        for block_id, key in zip(block_ids, keys, strict=True):
            if load:
                self._driver.poison(block_id)
            else:
                self._driver.fill(block_id, key)
        self._submitted += 1
        job = JobMetadata(
            job_id=JobId(self._submitted),
            keys=tuple(keys),
            block_ids=np.array(block_ids, dtype=np.int32),
            is_promotion=load,
            req_context=self._driver.request,
            submit_time=time.monotonic(),
        )
        self._jobs[job.job_id] = job
        if not load:
            self._busy.update(keys)
        (self._tier.submit_load if load else self._tier.submit_store)(job)

    def _is_usable(self, key: OffloadKey, load: bool) -> bool:
        # Whether a load beside the first store of its key finds it is a matter of luck.
        return key in self._present if load else key not in self._busy

    def _settle(self, result: JobResult) -> None:
        job = self._jobs.pop(result.job_id, None)
        if job is None:
            self.report.wrong.append(f"job {result.job_id} was reported twice, or never submitted")
            return
        self.report.jobs += 1
        good = set(job.keys if result.success else result.successful_keys or ())
        for key, block_id in zip(job.keys, job.block_ids.tolist(), strict=True):
            self._free.append(block_id)
            known = key in self._present
            if not job.is_promotion:
                self._busy.discard(key)
                self.report.stored += key in good
                if key in good:
                    self._present.add(key)
                else:
                    self.report.wrong.append(f"a store failed: {result.error}")
                continue
            if (key in good) != known:
                self.report.wrong.append(f"loaded: {key in good}, stored: {known}: {result.error}")
            self.report.loaded += key in good
            self.report.missing += not known
            with self._driver.primary.block(block_id) as block:
                expected = block_bytes_of(key, BLOCK_BYTES) if known else b"\xee" * BLOCK_BYTES
                if bytes(block) != expected:
                    self.report.wrong.append(f"wrong bytes in block {block_id}")

    def _judge(self) -> None:
        report = self.report
        if report.grown_bytes > _MOST_GROWN_BYTES:
            report.wrong.append(f"resident memory grew by {report.grown_bytes} bytes")
        if report.grown_descriptors > 2 * IN_FLIGHT:
            report.wrong.append(f"{report.grown_descriptors} more descriptors are open")
        if report.grown_threads > 0:
            report.wrong.append(f"{report.grown_threads} more threads run")
        stats = self._tier.get_stats()
        if stats["obj_requests_given_up"]:
            report.wrong.append("requests were given up")
        slots = 2 * IO_THREADS
        if stats["obj_staging_slots_free"] != slots:
            report.wrong.append(f"{stats['obj_staging_slots_free']} of {slots} slots are free")


def _process() -> tuple[int, int, int]:
    """Return resident bytes, open descriptors and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return pages * os.sysconf("SC_PAGESIZE"), descriptors, threading.active_count()


def soak(settings: dict[str, object], jobs: int, seed: int) -> Report:
    """Run jobs on a store that runs.

    Args:
        settings: Of the tier.
        jobs: Number of jobs.
        seed: Of what is drawn.
    """
    config = parse_tier_config(
        "obj",
        ObjConfig,
        {
            "prefix": f"soak-{os.getpid()}-{seed}",
            "io_threads": IO_THREADS,
            **PATIENT,
            **settings,
        },
    )
    with TierDriver(ObjTier, config, num_blocks=BLOCKS, block_bytes=BLOCK_BYTES) as driver:
        # One request for all: what a tier remembers of requests is not what is looked for here.
        driver.tier.on_new_request(ReqContext("soak"))
        return _Run(driver, seed).go(jobs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a store, and run on it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="kv-core-obj-soak-") as folder,
        SeaweedServer(Path(folder)) as server,
    ):
        server.make_bucket(BUCKET)
        report = soak({**server.access.settings(BUCKET)}, options.jobs, options.seed)
    for line in report.wrong[:20]:
        sys.stderr.write(line + "\n")
    sys.stdout.write(json.dumps(asdict(report)) + "\n")
    return int(bool(report.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
