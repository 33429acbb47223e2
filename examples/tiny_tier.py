"""A whole storage tier in forty lines, and the engine running on it.

The tier keeps each block in a file, without any of the care that ``kv-tier-fs`` takes. A real
one lives in a package of its own with an entry point in the group ``kv_core.tiers``; here the
registry is given the entry point by hand, so that the example runs as it is::

    python examples/tiny_tier.py
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field
from typing_extensions import override

import kv_core
from kv_core.contract import ContractVersion, OffloadKey, TierSpec
from kv_core.errors import BlockDamagedError, BlockDeclinedError, BlockMissingError
from kv_core.plugins import ENTRY_POINT_GROUP, TierRegistry
from kv_core.tierkit import ThreadedTier, TierKitConfig

if TYPE_CHECKING:
    from kv_core.workload.replay import ReplayReport

# -- the tier ---------------------------------------------------------------------------------


class TinyConfig(TierKitConfig):
    """Settings: those of the kit, a folder, and what must stay free there."""

    folder: Path
    """Where the files lie; made when it does not exist."""
    min_free_bytes: int = Field(default=2**28, ge=1)
    """Nothing is stored while the file system has less free than this."""


class TinyTier(ThreadedTier):
    """One file a block. Pool threads call these functions; they may block."""

    config: TinyConfig

    def _path(self, key: OffloadKey) -> Path:
        # The namespace keeps blocks apart that must not be mixed up.
        return self.config.folder / f"{self.context.namespace.fingerprint[:16]}-{key.hex()}"

    @override
    def open(self) -> None:
        self.config.folder.mkdir(parents=True, exist_ok=True)

    @override
    def exists(self, key: OffloadKey) -> bool:
        return self._path(key).exists()

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        try:
            content = self._path(key).read_bytes()
        except FileNotFoundError as error:
            raise BlockMissingError(f"no file for block {key.hex()}") from error
        if len(content) != len(buffer):
            raise BlockDamagedError(f"{len(content)} bytes, expected {len(buffer)}")
        buffer[:] = content

    @override
    def write_block(self, key: OffloadKey, data: memoryview) -> None:
        # A tier without a limit of its own must not fill what others use. An engine insists.
        if shutil.disk_usage(self.config.folder).free < self.config.min_free_bytes:
            raise BlockDeclinedError(f"{self.config.folder} has too little free space")
        path = self._path(key)
        # Written aside and renamed: a reader sees all of a block or nothing. One process and
        # one writer per key here; a tier for several needs a name of its own for each.
        unfinished = path.with_suffix(".tmp")
        unfinished.write_bytes(data)
        unfinished.rename(path)

    @override
    def retire(self, key: OffloadKey) -> None:
        self._path(key).unlink(missing_ok=True)


@kv_core.hookimpl
def kv_core_register_tier() -> TierSpec:
    """Describe the tier to the engine."""
    return TierSpec(
        type="tiny",
        summary="One file a block, for the tutorial.",
        contract=ContractVersion(1, 0),
        factory=TinyTier,
        config_model=TinyConfig,
        limits=lambda config: config.limits(min_free_bytes=config.min_free_bytes),
    )


# -- the engine on it -------------------------------------------------------------------------


def run(folder: Path) -> ReplayReport:
    """Replay a synthetic workload over the tier and return what happened."""
    from kv_core.workload import synthetic_trace
    from kv_core.workload.replay import ReplayConfig, replay_trace

    module = Path(__file__).stem
    registry = TierRegistry([EntryPoint("tiny", module, ENTRY_POINT_GROUP)])
    config = ReplayConfig(
        cpu_bytes=2 * 2**20,
        gpu_blocks=128,
        secondary_tiers=[{"type": "tiny", "folder": str(folder)}],
    )
    trace = synthetic_trace("chat", seed=1, num_requests=100)
    return replay_trace(trace, config, registry=registry)


def main() -> int:
    """Run the workload twice over one folder and print where its blocks came from."""
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as scratch:
        for title in ("first run", "second run"):
            report = run(Path(scratch))
            print(f"{title}: {report.hits}, computed {report.misses}, {report.problems() or 'ok'}")
            if not report.is_sound:
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
