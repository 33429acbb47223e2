"""The tiers that are measured: those of kv-core in this process, vLLM's in one of its own."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import numpy as np

from kv_core.contract import JobId, JobMetadata, NullMetrics, PrimaryView, ReqContext
from kv_core.plugins import open_tier
from kv_core.tierkit.testing import example_key, example_namespace
from kv_tier_fs import spec_of_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _fs_bench._memory import Batch, Memory

    from kv_core.contract import SecondaryTierManager
    from kv_tier_fs._config import Layout

__all__ = ["Contender", "FsContender", "VllmContender"]

_POLL_S: Final = 0.001
_CHILD: Final = Path(__file__).with_name("_vllm_child.py")


class Contender(Protocol):
    """A tier, opened on an empty folder for each sample."""

    name: str

    def open(self, folder: Path, block_bytes: int) -> None:
        """Open the tier on a folder that does not exist yet."""

    def store(self, batches: Sequence[Batch]) -> float:
        """Store all, and return the seconds from the first submit to the last result."""

    def load(self, batches: Sequence[Batch]) -> float:
        """Load all, and return the seconds."""

    def close(self) -> None:
        """Shut the tier down and remove its folder."""


@final
class FsContender:
    """The tier ``fs`` of kv-core.

    Args:
        memory: What is stored from and loaded into.
        layout: How the tier keeps its blocks; also its name in reports.

    Attributes:
        tier: The open tier.
        folder: Its folder.
    """

    tier: SecondaryTierManager
    folder: Path

    def __init__(self, memory: Memory, layout: Layout) -> None:
        self.name: str = layout
        self._layout: Layout = layout
        self._memory = memory
        self._job_ids = itertools.count(1)
        self.request = ReqContext("benchmark")

    def open(self, folder: Path, block_bytes: int, **settings: Any) -> None:
        """Open the tier, with more settings perhaps."""
        self.folder = folder
        self._primary = PrimaryView(self._memory.view(block_bytes), block_bytes)
        self.tier = open_tier(
            spec_of_layout(self._layout),
            name="fs",
            settings={"root_dir": folder, "layout": self._layout, **settings},
            namespace=example_namespace(block_bytes),
            primary=self._primary,
            clock=time.monotonic,
            metrics=NullMetrics(),
        ).manager
        self.tier.on_new_request(self.request)

    def store(self, batches: Sequence[Batch]) -> float:
        """Store all, and return the seconds from the first submit to the last result."""
        return self._move([self.job(batch, load=False) for batch in batches])

    def load(self, batches: Sequence[Batch]) -> float:
        """Load all, and return the seconds."""
        return self._move([self.job(batch, load=True) for batch in batches])

    def job(self, batch: Batch, *, load: bool) -> JobMetadata:
        """Return a job that has not been submitted."""
        return JobMetadata(
            job_id=JobId(next(self._job_ids)),
            keys=tuple(map(example_key, batch.keys)),
            block_ids=np.array(batch.slots, dtype=np.int32),
            is_promotion=load,
            req_context=self.request,
            submit_time=time.monotonic(),
        )

    def submit(self, job: JobMetadata) -> None:
        """Hand a job to the tier."""
        (self.tier.submit_load if job.is_promotion else self.tier.submit_store)(job)

    def close(self, *, keep: bool = False) -> None:
        """Shut the tier down and remove its folder, unless that is to be kept."""
        self.tier.shutdown()
        self._primary.release()
        if not keep:
            shutil.rmtree(self.folder)

    def _move(self, jobs: list[JobMetadata]) -> float:
        start = time.perf_counter()
        for job in jobs:
            self.submit(job)
        waiting = len(jobs)
        while waiting:
            results = list(self.tier.get_finished_jobs())
            for result in results:
                if not result.success:
                    raise RuntimeError(f"{self.name}: a job failed: {result.error}")
            waiting -= len(results)
            if not results:
                time.sleep(_POLL_S)
        return time.perf_counter() - start


@final
class VllmContender:
    """vLLM's file system tier as it ships, driven over a pipe.

    Args:
        python: An interpreter that has vLLM.
        memory: What is stored from and loaded into; the process maps the same.

    Attributes:
        version: Of vLLM.
        extension: Whether its C extension is there.
    """

    name = "vLLM"

    def __init__(self, python: str, memory: Memory) -> None:
        self._process = subprocess.Popen(
            [python, str(_CHILD), str(memory.descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[memory.descriptor],
            text=True,
        )
        hello = self._read()
        self.version = str(hello["version"])
        self.extension = bool(hello["extension"])
        self._folder = Path()

    def open(self, folder: Path, block_bytes: int) -> None:
        """Open the tier on a folder that does not exist yet."""
        self._folder = folder
        self._ask("open", root=str(folder), block_bytes=block_bytes)

    def store(self, batches: Sequence[Batch]) -> float:
        """Store all, and return the seconds from the first submit to the last result."""
        return self._move(batches, load=False)

    def load(self, batches: Sequence[Batch]) -> float:
        """Load all, and return the seconds."""
        return self._move(batches, load=True)

    def close(self) -> None:
        """Shut the tier down and remove its folder."""
        self._ask("close")
        shutil.rmtree(self._folder)

    def end(self) -> None:
        """End the process."""
        self._process.communicate()

    def _move(self, batches: Sequence[Batch], *, load: bool) -> float:
        answer = self._ask("move", batches=[(b.keys, b.slots) for b in batches], load=load)
        if answer["failed"]:
            raise RuntimeError(f"vLLM: {answer['failed']} jobs failed")
        return float(answer["seconds"])

    def _ask(self, command: str, **arguments: object) -> dict[str, Any]:
        stdin = self._process.stdin
        if stdin is None:
            raise AssertionError("the process has a pipe")
        stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        stdout = self._process.stdout
        line = stdout.readline() if stdout is not None else ""
        if not line:
            raise RuntimeError(
                f"the process with vLLM ended with status {self._process.wait()}; run "
                f"'{' '.join(map(str, self._process.args))}' to see why"  # type: ignore[arg-type]
            )
        answer: dict[str, Any] = json.loads(line)
        return answer
