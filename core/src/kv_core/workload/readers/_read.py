"""The door to all readers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kv_core.errors import ConfigError, TraceFormatError
from kv_core.workload.readers._block_ids import read_bailian, read_mooncake
from kv_core.workload.readers._detect import locate
from kv_core.workload.readers._sections import DEFAULT_BLOCK_TOKENS, read_ragpulse
from kv_core.workload.readers._sessions import read_claude_code

if TYPE_CHECKING:
    from os import PathLike

    from kv_core.workload._trace import Trace

__all__ = ["read_trace"]


def read_trace(
    path: str | PathLike[str], *, limit: int | None = None, block_tokens: int | None = None
) -> Trace:
    """Read a recorded trace; the format is found from the content.

    * Mooncake: lines with ``timestamp`` (milliseconds), ``input_length``, ``output_length`` and
      ``hash_ids``, one id for each block of 512 tokens.
    * Bailian: the same with ``chat_id``, blocks of 16 tokens and times in seconds.
    * RAGPulse: ``hash_ids`` are sections, whose lengths stand in five tables beside the trace.
    * Claude Code: one session a file; a folder of sessions is one trace.

    Args:
        path: A file, or a folder that holds one trace.
        limit: Keep the first so many requests in time order; ``None`` for all. The whole file
            is read and checked either way, only the kept requests are held and hashed.
        block_tokens: Tokens in a block, where the format leaves it open (RAGPulse, 64 by
            default). ``None`` for what the format says.

    Raises:
        TraceFormatError: The file is missing, unreadable, or not a trace of a known format; the
            message names the line.
        ConfigError: ``limit`` or ``block_tokens`` is out of range, or the format says another
            block length.
    """
    _check_positive("limit", limit)
    _check_positive("block_tokens", block_tokens)
    source = locate(Path(path))
    first = source.paths[0]
    if source.format == "ragpulse":
        trace = read_ragpulse(first, source.name, limit, block_tokens or DEFAULT_BLOCK_TOKENS)
    elif source.format == "claude-code":
        trace = read_claude_code(source.paths, source.name, limit)
    elif source.format == "bailian":
        trace = read_bailian(first, source.name, limit)
    else:
        trace = read_mooncake(first, source.name, limit)
    if not trace.requests:
        raise TraceFormatError(f"{path}: found no request in the trace", path=str(path))
    if block_tokens not in (None, trace.block_tokens):
        raise ConfigError(
            f"block_tokens is {block_tokens}, but the ids of a {trace.format} trace stand for "
            f"blocks of {trace.block_tokens} tokens; leave block_tokens out",
            setting="block_tokens",
        )
    return trace


def _check_positive(setting: str, value: int | None) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(
            f"{setting} must be a positive integer or None, found {value!r}", setting=setting
        )
