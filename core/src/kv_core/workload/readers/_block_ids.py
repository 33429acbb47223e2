"""Traces that give each block of a prompt an id: Mooncake and Bailian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from kv_core.workload._chain import IdChain, root_hash
from kv_core.workload._trace import Trace, TraceRequest
from kv_core.workload.readers._drafts import Draft, in_time_order
from kv_core.workload.readers._fields import Record, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["checked_ids", "complete", "read_bailian", "read_mooncake"]


@final
@dataclass(frozen=True, slots=True)
class _Dialect:
    name: str
    block_tokens: int
    units_per_second: int
    # Whether the partial last block of a prompt may go without an id.
    full_blocks_only: bool


_MOONCAKE: Final = _Dialect("mooncake", 512, 1000, full_blocks_only=False)
_BAILIAN: Final = _Dialect("bailian", 16, 1, full_blocks_only=True)


def read_mooncake(path: Path, name: str, limit: int | None) -> Trace:
    """Read a Mooncake trace: blocks of 512 tokens, times in milliseconds.

    Every line has one id for each block, the partial last one included.

    Raises:
        TraceFormatError: A line is not what the format says.
    """
    return _read(path, name, limit, _MOONCAKE)


def read_bailian(path: Path, name: str, limit: int | None) -> Trace:
    """Read a Bailian usage trace: blocks of 16 tokens, times in seconds.

    Raises:
        TraceFormatError: A line is not what the format says.
    """
    return _read(path, name, limit, _BAILIAN)


def _read(path: Path, name: str, limit: int | None, dialect: _Dialect) -> Trace:
    chain = IdChain(root_hash(dialect.name))
    requests = tuple(
        TraceRequest(
            req_id=draft.req_id,
            arrival_s=draft.arrival_s,
            prompt_tokens=draft.prompt_tokens,
            output_tokens=draft.output_tokens,
            block_hashes=complete(chain, draft, dialect.block_tokens),
        )
        for draft in in_time_order(_drafts(path, dialect), limit)
    )
    return Trace(name, dialect.name, dialect.block_tokens, requests)


def _drafts(path: Path, dialect: _Dialect) -> Iterator[Draft[list[int]]]:
    for record in read_lines(path):
        prompt_tokens = record.tokens("input_length", least=1)
        yield Draft(
            req_id=f"{dialect.name}-{record.line}",
            arrival_s=record.seconds("timestamp", per_second=dialect.units_per_second),
            prompt_tokens=prompt_tokens,
            output_tokens=record.tokens("output_length"),
            payload=checked_ids(
                record, prompt_tokens, dialect.block_tokens, dialect.full_blocks_only
            ),
        )


def checked_ids(
    record: Record, prompt_tokens: int, block_tokens: int, full_blocks_only: bool
) -> list[int]:
    """Return the ids of a request, once their number fits its length.

    Raises:
        TraceFormatError: Too few or too many ids, or something that is no id.
    """
    ids = record.ids("hash_ids")
    blocks = -(-prompt_tokens // block_tokens)
    if len(ids) == blocks or (full_blocks_only and len(ids) == prompt_tokens // block_tokens):
        return ids
    raise record.error(
        f"{len(ids)} hash_ids for a prompt of {prompt_tokens} tokens",
        f"{blocks} (one for each block of {block_tokens} tokens)",
    )


def complete(chain: IdChain, draft: Draft[list[int]], block_tokens: int) -> tuple[bytes, ...]:
    """Return the hashes of a request, with one of its own for a last block without an id."""
    hashes = chain.hashes(draft.payload)
    if len(hashes) * block_tokens < draft.prompt_tokens:
        hashes.append(chain.tail(hashes, draft.req_id))
    return tuple(hashes)
