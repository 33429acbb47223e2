"""Legal extremes of the LIFE and CONF clauses."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from kv_conformance.extremes._extreme import extreme
from kv_conformance.reference import FolderConfig, FolderHarness, FolderTier, folder_spec
from kv_core.contract import SecondaryTierManager

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from kv_conformance.harness import Harness, Opening
    from kv_core.contract import (
        JobId,
        JobMetadata,
        JobResult,
        LookupAnswer,
        OffloadingEvent,
        OffloadKey,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        TierContext,
        TierUsage,
    )


class _ReopensInFork(SecondaryTierManager):
    """Opens the storage anew in every process that uses it."""

    @override
    def __init__(self, context: TierContext) -> None:
        self.context = context
        self._opened: dict[int, FolderTier] = {os.getpid(): FolderTier(context)}

    @property
    def _tier(self) -> FolderTier:
        pid = os.getpid()
        if pid not in self._opened:
            self._opened[pid] = FolderTier(self.context)
        return self._opened[pid]

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        return self._tier.lookup(key, req_context)

    @override
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        return self._tier.lookup_many(keys, req_context)

    @override
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._tier.touch(keys, req_context)

    @override
    def submit_store(self, job: JobMetadata) -> None:
        self._tier.submit_store(job)

    @override
    def submit_load(self, job: JobMetadata) -> None:
        self._tier.submit_load(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return self._tier.get_finished_jobs()

    @override
    def drain_jobs(self) -> Collection[JobId]:
        return self._tier.drain_jobs()

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return self._tier.on_new_request(req_context)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._tier.on_request_finished(req_context)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._tier.on_schedule_end(context)

    @override
    def has_pending_work(self) -> bool:
        return self._tier.has_pending_work()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._tier.take_events()

    @override
    def get_stats(self) -> Mapping[str, float]:
        return self._tier.get_stats()

    @override
    def usage(self) -> TierUsage:
        return self._tier.usage()

    @override
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        self._tier.delete(keys)

    @override
    def shutdown(self) -> Collection[JobId]:
        return self._tier.shutdown()


@extreme(does="Works in a fork: it opens the storage anew.", relies_on=frozenset({"LIFE-6"}))
def reopens_in_a_fork(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_ReopensInFork))


class _Library:
    """What a client library keeps for the life of a process: a pool, a connection, a lock."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar[_Library | None] = None

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="library")
        self.connection = socket.socketpair()

    @classmethod
    def get(cls) -> _Library:
        """Return the one of this process."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            return cls._shared


class _UsesLibrary(FolderTier):
    @override
    def exists(self, key: OffloadKey) -> bool:
        return _Library.get().pool.submit(super().exists, key).result()


@extreme(
    does="Uses a library that keeps threads and sockets for the life of the process.",
    relies_on=frozenset({"LIFE-2"}),
)
def keeps_a_library(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_UsesLibrary))


class _Lazy(FolderTier):
    """Opens its connection and starts its own thread at the first use and not before."""

    _extra: tuple[socket.socket, socket.socket] | None = None

    @override
    def read_block(self, key: OffloadKey, buffer: memoryview) -> None:
        with self._lock:
            if self._extra is None:
                self._extra = socket.socketpair()
        super().read_block(key, buffer)

    @override
    def close(self) -> None:
        super().close()
        if self._extra is not None:
            for end in self._extra:
                end.close()


class _NoSecrets(FolderConfig):
    """Settings under other names, none of them secret, and one that names where a secret is."""

    token_file: str = ""
    credential_path: str = ""
    access_key_id: str = ""
    tokens_per_page: int = 16


class _PlainHarness(FolderHarness):
    @override
    def settings(self, opening: Opening) -> Mapping[str, object]:
        settings = dict(super().settings(opening))
        del settings["password"]
        return settings

    @override
    def unusable_settings(self, opening: Opening) -> Mapping[str, object] | None:
        return None


@extreme(
    does="Connects at the first load, can be opened anywhere, and is given no secret.",
    relies_on=frozenset({"LIFE-4", "CONF-2"}),
)
def connects_late(workdir: Path) -> Harness:
    """Make the harness."""
    return _PlainHarness(workdir, folder_spec(_Lazy, config_model=_NoSecrets))
