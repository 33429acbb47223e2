"""Verifies every block of a namespace: bounded memory, a bounded number of reads at a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from kv_core.errors import BlockDamagedError
from kv_core.tierkit.objects import TRAILER_BYTES, ObjectFormat, ObjectNames, read_trailer
from kv_tier_fsspec._cli._survey import blocks_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kv_core.contract import OffloadKey
    from kv_core.keys import Namespace
    from kv_tier_fsspec._cli._access import Access, Entry
    from kv_tier_fsspec._cli._survey import FoundNamespace

__all__ = ["Finding", "check_blocks"]


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """A block that is not as it should be, or a folder of blocks that cannot be listed.

    Attributes:
        name: Name of its object, or of the folder.
        problem: What is wrong with it.
        is_damaged: Whether it is the block that is wrong; ``False``: it could not be read.
        is_deleted: Whether it was removed.
    """

    name: str
    problem: str
    is_damaged: bool
    is_deleted: bool


async def check_blocks(
    access: Access,
    found: FoundNamespace,
    *,
    delete: bool,
    reads: int,
    describe: Callable[[BaseException], str],
    advance: Callable[[int], None],
) -> AsyncIterator[Finding]:
    """Read and verify every block; yield those that fail, and folders that cannot be listed.

    Args:
        access: The filesystem.
        found: The namespace, with a description.
        delete: Remove what is damaged.
        reads: Reads at a time, each of one block.
        describe: Puts an error into words, without secrets.
        advance: Called with the bytes of each object that was looked at.
    """
    if found.namespace is None:
        raise ValueError(f"namespace {found.name} has no description: {found.problem}")
    checker = _Checker(access, found.folder, found.namespace, delete, describe)
    running: set[asyncio.Task[Finding | None]] = set()
    unlisted: list[Finding] = []

    def skip(folder: str, error: PermissionError) -> None:
        problem = f"none of the blocks in this folder was checked: {describe(error)}"
        unlisted.append(Finding(folder, problem, is_damaged=False, is_deleted=False))

    async def one(entry: Entry) -> Finding | None:
        finding = await checker.check(entry)
        advance(entry.size_bytes or 0)
        return finding

    try:
        async for entry in blocks_of(access, found, skip):
            if len(running) >= reads:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if (finding := task.result()) is not None:
                        yield finding
            running.add(asyncio.create_task(one(entry)))
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (finding := task.result()) is not None:
                    yield finding
        for finding in unlisted:
            yield finding
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@final
class _Checker:
    """Verifies blocks of one namespace."""

    def __init__(
        self,
        access: Access,
        folder: str,
        namespace: Namespace,
        delete: bool,
        describe: Callable[[BaseException], str],
    ) -> None:
        self._access = access
        self._names = ObjectNames(folder.rpartition("/")[0], namespace)
        self._format = ObjectFormat(namespace)
        self._delete = delete
        self._describe = describe

    async def check(self, entry: Entry) -> Finding | None:
        """Return what is wrong with a block, if anything is."""
        try:
            problem = await self._problem_of(entry.name, entry.size_bytes)
            if problem and self._delete:
                # A second look: an engine may have stored it anew, or the reading went wrong.
                length = await self._access.length(entry.name)
                problem = await self._problem_of(entry.name, length)
        except FileNotFoundError:
            # An engine, or somebody else, has removed it in the meantime.
            return None
        except Exception as error:  # noqa: BLE001 - libraries raise anything; it is reported
            return Finding(entry.name, self._describe(error), is_damaged=False, is_deleted=False)
        if problem and self._delete:
            return await self._remove(entry.name, problem)
        return Finding(entry.name, problem, is_damaged=True, is_deleted=False) if problem else None

    async def _remove(self, name: str, problem: str) -> Finding | None:
        try:
            await self._access.remove(name)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 - damaged it is, whatever the removal says
            problem = f"{problem}; it cannot be removed: {self._describe(error)}"
            return Finding(name, problem, is_damaged=True, is_deleted=False)
        return Finding(name, problem, is_damaged=True, is_deleted=True)

    async def _problem_of(self, name: str, size_bytes: int | None) -> str:
        if size_bytes != self._format.object_bytes:
            # What is of another length is not even read.
            return f"{size_bytes} bytes long, expected {self._format.object_bytes}"
        content = await self._access.read(name)
        key = self._key_of(name, content)
        if key is None:
            return "its name is none that a block of this namespace has"
        try:
            self._format.check_length(key, len(content))
            with memoryview(content) as view:
                payload, trailer = view[:-TRAILER_BYTES], view[-TRAILER_BYTES:]
                # Seconds for gigabytes, during which others are read.
                await asyncio.to_thread(self._format.check, key, payload, trailer)
        except BlockDamagedError as error:
            return str(error)
        return ""

    def _key_of(self, name: str, content: bytes) -> OffloadKey | None:
        key = self._names.key_of(name)
        if key is None:
            # The name may be a digest: then the trailer has the key, and must belong to the name.
            trailer = read_trailer(content[-TRAILER_BYTES:])
            key = None if trailer is None else trailer.key
        return key if key is not None and self._names.block(key) == name else None
