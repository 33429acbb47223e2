"""Which blocks of a request CPU memory can provide."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_core.keys import OffloadKey, make_offload_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_core.engine import KVCacheGroupConfig
    from kv_core.simple._protocol import SimpleRequest

__all__ = ["BlockNames", "blocks_to_load", "match_prefix"]


@final
class BlockNames:
    """The keys of one request's blocks by group, computed once and extended.

    Attributes:
        all_keys: The keys that were asked for so far, of all groups.
    """

    __slots__ = ("_groups", "_keys", "_request", "_tokens_per_hash", "all_keys")

    def __init__(
        self, request: SimpleRequest, groups: Sequence[KVCacheGroupConfig], tokens_per_hash: int
    ) -> None:
        self._request = request
        self._groups = groups
        self._tokens_per_hash = tokens_per_hash
        self._keys: list[list[OffloadKey]] = [[] for _ in groups]
        self.all_keys: set[OffloadKey] = set()

    @property
    def num_hashed_tokens(self) -> int:
        """Tokens in full hash blocks: what has a name by now."""
        return len(self._request.block_hashes) * self._tokens_per_hash

    def keys(self, group_idx: int, start: int, stop: int) -> list[OffloadKey]:
        """Return the keys of a range of a group's blocks, which must have hashes by now."""
        keys = self._keys[group_idx]
        known = len(keys)
        if known < stop:
            step = self._groups[group_idx].tokens_per_block // self._tokens_per_hash
            hashes = self._request.block_hashes
            # A block is named by the hash of its last part: hashes are chained.
            keys.extend(
                make_offload_key(hashes[(index + 1) * step - 1], group_idx)
                for index in range(known, stop)
            )
            self.all_keys.update(keys[known:])
        return keys[start:stop]


def match_prefix(
    names: BlockNames,
    groups: Sequence[KVCacheGroupConfig],
    num_computed_tokens: int,
    is_present: Callable[[OffloadKey], bool],
) -> int:
    """Find how many leading tokens the GPU and CPU memory hold between them.

    Groups constrain each other: the answer is the largest prefix that every group can serve.

    Args:
        names: The request's blocks.
        groups: KV cache groups.
        num_computed_tokens: Leading tokens that the GPU has.
        is_present: Says whether CPU memory holds a block.

    Returns:
        Tokens from the start of the request, at least ``num_computed_tokens``.
    """
    tokens = names.num_hashed_tokens
    while tokens > num_computed_tokens:
        shorter = tokens
        for group_idx, group in enumerate(groups):
            size = group.tokens_per_block
            first, end = num_computed_tokens // size, shorter // size
            found = [is_present(key) for key in names.keys(group_idx, first, max(first, end))]
            if group.sliding_window is None:
                run = found.index(False) if False in found else len(found)
            else:
                run = _last_window(found, window_blocks(group.sliding_window, size))
            shorter = (first + run) * size
        if shorter == tokens:
            return tokens
        tokens = shorter
    return num_computed_tokens


def _last_window(found: Sequence[bool], wanted: int) -> int:
    """Return the end of the last run of hits that fills a window.

    A run that reaches what the GPU has is long enough.
    """
    run = 0
    for index in range(len(found) - 1, -1, -1):
        run = run + 1 if found[index] else 0
        if run == wanted:
            return index + run
    return run


def window_blocks(window: int, block_tokens: int) -> int:
    """Blocks that the tokens before a block boundary and within a window can lie in."""
    return -(-(window - 1) // block_tokens) if window > 1 else 1


def blocks_to_load(group: KVCacheGroupConfig, start_token: int, stop_token: int) -> range:
    """Return which blocks of a group are loaded for a range of tokens, a partial last one too."""
    size = group.tokens_per_block
    start, stop = start_token // size, -(-stop_token // size)
    if group.sliding_window is not None:
        start = max(start, stop - window_blocks(group.sliding_window, size))
    return range(start, stop)
