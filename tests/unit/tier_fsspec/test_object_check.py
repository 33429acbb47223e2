"""``kv-core object fsck`` beside engines: what is looked at twice, and what nothing describes."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import override

from kv_core.cli import main
from kv_core.contract import parse_tier_config
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_fsspec import kv_core_register_tier
from kv_tier_fsspec._cli._access import BlockingAccess
from kv_tier_fsspec._cli._check import check_blocks
from kv_tier_fsspec._cli._survey import find_namespaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_tier_fsspec._cli._access import Entry
    from kv_tier_fsspec._cli._check import Finding

KEYS = [example_key(number) for number in range(4)]
OBJECT_BYTES = 4096 + 256


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[TierDriver]:
    """Return an open tier that has stored some blocks."""
    spec = kv_core_register_tier()
    settings = {"url": f"file://{tmp_path}", "min_free_bytes": 1}
    config = parse_tier_config("cold", spec.config_model, settings)
    with TierDriver(spec.factory, config, block_bytes=4096, tier_name="cold") as driver:
        assert driver.store(KEYS).success
        yield driver


class Beside(BlockingAccess):  # type: ignore[misc]  # final for everybody else
    """A filesystem on which something happens once the blocks have been listed."""

    def __init__(self, files: Any, happening: Callable[[], object]) -> None:
        super().__init__(files)
        self._happening = happening

    @override
    async def entries(self, folder: str) -> list[Entry]:
        found = await super().entries(folder)
        if any(entry.stem.endswith(".kv") for entry in found):
            self._happening()
        return found


def check(driver: TierDriver, root: Path, happening: Callable[[], object]) -> list[Finding]:
    """Check all blocks, with ``--delete``."""
    tier: Any = driver.tier

    async def look() -> list[Finding]:
        access = Beside(tier._files, happening)
        (found,) = await find_namespaces(access, str(root))
        findings = check_blocks(
            access, found, delete=True, reads=1, describe=str, advance=lambda _: None
        )
        return [finding async for finding in findings]

    return asyncio.run(look())


def block_of(driver: TierDriver, number: int) -> Path:
    """Return the file of a block."""
    tier: Any = driver.tier
    return Path(tier._blocks.names.block(KEYS[number]))


@pytest.mark.parametrize("cut", [b"", b"cut", bytes(OBJECT_BYTES + 1)])
def test_what_was_stored_anew_since_the_listing_stays(
    driver: TierDriver, tmp_path: Path, cut: bytes
) -> None:
    """The second look is at the file of now: its length was listed before an engine stored it."""
    path = block_of(driver, 1)
    whole = path.read_bytes()
    path.write_bytes(cut)
    assert check(driver, tmp_path, lambda: path.write_bytes(whole)) == []
    assert path.read_bytes() == whole
    assert driver.load(KEYS).success


def test_what_is_still_cut_at_the_second_look_goes(driver: TierDriver, tmp_path: Path) -> None:
    """With the length that it has by then."""
    path = block_of(driver, 1)
    os.truncate(path, 100)
    (finding,) = check(driver, tmp_path, lambda: os.truncate(path, 50))
    assert (finding.name, finding.is_damaged, finding.is_deleted) == (str(path), True, True)
    assert finding.problem == f"50 bytes long, expected {OBJECT_BYTES}"
    assert not path.exists()


def test_what_was_removed_since_the_listing_is_no_finding(
    driver: TierDriver, tmp_path: Path
) -> None:
    """An engine has met the damage as well."""
    path = block_of(driver, 1)
    os.truncate(path, 100)
    assert check(driver, tmp_path, lambda: path.unlink(missing_ok=True)) == []


# -- the description ------------------------------------------------------------------------------


def test_a_namespace_that_nothing_describes_is_no_damage(
    driver: TierDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rule that goes by age has removed it: status 3, since its blocks were not checked."""
    (description,) = tmp_path.rglob("namespace.json")
    content = description.read_bytes()
    description.unlink()
    url = f"file://{tmp_path}"
    assert main(["object", "fsck", "--delete", "--json", url]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["objects"], found["findings"]) == (0, [])
    assert list(found["problems"]) == [description.parent.name]
    assert "has no description (namespace.json); the next engine" in str(found["problems"])
    assert driver.load(KEYS).success
    description.write_bytes(content)
    assert main(["object", "fsck", url]) == 0


def test_damage_elsewhere_counts_more(
    driver: TierDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1: a description that cannot be used is no missing one."""
    (description,) = tmp_path.rglob("namespace.json")
    (tmp_path / "other_0123456789ab" / "r0").mkdir(parents=True)
    url = f"file://{tmp_path}"
    assert main(["object", "fsck", url]) == 3
    os.truncate(block_of(driver, 0), 100)
    assert main(["object", "fsck", url]) == 1
    assert main(["object", "fsck", "--delete", url]) == 3
    description.write_text("{}")
    assert main(["object", "fsck", url]) == 1
    assert "its description cannot be used" in capsys.readouterr().out
