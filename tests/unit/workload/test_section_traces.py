"""Tests of the RAGPulse reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.errors import ConfigError, TraceFormatError
from kv_core.workload import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    WriteLines = Callable[[str, list[Any]], Path]

TABLES = {
    "1_sys_prompt.jsonl": [("sys_prompt_id", 1, 100), ("sys_prompt_id", 2, 28)],
    "2_passages.jsonl": [("passage_id", 1, 64), ("passage_id", 2, 50)],
    "3_history.jsonl": [("history_id", 1, 10)],
    "4_user_input.jsonl": [("user_input_id", 1, 9), ("user_input_id", 2, 9)],
    "5_web_search.jsonl": [("web_search_id", 1, 30)],
}


def line(
    *,
    sys_prompt: list[int],
    passages: list[int],
    user_input: int,
    tokens: int,
    timestamp: Any = "82",
) -> dict[str, Any]:
    """Return one line of a trace."""
    return {
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": 5,
        "hash_ids": {
            "sys_prompt": sys_prompt,
            "passages_ids": passages,
            "history": [],
            "web_search": [],
            "user_input": [user_input],
        },
        "session_id": "s",
    }


GOOD = line(sys_prompt=[1, 2], passages=[1, 2], user_input=1, tokens=257)


@pytest.fixture
def write_trace(write_lines: WriteLines) -> Callable[..., Path]:
    """Return a function that writes a trace with its tables."""

    def write(*lines: Any) -> Path:
        for name, rows in TABLES.items():
            write_lines(name, [{field: ident, "token_length": n} for field, ident, n in rows])
        return write_lines("0_trace.jsonl", list(lines))

    return write


def test_cuts_the_sections_into_blocks(write_trace: Callable[..., Path]) -> None:
    """A prompt of 251 section tokens and 6 more has five blocks of 64."""
    trace = read_trace(write_trace(GOOD))
    (request,) = trace.requests
    assert (trace.format, trace.block_tokens) == ("ragpulse", 64)
    assert (request.arrival_s, request.prompt_tokens, request.output_tokens) == (82.0, 257, 5)
    assert len(request.block_hashes) == 5


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        # 128 tokens of instructions, then passages of 64 and 50 tokens.
        (line(sys_prompt=[1, 2], passages=[1, 2], user_input=2, tokens=257), 3),
        (line(sys_prompt=[1, 2], passages=[2, 1], user_input=1, tokens=257), 2),
        (line(sys_prompt=[1], passages=[1, 2], user_input=1, tokens=229), 1),
        (line(sys_prompt=[2, 1], passages=[1, 2], user_input=1, tokens=257), 0),
        (line(sys_prompt=[1, 2], passages=[1, 2], user_input=1, tokens=257), 5),
        (line(sys_prompt=[1, 2], passages=[1, 2], user_input=1, tokens=256), 4),
    ],
)
def test_shares_blocks_as_far_as_the_tokens_agree(
    write_trace: Callable[..., Path], other: dict[str, Any], shared: int
) -> None:
    """Order and position of sections count: a block after a difference is another block."""
    first, second = read_trace(write_trace(GOOD, other)).requests
    pairs = zip(first.block_hashes, second.block_hashes, strict=False)
    assert [left == right for left, right in pairs].count(True) == shared
    assert first.block_hashes[:shared] == second.block_hashes[:shared]


def test_section_order_is_the_order_of_the_line(write_trace: Callable[..., Path]) -> None:
    """The sections stand in the prompt as they stand in the object of the line."""
    other = {**GOOD, "hash_ids": dict(reversed(GOOD["hash_ids"].items()))}
    first, second = read_trace(write_trace(GOOD, other)).requests
    assert first.block_hashes[0] != second.block_hashes[0]


@pytest.mark.parametrize(("block_tokens", "blocks"), [(1, 257), (16, 17), (512, 1)])
def test_block_length_can_be_chosen(
    write_trace: Callable[..., Path], block_tokens: int, blocks: int
) -> None:
    """The format leaves the length of a block open."""
    trace = read_trace(write_trace(GOOD), block_tokens=block_tokens)
    assert trace.block_tokens == block_tokens
    assert trace.max_blocks == blocks


def test_clock_that_starts_again_opens_the_next_week(write_trace: Callable[..., Path]) -> None:
    """The recording's clock counts within a week; a small step back is mere disorder."""
    times = ["100", "90", "604453", "0", "27", "604453", "3"]
    trace = read_trace(write_trace(*({**GOOD, "timestamp": time} for time in times)))
    assert [(request.req_id, request.arrival_s) for request in trace.requests] == [
        ("ragpulse-2", 90),
        ("ragpulse-1", 100),
        ("ragpulse-3", 604_453),
        ("ragpulse-4", 604_800),
        ("ragpulse-5", 604_827),
        ("ragpulse-6", 604_800 + 604_453),
        ("ragpulse-7", 2 * 604_800 + 3),
    ]


