"""Settings of the file system tier."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic evaluates the annotation
from typing import Any, Literal, TypeAlias

from pydantic import field_validator

from kv_core.tierkit import TierKitConfig
from kv_core.units import parse_bytes

__all__ = ["FsConfig", "Layout"]

Layout: TypeAlias = Literal["files"]
"""How blocks lie in the root folder."""


class FsConfig(TierKitConfig):
    """What an operator can set."""

    root_dir: Path
    """Folder of the blocks; made when it does not exist. Several engines, models and hosts may
    share one.
    """
    layout: Layout = "files"
    """How blocks lie in it. Layouts do not see each other's blocks."""
    direct_io: bool = True
    """Whether to bypass the page cache where the file system allows it."""
    min_free_bytes: int = 2**30
    """Stores are declined while the file system has less free than this; bytes, or text such as
    '20GiB'.
    """

    @field_validator("root_dir", mode="before")
    @classmethod
    def _is_not_empty(cls, value: object) -> object:
        if value == "":
            # Path("") is the working directory, which nobody means who writes nothing.
            raise ValueError("must not be empty")
        return value

    @field_validator("min_free_bytes", mode="before")
    @classmethod
    def _read_size(cls, value: Any) -> int:
        return parse_bytes(value, setting="min_free_bytes")
