"""The memory of the primary tier: one mapping that scheduler, workers and tiers share.

One thread at a time uses a region object; the bytes it maps are guarded by the ledger, which
lets one party at a time write a row. The file behind it has a name only while processes still
have to find it: whatever kills them afterwards, the memory goes with the last of them.

The scheduler creates, and its workers attach::

    region = SharedOffloadRegion(..., nonce=nonce, keep_name=True)
    # start the workers, with the nonce; each calls SharedOffloadRegion.attach(...)
    region.wait_until_attached(deadline_s=60)  # the name is gone when this returns
"""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_core.cpu._attendance import CREATOR, Attendance, attached, ready
from kv_core.cpu._joining import Poll, join_region
from kv_core.cpu._prefault import map_file, populate, worker_spans
from kv_core.cpu._progress import Progress
from kv_core.cpu._region_file import RegionFile, remove_leftover
from kv_core.cpu._row_marks import RowMarks
from kv_core.cpu._trailer import NONCE_BYTES, TRAILER_BYTES, RegionTrailer
from kv_core.errors import RegionError

if TYPE_CHECKING:
    import mmap
    import threading
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

    from kv_core.cpu._geometry import PrimaryGeometry

__all__ = ["SharedOffloadRegion"]

DEFAULT_SHM_DIR: Final = Path("/dev/shm")  # noqa: S108 - shared memory is the point

_NAME_PREFIX: Final = "kv_core_"


