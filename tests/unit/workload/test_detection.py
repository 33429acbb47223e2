"""Tests of format detection and of what is no trace at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.errors import ConfigError, TraceFormatError
from kv_core.workload import detect_format, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    WriteLines = Callable[[str, list[Any]], Path]

MOONCAKE = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}
SESSION = {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": []}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (MOONCAKE, "mooncake"),
        ({**MOONCAKE, "chat_id": 1}, "bailian"),
        ({**MOONCAKE, "hash_ids": {"history": []}}, "ragpulse"),
        (SESSION, "claude-code"),
    ],
)
@pytest.mark.parametrize("name", ["trace.jsonl", "ragpulse.txt", "conversation_trace"])
def test_format_is_judged_by_content(
    write_lines: WriteLines, name: str, value: dict[str, Any], expected: str
) -> None:
    """The name of a file says nothing about its format."""
    assert detect_format(write_lines(name, [value])) == expected


def test_path_may_be_a_string(write_lines: WriteLines) -> None:
    """Both functions take what a command line gives."""
    path = str(write_lines("t", [MOONCAKE]))
    assert detect_format(path) == "mooncake"
    assert len(read_trace(path).requests) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"found an empty file"),
        (b"\n \n", r"found an empty file"),
        (b"timestamp,input_length\n0,5\n", r"line 1, column 1: found text that is not JSON"),
        (b"\n\nhello", r"line 3, column 1: found text that is not JSON"),
        (b'{\n"id": 1,\n,}', r"line 3, column 1: found text that is not JSON"),
        (b"\x1f\x8b\x08\x00\xff", r"found bytes that are no UTF-8 text.*unpack a compressed"),
        (b"[" * 100_000, r"found JSON beyond what Python reads"),
        (b"[1, 2]", r"found JSON that is not an object"),
        (b'"text"', r"found JSON that is not an object"),
        (b"{}", r"found JSON that is not a trace \(fields: none\)"),
        (b'{"b": 1, "a": 2}', r"not a trace \(fields: 'a', 'b'\); expected a Mooncake"),
        (b'{"history_id": 1, "token_length": 2}', r"found a table of section lengths"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """The error says what was found and which formats there are."""
    path = tmp_path / "file"
    path.write_bytes(content)
    for function in (detect_format, read_trace):
        with pytest.raises(TraceFormatError, match=message) as caught:
            function(path)
        assert caught.value.path == str(path)
        assert caught.value.code == "KVC701"


@pytest.mark.parametrize("name", ["missing", "missing\0", "m" * 5000])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    """A path that leads nowhere is an error of the same class."""
    with pytest.raises(TraceFormatError, match="cannot be read"):
        read_trace(tmp_path / name)


def test_special_file_is_refused(tmp_path: Path) -> None:
    """A pipe is refused instead of waited for."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(TraceFormatError, match="neither a file nor a folder"):
        read_trace(path)


def test_file_that_fails_to_read_is_named() -> None:
    """An error of the operating system, here EIO, is an error of the same class."""
    # The memory of a process is a regular file whose first page nobody can read, not even root.
    with pytest.raises(TraceFormatError, match="/proc/self/mem: cannot be read"):
        read_trace(Path("/proc/self/mem"))


def test_folder_with_one_trace_is_that_trace(write_lines: WriteLines, tmp_path: Path) -> None:
    """Files that are not named *.json or *.jsonl, hidden ones and folders are passed over."""
    path = write_lines("t.jsonl", [MOONCAKE])
    for name in ("LICENSE", ".hidden.jsonl"):
        (tmp_path / name).write_text("no JSON")
    (tmp_path / "folder.json").mkdir()
    assert detect_format(tmp_path) == "mooncake"
    assert read_trace(tmp_path).requests == read_trace(path).requests


def test_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    """An empty folder, or one that holds only folders of traces, is no trace."""
    (tmp_path / "below").mkdir()
    with pytest.raises(TraceFormatError, match="found a folder without a trace"):
        read_trace(tmp_path)


@pytest.mark.parametrize("other", [MOONCAKE, SESSION])
def test_folder_with_several_traces_is_refused(
    write_lines: WriteLines, tmp_path: Path, other: dict[str, Any]
) -> None:
    """Only sessions are merged."""
    write_lines("a.jsonl", [MOONCAKE])
    write_lines("b.json", [other])
    with pytest.raises(TraceFormatError, match=r"found several traces: a\.jsonl \(mooncake\)"):
        read_trace(tmp_path)


def test_damaged_file_in_a_folder_is_not_passed_over(
    write_lines: WriteLines, tmp_path: Path
) -> None:
    """A folder with a damaged session is an error, not a smaller trace."""
    write_lines("a.json", [SESSION])
    (tmp_path / "b.json").write_text('{"id": "b", "requests": [')
    with pytest.raises(TraceFormatError, match=r"b\.json"):
        read_trace(tmp_path)


@pytest.mark.parametrize("setting", ["limit", "block_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_refuses_arguments_out_of_range(write_lines: WriteLines, setting: str, value: Any) -> None:
    """The error names the argument."""
    path = write_lines("t", [MOONCAKE])
    with pytest.raises(ConfigError, match=f"{setting} must be a positive integer") as caught:
        read_trace(path, **{setting: value})
    assert caught.value.setting == setting
