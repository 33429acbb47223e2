"""Root folders with blocks in them, and the command line as a function."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import pytest
from typer import Typer
from typer.testing import CliRunner

from kv_core.tierkit.testing import TierDriver, example_key, example_namespace
from kv_tier_fs import FsConfig, spec_of_layout
from kv_tier_fs._cli import add_commands
from kv_tier_fs._config import Layout

if TYPE_CHECKING:
    from pathlib import Path

    from kv_core.contract import OffloadKey

__all__ = ["BLOCK_BYTES", "Cache"]

BLOCK_BYTES = 4096


@dataclass
class Cache:
    """A root folder, and one layout to fill it with.

    Attributes:
        root: The folder.
        layout: The layout.
    """

    root: Path
    layout: Layout

    def open(self, model: str = "example/model", **settings: Any) -> TierDriver:
        """Open the tier; the model is a part of the namespace."""
        config = FsConfig(root_dir=self.root, layout=self.layout, min_free_bytes=1, **settings)
        namespace = example_namespace(BLOCK_BYTES, model=model, model_fingerprint=model)
        return TierDriver(
            spec_of_layout(self.layout).factory,
            config,
            block_bytes=BLOCK_BYTES,
            num_blocks=64,
            namespace=namespace,
        )

    def fill(self, count: int, model: str = "example/model", first: int = 0) -> list[OffloadKey]:
        """Store so many blocks, in files of their own, and close the tier."""
        keys = [example_key(number) for number in range(first, first + count)]
        with self.open(model) as driver:
            assert driver.store(keys).success
        return keys

    def wait_for_lookups(self, driver: TierDriver, keys: list[OffloadKey], expected: str) -> None:
        """Look up, step after step, until the answers are what is expected: ``"1"`` or ``"0"``s."""
        end = time.monotonic() + 20
        while "".join(str(int(found)) for found in driver.resolve(keys)) != expected:
            assert time.monotonic() < end, f"the answers never became {expected}"
            driver.step()
            threading.Event().wait(0.01)

    def payload_files(self) -> list[Path]:
        """Return the files that hold payloads, oldest names first."""
        suffix = "seg" if self.layout == "segments" else "bin"
        return sorted(self.root.rglob(f"*.{suffix}"))

    def flip(self, path: Path, offset: int) -> None:
        """Change one byte of a file, and none of its times or modes."""
        mode = path.stat().st_mode
        path.chmod(0o600)
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
        path.chmod(mode)

    def run(self, command: str, *arguments: object, status: int = 0) -> str:
        """Run ``kv-core fs COMMAND ROOT ...``; return what it printed."""
        app = Typer()
        add_commands(app)
        line = ["fs", command, str(self.root), *map(str, arguments)]
        result = CliRunner().invoke(app, line, prog_name="kv-core")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == status, result.output
        return result.stdout

    def json(self, command: str, *arguments: object, status: int = 0) -> Any:
        """Run a command with ``--json``; return what it printed."""
        return json.loads(self.run(command, *arguments, "--json", status=status))


@pytest.fixture(params=get_args(Layout))
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Cache:
    """Provide an empty root folder for each layout."""
    return Cache(tmp_path / "root", request.param)


@pytest.fixture
def segments(tmp_path: Path) -> Cache:
    """Provide an empty root folder for segments."""
    return Cache(tmp_path / "root", "segments")
