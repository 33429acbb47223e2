"""What the package metadata says about tiers, without importing any."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ENTRY_POINT_GROUP", "InstalledTier", "list_installed"]

ENTRY_POINT_GROUP: Final = "kv_core.tiers"
"""Group of entry points; the name of an entry point is the type of its tier."""


@dataclass(frozen=True, slots=True)
class InstalledTier:
    """A tier type that an installed package claims to provide.

    Attributes:
        type: Name of the entry point.
        distribution: Name of the package, or ``"unknown"`` when its metadata has none.
        version: Version of the package, or ``"unknown"``.
        entry_point: Names the module with the hooks.
    """

    type: str
    distribution: str
    version: str
    entry_point: metadata.EntryPoint

    @property
    def origin(self) -> str:
        """Name and version of the package, for messages."""
        return f"{self.distribution} {self.version}"


def list_installed(entry_points: Iterable[metadata.EntryPoint] | None) -> list[InstalledTier]:
    """Return the claims, sorted by type and distribution, one for each pair.

    A distribution that is on ``sys.path`` twice (an editable install besides an older wheel) is
    one claimant: the copy that comes first is the one that Python would import.

    Args:
        entry_points: Entry points in order of precedence, or ``None`` for those of this
            environment. Those of other groups are ignored.
    """
    if entry_points is None:
        entry_points = metadata.entry_points(group=ENTRY_POINT_GROUP)
    claims: dict[tuple[str, str], InstalledTier] = {}
    for entry_point in entry_points:
        if entry_point.group != ENTRY_POINT_GROUP:
            continue
        distribution, version = _origin(entry_point)
        claim = InstalledTier(entry_point.name, distribution, version, entry_point)
        claims.setdefault((entry_point.name, _normalized(distribution)), claim)
    return [claims[pair] for pair in sorted(claims)]


def _origin(entry_point: metadata.EntryPoint) -> tuple[str, str]:
    if entry_point.dist is None:
        return "unknown", "unknown"
    # Half-removed packages leave folders without a METADATA file; depending on the Python
    # version their fields are None.
    fields = entry_point.dist.metadata
    return fields["Name"] or "unknown", fields["Version"] or "unknown"


def _normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
