"""Keeps secrets out of what a client library logs about its requests.

**Who owns what.** ``begin`` and ``end`` of :class:`MaskedLogs` are called on the tier's loop;
the filters run on whatever thread logs, and only read.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MaskedLogs"]


@final
class MaskedLogs:
    """A filter on some loggers, for as long as a client is open.

    Args:
        loggers: Their names. A filter acts on what is logged to a logger itself, not below it.
        hide: Masks the secrets in a text.
    """

    def __init__(self, loggers: Sequence[str], hide: Callable[[str], str]) -> None:
        self._loggers = [logging.getLogger(name) for name in loggers]
        self._filter = _Mask(hide)

    def begin(self) -> None:
        """Mask from now on."""
        for logger in self._loggers:
            logger.addFilter(self._filter)

    def end(self) -> None:
        """Mask no more. Idempotent."""
        for logger in self._loggers:
            logger.removeFilter(self._filter)


class _Mask(logging.Filter):
    def __init__(self, hide: Callable[[str], str]) -> None:
        super().__init__()
        self._hide = hide

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self._hide(record.getMessage()), ()
        return True
