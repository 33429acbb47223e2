"""Settings of the file system tier."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic evaluates the annotation
from typing import Any, Final, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator, model_validator

from kv_core.tierkit import TierKitConfig
from kv_core.units import parse_bytes

__all__ = ["FsConfig", "Layout"]

Layout: TypeAlias = Literal["files", "segments"]
"""How blocks lie in the root folder."""


_OF_SEGMENTS: Final = frozenset(
    {"capacity_bytes", "root_capacity_bytes", "namespace_ttl_s", "durability", "read_only"}
)


class FsConfig(TierKitConfig):
    """What an operator can set."""

    root_dir: Path
    """Folder of the blocks; made when it does not exist. Several engines, models and hosts may
    share one.
    """
    io_threads: int = Field(default=16, ge=2, le=256)
    """Transfers that run at the same time. In layout 'segments' at most a quarter of them are
    stores, and at most two while there are loads.
    """
    layout: Layout = "segments"
    """How blocks lie in it. Layouts do not see each other's blocks."""
    direct_io: bool = True
    """Whether to bypass the page cache where the file system allows it."""
    min_free_bytes: int = 2**30
    """Stores are declined while the file system has less free than this; bytes, or text such as
    '20GiB'.
    """

    capacity_bytes: int | None = Field(default=None, gt=0)
    """Most bytes that the blocks of one namespace take, over all engines that share it; layout
    'segments' only. What was used least recently goes first. Without it, only 'min_free_bytes'
    ends the growth.
    """
    root_capacity_bytes: int | None = Field(default=None, gt=0)
    """Most bytes that all namespaces below the root folder take together; layout 'segments' only:
    blocks of layout 'files' neither count nor go.
    """
    namespace_ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """A namespace that nobody has used for so many seconds is removed; layout 'segments' only:
    one of layout 'files' stays.
    """
    durability: Literal["none", "data"] = "none"
    """What a stored block survives. 'none': the end of the process, however it ends; after a loss
    of power, blocks of the last seconds may be gone, and none is wrong. 'data': a loss of power,
    too; each store waits for the disk. Layout 'segments' only.
    """
    read_only: bool = False
    """Whether to load only, and leave the folder as it is: for a folder that cannot be written.
    Layout 'segments' only.
    """

    @field_validator("root_dir", mode="before")
    @classmethod
    def _is_not_empty(cls, value: object) -> object:
        if value == "":
            # Path("") is the working directory, which nobody means who writes nothing.
            raise ValueError("must not be empty")
        return value

    @field_validator("min_free_bytes", "capacity_bytes", "root_capacity_bytes", mode="before")
    @classmethod
    def _read_size(cls, value: Any, info: ValidationInfo) -> int | None:
        return None if value is None else parse_bytes(value, setting=info.field_name or "")

    @model_validator(mode="after")
    def _fits_the_layout(self) -> FsConfig:
        if self.layout != "segments":
            for setting in sorted(_OF_SEGMENTS & self.model_fields_set):
                if getattr(self, setting) != type(self).model_fields[setting].default:
                    raise ValueError(
                        f"{setting!r} is a setting of layout 'segments', and the layout is "
                        f"{self.layout!r}"
                    )
        return self