def test_folder_and_file_are_the_same_trace(write_trace: Callable[..., Path]) -> None:
    """The tables in the folder are no traces of their own."""
    path = write_trace(GOOD)
    assert read_trace(path.parent).requests == read_trace(path).requests


def test_tables_are_found_under_any_name(write_trace: Callable[..., Path], tmp_path: Path) -> None:
    """Tables are told apart by their fields, and files that are none are left alone."""
    path = write_trace(GOOD)
    expected = read_trace(path).requests
    for number, name in enumerate(TABLES):
        (tmp_path / name).rename(tmp_path / f"renamed-{9 - number}.jsonl")
    (tmp_path / "notes.jsonl").write_text("no JSON")
    assert read_trace(path).requests == expected


@pytest.mark.parametrize("name", list(TABLES))
def test_missing_table_is_named(
    write_trace: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """Without the lengths of a kind of section there is no trace."""
    path = write_trace(GOOD)
    (tmp_path / name).unlink()
    with pytest.raises(TraceFormatError, match=rf"found no table for section .*{name}"):
        read_trace(path)


def test_damaged_table_is_named(write_trace: Callable[..., Path], tmp_path: Path) -> None:
    """A table that cannot be read is not merely missing."""
    path = write_trace(GOOD)
    (tmp_path / "3_history.jsonl").write_text("{")
    with pytest.raises(
        TraceFormatError, match=r"no table for section 'history'.*3_history\.jsonl, line 1"
    ):
        read_trace(path)


def test_second_table_of_a_kind_is_refused(
    write_trace: Callable[..., Path], write_lines: WriteLines
) -> None:
    """Two tables of one kind are two answers."""
    path = write_trace(GOOD)
    write_lines("6_more.jsonl", [{"history_id": 2, "token_length": 3}])
    with pytest.raises(TraceFormatError, match=r"second table of 'history_id'"):
        read_trace(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"history_id": 1, "token_length": 11}, r"'token_length' = 11 for id 1; expected 10"),
        ({"history_id": "x", "token_length": 1}, r"'history_id' = 'x'; expected an integer"),
        ({"history_id": 2, "token_length": -1}, r"'token_length' = -1; expected an integer"),
        ({"history_id": 2}, r"no field 'token_length'"),
        ({"token_length": 2}, r"no field 'history_id'"),
    ],
)
def test_bad_row_of_a_table_is_named(
    write_trace: Callable[..., Path],
    tmp_path: Path,
    write_lines: WriteLines,
    row: Any,
    message: str,
) -> None:
    """The error names the table and the line."""
    path = write_trace(GOOD)
    write_lines("3_history.jsonl", [{"history_id": 1, "token_length": 10}, row])
    with pytest.raises(TraceFormatError, match=f"line 2: found {message}") as caught:
        read_trace(path)
    assert caught.value.path == str(tmp_path / "3_history.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_ids": [1, 2]}, r"'hash_ids' = a list of 2; expected an object of sections"),
        ({"hash_ids": {"footer": [1]}}, r"hash_ids: found section 'footer'; expected one of"),
        ({"hash_ids": {"history": 1}}, r"hash_ids: found 'history' = 1; expected a list"),
        ({"hash_ids": {"history": [7]}}, r"id 7 in 'history'; expected an id of its table"),
        ({"hash_ids": {"history": [[]]}}, r"history\[0\] = a list of 0; expected"),
        ({"input_length": 250}, r"'input_length' = 250, but sections of 251 tokens"),
        ({"timestamp": ""}, r"'timestamp' = ''; expected a number"),
        ({"timestamp": "nan"}, r"'timestamp' = 'nan'; expected a number"),
    ],
)
def test_bad_line_is_named(
    write_trace: Callable[..., Path], change: dict[str, Any], message: str
) -> None:
    """The error names the line and the section."""
    with pytest.raises(TraceFormatError, match=f"line 2: .*{message}"):
        read_trace(write_trace(GOOD, {**GOOD, **change}))


def test_other_formats_fix_the_block_length(write_lines: WriteLines) -> None:
    """A block length that contradicts the ids is refused, the right one is not."""
    good = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}
    path = write_lines("t", [good])
    assert read_trace(path, block_tokens=512).block_tokens == 512
    with pytest.raises(ConfigError, match="blocks of 512 tokens") as caught:
        read_trace(path, block_tokens=64)
    assert caught.value.setting == "block_tokens"
