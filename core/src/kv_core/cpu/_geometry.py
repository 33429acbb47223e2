"""How the primary tier is cut into slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kv_core.cpu._row_marks import RowMarks
from kv_core.cpu._trailer import TRAILER_BYTES
from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from kv_core.engine import OffloadingConfig

__all__ = ["ROW_ALIGNMENT_BYTES", "PrimaryGeometry"]

ROW_ALIGNMENT_BYTES: Final = 4096
"""Rows begin on page boundaries: direct I/O and pinning work on whole pages."""

_SETTING: Final = "cpu_bytes_to_use"


@dataclass(frozen=True, slots=True)
class PrimaryGeometry:
    """Shape of the primary tier: ``num_blocks`` rows of ``row_stride`` bytes.

    A row holds one offloaded block: the page of worker 0, of worker 1, and so on, then padding.

    Attributes:
        num_blocks: Rows.
        num_workers: Pages in a row.
        worker_page_bytes: Bytes of one worker's page.
        row_stride: Bytes from one row to the next, a multiple of 4096.
        block_bytes: Bytes of a row that move as one block: the whole row.
    """

    num_blocks: int
    num_workers: int
    worker_page_bytes: int
    row_stride: int
    block_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_blocks", "num_workers", "worker_page_bytes", "block_bytes"):
            _require_positive(name, getattr(self, name))
        used_bytes = self.num_workers * self.worker_page_bytes
        if self.row_stride < max(used_bytes, self.block_bytes):
            raise ConfigError(
                f"rows of {self.row_stride} bytes are too short: the pages of {self.num_workers} "
                f"workers take {used_bytes} bytes, and a block {self.block_bytes}",
                setting="row_stride",
            )

    @classmethod
    def from_config(cls, config: OffloadingConfig) -> PrimaryGeometry:
        """Compute the geometry that ``cpu_bytes_to_use`` affords.

        Raises:
            ConfigError: ``cpu_bytes_to_use`` is missing, not a positive integer, or too little
                for one block.
        """
        page_bytes = config.worker_block_bytes * config.block_size_factor
        row_stride = cls.stride_of(page_bytes, config.num_workers)
        budget = config.extra_config.get(_SETTING)
        if budget is None:
            raise ConfigError(
                f"{_SETTING!r} is missing: set it to the bytes of CPU memory that the KV cache "
                f"may use (one block needs {row_stride} bytes)",
                setting=_SETTING,
            )
        if type(budget) is not int or budget < 1:
            raise ConfigError(
                f"{_SETTING!r} must be a positive integer, found {budget!r}", setting=_SETTING
            )
        return cls.fit(
            budget_bytes=budget, num_workers=config.num_workers, worker_page_bytes=page_bytes
        )

    @classmethod
    def fit(cls, *, budget_bytes: int, num_workers: int, worker_page_bytes: int) -> PrimaryGeometry:
        """Compute the geometry that a number of bytes affords.

        Args:
            budget_bytes: What ``cpu_bytes_to_use`` says.
            num_workers: Ranks that share the region.
            worker_page_bytes: Bytes that one worker contributes to one offloaded block.

        Raises:
            ConfigError: There is no worker, a page is empty, or the bytes are too few for one
                block.
        """
        _require_positive("num_workers", num_workers)
        _require_positive("worker_page_bytes", worker_page_bytes)
        row_stride = cls.stride_of(worker_page_bytes, num_workers)
        if budget_bytes < row_stride:
            raise ConfigError(
                f"{_SETTING!r} is {budget_bytes} bytes, but one block needs {row_stride} bytes "
                f"({num_workers} workers x {worker_page_bytes} bytes, rounded up to "
                f"{ROW_ALIGNMENT_BYTES})",
                setting=_SETTING,
            )
        return cls(
            num_blocks=budget_bytes // row_stride,
            num_workers=num_workers,
            worker_page_bytes=worker_page_bytes,
            row_stride=row_stride,
            block_bytes=row_stride,
        )

    @property
    def rows_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_blocks * self.row_stride

    @property
    def region_bytes(self) -> int:
        """Bytes of shared memory that the region takes: rows, a mark for each, the trailer page."""
        return self.rows_bytes + RowMarks.size_bytes(self.num_blocks) + TRAILER_BYTES

    @staticmethod
    def stride_of(worker_page_bytes: int, num_workers: int) -> int:
        """Return the bytes of a row that holds the pages of so many workers."""
        pages_bytes = worker_page_bytes * num_workers
        return -(-pages_bytes // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name!r} must be a positive integer, found {value!r}", setting=name)
