"""Memory for copies in flight: bounded, used again, and never while somebody may still read it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kv_tier_fsspec._scatter import copy_bytes, scatter
from kv_tier_fsspec._staging import Staging

if TYPE_CHECKING:
    from collections.abc import Coroutine


def run(coroutine: Coroutine[object, object, None]) -> None:
    """Run a test on a loop."""
    asyncio.run(asyncio.wait_for(coroutine, 10))


def test_a_buffer_is_lent_again() -> None:
    """The second transfer gets the memory of the first, which costs no new pages."""

    async def check() -> None:
        staging = Staging(64, 2)
        async with staging.buffer() as first:
            first[:] = b"a" * 64
        async with staging.buffer() as second:
            assert second is first

    run(check())


def test_transfers_at_a_time_have_buffers_of_their_own() -> None:
    """Two that are in flight never share memory."""

    async def check() -> None:
        staging = Staging(64, 2)
        async with staging.buffer() as one, staging.buffer() as other:
            assert one is not other
            assert len(one) == len(other) == 64

    run(check())


def test_the_buffer_of_a_failed_transfer_is_not_lent_again() -> None:
    """A client library may still be sending what it was given when its call ended early."""

    async def check() -> None:
        staging = Staging(64, 1)
        lost = None
        for error in (OSError, asyncio.CancelledError):
            with pytest.raises(error):
                async with staging.buffer() as lost:
                    raise error
            async with staging.buffer() as fresh:
                assert fresh is not lost

    run(check())


def test_turns_are_bounded_and_given_back() -> None:
    """With both kinds of turn together, also after a failure."""

    async def check() -> None:
        staging = Staging(64, 1)
        entered = asyncio.Event()

        async def load() -> None:
            async with staging.turn():
                entered.set()

        async with staging.buffer():
            loading = asyncio.create_task(load())
            for _ in range(10):
                await asyncio.sleep(0)
            assert not entered.is_set()
        await loading
        assert entered.is_set()

    run(check())


@pytest.mark.parametrize(
    ("found", "first", "second"),
    [
        (b"abcdef", b"abcd", b"ef"),
        (b"abcde", b"abcd", b"e."),
        (b"abc", b"abc.", b".."),
        (b"", b"....", b".."),
        (b"abcdefgh", b"abcd", b"ef"),
    ],
)
def test_an_object_is_scattered(found: bytes, first: bytes, second: bytes) -> None:
    """In order; what is missing leaves the buffers as they are, what is too much only counts."""
    parts = bytearray(b"...."), bytearray(b"..")
    assert scatter(found, tuple(map(memoryview, parts))) == len(found)
    assert tuple(map(bytes, parts)) == (first, second)


def test_a_copy_needs_equal_lengths() -> None:
    """Nothing is spread over a longer buffer, a single byte in particular."""
    for source in (b"abc", b"a", b""):
        with pytest.raises(ValueError, match="over 4"):
            copy_bytes(memoryview(bytearray(4)), memoryview(source))
