"""``kv-core fs`` on folders that engines are using: neither side minds the other."""

from __future__ import annotations

import json
import random
import threading
from typing import TYPE_CHECKING

from typing_extensions import override

from kv_core.cli import main
from kv_core.contract import JobErrorKind
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_fs import FsConfig, spec_of_layout

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from kv_core.contract import JobResult

BLOCK_BYTES = 4096
NUM_KEYS = 3000
ROUNDS = 6


class Engine(threading.Thread):
    """Stores and loads blocks of a few thousand keys until it is stopped, and checks every byte.

    Attributes:
        problems: What must not happen.
        loads: Blocks that were loaded.
    """

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.loads = 0
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        config = FsConfig(root_dir=root, capacity_bytes=1600 * BLOCK_BYTES, min_free_bytes=1)
        self._driver = TierDriver(
            spec_of_layout("segments").factory, config, block_bytes=BLOCK_BYTES, num_blocks=32
        )

    @override
    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                keys = [example_key(n) for n in self._random.sample(range(NUM_KEYS), 8)]
                self._judge(self._driver.store(keys), JobErrorKind.DECLINED)
                wanted = [example_key(n) for n in self._random.sample(range(NUM_KEYS), 8)]
                result = self._driver.load(wanted)
                self._judge(result, JobErrorKind.MISSING)
                good = wanted if result.success else list(result.successful_keys)
                self.loads += len(good)
                if not set(good) <= set(self._driver.loaded(wanted)):
                    self.problems.append("wrong bytes")
        except Exception as error:  # noqa: BLE001 - reported by the test, on its own thread
            self.problems.append(repr(error))

    def _judge(self, result: JobResult, allowed: JobErrorKind) -> None:
        if result.error is not None and result.error.kind is not allowed:
            self.problems.append(str(result.error))

    def stop(self) -> None:
        """Stop and close the tier."""
        self._stopping.set()
        self.join()
        self._driver.close()


def test_tools_and_engines_do_not_mind_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While two engines store, evict and load, no tool fails or finds damage; no byte is wrong."""
    root = tmp_path / "root"
    engines = [Engine(root, seed) for seed in (1, 2)]
    try:
        for engine in engines:
            engine.start()
        for _ in range(ROUNDS):
            for command in (["ls"], ["du"], ["fsck"], ["gc", "--capacity", "3MiB"], ["gc"]):
                name, *options = command
                assert main(["fs", name, str(root), *options, "--json"]) == 0, command
                found = json.loads(capsys.readouterr().out)
                if name == "fsck":
                    assert found["damage"] == []
    finally:
        for engine in engines:
            engine.stop()
    assert [engine.problems for engine in engines] == [[], []]
    assert all(engine.loads for engine in engines)
