"""How much memory a process can have, and an engine that would need more."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_core.connector import (
    CPUOffloadingSpec,
    TieringOffloadingSpec,
    _specs,
    memory_limit_bytes,
)
from kv_core.errors import InsufficientSpaceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_core.engine import OffloadingConfig

MACHINE_BYTES: Final = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit(tmp_path: Path, membership: str, **files: str) -> int:
    """Return the limit that is found on a machine with these control groups."""
    (tmp_path / "membership").write_text(membership)
    mount = tmp_path / "mount"
    for name, text in files.items():
        path = mount / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_limit_bytes(tmp_path / "membership", mount)


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "8192\n"}, 8192),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, 4096),
        ("0::/a/b\n", {"a/b/memory.max": "4096\n", "a/memory.max": "max\n"}, 4096),
        ("0::/seen/from/outside\n", {"memory.max": "8192\n"}, 8192),
        ("0::/a\n", {"b/memory.max": "4096\n"}, MACHINE_BYTES),
        (
            "4:cpu:/x\n3:cpuset,memory:/a\n0::/\n",
            {"memory/a/memory.limit_in_bytes": "4096\n", "memory/x/memory.limit_in_bytes": "1\n"},
            4096,
        ),
        ("1:memory:/\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, MACHINE_BYTES),
        ("", {}, MACHINE_BYTES),
    ],
)
def test_the_smallest_limit_around_the_process_counts(
    membership: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    """Of both versions of control groups, at any level; without one, the machine's memory."""
    assert limit(tmp_path, membership, **files) == expected


def test_a_system_without_control_groups_has_the_memory_of_the_machine(tmp_path: Path) -> None:
    """Nothing to read is no error."""
    assert memory_limit_bytes(tmp_path / "absent", tmp_path / "absent") == MACHINE_BYTES


@pytest.mark.parametrize("levels", [2, 3])
def test_an_engine_that_needs_more_than_its_host_has_does_not_start(
    levels: int,
    config: Callable[..., OffloadingConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is refused before the shared memory is taken, not killed under load."""
    monkeypatch.setattr(_specs, "memory_limit_bytes", lambda: 2**20)
    settings: dict[str, Any] = {"cpu_bytes_to_use": 2**20, "shm_dir": str(tmp_path)}
    spec = (
        CPUOffloadingSpec(config(**settings))
        if levels == 2
        else TieringOffloadingSpec(config(**settings, secondary_tiers=[{"type": "example"}]))
    )
    with pytest.raises(InsufficientSpaceError, match="for the primary tier, which is more than"):
        spec.get_manager()
    assert list(tmp_path.iterdir()) == []
    spec.shutdown()
