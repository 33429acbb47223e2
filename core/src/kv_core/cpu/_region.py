"""The memory of the primary tier: one mapping that scheduler, workers and tiers share.

One thread at a time uses a region object; the bytes it maps are guarded by the ledger, which
lets one party at a time write a row. The file behind it has a name only while processes still
have to find it: whatever kills them afterwards, the memory goes with the last of them.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_core.cpu._region_file import RegionFile
from kv_core.cpu._trailer import NONCE_BYTES, TRAILER_BYTES, RegionTrailer
from kv_core.errors import RegionError

if TYPE_CHECKING:
    import numpy.typing as npt

    from kv_core.cpu._geometry import PrimaryGeometry

__all__ = ["SharedOffloadRegion"]

DEFAULT_SHM_DIR: Final = Path("/dev/shm")  # noqa: S108 - shared memory is the point

# Not in the mmap module before Python 3.14, and known to Linux from 5.14 on.
_MADV_POPULATE_WRITE: Final = 23


@final
class SharedOffloadRegion:
    """Owns the mapping of one engine instance: ``num_blocks`` rows and a trailer page.

    Row ``b`` holds the page of worker 0 of block ``b``, then of worker 1, and so on, then
    padding. Within a worker's page, layers lie in the order of :meth:`create_next_view`.

    Attributes:
        geometry: Shape of the rows.
        trailer: Identity and shape, as written to the last page.
        path: Name of the file while it has one.
    """

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
        """Create the region, with all of its pages zeroed and present.

        Args:
            engine_id: Unique name of the engine instance on this host.
            geometry: Shape of the rows.
            namespace_fingerprint: What the bytes are, 64 hex digits.
            nonce: 16 bytes that the config carries to every process, drawn here by default.
            shm_dir: Folder on a memory file system.
            keep_name: Leave the name for other processes to attach by; the caller then calls
                :meth:`unlink_name` once all have.

        Raises:
            InsufficientSpaceError: The file system has too little space.
            RegionError: A running engine uses the id, or the memory cannot be mapped. Nothing
                is left behind.
        """
        self.geometry = geometry
        self.path = shm_dir / region_name(engine_id)
        self.trailer = RegionTrailer(
            num_workers=geometry.num_workers,
            num_blocks=geometry.num_blocks,
            worker_page_bytes=geometry.worker_page_bytes,
            row_stride=geometry.row_stride,
            namespace_fingerprint=namespace_fingerprint,
            nonce=secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce,
        )
        self._rows_bytes = geometry.num_blocks * geometry.row_stride
        self._used_bytes = [0] * geometry.num_workers
        packed_trailer = self.trailer.pack()
        self._file = RegionFile.create(self.path)
        try:
            if not keep_name:
                # Before it has any memory: whoever is killed meanwhile leaves an empty file.
                self.unlink_name()
            size_bytes = self._rows_bytes + TRAILER_BYTES
            self._file.allocate(size_bytes)
            self._mapping: mmap.mmap | None = _map(self._file.descriptor, size_bytes)
            self._mapping[self._rows_bytes : self._rows_bytes + len(packed_trailer)] = (
                packed_trailer
            )
        except BaseException:
            self._file.close()
            raise

    def unlink_name(self) -> bool:
        """Remove the name, once every process that needs it has attached.

        Returns:
            Whether the name was there and was this region's: a successor's is left alone.
        """
        return self._file.unlink()

    def create_next_view(self, worker: int, page_bytes: int) -> npt.NDArray[np.int8]:
        """Return the place of a worker's next layer in every row.

        Args:
            worker: Rank among the workers of the region.
            page_bytes: Bytes of the layer in one block.

        Returns:
            ``int8``, shape ``(num_blocks, page_bytes)``, strides ``(row_stride, 1)``. An export
            of the mapping: drop it before :meth:`close`.

        Raises:
            RegionError: There is no such worker, its page is full, or the region is closed.
        """
        geometry = self.geometry
        if not 0 <= worker < geometry.num_workers:
            raise RegionError(f"worker {worker} is not in 0..{geometry.num_workers - 1}")
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
        """Unmap the memory and remove the name if it is still there. Idempotent.

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
    return f"kv_core_{readable}_{digest}"


def _map(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map a file and fault its pages in, so that no copy pays for that later."""
    try:
        mapping = mmap.mmap(descriptor, size_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise RegionError(f"{size_bytes} bytes cannot be mapped: {error}") from error
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError:
        # Older kernels. Reading is enough to map the pages, and races with nobody's write.
        np.frombuffer(mapping, dtype=np.uint8)[:: mmap.PAGESIZE].sum()
    return mapping
