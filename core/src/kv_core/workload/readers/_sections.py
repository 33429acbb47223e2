"""RAGPulse traces: prompts put together from sections whose lengths stand in tables.

The ids name sections, not prefixes. The prompt is taken to be the sections side by side, in the
order of the line's own object, and after them what the prompt template adds: the recorded length
is 6 to 12 tokens more than the sections have. Where in the prompt those tokens stand is not
recorded; at the end they take no reuse from any section.

The clock of the recording starts again every week: the published trace steps from 604,453 s back
to 0, while its session ids, which hold the time of day, go on. Such a step opens the next week.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from kv_core.errors import TraceFormatError
from kv_core.workload._chain import MAX_ID, SectionChain, root_hash
from kv_core.workload._trace import Trace, TraceRequest
from kv_core.workload.readers._detect import sniff
from kv_core.workload.readers._drafts import Draft, in_time_order
from kv_core.workload.readers._fields import Record, describe, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["DEFAULT_BLOCK_TOKENS", "read_ragpulse"]

DEFAULT_BLOCK_TOKENS: Final = 64

_FORMAT: Final = "ragpulse"
_TEMPLATE: Final = b"t"
_WEEK_S: Final = 7 * 24 * 3600


@final
@dataclass(frozen=True, slots=True)
class _Kind:
    code: bytes
    id_field: str
    published_as: str


_KINDS: Final[Mapping[str, _Kind]] = {
    "sys_prompt": _Kind(b"s", "sys_prompt_id", "1_sys_prompt.jsonl"),
    "passages_ids": _Kind(b"p", "passage_id", "2_passages.jsonl"),
    "history": _Kind(b"h", "history_id", "3_history.jsonl"),
    "user_input": _Kind(b"u", "user_input_id", "4_user_input.jsonl"),
    "web_search": _Kind(b"w", "web_search_id", "5_web_search.jsonl"),
}

# Code of the kind, id, tokens.
_Section = tuple[bytes, int, int]


def read_ragpulse(path: Path, name: str, limit: int | None, block_tokens: int) -> Trace:
    """Read a RAGPulse trace.

    Args:
        path: The trace; the five tables lie beside it, under any name.
        name: Name of the trace.
        limit: Number of requests, or ``None`` for all.
        block_tokens: Tokens in a block; the format leaves it open.

    Raises:
        TraceFormatError: A table is missing, or a line is not what the format says.
    """
    tables = _read_tables(path)
    root = root_hash(_FORMAT, str(block_tokens))
    requests = []
    for draft in in_time_order(_drafts(path, tables), limit):
        chain = SectionChain(root, block_tokens)
        for section in draft.payload:
            chain.append(*section)
        chain.append(_TEMPLATE, 0, draft.prompt_tokens - chain.num_tokens)
        requests.append(
            TraceRequest(
                req_id=draft.req_id,
                arrival_s=draft.arrival_s,
                prompt_tokens=draft.prompt_tokens,
                output_tokens=draft.output_tokens,
                block_hashes=chain.block_hashes(),
            )
        )
    return Trace(name, _FORMAT, block_tokens, tuple(requests))


def _drafts(path: Path, tables: Mapping[str, Mapping[int, int]]) -> Iterator[Draft[list[_Section]]]:
    week = 0
    previous_s = 0.0
    for record in read_lines(path):
        time_s = record.seconds("timestamp")
        # A small step back is disorder, and sorted away later.
        if time_s < previous_s - _WEEK_S / 2:
            week += 1
        previous_s = time_s
        prompt_tokens = record.tokens("input_length", least=1)
        sections = _sections(record, tables)
        tokens = sum(section[2] for section in sections)
        if tokens > prompt_tokens:
            raise record.error(
                f"'input_length' = {prompt_tokens}, but sections of {tokens} tokens",
                "a prompt at least as long as its sections (do the tables belong to this trace?)",
            )
        yield Draft(
            req_id=f"{_FORMAT}-{record.line}",
            arrival_s=week * _WEEK_S + time_s,
            prompt_tokens=prompt_tokens,
            output_tokens=record.tokens("output_length"),
            payload=sections,
        )


def _sections(record: Record, tables: Mapping[str, Mapping[int, int]]) -> list[_Section]:
    expected = f"an object of sections ({', '.join(_KINDS)})"
    by_kind = record.get("hash_ids", expected)
    if not isinstance(by_kind, dict):
        raise record.error(f"'hash_ids' = {describe(by_kind)}", expected)
    inner = Record(record.path, record.line, "hash_ids", by_kind)
    sections = []
    for name in by_kind:
        kind = _KINDS.get(name)
        if kind is None:
            raise inner.error(f"section {describe(name)}", f"one of {', '.join(_KINDS)}")
        for ident in inner.ids(name):
            tokens = tables[name].get(ident)
            if tokens is None:
                raise inner.error(
                    f"id {ident} in {name!r}",
                    f"an id of its table ({kind.published_as})",
                )
            sections.append((kind.code, ident, tokens))
    return sections


def _read_tables(path: Path) -> dict[str, dict[int, int]]:
    by_field, unusable = _find_tables(path.parent)
    tables = {}
    for name, kind in _KINDS.items():
        table = by_field.get(kind.id_field)
        if table is None:
            raise TraceFormatError(
                f"{path}: found no table for section {name!r} in the folder {path.parent}; "
                f"expected a file of lines with {kind.id_field!r} and 'token_length' there "
                f"(published as {kind.published_as}){unusable}",
                path=str(path),
            )
        tables[name] = _read_table(table, kind.id_field)
    return tables


def _find_tables(folder: Path) -> tuple[dict[str, Path], str]:
    """Return the tables of a folder by the name of their id field, and what could be none."""
    fields = {kind.id_field for kind in _KINDS.values()}
    found: dict[str, Path] = {}
    unusable = ""
    for file in sorted(folder.glob("*.jsonl")):
        try:
            if not file.is_file() or sniff(file) != "table":
                continue
            first = next(read_lines(file))
        except TraceFormatError as error:
            # No concern of this trace, unless a table turns out to be missing.
            unusable += f"; cannot be used: {error.message}"
            continue
        for field in fields & first.fields.keys():
            if field in found:
                raise first.error(f"a second table of {field!r}", f"one ({found[field].name})")
            found[field] = file
    return found, unusable


def _read_table(path: Path, id_field: str) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for record in read_lines(path):
        expected = f"an integer from 0 to {MAX_ID}"
        ident = record.get(id_field, expected)
        if type(ident) is not int or not 0 <= ident <= MAX_ID:
            raise record.error(f"{id_field!r} = {describe(ident)}", expected)
        tokens = record.tokens("token_length")
        if lengths.setdefault(ident, tokens) != tokens:
            raise record.error(
                f"'token_length' = {tokens} for id {ident}",
                f"{lengths[ident]}, as in an earlier line",
            )
    return lengths
