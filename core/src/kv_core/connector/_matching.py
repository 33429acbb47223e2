"""Which blocks of a request can be loaded: from the front, or from the end of a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_core.contract import ReqContext
from kv_core.engine import LookupResult
from kv_core.keys import OffloadKey, make_offload_key

if TYPE_CHECKING:
    from kv_core.connector._protocol import KVRequest
    from kv_core.engine import OffloadingConfig, OffloadingManager

__all__ = ["RequestBlocks", "match_prefix"]


@final
class RequestBlocks:
    """The offloaded blocks of one request: keys by group, computed once and extended.

    Attributes:
        request: The request.
        context: Its context for the managers.
    """

    __slots__ = ("_config", "_keys", "context", "request")

    def __init__(self, request: KVRequest, config: OffloadingConfig) -> None:
        self.request = request
        self.context = ReqContext(request.req_id, request.kv_transfer_params)
        self._config = config
        self._keys: list[list[OffloadKey]] = [[] for _ in config.groups]

    @property
    def num_hashed_tokens(self) -> int:
        """Tokens in full hash blocks: what has a name by now."""
        return len(self.request.block_hashes) * self._config.tokens_per_hash

    def keys(self, group_idx: int, num_blocks: int) -> list[OffloadKey]:
        """Return the keys of a group's first blocks.

        Args:
            group_idx: The KV cache group.
            num_blocks: Blocks wanted; their tokens must have hashes by now.

        Returns:
            At least ``num_blocks`` keys; do not change the list.
        """
        keys = self._keys[group_idx]
        if len(keys) < num_blocks:
            tokens = self._config.tokens_per_offloaded_block(group_idx)
            step = tokens // self._config.tokens_per_hash
            hashes = self.request.block_hashes
            # A block is named by the hash of its last part: hashes are chained.
            keys.extend(
                make_offload_key(hashes[(index + 1) * step - 1], group_idx)
                for index in range(len(keys), num_blocks)
            )
        return keys


def match_prefix(
    blocks: RequestBlocks,
    num_computed_tokens: int,
    config: OffloadingConfig,
    manager: OffloadingManager,
) -> int | None:
    """Find how many leading tokens the offloaded blocks can provide.

    Groups constrain each other: the answer is the largest prefix that every group can serve,
    found by shrinking it until no group objects.

    Args:
        blocks: The request.
        num_computed_tokens: Leading tokens that the GPU has.
        config: The configuration.
        manager: Answers the lookups.

    Returns:
        Tokens, counted from the start of the request and including those the GPU has; ``None``
        when an answer is still unknown.
    """
    tokens = blocks.num_hashed_tokens
    unknown = False
    shrunk = True
    while shrunk:
        shrunk = False
        for group_idx, group in enumerate(config.groups):
            if tokens <= num_computed_tokens:
                return num_computed_tokens if not unknown else None
            if group.sliding_window is None:
                matched, is_unknown = _match_full(
                    blocks, group_idx, num_computed_tokens, tokens, config, manager
                )
            else:
                matched, is_unknown = _match_window(
                    blocks,
                    group_idx,
                    group.sliding_window,
                    num_computed_tokens,
                    tokens,
                    config,
                    manager,
                )
            unknown |= is_unknown
            if matched < tokens:
                tokens = matched
                shrunk = len(config.groups) > 1
    if unknown:
        return None
    return max(tokens, num_computed_tokens)


def _match_full(
    blocks: RequestBlocks,
    group_idx: int,
    num_computed_tokens: int,
    tokens: int,
    config: OffloadingConfig,
    manager: OffloadingManager,
) -> tuple[int, bool]:
    """Scan from the front to the first miss; go on past unknown answers.

    Going on starts all probes in one step instead of one per step.
    """
    size = config.tokens_per_offloaded_block(group_idx)
    end = tokens // size
    keys = blocks.keys(group_idx, end)
    unknown = False
    index = num_computed_tokens // size
    while index < end:
        answer = manager.lookup(keys[index], blocks.context)
        if answer is LookupResult.MISS:
            break
        if answer is not LookupResult.HIT:
            unknown = True
        index += 1
    return index * size, unknown


def _match_window(
    blocks: RequestBlocks,
    group_idx: int,
    window: int,
    num_computed_tokens: int,
    tokens: int,
    config: OffloadingConfig,
    manager: OffloadingManager,
) -> tuple[int, bool]:
    """Scan from the end for the last run of hits that fills a window.

    What the GPU has needs no lookup: a run that reaches it is long enough.
    """
    size = config.tokens_per_offloaded_block(group_idx)
    end = tokens // size
    keys = blocks.keys(group_idx, end)
    first = num_computed_tokens // size
    wanted = window_blocks(window, size)
    run = 0
    unknown = False
    for index in range(end - 1, first - 1, -1):
        answer = manager.lookup(keys[index], blocks.context)
        if answer is LookupResult.MISS:
            # The run was too short, whatever its unknown blocks turn out to be.
            run = 0
            unknown = False
            continue
        unknown |= answer is not LookupResult.HIT
        run += 1
        if run == wanted:
            return (index + run) * size, unknown
    return (first + run) * size, unknown


def window_blocks(window: int, block_tokens: int) -> int:
    """Blocks that the tokens before a position can lie in, seen from a block boundary."""
    return -(-(window - 1) // block_tokens) if window > 1 else 1
