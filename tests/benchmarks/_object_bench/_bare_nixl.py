"""NIXL without a tier, used as its examples do: blocks straight from and into shared memory.

The memory is registered once and prepared once; a job is one transfer of all its blocks, and all
jobs are begun at once. Nothing is copied and nothing is checked.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, final

import numpy as np
from _object_bench._contenders import Pace, new_prefix

from kv_core.tierkit.testing import example_key
from kv_tier_obj._nixl import open_agent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _fs_bench._memory import Batch, Memory
    from _object_bench._place import Place

__all__ = ["BareNixl"]

_POLL_S = 0.002
_PLUGIN = "OBJ"


@final
class BareNixl:
    """NIXL's OBJ plugin.

    Args:
        name: In reports.
        place: The bucket.
        memory: What is stored from and loaded into.
        threads: Threads of the plugin.
    """

    def __init__(self, name: str, place: Place, memory: Memory, threads: int) -> None:
        self.name = name
        self._place = place
        self._memory = memory
        self._threads = threads

    def open(self, block_bytes: int) -> None:
        """Open an agent and register the memory."""
        access = self._place.access
        self._pace = Pace()
        self._block_bytes = block_bytes
        self._prefix = new_prefix(self.name)
        self._devices = itertools.count(1)
        parameters = {
            "bucket": self._place.bucket,
            "endpoint_override": access.endpoint_url,
            "scheme": access.endpoint_url.partition("://")[0],
            "access_key": access.access_key,
            "secret_key": access.secret_key,
            "region": access.region,
            "num_threads": str(self._threads),
            "req_checksum": "required",
        }
        if access.ca_file is not None:
            parameters["ca_bundle"] = str(access.ca_file)
        self._agent: Any = open_agent(self._prefix, parameters, defaults={}, environment={})
        view = np.frombuffer(self._memory.mapping, np.uint8)
        base, size = int(view.ctypes.data), view.nbytes
        del view
        self._registered = self._agent.register_memory([(base, size, 0, "")], "DRAM", [_PLUGIN])
        slots = [(base + start, block_bytes, 0) for start in range(0, size, block_bytes)]
        self._blocks = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", slots, "DRAM", [_PLUGIN])

    def put(self, batches: Sequence[Batch]) -> float:
        """Store all, and return the seconds."""
        return self._move("WRITE", batches)

    def get(self, batches: Sequence[Batch]) -> float:
        """Load all, and return the seconds."""
        return self._move("READ", batches)

    def find(self, keys: Sequence[int]) -> tuple[float, int]:
        """Look all keys up in one call; return the seconds, and how many are there."""
        start = time.perf_counter()
        wanted = [(0, 1, 0, self._object(key)) for key in keys]
        found = self._agent.query_memory(wanted, _PLUGIN, _PLUGIN)
        return time.perf_counter() - start, sum(answer is not None for answer in found)

    def close(self) -> None:
        """Give everything back."""
        self._agent.release_dlist_handle(self._blocks)
        self._agent.deregister_memory(self._registered, [_PLUGIN])
        del self._agent

    def _object(self, key: int) -> str:
        # As long as the names of the tier, and spread in the same way.
        digits = example_key(key).hex()
        return f"{self._prefix}/model_0123456789ab/r0/{digits[:3]}/{digits}.kv"

    def _move(self, operation: str, batches: Sequence[Batch]) -> float:
        agent, length = self._agent, self._block_bytes
        start = time.perf_counter()
        running = []
        for batch in batches:
            names = [(0, length, next(self._devices), self._object(key)) for key in batch.keys]
            registered = agent.register_memory(names, _PLUGIN, [_PLUGIN])
            objects = agent.prep_xfer_dlist(agent.name, registered.trim(), _PLUGIN, [_PLUGIN])
            slots = np.array(batch.slots, dtype=np.int32)
            order = np.arange(len(slots), dtype=np.int32)
            handle = agent.make_prepped_xfer(operation, self._blocks, slots, objects, order)
            agent.transfer(handle)
            running.append((handle, objects, registered))
        num_blocks = sum(len(batch.keys) for batch in batches)
        self._pace.sleep(operation, num_blocks)
        while running:
            handle, objects, registered = running[0]
            if agent.check_xfer_state(handle) != "DONE":
                time.sleep(_POLL_S)
                continue
            agent.release_xfer_handle(handle)
            agent.release_dlist_handle(objects)
            agent.deregister_memory(registered, [_PLUGIN])
            del running[0]
        seconds = time.perf_counter() - start
        self._pace.note(operation, num_blocks, seconds)
        return seconds
