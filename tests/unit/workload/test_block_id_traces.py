"""Tests of the Mooncake and Bailian readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.errors import TraceFormatError
from kv_core.workload import HASH_BYTES, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    WriteLines = Callable[[str, list[Any]], Path]

GOOD: dict[str, Any] = {
    "timestamp": 1500,
    "input_length": 1025,
    "output_length": 7,
    "hash_ids": [0, 1, 2],
}
BAILIAN: dict[str, Any] = {
    "chat_id": 5,
    "parent_chat_id": -1,
    "timestamp": 61.25,
    "input_length": 33,
    "output_length": 9,
    "type": "text",
    "turn": 1,
    "hash_ids": [10, 11, 12],
}


def test_reads_a_mooncake_line(write_lines: WriteLines) -> None:
    """Milliseconds become seconds, ids become hashes."""
    trace = read_trace(write_lines("any-name", [GOOD]))
    (request,) = trace.requests
    assert (trace.name, trace.format, trace.block_tokens) == ("any-name", "mooncake", 512)
    assert request.req_id == "mooncake-1"
    assert (request.arrival_s, request.prompt_tokens, request.output_tokens) == (1.5, 1025, 7)
    assert [len(block_hash) for block_hash in request.block_hashes] == [HASH_BYTES] * 3


def test_equal_ids_are_equal_blocks(write_lines: WriteLines) -> None:
    """Requests share blocks as far as their ids agree."""
    other = {**GOOD, "hash_ids": [0, 1, 9]}
    first, second = read_trace(write_lines("t", [GOOD, other])).requests
    assert first.block_hashes[:2] == second.block_hashes[:2]
    assert first.block_hashes[2] != second.block_hashes[2]


def test_requests_come_in_time_order(write_lines: WriteLines) -> None:
    """An early request that stands late is moved; equal times keep the order of the file."""
    times = [20, 10, 20, 10, 0]
    trace = read_trace(write_lines("t", [{**GOOD, "timestamp": time} for time in times]))
    assert [request.req_id for request in trace.requests] == [
        "mooncake-5",
        "mooncake-2",
        "mooncake-4",
        "mooncake-1",
        "mooncake-3",
    ]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
def test_limit_keeps_the_first_in_time_order(write_lines: WriteLines, limit: int) -> None:
    """A limited trace is the beginning of the whole one, ties included."""
    times = [20, 10, 20, 10, 0]
    path = write_lines("t", [{**GOOD, "timestamp": time} for time in times])
    assert read_trace(path, limit=limit).requests == read_trace(path).requests[:limit]


def test_blank_lines_are_skipped(write_lines: WriteLines) -> None:
    """Blank lines count as lines and as nothing else."""
    path = write_lines("t", [GOOD])
    path.write_text("\n" + path.read_text() + " \n" + path.read_text() + "\n\n")
    assert [request.req_id for request in read_trace(path).requests] == ["mooncake-2", "mooncake-4"]


def test_reads_a_bailian_line(write_lines: WriteLines) -> None:
    """Blocks of 16 tokens and times in seconds."""
    trace = read_trace(write_lines("t", [BAILIAN]))
    assert (trace.format, trace.block_tokens) == ("bailian", 16)
    assert trace.requests[0].arrival_s == 61.25
    assert len(trace.requests[0].block_hashes) == 3


def test_bailian_block_without_an_id_is_never_shared(write_lines: WriteLines) -> None:
    """Where only full blocks have ids, the partial last one gets a hash of its own."""
    line = {**BAILIAN, "hash_ids": [10, 11]}
    first, second = read_trace(write_lines("t", [line, line])).requests
    assert first.block_hashes[:2] == second.block_hashes[:2]
    assert first.block_hashes[2] != second.block_hashes[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_length": -1}, r"'input_length' = -1; expected an integer from 1 to"),
        ({"input_length": 0}, r"'input_length' = 0; expected an integer from 1 to"),
        ({"input_length": 2.5}, r"'input_length' = 2.5; expected an integer"),
        ({"input_length": True}, r"'input_length' = True; expected an integer"),
        ({"input_length": 10**30}, r"'input_length' = 1000+; expected an integer from 1 to"),
        ({"output_length": "9"}, r"'output_length' = '9'; expected an integer from 0 to"),
        ({"output_length": None}, r"'output_length' = None; expected an integer"),
        ({"timestamp": "soon"}, r"'timestamp' = 'soon'; expected a number"),
        ({"timestamp": "1_0"}, r"'timestamp' = '1_0'; expected a number"),
        ({"timestamp": -0.5}, r"'timestamp' = -0.5; expected a number that is not negative"),
        ({"timestamp": float("nan")}, r"'timestamp' = nan; expected a number"),
        ({"timestamp": float("inf")}, r"'timestamp' = inf; expected a number"),
        ({"timestamp": 10**400}, r"'timestamp' = 1000+\.\.\.; expected a number"),
        ({"timestamp": [1]}, r"'timestamp' = a list of 1; expected a number"),
        ({"hash_ids": "abc"}, r"'hash_ids' = 'abc'; expected a list of integers"),
        ({"hash_ids": {"a": 1}}, r"'hash_ids' = an object with 1 fields; expected a list"),
        ({"hash_ids": [0, "1", 2]}, r"hash_ids\[1\] = '1'; expected a list of integers"),
        ({"hash_ids": [0, 1, -2]}, r"hash_ids\[2\] = -2; expected"),
        ({"hash_ids": [0, 1, 2**63]}, r"hash_ids\[2\] = 9223372036854775808; expected"),
        ({"hash_ids": [0, False, 2]}, r"hash_ids\[1\] = False; expected"),
        ({"hash_ids": [0, 1]}, r"2 hash_ids for a prompt of 1025 tokens; expected 3"),
        ({"hash_ids": [0, 1, 2, 3]}, r"4 hash_ids for a prompt of 1025 tokens; expected 3"),
    ],
)
def test_names_the_line_and_the_field(
    write_lines: WriteLines, change: dict[str, Any], message: str
) -> None:
    """The error says where, what was found and what was expected."""
    path = write_lines("t", [GOOD, {**GOOD, **change}])
    with pytest.raises(TraceFormatError, match=f"line 2: found {message}") as caught:
        read_trace(path)
    assert (caught.value.path, caught.value.line) == (str(path), 2)


@pytest.mark.parametrize("field", list(GOOD))
def test_names_a_missing_field(write_lines: WriteLines, field: str) -> None:
    """Every field is needed in every line."""
    bad = {name: value for name, value in GOOD.items() if name != field}
    with pytest.raises(TraceFormatError, match=f"line 2: found no field '{field}'"):
        read_trace(write_lines("t", [GOOD, bad]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"line 2, column [12]: found text that is not JSON"),
        ("3", r"line 2: found 3; expected one JSON object"),
        ("[" * 100_000, r"line 2: found JSON beyond what Python reads"),
        ("1" * 10_000, r"line 2: found JSON beyond what Python reads"),
        ("null", r"line 2: found None; expected one JSON object"),
    ],
)
def test_names_a_line_that_is_no_object(write_lines: WriteLines, text: str, message: str) -> None:
    """A damaged line is named, also when Python's own parser gives up on it."""
    path = write_lines("t", [GOOD])
    path.write_text(f"{path.read_text()}{text}\n")
    with pytest.raises(TraceFormatError, match=message) as caught:
        read_trace(path)
    assert caught.value.line == 2


def test_names_bytes_that_are_no_text(write_lines: WriteLines) -> None:
    """Binary garbage in a line is named."""
    path = write_lines("t", [GOOD])
    path.write_bytes(path.read_bytes() + b'{"timestamp": "\xff\xfe"}\n')
    with pytest.raises(TraceFormatError, match=r"line 2: found bytes that are no UTF-8 text"):
        read_trace(path)


def test_checks_lines_beyond_the_limit(write_lines: WriteLines) -> None:
    """A limit does not hide a damaged line: which requests come first depends on all lines."""
    path = write_lines("t", [GOOD, {**GOOD, "input_length": -1}])
    with pytest.raises(TraceFormatError, match="line 2"):
        read_trace(path, limit=1)
