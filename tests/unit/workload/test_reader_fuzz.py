"""Whatever a file holds, reading it gives a trace or a TraceFormatError."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kv_core.errors import TraceFormatError
from kv_core.workload import Trace, read_trace

if TYPE_CHECKING:
    from pathlib import Path

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 100)
    | st.floats()
    | st.text(max_size=5)
    | st.from_regex(r"[0-9]{1,4}(\.[0-9])?", fullmatch=True),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
IDS = st.lists(st.integers(0, 5), max_size=3)
REQUEST_FIELDS = {
    "timestamp": st.integers(0, 9),
    "input_length": st.integers(1, 1500),
    "output_length": st.integers(0, 9),
    "hash_ids": IDS
    | st.dictionaries(
        st.sampled_from(["sys_prompt", "passages_ids", "history", "web_search", "user_input"]), IDS
    ),
}
CALL_FIELDS = {
    "t": st.integers(0, 9),
    "in": st.integers(1, 300),
    "out": st.integers(0, 9),
    "hash_ids": IDS,
}


def nearly(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with mostly right fields, some missing, some of any value."""
    usual = st.fixed_dictionaries({}, optional={name: JSON | v for name, v in fields.items()})
    return st.fixed_dictionaries(fields) | usual


CALLS = st.recursive(
    nearly(CALL_FIELDS),
    lambda inner: st.fixed_dictionaries({"t": JSON, "requests": st.lists(inner, max_size=3)}),
    max_leaves=4,
)
SESSION_FIELDS = {
    "id": st.text(max_size=3),
    "block_size": st.integers(1, 64),
    "hash_id_scope": st.sampled_from(["local", "global"]),
    "requests": st.lists(CALLS, max_size=3),
}

TABLES = {
    "sys_prompt_id": 30,
    "passage_id": 64,
    "history_id": 0,
    "user_input_id": 1,
    "web_search_id": 200,
}


@pytest.fixture(scope="module")
def fuzzed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the file under test, in a folder with all tables of a RAGPulse trace."""
    folder = tmp_path_factory.mktemp("fuzz")
    for field, tokens in TABLES.items():
        rows = [{field: ident, "token_length": tokens} for ident in range(4)]
        (folder / f"{field}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "trace.jsonl"


def read_or_refuse(path: Path) -> Trace | None:
    """Return the trace, or ``None`` where it was refused in the right way."""
    try:
        trace = read_trace(path)
    except TraceFormatError:
        return None
    assert trace.requests
    assert trace.max_blocks > 0
    return trace


@given(content=st.binary(max_size=200))
@example(content=b'{"hash_ids": [], "timestamp": 1e999}')
@example(content=b'{"requests": ' + b"[" * 5000)
@settings(max_examples=150, deadline=None)
def test_any_bytes(fuzzed_file: Path, content: bytes) -> None:
    """Bytes are refused in the right way."""
    fuzzed_file.write_bytes(content)
    read_or_refuse(fuzzed_file)


@given(values=st.lists(JSON, max_size=3))
@settings(max_examples=150, deadline=None)
def test_any_json(fuzzed_file: Path, values: list[Any]) -> None:
    """JSON is refused in the right way."""
    fuzzed_file.write_text("\n".join(map(json.dumps, values)))
    assert read_or_refuse(fuzzed_file) is None


@given(values=st.lists(nearly(REQUEST_FIELDS), min_size=1, max_size=3), chat=st.booleans())
@settings(max_examples=300, deadline=None)
def test_nearly_right_lines(fuzzed_file: Path, values: list[dict[str, Any]], chat: bool) -> None:
    """Lines with a field that is missing or odd are refused in the right way."""
    if chat:
        values = [{"chat_id": 1, **value} for value in values]
    fuzzed_file.write_text("\n".join(map(json.dumps, values)))
    read_or_refuse(fuzzed_file)


@given(session=nearly(SESSION_FIELDS))
@settings(max_examples=300, deadline=None)
def test_nearly_right_sessions(fuzzed_file: Path, session: dict[str, Any]) -> None:
    """Sessions with a field that is missing or odd are refused in the right way."""
    fuzzed_file.write_text(json.dumps(session))
    read_or_refuse(fuzzed_file)


@given(cut=st.integers(0, 220), garbage=st.binary(max_size=3))
@settings(max_examples=100, deadline=None)
def test_torn_files(fuzzed_file: Path, cut: int, garbage: bytes) -> None:
    """A file that was cut or overwritten in the middle is refused in the right way."""
    line = {"timestamp": 3, "input_length": 600, "output_length": 1, "hash_ids": [4, 5]}
    whole = "".join(f"{json.dumps(line)}\n" for _ in range(3)).encode()
    fuzzed_file.write_bytes(whole[:cut] + garbage + whole[cut + len(garbage) :])
    read_or_refuse(fuzzed_file)
