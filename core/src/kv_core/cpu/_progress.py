"""Says how far a preparation of memory has come, when it is long enough for people to wonder."""

from __future__ import annotations

import logging
from typing import Final, final

__all__ = ["CHUNK_BYTES", "Progress"]

_LOGGER: Final = logging.getLogger(__name__)

CHUNK_BYTES: Final = 2**30
"""Most bytes of one system call: signals are handled in between, and progress is seen."""

_REPORT_BYTES: Final = 16 * 2**30


@final
class Progress:
    """Logs one line for every so many bytes.

    Attributes:
        done_bytes: Bytes so far.
    """

    def __init__(self, what: str, total_bytes: int, *, report_bytes: int = _REPORT_BYTES) -> None:
        """Begin.

        Args:
            what: What happens to the bytes, as the beginning of a sentence.
            total_bytes: Bytes in all.
            report_bytes: Bytes between two lines; fewer bytes in all are not worth one.
        """
        self.done_bytes = 0
        self._what = what
        self._total_bytes = total_bytes
        self._report_bytes = report_bytes
        self._next_report = report_bytes

    def add(self, num_bytes: int) -> None:
        """Count bytes that are done."""
        self.done_bytes += num_bytes
        if self.done_bytes >= self._next_report:
            self._next_report = self.done_bytes + self._report_bytes
            _LOGGER.info(
                "%s: %.0f of %.0f GiB",
                self._what,
                self.done_bytes / 2**30,
                self._total_bytes / 2**30,
            )