@final
class SharedOffloadRegion:
    """Owns one process's mapping of a region: ``num_blocks`` rows, their marks and a trailer page.

    Row ``b`` holds the page of worker 0 of block ``b``, then of worker 1, and so on, then
    padding. Within a worker's page, layers lie in the order of :meth:`create_next_view`.

    Attributes:
        geometry: Shape of the rows.
        trailer: Identity and shape, as written to the last page.
        path: Name of the file while it has one.
        worker: Rank that this process attached as; ``None`` in the process that created it.
    """

    _mapping: mmap.mmap | None

    def __init__(
        self,
        engine_id: str,
        geometry: PrimaryGeometry,
        *,
        namespace_fingerprint: str,
        nonce: bytes | None = None,
        shm_dir: Path = DEFAULT_SHM_DIR,
        keep_name: bool = False,
    ) -> None:
        """Create the region, zeroed, with all of its memory reserved.

        Args:
            engine_id: Unique name of the engine instance on this host.
            geometry: Shape of the rows.
            namespace_fingerprint: What the bytes are, 64 hex digits.
            nonce: 16 bytes that the config carries to every process, drawn anew for each start;
                drawn here by default.
            shm_dir: Folder on a memory file system.
            keep_name: Leave the name for other processes to :meth:`attach` by, until
                :meth:`wait_until_attached` or :meth:`unlink_name`. Pages are made present by
                the workers then, each its own; otherwise here and now.

        Raises:
            InsufficientSpaceError: The file system has too little space.
            RegionError: A running engine uses the id, or the memory cannot be mapped. Nothing
                is left behind.
        """
        nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
        trailer = RegionTrailer.of(geometry, namespace_fingerprint, nonce)
        file = RegionFile.create(shm_dir / region_name(engine_id))
        self._adopt(file, geometry, trailer, worker=None)
        try:
            if keep_name:
                # Before it is complete, and so before anybody looks for the creator.
                Attendance(file.descriptor).take(CREATOR)
            else:
                # Before it has any memory: whoever is killed meanwhile leaves an empty file.
                file.unlink()
            file.allocate(geometry.region_bytes)
            self._mapping = map_file(file.descriptor, geometry.region_bytes)
            if not keep_name:
                self._populate([(0, geometry.region_bytes)])
            # Last: whoever reads it may use the rows.
            packed = trailer.pack()
            start = geometry.region_bytes - TRAILER_BYTES
            self._mapping[start : start + len(packed)] = packed
        except BaseException:
            self.close()
            raise

    @classmethod
    def attach(
        cls,
        engine_id: str,
        geometry: PrimaryGeometry,
        *,
        namespace_fingerprint: str,
        nonce: bytes,
        worker: int,
        shm_dir: Path = DEFAULT_SHM_DIR,
        deadline_s: float = 60.0,
        stop: threading.Event | None = None,
    ) -> SharedOffloadRegion:
        """Map the region that the scheduler of this engine created, as one of its workers.

        Blocks until the region is complete and this worker's pages are present. Scheduler and
        workers may start in any order. The place of a worker that died can be taken anew as
        long as others are missing; once all have attached the name is gone, and nobody can.

        Args:
            engine_id: As the scheduler's.
            geometry: As the scheduler's.
            namespace_fingerprint: As the scheduler's.
            nonce: As the scheduler's: the 16 bytes of this start.
            worker: Rank of this process among the workers.
            shm_dir: As the scheduler's.
            deadline_s: Seconds to wait for the region; 0 looks once. Reserving the memory of a
                large region takes a while: about a second for each 2 GiB.
            stop: Ends the wait as the deadline does, when another thread sets it.

        Raises:
            RegionError: The region did not appear in time, or is no longer to be found; it has
                another size, namespace or nonce; the rank does not exist or is attached
                already; or the memory cannot be mapped. Nothing was created or removed.
        """
        _require_worker(geometry, worker)
        trailer = RegionTrailer.of(geometry, namespace_fingerprint, nonce)
        file = join_region(
            shm_dir / region_name(engine_id), trailer, worker, Poll(deadline_s, stop=stop)
        )
        region = cls.__new__(cls)
        region._adopt(file, geometry, trailer, worker=worker)
        try:
            region._mapping = map_file(file.descriptor, geometry.region_bytes)
            region._populate(worker_spans(geometry, worker))
            Attendance(file.descriptor).take(ready(worker))
        except BaseException:
            region.close()
            raise
        return region

    def _adopt(
        self,
        file: RegionFile,
        geometry: PrimaryGeometry,
        trailer: RegionTrailer,
        worker: int | None,
    ) -> None:
        self.geometry = geometry
        self.trailer = trailer
        self.path = file.path
        self.worker = worker
        self._file = file
        self._rows_bytes = geometry.rows_bytes
        self._used_bytes = [0] * geometry.num_workers
        self._is_complete = False
        self._mapping = None

    def _populate(self, spans: Iterable[tuple[int, int]]) -> None:
        whose = "the scheduler" if self.worker is None else f"worker {self.worker}"
        total_bytes = self.geometry.region_bytes
        if self.worker is not None:
            total_bytes = self.geometry.num_blocks * self.geometry.worker_page_bytes
        populate(
            self._open_mapping(),
            spans,
            Progress(f"pages of the primary tier present for {whose}", total_bytes),
        )

    def wait_until_attached(self, deadline_s: float = 60.0) -> None:
        """Wait for all workers, then remove the name. Returns at once when called again.

        The name goes as soon as the last worker needs it no longer; after that this waits for
        the workers' pages to be present, and makes those of this process present.

        Args:
            deadline_s: Seconds to wait in all; 0 looks once.

        Raises:
            RegionError: Workers are missing at the deadline, or one ended after the name was
                removed; their ranks are named. The region stays as it is until :meth:`close`.
                Also for a region that other processes cannot attach to.
        """
        self._open_mapping()
        if self._is_complete:
            return
        if self.worker is not None:
            raise RegionError(
                f"worker {self.worker} cannot wait for the others: the process that created the "
                "region does, and removes its name"
            )
        poll = Poll(deadline_s)
        self._wait_for(attached, poll, "attached to")
        self.unlink_name()
        self._wait_for(ready, poll, "made their pages present in", cannot_return=True)
        self._populate([(0, self.geometry.region_bytes)])
        self._is_complete = True

    def _wait_for(
        self,
        place: Callable[[int], int],
        poll: Poll,
        deed: str,
        *,
        cannot_return: bool = False,
    ) -> None:
        attendance = Attendance(self._file.descriptor)
        ranks = range(self.geometry.num_workers)
        while missing := [w for w in ranks if not attendance.is_taken(place(w))]:
            if cannot_return:
                gone = [w for w in missing if not attendance.is_taken(attached(w))]
                if gone:
                    raise RegionError(
                        f"of {len(ranks)} workers, {_listed(gone)} ended right after attaching to "
                        f"the region {self.path.name}, and cannot attach again. Look at their "
                        "logs, and restart all processes of the engine together."
                    )
            elif not self._file.has_name():
                raise RegionError(
                    f"the region {self.path.name} has no name to attach by, and of {len(ranks)} "
                    f"workers {_listed(missing)} have not attached. Create it with 'keep_name', "
                    "and leave its file alone."
                )
            if not poll.pause():
                raise RegionError(
                    f"of {len(ranks)} workers, {_listed(missing)} have not {deed} the region "
                    f"{self.path.name} in time. Look at their logs; they need the nonce of this "
                    "start and the same 'shm_dir'."
                )

    def unlink_name(self) -> bool:
        """Remove the name, once no process needs it any more.

        Returns:
            Whether the name was there and this region's: a successor's is left alone, and a
            worker removes none.
        """
        return self._file.unlink()

    @staticmethod
    def remove_leftover(engine_id: str, shm_dir: Path = DEFAULT_SHM_DIR) -> bool:
        """Remove the name that a killed scheduler left. A running one's is left alone.

        The next scheduler with the same id does so by itself. This is for workers that see theirs
        die, of an engine whose id will not come again.

        Args:
            engine_id: As the scheduler's.
            shm_dir: As the scheduler's.

        Returns:
            Whether there is no name, or none any more.
        """
        return remove_leftover(shm_dir / region_name(engine_id))

    @staticmethod
    def remove_leftovers(engine_id_prefix: str, shm_dir: Path = DEFAULT_SHM_DIR) -> None:
        """Remove the names that killed schedulers left whose ids begin alike.

        For engines that draw a new id for each start, whose names would be nobody's to reclaim.
        Those of running ones are left alone, and so is what cannot be removed.

        Args:
            engine_id_prefix: Beginning of the ids, of letters, digits, dots and hyphens.
            shm_dir: As the schedulers'.
        """
        for path in shm_dir.glob(f"{_NAME_PREFIX}{engine_id_prefix}*"):
            remove_leftover(path)

    def create_next_view(self, worker: int, page_bytes: int) -> npt.NDArray[np.int8]:
        """Return the place of a worker's next layer in every row.

        Args:
            worker: Rank among the workers of the region.
            page_bytes: Bytes of the layer in one block.

        Returns:
            ``int8``, shape ``(num_blocks, page_bytes)``, strides ``(row_stride, 1)``. An export
            of the mapping: drop it before :meth:`close`.

        Raises:
            RegionError: There is no such worker, or it is another process; its page is full; or
                the region is closed.
        """
        geometry = self.geometry
        _require_worker(geometry, worker)
        if self.worker not in (None, worker):
            raise RegionError(
                f"this process attached as worker {self.worker}; the page of worker {worker} "
                "belongs to another process"
            )
        used_bytes = self._used_bytes[worker]
        if page_bytes < 1 or used_bytes + page_bytes > geometry.worker_page_bytes:
            raise RegionError(
                f"a layer of {page_bytes} bytes does not fit the page of worker {worker}: "
                f"{used_bytes} of its {geometry.worker_page_bytes} bytes are in use. The layers "
                "must add up to what the geometry was computed from."
            )
        # Not np.ndarray(buffer=...): that forgets its export, and close() would unmap under it.
        rows = np.frombuffer(self._open_mapping(), dtype=np.int8, count=self._rows_bytes)
        start = worker * geometry.worker_page_bytes + used_bytes
        view = rows.reshape(geometry.num_blocks, -1)[:, start : start + page_bytes]
        self._used_bytes[worker] += page_bytes
        return view

    def mark_failed(self, block_ids: Iterable[int]) -> None:
        """Note, in a worker, that copies into blocks have failed, before it reports their end.

        Args:
            block_ids: Rows, in range.
        """
        self._marks().set(block_ids)

    @property
    def has_failures(self) -> bool:
        """Whether a worker has ever marked a block as failed."""
        return self._marks().has_any

    def take_failed(self, block_ids: Iterable[int]) -> list[int]:
        """Return, in the scheduler, those blocks whose copy failed on a worker; forgets them.

        Args:
            block_ids: Rows, in range, whose copies have ended on all workers.
        """
        return self._marks().take(block_ids)

    def _marks(self) -> RowMarks:
        return RowMarks(self._open_mapping(), self._rows_bytes)

    def create_kv_memoryview(self) -> memoryview:
        """Return all rows: shape ``(num_blocks, row_stride)``, format ``B``, no copy.

        An export of the mapping: release it before :meth:`close`.

        Raises:
            RegionError: The region is closed.
        """
        shape = (self.geometry.num_blocks, self.geometry.row_stride)
        with memoryview(self._open_mapping()) as flat:
            view = flat[: self._rows_bytes].cast("B", shape)
        rows = np.frombuffer(self._open_mapping(), dtype=np.uint8, count=self._rows_bytes)
        if np.asarray(view).ctypes.data != rows.ctypes.data:
            raise RegionError("the view of the rows is a copy, which tiers could not share")
        return view

    def close(self) -> None:
        """Unmap the memory and, in its creator, remove the name if it is there. Idempotent.

        Raises:
            RegionError: Views of the memory are still alive. Nothing was unmapped; drop them
                and call again.
        """
        if self._mapping is not None:
            try:
                self._mapping.close()
            except BufferError as error:
                raise RegionError(
                    f"the region {self.path.name} cannot be closed: {error}. Shut the tiers down "
                    "and drop every view and array made of it first."
                ) from error
            self._mapping = None
        self._file.close()

    def _open_mapping(self) -> mmap.mmap:
        if self._mapping is None:
            raise RegionError(f"the region {self.path.name} is closed")
        return self._mapping


def region_name(engine_id: str) -> str:
    """Return the file name of an engine's region: readable, and distinct for distinct ids."""
    readable = re.sub(r"[^A-Za-z0-9.-]", "_", engine_id)[:64]
    digest = hashlib.sha256(engine_id.encode()).hexdigest()[:12]
    return f"{_NAME_PREFIX}{readable}_{digest}"


def _require_worker(geometry: PrimaryGeometry, worker: int) -> None:
    if not 0 <= worker < geometry.num_workers:
        raise RegionError(
            f"there is no worker {worker}: the region has {geometry.num_workers}, and their ranks "
            f"are in 0..{geometry.num_workers - 1}"
        )


def _listed(workers: list[int]) -> str:
    return ", ".join(map(str, workers))
