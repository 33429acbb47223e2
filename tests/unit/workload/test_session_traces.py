"""Tests of the Claude Code reader."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.errors import TraceFormatError
from kv_core.workload import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def call(t: float, ids: list[int], *, tokens: int | None = None) -> dict[str, Any]:
    """Return one request."""
    tokens = 64 * len(ids) + 10 if tokens is None else tokens
    return {"t": t, "type": "n", "in": tokens, "out": 3, "hash_ids": ids, "api_time": 1.0}


def subagent(t: float, *requests: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a sub-agent."""
    return {"t": t, "type": "subagent", "agent_id": "a", "requests": list(requests)}


@pytest.fixture
def write_session(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes one session file."""

    def write(ident: str, *requests: Any, indent: int | None = None, **fields: Any) -> Path:
        session = {
            "id": ident,
            "models": ["m"],
            "block_size": 64,
            "hash_id_scope": "local",
            "requests": list(requests),
            **fields,
        }
        path = tmp_path / f"trace_{ident}.json"
        path.write_text(json.dumps(session, indent=indent))
        return path

    return write


def test_reads_a_session(write_session: Callable[..., Path]) -> None:
    """Ids cover the full blocks; the partial last one gets a hash of its own."""
    trace = read_trace(write_session("s1", call(0.5, [1, 2]), call(2, [1, 2, 3], tokens=192)))
    first, second = trace.requests
    assert (trace.format, trace.block_tokens) == ("claude-code", 64)
    assert (first.req_id, first.arrival_s) == ("s1/0", 0.5)
    assert (first.prompt_tokens, first.output_tokens) == (138, 3)
    assert len(first.block_hashes) == 3
    assert first.block_hashes[:2] == second.block_hashes[:2]
    assert first.block_hashes[2] not in second.block_hashes


def test_equal_prompts_share_no_partial_block(write_session: Callable[..., Path]) -> None:
    """What the partial last block holds is not recorded, so it is shared with nobody."""
    first, second = read_trace(write_session("s", call(0, [1]), call(1, [1]))).requests
    assert first.block_hashes[0] == second.block_hashes[0]
    assert first.block_hashes[1] != second.block_hashes[1]


def test_sub_agents_are_found_at_any_depth_and_ordered_by_time(
    write_session: Callable[..., Path],
) -> None:
    """Nested requests take their place on the clock of the session and share its ids."""
    trace = read_trace(
        write_session(
            "s",
            call(0, [1]),
            subagent(1, call(5, [7]), subagent(2, call(2.5, [7, 8])), call(1, [7, 9])),
            call(3, [1, 2]),
        )
    )
    assert [(r.req_id, r.arrival_s) for r in trace.requests] == [
        ("s/0", 0),
        ("s/3", 1),
        ("s/2", 2.5),
        ("s/4", 3),
        ("s/1", 5),
    ]
    assert trace.requests[1].block_hashes[0] == trace.requests[2].block_hashes[0]


def test_depth_is_no_limit(write_session: Callable[..., Path]) -> None:
    """Nesting as deep as JSON itself can be read is walked without recursion."""
    entry = call(0, [1])
    for _ in range(150):
        entry = subagent(0, entry)
    assert len(read_trace(write_session("s", entry)).requests) == 1


def test_folder_merges_sessions_in_time_order(
    write_session: Callable[..., Path], tmp_path: Path
) -> None:
    """Sessions run side by side from time zero; equal times keep the order of the file names."""
    write_session("b", call(0, [1]), call(2, [1, 2]))
    write_session("a", call(0, [1]), call(3, [1, 2]))
    trace = read_trace(tmp_path)
    assert [request.req_id for request in trace.requests] == ["a/0", "b/0", "b/1", "a/1"]
    assert trace.name == tmp_path.name
    assert read_trace(tmp_path, limit=3).requests == trace.requests[:3]


@pytest.mark.parametrize(("scope", "equal"), [("local", False), ("global", True)])
def test_scope_decides_whether_sessions_share_blocks(
    write_session: Callable[..., Path], tmp_path: Path, scope: str, equal: bool
) -> None:
    """A local id means something else in every session."""
    write_session("a", call(0, [1]), hash_id_scope=scope)
    write_session("b", call(0, [1]), hash_id_scope=scope)
    first, second = read_trace(tmp_path).requests
    assert (first.block_hashes[0] == second.block_hashes[0]) is equal


def test_indented_file_is_read(write_session: Callable[..., Path]) -> None:
    """One object over many lines is one object."""
    assert len(read_trace(write_session("s", call(0, [1]), indent=2)).requests) == 1


def test_session_without_requests_is_allowed_beside_others(
    write_session: Callable[..., Path], tmp_path: Path
) -> None:
    """An empty session adds nothing, and alone it is an error."""
    empty = write_session("a")
    with pytest.raises(TraceFormatError, match="found no request"):
        read_trace(empty)
    write_session("b", call(0, [1]))
    assert len(read_trace(tmp_path).requests) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": 7}, r"'id' = 7; expected a printable name"),
        ({"id": "a\0b"}, r"'id' = 'a\\x00b'; expected a printable name"),
        ({"id": "\ud800"}, r"'id' = '\\ud800'; expected a printable name"),
        ({"block_size": 0}, r"'block_size' = 0; expected an integer from 1"),
        ({"block_size": "64"}, r"'block_size' = '64'; expected an integer"),
        ({"hash_id_scope": "galaxy"}, r"'hash_id_scope' = 'galaxy'; expected 'local'"),
        ({"requests": {}}, r"'requests' = an object with 0 fields; expected a list"),
        ({"requests": [3]}, r"requests\[0\]: found 3; expected an object"),
    ],
)
def test_bad_session_is_named(
    write_session: Callable[..., Path], fields: dict[str, Any], message: str
) -> None:
    """The error names the file and the field."""
    path = write_session("s", call(0, [1]), **fields)
    with pytest.raises(TraceFormatError, match=message) as caught:
        read_trace(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in": -1}, r"found 'in' = -1; expected an integer from 1"),
        ({"out": None}, r"found 'out' = None; expected an integer"),
        ({"t": "x"}, r"found 't' = 'x'; expected a number"),
        ({"hash_ids": [1, 2, 3]}, r"found 3 hash_ids for a prompt of 74 tokens; expected 2"),
        ({"hash_ids": None}, r"found 'hash_ids' = None; expected a list"),
    ],
)
def test_bad_request_is_named_by_its_place(
    write_session: Callable[..., Path], change: dict[str, Any], message: str
) -> None:
    """The error names the request within its sub-agent."""
    bad = {**call(0, [1]), **change}
    path = write_session("s", call(0, [1]), subagent(0, call(0, [1]), bad))
    with pytest.raises(TraceFormatError, match=rf"requests\[1\]\.requests\[1\]: {message}"):
        read_trace(path)


def test_one_session_twice_is_refused(write_session: Callable[..., Path], tmp_path: Path) -> None:
    """A copy of a session would double its reuse."""
    path = write_session("s", call(0, [1]))
    (tmp_path / "trace_t.json").write_bytes(path.read_bytes())
    with pytest.raises(TraceFormatError, match=r"session 's', which is also in trace_s\.json"):
        read_trace(tmp_path)


def test_sessions_with_other_blocks_are_refused(
    write_session: Callable[..., Path], tmp_path: Path
) -> None:
    """One trace has one block length."""
    write_session("a", call(0, [1]))
    write_session("b", call(0, [1]), block_size=32)
    with pytest.raises(TraceFormatError, match=r"'block_size' = 32; expected 64, as in trace_a"):
        read_trace(tmp_path)
