"""Blocks in an object store: how they are stored over nothing, over themselves and over damage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from typing_extensions import override

from kv_core.contract import parse_tier_config
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_fsspec import ObjectConfig
from kv_tier_fsspec.store import ObjectTier, scatter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from kv_tier_fsspec.store import ObjectStore

BLOCK_BYTES: Final = 512
KEY: Final = example_key(1)


class Store:
    """An object store in memory, which notes what it is asked and fails when it is told to."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.given: list[object] = []
        self.error: Exception | None = None

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

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


@pytest.fixture
def store() -> Store:
    """Return an empty store."""
    return Store()


@pytest.fixture
def driver(store: Store) -> Iterator[TierDriver]:
    """Return a tier over the store."""
    kind: Any = type("StoreTier", (Tier,), {"store": store})
    config = parse_tier_config("objects", ObjectConfig, {})
    with TierDriver(kind, config, num_blocks=4, block_bytes=BLOCK_BYTES) as driver:
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
