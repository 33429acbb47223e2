"""Keeps secrets out of what a client library logs about its requests.

**Who owns what.** ``begin`` and ``end`` of :class:`MaskedLogs` are called by whoever opens and
closes the client, one after the other; the filters run on whatever thread logs, and only read.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MaskedLogs", "hide_what_looks_secret"]

_MASK: Final = "**********"

# How secrets look that nobody has told yet: an answer of a server of credentials, a header.
_LOOKS_SECRET: Final = re.compile(
    r"((?:secret_?access_?key|(?:session|access|refresh|id)_?token|(?:security|metadata)-token"
    r"|customer-key|[\"'<]token)[\"']?\s*[:=>]\s*b?[\"']?|\bbearer\s+)([^\"'<,\s}]+)",
    re.IGNORECASE,
)
# What signs an address, for whoever has the address.
_SIGNS: Final = re.compile(r"([?&]sig=)[^&\"'\s]+", re.IGNORECASE)

_FORMATTER: Final = logging.Formatter()


def hide_what_looks_secret(text: str) -> str:
    """Mask the values of what has the name of a secret in requests and answers."""
    return _SIGNS.sub(rf"\1{_MASK}", _LOOKS_SECRET.sub(rf"\1{_MASK}", text))


@final
class MaskedLogs:
    """A filter on some loggers, for as long as a client is open.

    Args:
        loggers: Their names. A filter acts on what is logged to a logger itself, not below it.
        hide: Masks the secrets in a text.
        packages: Names of packages; all loggers of theirs that there are by ``begin`` are
            filtered as well.
    """

    def __init__(
        self,
        loggers: Sequence[str],
        hide: Callable[[str], str],
        *,
        packages: Sequence[str] = (),
    ) -> None:
        self._names = (*loggers, *packages)
        self._below = tuple(f"{package}." for package in packages)
        self._filter = _Mask(hide)
        self._masked: list[logging.Logger] = []

    def begin(self) -> None:
        """Mask from now on; called again, also the loggers that have come since."""
        # A copy: other threads import modules, which make loggers.
        known = list(logging.root.manager.loggerDict)
        for name in {*self._names, *(name for name in known if name.startswith(self._below))}:
            logger = logging.getLogger(name)
            logger.addFilter(self._filter)
            self._masked.append(logger)

    def end(self) -> None:
        """Mask no more. Idempotent."""
        for logger in self._masked:
            # A new list: other threads log, and go through the one that there is.
            logger.filters = [kept for kept in logger.filters if kept is not self._filter]
        self._masked.clear()


class _Mask(logging.Filter):
    def __init__(self, hide: Callable[[str], str]) -> None:
        super().__init__()
        self._hide = hide

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        text: str | None
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - a line that cannot be made must not fail a request
            text = None
        hidden = self._hide(str(record.msg) if text is None else text)
        if hidden != text:
            # Else left alone: others may log by the same library, and tell lines apart by these.
            record.msg, record.args = hidden, ()
        if record.exc_info:
            trace = record.exc_text or _FORMATTER.formatException(record.exc_info)
            hidden_trace = self._hide(trace)
            if hidden_trace != trace:
                # Without the error itself, of which a handler would make the text anew.
                record.exc_text, record.exc_info = hidden_trace, None
        return True
