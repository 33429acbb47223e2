"""What is in a file or folder, judged by the fields of its first object."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, final

from kv_core.errors import TraceFormatError
from kv_core.workload.readers._fields import load_json

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["Source", "TraceFormat", "detect_format", "locate", "sniff"]

TraceFormat = Literal["bailian", "claude-code", "mooncake", "ragpulse"]
"""Formats that can be read, see :func:`read_trace`."""

_SUFFIXES: Final = frozenset({".json", ".jsonl"})
_TABLE: Final = "table"
_KNOWN: Final = (
    "a Mooncake or Bailian trace (objects with 'hash_ids' as a list), a RAGPulse trace "
    "('hash_ids' as sections) or a Claude Code session (one object with 'requests')"
)


@final
@dataclass(frozen=True, slots=True)
class Source:
    """A trace that was found.

    Attributes:
        name: Name of the file or folder that was asked for.
        format: Its format.
        paths: Its files, sorted by name; more than one only for sessions.
    """

    name: str
    format: TraceFormat
    paths: tuple[Path, ...]


def detect_format(path: str | PathLike[str]) -> TraceFormat:
    """Return the format of a trace, judged by its content and not by its name.

    Args:
        path: A file, or a folder that holds one trace.

    Raises:
        TraceFormatError: There is no such file, or it is not a trace of a known format.
    """
    return locate(Path(path)).format


def locate(path: Path) -> Source:
    """Find the files of a trace.

    In a folder only files named ``*.json`` or ``*.jsonl`` count, and each must be a trace or a
    table: a damaged one is an error rather than a smaller trace.

    Raises:
        TraceFormatError: There is no such file, or not exactly one trace in it.
    """
    name = path.name or str(path)
    if not stat.S_ISDIR(_mode(path)):
        found = sniff(path)
        if found == _TABLE:
            raise TraceFormatError(
                f"{path}: found a table of section lengths; expected the trace that goes with it "
                "(name that file, or the folder)",
                path=str(path),
            )
        return Source(name, found, (path,))
    formats = {file: kind for file in _candidates(path) if (kind := sniff(file)) != _TABLE}
    kinds = set(formats.values())
    if not formats:
        raise TraceFormatError(
            f"{path}: found a folder without a trace in it; expected {_KNOWN} in a file named "
            "*.json or *.jsonl, not in a folder below",
            path=str(path),
        )
    if len(kinds) > 1 or (len(formats) > 1 and kinds != {"claude-code"}):
        listing = ", ".join(f"{file.name} ({kind})" for file, kind in formats.items())
        raise TraceFormatError(
            f"{path}: found several traces: {listing}; expected one, or sessions only (name one "
            "of the files)",
            path=str(path),
        )
    return Source(name, kinds.pop(), tuple(formats))


def sniff(path: Path) -> TraceFormat | Literal["table"]:
    """Return what a file holds.

    Raises:
        TraceFormatError: Nothing that is known, or the file cannot be read.
    """
    if not stat.S_ISREG(_mode(path)):
        raise TraceFormatError(
            f"{path}: found something that is neither a file nor a folder", path=str(path)
        )
    value = _first_object(path)
    if not isinstance(value, dict):
        raise TraceFormatError(
            f"{path}: found JSON that is not an object; expected {_KNOWN}", path=str(path), line=1
        )
    kind = _classify(value)
    if kind is None:
        fields = ", ".join(repr(field)[:40] for field in sorted(value)[:12]) or "none"
        raise TraceFormatError(
            f"{path}: found JSON that is not a trace (fields: {fields}); expected {_KNOWN}",
            path=str(path),
            line=1,
        )
    return kind


def _classify(fields: dict[str, Any]) -> TraceFormat | Literal["table"] | None:
    ids = fields.get("hash_ids")
    if isinstance(ids, dict):
        return "ragpulse"
    if "hash_ids" in fields:
        return "bailian" if "chat_id" in fields else "mooncake"
    if "requests" in fields:
        return "claude-code"
    return _TABLE if "token_length" in fields else None


def _first_object(path: Path) -> object:
    try:
        with path.open("rb") as file:
            number = 0
            for number, text in enumerate(file, start=1):  # noqa: B007 - used after the loop
                if text.strip():
                    break
            else:
                raise TraceFormatError(
                    f"{path}: found an empty file; expected {_KNOWN}", path=str(path)
                )
            try:
                return load_json(text, path, number)
            except TraceFormatError:
                # One object over many lines, or no JSON at all: the whole file tells.
                rest = file.read()
            return load_json(b"\n" * (number - 1) + text + rest, path, None)
    except OSError as error:
        raise _unreadable(path, error) from error


def _candidates(folder: Path) -> list[Path]:
    try:
        return sorted(
            file
            for file in folder.iterdir()
            if file.suffix in _SUFFIXES and not file.name.startswith(".") and file.is_file()
        )
    except OSError as error:
        raise _unreadable(folder, error) from error


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError | ValueError) -> TraceFormatError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return TraceFormatError(
        f"{path}: cannot be read ({reason}); expected a trace file or a folder that holds one",
        path=str(path),
    )
