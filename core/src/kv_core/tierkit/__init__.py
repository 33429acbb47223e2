"""The convenience layer: a conforming tier made of three short functions.

Derive from :class:`ThreadedTier` for a blocking client or from :class:`AsyncioTier` for
coroutines, and write ``exists``, ``read_block`` and ``write_block``. :class:`BatchTier` is for a
storage with an index in memory that moves many blocks in one call. :class:`AsyncLookup` and
:class:`LoadFirstPool` are the parts of the kit that a tier written directly on the contract may
want as well.
"""

from kv_core.tierkit._asyncio import AsyncioTier
from kv_core.tierkit._batch import BatchOutcome, BatchTier
from kv_core.tierkit._config import TierKitConfig
from kv_core.tierkit._errors import RETIRING_KINDS, BlockFailure, Occasionally
from kv_core.tierkit._free_space import FreeSpace
from kv_core.tierkit._lookup import AsyncLookup, HitClaim, Prober, Question
from kv_core.tierkit._pool import LoadFirstPool
from kv_core.tierkit._threaded import ThreadedTier

__all__ = [
    "RETIRING_KINDS",
    "AsyncLookup",
    "AsyncioTier",
    "BatchOutcome",
    "BatchTier",
    "BlockFailure",
    "FreeSpace",
    "HitClaim",
    "LoadFirstPool",
    "Occasionally",
    "Prober",
    "Question",
    "ThreadedTier",
    "TierKitConfig",
]
