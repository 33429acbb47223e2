"""Secrets: which settings are some, and everything in which they must not be seen.

**Who owns what.** A :class:`Listener` hears all threads; what it heard is read on the suite's
thread after the tier has been shut down.
"""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
import typing
import warnings
from typing import TYPE_CHECKING, Final, final
from unittest.mock import patch
from urllib.parse import quote

from pydantic import BaseModel, Secret, SecretBytes, SecretStr

from kv_conformance.rig._process import command_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from pydantic.fields import FieldInfo
    from typing_extensions import Self

__all__ = ["Listener", "plain_secrets", "secret_fields", "secrets_in"]

_SECRET_TYPES: Final = (SecretStr, SecretBytes, Secret)

# A shorter one is found in texts that have nothing to do with it.
_LEAST_CHARACTERS: Final = 8

_WORDS: Final = frozenset({"secret", "password", "passwd", "passphrase", "token", "credential"})
_PHRASES: Final = ("access_key", "api_key", "private_key")
# What names a secret, or where it is, is none.
_HARMLESS_ENDINGS: Final = ("_file", "_path", "_dir", "_env", "_id", "_name", "_url", "_type")


def _parts(annotation: object) -> Iterator[object]:
    """Yield a type and all that it is made of: ``str | None`` holds ``str``."""
    yield annotation
    for part in typing.get_args(annotation):
        yield from _parts(part)


def secret_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the settings that are declared to be secret text, by name."""
    return {
        name: field
        for name, field in model.model_fields.items()
        if SecretStr in _parts(field.annotation)
    }


def secrets_in(value: object) -> frozenset[str]:
    """Return the secrets of validated settings, however deep, also as they look in an address.

    Those that are too short to be told from ordinary words are left out.
    """
    return frozenset(text for text in _secrets(value) if len(text) >= _LEAST_CHARACTERS)


def _secrets(value: object) -> Iterator[str]:
    if isinstance(value, _SECRET_TYPES):
        found = value.get_secret_value()
        text = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
        yield from (text, quote(text, safe=""), repr(text)[1:-1])
    elif isinstance(value, BaseModel):
        for _, item in value:
            yield from _secrets(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _secrets(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _secrets(item)


def plain_secrets(model: type[BaseModel]) -> list[str]:
    """Return the settings whose names say that they are secrets, and whose types do not."""
    return [name for name, field in model.model_fields.items() if _is_plain(name, field)]


def _is_plain(name: str, field: FieldInfo) -> bool:
    lower = name.lower()
    if lower.endswith(_HARMLESS_ENDINGS):
        return False
    telling = not _WORDS.isdisjoint(lower.split("_")) or any(part in lower for part in _PHRASES)
    parts = set(map(id, _parts(field.annotation)))
    return telling and bool(parts & {id(str), id(bytes)})


@final
class Listener:
    """Hears what is logged, printed, warned of and shown in lists of processes.

    Every record of every logger, down to DEBUG, also of loggers that hand nothing on.
    """

    def __init__(self) -> None:
        self._heard: list[tuple[str, str]] = []
        self._printed = io.StringIO()
        self._stack = contextlib.ExitStack()
        self._warnings: list[warnings.WarningMessage] = []

    def __enter__(self) -> Self:
        root = logging.getLogger()

        # Where a record goes once it has passed the filters of its logger: a tier may mask there
        # what its client library says.
        hand_on = logging.Logger.callHandlers

        def note(logger: logging.Logger, record: logging.LogRecord) -> None:
            self._note(record)
            hand_on(logger, record)

        self._stack.callback(root.setLevel, root.level)
        root.setLevel(logging.DEBUG)
        self._stack.enter_context(patch.object(logging.Logger, "callHandlers", note))
        self._stack.enter_context(contextlib.redirect_stdout(self._printed))
        self._stack.enter_context(contextlib.redirect_stderr(self._printed))
        self._warnings = self._stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _note(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            text = f"{record.msg} {record.args}"
        if record.exc_info and record.exc_info[1] is not None:
            text += "".join(traceback.format_exception(record.exc_info[1]))
        self._heard.append((f"a log record of {record.name} ({record.levelname})", text))

    def hear(self, where: str, text: object) -> None:
        """Note a text by hand."""
        self._heard.append((where, str(text)))

    def look_at_processes(self) -> None:
        """Note the command lines of all child processes: everybody on the machine can see them."""
        for line in command_lines():
            self.hear("the command line of a child process", line)

    def find(self, secrets: frozenset[str]) -> list[str]:
        """Return where a secret was seen."""
        heard = [
            *self._heard,
            ("what was printed", self._printed.getvalue()),
            *(("a warning", str(warning.message)) for warning in self._warnings),
        ]
        found = [where for where, text in heard if any(secret in text for secret in secrets)]
        return list(dict.fromkeys(found))
