"""Blocks in an object store: how they are stored over nothing, over themselves and over damage."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Final

import pytest
from typing_extensions import override

from kv_core.contract import parse_tier_config
from kv_core.errors import TierOpenError
from kv_core.tierkit.objects import describe_namespace
from kv_core.tierkit.testing import TierDriver, example_key, example_namespace
from kv_tier_fsspec import ObjectConfig
from kv_tier_fsspec.store import ObjectTier, scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from kv_tier_fsspec.store import ObjectStore

BLOCK_BYTES: Final = 512
KEY: Final = example_key(1)


class Days:
    """The days of a tier, which pass when a test says so."""

    def __init__(self) -> None:
        self._evening = threading.Semaphore(0)
        self._begin: Callable[[], object] = bool

    async def wait(self) -> None:
        """Wait for the next one. On the tier's loop."""
        loop, morning = asyncio.get_running_loop(), asyncio.Event()
        self._begin = lambda: loop.call_soon_threadsafe(morning.set)
        self._evening.release()
        await morning.wait()

    def begin_one(self) -> None:
        """Let a day begin."""
        assert self._evening.acquire(timeout=10)
        self._begin()

    def pass_one(self) -> None:
        """Let a day begin, and return when all that it brings is done."""
        self.begin_one()
        assert self._evening.acquire(timeout=10)
        self._evening.release()


