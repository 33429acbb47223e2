"""The journal: what happened, written down at once, because the process may not live long.

The process that runs the tests appends one line of JSON per event; the supervisor reads them all
when that process has ended, however it ended. Outcomes are taken from here and not from pytest's
reports, which any plugin may change.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["JOURNAL_VARIABLE", "SUPERVISED", "Journal", "journal_of_this_process", "read_journal"]

JOURNAL_VARIABLE: Final = "KV_CONFORMANCE_JOURNAL"
"""Names the journal in the environment of the process that runs the tests."""


SUPERVISED: Final = "kv_conformance_supervised"
"""Name of the pytest plugin that the supervisor gives to the process that runs the tests.

Without it :data:`JOURNAL_VARIABLE` means nothing: an environment alone must not turn a run into one
that nobody judges.
"""


_OF_A_TEST: Final = frozenset({"tier", "case"})
_FIELDS: Final[dict[str, frozenset[str]]] = {
    "start": frozenset(),
    "subject": frozenset({"tier", "origin", "capabilities", "faults"}),
    "begin": _OF_A_TEST | {"clause", "silence_s"},
    "violation": _OF_A_TEST | {"clause", "message"},
    "end": _OF_A_TEST | {"outcome", "message", "seconds"},
    "died": _OF_A_TEST | {"clause", "message"},
    "interrupted": frozenset(),
    "stopping": frozenset(),
    "plugins": frozenset({"names"}),
    "problem": frozenset({"message"}),
    "finished": frozenset(),
}
"""What every event says."""


@final
class Journal:
    """Appends events to a file.

    Thread-safe: an event is one write of one line to a file opened for appending.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.path = path

    @property
    def descriptor(self) -> int:
        """The open file: not a leak of the tier."""
        return self._descriptor

    def write(self, event: str, **fields: Any) -> None:
        """Append an event."""
        os.write(self._descriptor, (json.dumps({"event": event, **fields}) + "\n").encode())


_opened: dict[str, Journal] = {}


def journal_of_this_process() -> Journal | None:
    """Return the journal that the environment names, or ``None``: the tests are not supervised."""
    name = os.environ.get(JOURNAL_VARIABLE)
    if not name:
        return None
    if name not in _opened:
        _opened[name] = Journal(Path(name))
    return _opened[name]


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a journal; a last line that was cut off is left out.

    So is what the suite has not written: no harm comes of a tier that writes to any descriptor.
    """
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and _is_complete(event):
                yield event


def _is_complete(event: dict[str, Any]) -> bool:
    fields = _FIELDS.get(str(event.get("event")))
    return fields is not None and event.keys() >= fields
