"""Traces of coding agents: one session a file, sub-agents nested, ids local to the session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kv_core.errors import TraceFormatError
from kv_core.workload._chain import IdChain, root_hash
from kv_core.workload._trace import Trace, TraceRequest
from kv_core.workload.readers._block_ids import checked_ids, complete
from kv_core.workload.readers._drafts import Draft, in_time_order
from kv_core.workload.readers._fields import Record, describe, load_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["read_claude_code"]

_FORMAT: Final = "claude-code"


def read_claude_code(paths: Sequence[Path], name: str, limit: int | None) -> Trace:
    """Read sessions as one trace, merged by the time within each session.

    A request's ids cover its full blocks; the partial last block gets a hash that no other
    request has. Requests of sub-agents lie in nested ``requests`` lists, to any depth; their
    times are on the clock of the session.

    Raises:
        TraceFormatError: A file is no session, two files hold one session, or the sessions
            differ in block size.
    """
    sessions = [_session(path) for path in paths]
    block_tokens = sessions[0].tokens("block_size", least=1)
    chains: dict[str, tuple[IdChain, Path]] = {}
    for session in sessions:
        ident = _ident(session)
        if session.tokens("block_size", least=1) != block_tokens:
            raise session.error(
                f"'block_size' = {session.fields['block_size']}",
                f"{block_tokens}, as in {paths[0].name} (read them apart)",
            )
        if ident in chains:
            raise session.error(
                f"session {ident!r}, which is also in {chains[ident][1].name}",
                "every session once",
            )
        chains[ident] = (IdChain(_root(session, ident)), session.path)
    drafts = (draft for session in sessions for draft in _drafts(session, block_tokens))
    requests = tuple(
        TraceRequest(
            req_id=draft.req_id,
            arrival_s=draft.arrival_s,
            prompt_tokens=draft.prompt_tokens,
            output_tokens=draft.output_tokens,
            block_hashes=complete(chains[draft.req_id.rpartition("/")[0]][0], draft, block_tokens),
        )
        for draft in in_time_order(drafts, limit)
    )
    return Trace(name, _FORMAT, block_tokens, requests)


def _session(path: Path) -> Record:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise TraceFormatError(
            f"{path}: cannot be read ({error.strerror or error})", path=str(path)
        ) from error
    value = load_json(text, path, None)
    if not isinstance(value, dict):
        raise TraceFormatError(
            f"{path}: found {describe(value)}; expected one JSON object", path=str(path)
        )
    return Record(path, None, "", value)


def _ident(session: Record) -> str:
    expected = "a printable name of the session"
    ident = session.get("id", expected)
    if not isinstance(ident, str) or not ident or not ident.isprintable():
        raise session.error(f"'id' = {describe(ident)}", expected)
    return ident


def _root(session: Record, ident: str) -> bytes:
    expected = "'local' (ids of this session only) or 'global'"
    scope = session.get("hash_id_scope", expected)
    if scope == "local":
        return root_hash(_FORMAT, "local", ident)
    if scope == "global":
        return root_hash(_FORMAT, "global")
    raise session.error(f"'hash_id_scope' = {describe(scope)}", expected)


def _drafts(session: Record, block_tokens: int) -> Iterator[Draft[list[int]]]:
    ident = _ident(session)
    for number, record in enumerate(_leaves(session)):
        prompt_tokens = record.tokens("in", least=1)
        yield Draft(
            req_id=f"{ident}/{number}",
            arrival_s=record.seconds("t"),
            prompt_tokens=prompt_tokens,
            output_tokens=record.tokens("out"),
            payload=checked_ids(record, prompt_tokens, block_tokens, full_blocks_only=True),
        )


def _leaves(session: Record) -> Iterator[Record]:
    """Yield the requests in document order, those of sub-agents where these stand."""
    # A stack rather than recursion: a file decides how deep it is.
    stack = [_children(session)]
    while stack:
        record = next(stack[-1], None)
        if record is None:
            stack.pop()
        elif "requests" in record.fields:
            stack.append(_children(record))
        else:
            yield record


def _children(parent: Record) -> Iterator[Record]:
    expected = "a list of requests"
    children: Any = parent.get("requests", expected)
    if not isinstance(children, list):
        raise parent.error(f"'requests' = {describe(children)}", expected)
    prefix = f"{parent.place}." if parent.place else ""
    for index, child in enumerate(children):
        place = f"{prefix}requests[{index}]"
        if not isinstance(child, dict):
            raise Record(parent.path, None, place, {}).error(describe(child), "an object")
        yield Record(parent.path, None, place, child)