class Store:
    """An object store in memory, which notes what it is asked and fails when it is told to."""

    def __init__(self) -> None:
        self.days = Days()
        self.hangs = False
        self.is_asked = threading.Event()
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.given: list[object] = []
        self.error: Exception | None = None

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Note it."""
        self.asked.append("close")

    async def length(self, name: str) -> int:
        """Return the length of an object."""
        return len(self._found("length", name))

    async def get(self, name: str, most_bytes: int) -> Buffer:
        """Return an object."""
        return self._found("get", name)[:most_bytes]

    async def get_into(self, name: str, parts: Sequence[memoryview]) -> int:
        """Read an object into buffers."""
        return scatter(self._found("get_into", name), parts)

    async def get_range(self, name: str, start: int, end: int) -> Buffer:
        """Return a range of an object."""
        return self._found("get_range", name)[start:end]

    async def put(self, name: str, data: bytes | bytearray) -> None:
        """Store an object."""
        self.asked.append("put")
        if self.hangs:
            self.is_asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.asked.append("given up")
        self._take(name, data)

    async def put_new(self, name: str, data: bytes | bytearray) -> bool:
        """Store an object unless there is one."""
        self.asked.append("put_new")
        if name in self.objects:
            return False
        self._take(name, data)
        return True

    async def remove(self, name: str) -> None:
        """Remove an object."""
        self.asked.append("remove")
        self.objects.pop(name, None)

    def _take(self, name: str, data: bytes | bytearray) -> None:
        self.given.append(data)
        if self.error is not None:
            raise self.error
        self.objects[name] = bytes(data)

    def _found(self, what: str, name: str) -> bytes:
        self.asked.append(what)
        try:
            return self.objects[name]
        except KeyError:
            raise FileNotFoundError(name) from None

    def name_of_block(self) -> str:
        """Return the name of the only block."""
        (name,) = (name for name in self.objects if name.endswith(".kv"))
        return name


class Tier(ObjectTier):
    """The tier over the store."""

    store: Store

    @override
    def make_store(self) -> ObjectStore:
        return self.store

    @override
    def root(self, store: ObjectStore) -> str:
        return "prefix"

    @override
    async def _wait_a_day(self) -> None:
        await self.store.days.wait()


@pytest.fixture
def store() -> Store:
    """Return an empty store."""
    return Store()


def drive(store: Store) -> TierDriver:
    """Open a tier over the store."""
    kind: Any = type("StoreTier", (Tier,), {"store": store})
    config = parse_tier_config("objects", ObjectConfig, {})
    return TierDriver(kind, config, num_blocks=4, block_bytes=BLOCK_BYTES)


@pytest.fixture
def driver(store: Store) -> Iterator[TierDriver]:
    """Return a tier over the store."""
    with drive(store) as driver:
        store.asked.clear()
        store.given.clear()
        yield driver


def test_a_new_block_is_one_request(driver: TierDriver, store: Store) -> None:
    """Nothing is asked before."""
    result = driver.store([KEY])
    assert (result.success, result.transfer_bytes) == (True, BLOCK_BYTES)
    assert store.asked == ["put_new"]


def test_a_block_that_is_there_is_left_alone(driver: TierDriver, store: Store) -> None:
    """Its trailer says that it is whole; nothing has moved."""
    driver.store([KEY])
    store.asked.clear()
    result = driver.store([KEY])
    assert (result.success, result.transfer_bytes) == (True, 0)
    assert store.asked == ["put_new", "get_range"]


@pytest.mark.parametrize("content", [b"", b"short", b"x" * (BLOCK_BYTES + 256)])
def test_damage_is_stored_over(driver: TierDriver, store: Store, content: bytes) -> None:
    """Whatever has the name of the block and is not the block."""
    driver.store([KEY])
    name = store.name_of_block()
    whole, store.objects[name] = store.objects[name], content
    assert driver.store([KEY]).success
    assert store.objects[name] == whole
    assert driver.load([KEY]).success
    assert driver.loaded([KEY]) == [KEY]


def test_a_longer_object_is_stored_over(driver: TierDriver, store: Store) -> None:
    """A whole block with something behind it is none."""
    driver.store([KEY])
    name = store.name_of_block()
    whole = store.objects[name]
    store.objects[name] = whole + b"more"
    assert driver.store([KEY]).success
    assert store.objects[name] == whole


@pytest.mark.parametrize("change", [b"", b"more"])
def test_an_object_of_another_length_is_no_load(
    driver: TierDriver, store: Store, change: bytes
) -> None:
    """It is removed, and only its block fails."""
    other = example_key(2)
    driver.store([KEY])
    name = store.name_of_block()
    driver.store([other])
    whole = store.objects[name]
    store.objects[name] = whole + change if change else whole[:-1]
    result = driver.load([KEY, other])
    assert (result.success, list(result.successful_keys)) == (False, [other])
    assert other in driver.loaded([KEY, other])
    assert name not in store.objects


def test_what_is_sent_is_used_again_only_when_it_was_taken(
    driver: TierDriver, store: Store
) -> None:
    """A library may still be sending a buffer whose request has failed."""
    store.error = OSError("gone")
    driver.store([KEY])
    store.error = None
    driver.store([KEY])
    driver.store([example_key(2)])
    failed, first, second = store.given
    assert failed is not first
    assert first is second


# -- the description ------------------------------------------------------------------------------

DESCRIPTION: Final = describe_namespace(example_namespace(BLOCK_BYTES))
ANOTHER: Final = describe_namespace(example_namespace(2 * BLOCK_BYTES))


def description_in(store: Store) -> bytes | None:
    """Return the description that a store has, if any."""
    found = [data for name, data in store.objects.items() if name.endswith("namespace.json")]
    return found[0] if found else None


@pytest.mark.usefixtures("driver")
def test_a_day_writes_the_description_anew(store: Store) -> None:
    """With what it says already: a rule that goes by age leaves it."""
    store.days.pass_one()
    store.days.pass_one()
    assert store.asked == ["get", "put"] * 2
    assert store.given == [DESCRIPTION] * 2


def test_a_description_that_was_removed_comes_back(driver: TierDriver, store: Store) -> None:
    """Below a tier that is open, with the blocks or without them."""
    driver.store([KEY])
    store.objects.clear()
    store.days.pass_one()
    assert list(store.objects.values()) == [DESCRIPTION]


def test_a_description_that_is_not_written_fails_nothing(driver: TierDriver, store: Store) -> None:
    """The next day is another try."""
    store.objects.clear()
    store.error = OSError("gone")
    store.days.pass_one()
    assert description_in(store) is None
    store.error = None
    assert driver.store([KEY]).success
    assert driver.load([KEY]).success
    store.days.pass_one()
    assert description_in(store) == DESCRIPTION


def test_another_description_is_not_written_over(driver: TierDriver, store: Store) -> None:
    """It tells whoever opens the namespace next that it is in use otherwise."""
    (name,) = store.objects
    store.objects[name] = ANOTHER
    store.days.pass_one()
    assert store.objects == {name: ANOTHER}
    assert driver.store([KEY]).success
    with pytest.raises(TierOpenError, match="describes another namespace"):
        drive(store)


def test_a_tier_that_ends_gives_up_the_description(store: Store) -> None:
    """Also in the middle of a write that does not end."""
    driver = drive(store)
    store.hangs = True
    store.days.begin_one()
    assert store.is_asked.wait(10)
    driver.close()
    assert store.asked[-3:] == ["put", "given up", "close"]
