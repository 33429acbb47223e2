"""The memory that an engine takes, held against what its host has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kv_core.errors import InsufficientSpaceError
from kv_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kv_core.plugins import CheckedTier

__all__ = ["memory_limit_bytes", "require_memory", "staging_bytes"]

_CGROUPS_OF_PROCESS: Final = Path("/proc/self/cgroup")
_CGROUP_MOUNT: Final = Path("/sys/fs/cgroup")


def staging_bytes(tiers: Iterable[CheckedTier]) -> int:
    """Return the memory that tiers take beside the primary tier at most, all of them together."""
    return sum(tier.limits.staging_bytes for tier in tiers)


def require_memory(region_bytes: int, tiers: Iterable[CheckedTier], limit_bytes: int) -> None:
    """Refuse a primary tier that, with what its tiers stage, is more than the host has.

    The region takes its memory at start and the tiers take theirs under load, so without this
    the system would kill the process at its busiest.

    Args:
        region_bytes: Shared memory that the primary tier takes.
        tiers: The secondary tiers.
        limit_bytes: Memory that the process can have at most.

    Raises:
        InsufficientSpaceError: It is more. Nothing was allocated.
    """
    staged = {tier.name: tier.limits.staging_bytes for tier in tiers if tier.limits.staging_bytes}
    needed_bytes = region_bytes + sum(staged.values())
    if needed_bytes <= limit_bytes:
        return
    parts = [f"{_exact(region_bytes)} for the primary tier"]
    parts += [f"{_exact(size)} that tier {name!r} stages" for name, size in staged.items()]
    raise InsufficientSpaceError(
        f"the engine needs {', and '.join(parts)}, which is more than the {_exact(limit_bytes)} "
        "of memory that a process can have here. Lower 'cpu_bytes_to_use' (--cpu-bytes), lower "
        "what the tiers stage, or raise the memory limit of the container",
        needed_bytes=needed_bytes,
        available_bytes=limit_bytes,
    )


def memory_limit_bytes(membership: Path = _CGROUPS_OF_PROCESS, mount: Path = _CGROUP_MOUNT) -> int:
    """Return the memory that this process can have at most: of the machine or the container.

    Args:
        membership: File that names the control groups of the process.
        mount: Where control groups are mounted.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _limit_files(membership, mount):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):
            # No such control group here, or "max".
            continue
    return min(limit for limit in limits if limit > 0)


def _limit_files(membership: Path, mount: Path) -> Iterator[Path]:
    """Yield the files with the limits of a process's control group and of those around it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    # Inside a container the group is often shown as seen from outside, where there is no such
    # folder; its own limit is then at the root of the mount.
    found = {mount / "memory.max", mount / "memory" / "memory.limit_in_bytes"}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        found.update(folder / name for folder in (group, *group.parents) if root in folder.parents)
    yield from sorted(found)


def _exact(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({format_bytes(size_bytes)})"
