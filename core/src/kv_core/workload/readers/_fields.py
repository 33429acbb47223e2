"""Checked access to what a trace file holds: every complaint names file, place and remedy."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from kv_core.errors import TraceFormatError
from kv_core.workload._chain import MAX_ID

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["MAX_TOKENS", "Record", "describe", "load_json", "read_lines"]

MAX_TOKENS: Final = 2**24
"""Longest prompt, answer or section that is believed: far beyond any context window."""

_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?")
_SHOWN: Final = 60


def describe(value: object) -> str:
    """Return a short text for what was found, whatever its size."""
    if isinstance(value, dict):
        return f"an object with {len(value)} fields"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@final
@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object of a trace file, with the place it stands at.

    Attributes:
        path: The file.
        line: One-based line, or ``None`` where one object fills the file.
        place: Place within the line, for example ``"requests[3]"``; empty for the line itself.
        fields: The object.
    """

    path: Path
    line: int | None
    place: str
    fields: dict[str, Any]

    def error(self, found: str, expected: str) -> TraceFormatError:
        """Return the error to raise for this object."""
        place = f"{self.place}: " if self.place else ""
        return TraceFormatError(
            f"{_location(self.path, self.line)}: {place}found {found}; expected {expected}",
            path=str(self.path),
            line=self.line,
        )

    def get(self, name: str, expected: str) -> Any:
        """Return a field that must be there.

        Raises:
            TraceFormatError: It is not.
        """
        try:
            return self.fields[name]
        except KeyError:
            raise self.error(f"no field {name!r}", f"{name!r}: {expected}") from None

    def tokens(self, name: str, *, least: int = 0) -> int:
        """Return a number of tokens, ``least`` to :data:`MAX_TOKENS`.

        Raises:
            TraceFormatError: The field is missing or something else.
        """
        expected = f"an integer from {least} to {MAX_TOKENS}"
        value = self.get(name, expected)
        if type(value) is not int or not least <= value <= MAX_TOKENS:
            raise self.error(f"{name!r} = {describe(value)}", expected)
        return value

    def seconds(self, name: str, *, per_second: int = 1) -> float:
        """Return a time in seconds.

        Args:
            name: The field: a number, or the digits of one as a string.
            per_second: Units of the field in a second.

        Raises:
            TraceFormatError: The field is missing, negative, not finite or no number.
        """
        expected = "a number that is not negative"
        value = self.get(name, expected)
        number = value
        if isinstance(number, str) and len(number) <= _SHOWN and _NUMBER.fullmatch(number):
            number = float(number)
        if type(number) in (int, float):
            try:
                result = float(number / per_second)
            except OverflowError:
                result = math.inf
            if 0 <= result < math.inf:
                return result
        raise self.error(f"{name!r} = {describe(value)}", expected)

    def ids(self, name: str) -> list[int]:
        """Return a list of block or section ids.

        Raises:
            TraceFormatError: The field is missing, no list, or has an element that is no id.
        """
        expected = f"a list of integers from 0 to {MAX_ID}"
        value = self.get(name, expected)
        if not isinstance(value, list):
            raise self.error(f"{name!r} = {describe(value)}", expected)
        for index, element in enumerate(value):
            if type(element) is not int or not 0 <= element <= MAX_ID:
                raise self.error(f"{name}[{index}] = {describe(element)}", expected)
        return value


def load_json(text: bytes, path: Path, line: int | None) -> object:
    """Parse JSON.

    Args:
        text: A line, or a whole file.
        path: The file, for the message.
        line: One-based line, or ``None`` for a whole file.

    Raises:
        TraceFormatError: The text is not UTF-8, not JSON, or nested too deeply.
    """
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise TraceFormatError(
            f"{_location(path, line)}: found bytes that are no UTF-8 text; expected JSON (unpack "
            "a compressed trace first)",
            path=str(path),
            line=line,
        ) from error
    except json.JSONDecodeError as error:
        at = error.lineno if line is None else line
        raise TraceFormatError(
            f"{_location(path, at)}, column {error.colno}: found text that is not JSON "
            f"({error.msg}); expected one JSON object",
            path=str(path),
            line=at,
        ) from error
    except (ValueError, RecursionError) as error:
        # Thousands of digits in a number, thousands of brackets.
        raise TraceFormatError(
            f"{_location(path, line)}: found JSON beyond what Python reads ({error}); expected one "
            "JSON object",
            path=str(path),
            line=line,
        ) from error


def read_lines(path: Path) -> Iterator[Record]:
    """Yield the object of each line that is not blank.

    Raises:
        TraceFormatError: The file cannot be read, or a line is no JSON object.
    """
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                value = load_json(text, path, number)
                if not isinstance(value, dict):
                    raise TraceFormatError(
                        f"{_location(path, number)}: found {describe(value)}; expected one JSON "
                        "object",
                        path=str(path),
                        line=number,
                    )
                yield Record(path, number, "", value)
    except OSError as error:
        raise TraceFormatError(
            f"{path}: cannot be read ({error.strerror or error})", path=str(path)
        ) from error


def _location(path: Path, line: int | None) -> str:
    return str(path) if line is None else f"{path}, line {line}"
