"""What fsspec keeps between callers, on each real storage: none of it reaches a tier."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import fsspec
import fsspec.asyn
import pytest

from kv_core.errors import TierClosedError
from kv_core.tierkit.testing import example_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.contract import OffloadKey
    from kv_core.tierkit.testing import TierDriver

    Drive = Callable[..., TierDriver]

KEYS = [example_key(number) for number in range(4)]
STORAGES = ("file", "sftp", "s3", "az")


@pytest.fixture(params=STORAGES)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return settings for each kind of storage."""
    found: dict[str, Any] = request.getfixturevalue(request.param)
    return found


def filesystem_of(driver: TierDriver) -> Any:
    """Return the filesystem of a tier; of several, one."""
    tier: Any = driver.tier
    if hasattr(tier, "_store"):
        return tier._store.fs
    return tier._files.run(lambda fs: fs)


def list_beside(driver: TierDriver, key: OffloadKey) -> list[Any]:
    """Return the listing of a block's folder, made by the filesystem of a tier."""
    tier: Any = driver.tier
    folder = tier._blocks.names.block(key).rpartition("/")[0]
    if hasattr(tier, "_store"):
        listing = tier._store.fs._ls(folder, detail=True)
        found = asyncio.run_coroutine_threadsafe(listing, tier._thread.loop).result(30)
    else:
        found = tier._files.run(lambda fs: fs.ls(folder, detail=True))
    return list(found)


def neighbours() -> tuple[OffloadKey, OffloadKey]:
    """Return two keys whose blocks lie in one folder."""
    seen: dict[str, OffloadKey] = {}
    for number in range(10_000):
        key = example_key(number)
        if key.hex()[:3] in seen:
            return seen[key.hex()[:3]], key
        seen[key.hex()[:3]] = key
    raise AssertionError("no two keys of ten thousand begin alike")


def test_listings_are_not_remembered(drive: Drive, settings: dict[str, Any]) -> None:
    """A block that was not in its folder when that was listed is found once it is stored."""
    reader, writer = drive(settings), drive(settings)
    first, second = neighbours()
    assert writer.store([first]).success
    assert len(list_beside(reader, first)) == 1
    assert writer.store([second]).success
    assert reader.resolve([second]) == [True]
    assert reader.load([second]).success
    assert len(list_beside(reader, first)) == 2


def test_absence_is_not_remembered(drive: Drive, settings: dict[str, Any]) -> None:
    """A key that was absent a moment ago is found once another tier has stored it."""
    reader, writer = drive(settings), drive(settings)
    for number, key in enumerate(KEYS):
        assert reader.resolve([key], driver_request(reader, f"before-{number}")) == [False]
        assert writer.store([key]).success
        assert reader.resolve([key], driver_request(reader, f"after-{number}")) == [True]


def test_instances_are_not_shared(drive: Drive, settings: dict[str, Any]) -> None:
    """Two tiers of the same settings have two filesystems, and fsspec remembers neither."""
    first, second = filesystem_of(drive(settings)), filesystem_of(drive(settings))
    assert first is not second
    remembered = [id(fs) for fs in type(first)._cache.values()]
    assert not {id(first), id(second)} & set(remembered)


def test_the_loop_of_the_process_is_not_used(drive: Drive, settings: dict[str, Any]) -> None:
    """The thread on which fsspec runs everything of a process does not exist, or is not ours."""
    before = {thread for thread in threading.enumerate() if thread.name == "fsspecIO"}
    driver = drive(settings)
    assert driver.store(KEYS).success
    assert driver.load(KEYS).success
    assert {thread for thread in threading.enumerate() if thread.name == "fsspecIO"} == before
    loop = getattr(filesystem_of(driver), "_loop", None)
    assert loop is None or loop is not fsspec.asyn.loop[0]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_refuses_and_can_open_its_own(drive: Drive, settings: dict[str, Any]) -> None:
    """A forked child is told so by the tier, opens another, and the parent's goes on."""
    driver = drive(settings)
    assert driver.store(KEYS[:2]).success
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = _in_the_fork(drive, driver, settings)
        except BaseException:  # noqa: BLE001 - a child of a test must not go on as pytest
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, waited = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(waited) == 0
    assert driver.load(KEYS[:2]).success
    assert driver.loaded(KEYS[:2]) == KEYS[:2]
    assert driver.resolve(KEYS[2:], driver_request(driver, "late")) == [True, True]


def _in_the_fork(drive: Drive, inherited: TierDriver, settings: dict[str, Any]) -> int:
    try:
        inherited.tier.lookup(KEYS[0], inherited.request)
    except TierClosedError:
        pass
    else:
        return 2
    own = drive(settings)
    if not (own.load(KEYS[:2]).success and own.store(KEYS[2:]).success):
        return 3
    own.close()
    return 0


def driver_request(driver: TierDriver, name: str) -> Any:
    """Return a request that has not asked yet."""
    request = driver.request.__class__(name)
    driver.tier.on_new_request(request)
    return request
