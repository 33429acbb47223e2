"""What the harnesses of all layouts have in common: folders and settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final

from typing_extensions import override

from kv_conformance.faults.folders import FolderFaults

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kv_conformance.harness import Corruption, Opening, Subject
    from kv_core.contract import OffloadKey, TierSpec
    from kv_tier_fs._config import Layout

__all__ = ["LayoutHarness"]

_MIN_FREE_BYTES: Final = 1 << 20
"""The suite stores little, and not only on machines with a lot of room."""


class LayoutHarness(FolderFaults, ABC):
    """A harness of the tier ``fs``.

    Attributes:
        layout: The layout under test.
    """

    spec: TierSpec
    layout: ClassVar[Layout]

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings for a storage; mount it first if faults will be injected."""
        return {
            "root_dir": str(self.root(opening)),
            "layout": self.layout,
            "job_deadline_s": opening.deadlines.job_s,
            "lookup_deadline_s": opening.deadlines.lookup_s,
            "error_backoff_s": opening.deadlines.error_backoff_s,
            "min_free_bytes": _MIN_FREE_BYTES,
        }

    @override
    def unusable_settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return settings whose root folder would be below a file."""
        return {"root_dir": str(self.unusable_root(opening)), "layout": self.layout}

    @abstractmethod
    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Remove a block."""

    @abstractmethod
    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        """Damage a block."""

    @abstractmethod
    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys of the blocks that are there."""
