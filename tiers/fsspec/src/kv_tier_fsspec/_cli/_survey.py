"""Finds the namespaces below a URL, and walks over their blocks."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

from kv_core.errors import ConfigError, NamespaceError, TierOpenError
from kv_core.keys import Namespace
from kv_core.tierkit.objects import check_description

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kv_tier_fsspec._cli._access import Access, Entry

__all__ = ["FoundNamespace", "Report", "blocks_of", "find_namespaces", "report_on"]

_NAMESPACE: Final = re.compile(r".+_[0-9a-f]{12}")
_RANK: Final = re.compile(r"r[0-9]+")
_MOST_LISTINGS: Final = 8
"""Listings under way at a time: each may be a request of a tenth of a second."""


@final
@dataclass(frozen=True, slots=True)
class FoundNamespace:
    """A namespace below a URL.

    Attributes:
        folder: Its folder, as the filesystem writes it.
        namespace: What its blocks belong to; ``None`` if that cannot be told.
        description: Every field of it.
        problem: Why it cannot be told; empty if it can.
        is_undescribed: Whether it cannot be told because nothing says it, which is no damage.
    """

    folder: str
    namespace: Namespace | None
    description: dict[str, Any]
    problem: str = ""
    is_undescribed: bool = False

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.rpartition("/")[2]


@final
@dataclass(slots=True)
class Report:
    """What a namespace takes.

    Attributes:
        objects: Blocks.
        object_bytes: Bytes of their objects.
        unfinished: Temporary files, of live writers and of dead ones.
        unfinished_bytes: Their bytes.
        oldest_s: When the oldest block was written, in seconds since 1970, if anybody says.
        latest_s: When the latest was.
    """

    objects: int = 0
    object_bytes: int = 0
    unfinished: int = 0
    unfinished_bytes: int = 0
    oldest_s: float | None = field(default=None)
    latest_s: float | None = field(default=None)

    def add(self, entry: Entry) -> None:
        """Count a block."""
        self.objects += 1
        self.object_bytes += entry.size_bytes or 0
        if entry.changed_s is not None:
            self.oldest_s = min(self.oldest_s or entry.changed_s, entry.changed_s)
            self.latest_s = max(self.latest_s or entry.changed_s, entry.changed_s)


async def find_namespaces(
    access: Access, root: str, only: str | None = None
) -> list[FoundNamespace]:
    """Return the namespaces below a folder, by name.

    Args:
        access: The filesystem.
        root: The folder: what the 'url' of a tier names, or bucket and prefix.
        only: Beginning of a namespace's name, or of the digits at its end; ``None`` for all.

    Raises:
        ConfigError: There is none of that name.
        FileNotFoundError: There is no such folder.
    """
    found = []
    for entry in await access.entries(root):
        if entry.size_bytes is not None or not _NAMESPACE.fullmatch(entry.stem):
            continue
        digits = entry.stem.rpartition("_")[2]
        if only is None or entry.stem.startswith(only) or digits.startswith(only):
            found.append(await _describe(access, entry.name))
    if only is not None and not found:
        raise ConfigError(
            f"there is no namespace whose name begins with {only!r}; 'kv-core object ls' lists "
            "them",
            setting="--namespace",
        )
    return found


async def _describe(access: Access, folder: str) -> FoundNamespace:
    try:
        content = await access.read(f"{folder}/namespace.json")
    except FileNotFoundError:
        problem = "it has no description (namespace.json); the next engine that opens it writes one"
        return FoundNamespace(folder, None, {}, problem, is_undescribed=True)
    except PermissionError:
        return FoundNamespace(folder, None, {}, "its description (namespace.json) may not be read")
    try:
        described = dict(json.loads(content)["namespace"])
        namespace = Namespace.from_description(dict(described))
        check_description(content, namespace, where=f"{folder}/namespace.json")
    except (ValueError, KeyError, TypeError, NamespaceError, TierOpenError) as error:
        return FoundNamespace(folder, None, {}, f"its description cannot be used: {error}")
    if namespace.folder_name.rpartition("_")[2] != folder.rpartition("_")[2]:
        return FoundNamespace(folder, None, described, "its description is that of another one")
    return FoundNamespace(folder, namespace, described)


def _raise(folder: str, error: PermissionError) -> None:  # noqa: ARG001 - as others are called
    raise error


async def report_on(
    access: Access,
    found: FoundNamespace,
    skip: Callable[[str, PermissionError], None] = _raise,
) -> Report:
    """Count the blocks of a namespace. Memory does not grow with their number.

    Args:
        access: The filesystem.
        found: The namespace.
        skip: Called with a folder that may not be listed, and why; goes on without it if it
            returns.
    """
    report = Report()
    async for entry in blocks_of(access, found, skip):
        report.add(entry)
    for entry in await _listed(access, f"{found.folder}/unfinished", skip):
        report.unfinished += 1
        report.unfinished_bytes += entry.size_bytes or 0
    return report


async def _listed(
    access: Access, folder: str, skip: Callable[[str, PermissionError], None]
) -> list[Entry]:
    try:
        return await access.entries_if_any(folder)
    except PermissionError as error:
        # Of this folder; whatever else goes wrong would go wrong with thousands of others.
        skip(folder, error)
        return []


async def blocks_of(
    access: Access,
    found: FoundNamespace,
    skip: Callable[[str, PermissionError], None] = _raise,
) -> AsyncIterator[Entry]:
    """Yield the blocks of a namespace, one folder after the other, a few listings ahead.

    Args:
        access: The filesystem.
        found: The namespace.
        skip: Called with a folder that may not be listed, and why; goes on without it if it
            returns.
    """
    folders: list[str] = []
    for rank in await _listed(access, found.folder, skip):
        if rank.size_bytes is None and _RANK.fullmatch(rank.stem):
            folders += [
                entry.name
                for entry in await _listed(access, rank.name, skip)
                if entry.size_bytes is None
            ]
    ahead: deque[asyncio.Task[list[Entry]]] = deque()
    todo = iter(folders)
    try:
        while True:
            for folder in todo:
                ahead.append(asyncio.create_task(_listed(access, folder, skip)))
                if len(ahead) == _MOST_LISTINGS:
                    break
            if not ahead:
                return
            for entry in await ahead.popleft():
                if entry.size_bytes is not None and entry.stem.endswith(".kv"):
                    yield entry
    finally:
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
