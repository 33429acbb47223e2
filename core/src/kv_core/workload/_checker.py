"""The judge of loaded bytes: counts what differs from what the key demands.

The definition of the content stands in :mod:`kv_core.workload._content`. Nothing is imported
from there, and the computation takes another route (whole-array expressions over explicit word
numbers instead of in-place steps over slices), so a mistake in writing cannot excuse itself in
checking. Do not "share" code between the two.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, cast, final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Buffer

__all__ = ["BlockChecker"]


@final
class BlockChecker:
    """Compare blocks with the content that belongs to their keys.

    Keeps the part of the expected content that depends on the length alone, so that checking
    many blocks of one size costs three passes over memory each. One thread at a time.
    """

    def __init__(self) -> None:
        self._lane_of_word: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._page_of_word: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)

    def count_wrong_bytes(self, key: bytes, data: Buffer | npt.NDArray[np.uint8]) -> int:
        """Return how many bytes of ``data`` differ from the content of the block ``key``.

        Args:
            key: Key of the block that the bytes should be.
            data: What was found, contiguous, of any length: the whole block from its start.

        Raises:
            ValueError: ``data`` is not contiguous.
        """
        view = memoryview(cast("Buffer", data))  # an array is one, as its types say from 3.12 on
        if not view.c_contiguous:
            raise ValueError("the bytes to check must be contiguous, found strided memory")
        if view.nbytes == 0:
            return 0
        found = np.frombuffer(view, dtype=np.uint8)
        expected = self._expected(key, found.size)
        whole = found.size // 8 * 8
        # Nearly every block is right, and words compare eight times faster than bytes.
        if found.size == whole and np.array_equal(found.view(np.uint64), expected.view(np.uint64)):
            return 0
        return int(np.count_nonzero(found != expected))

    def _expected(self, key: bytes, length: int) -> npt.NDArray[np.uint8]:
        digest = blake2b(key, digest_size=16, person=b"kv-core block").digest()
        offset = np.uint64(int.from_bytes(digest[:8], "little"))
        factor = np.uint64(int.from_bytes(digest[8:], "little") | 1)
        count = -(-length // 8)
        if count > self._lane_of_word.size:
            self._grow(count)
        pages = self._page_of_word[:count] + offset
        words: npt.NDArray[np.uint64] = (self._lane_of_word[:count] ^ pages) * factor
        octets: npt.NDArray[np.uint8] = words.astype("<u8", copy=False).view(np.uint8)
        return octets[:length]

    def _grow(self, count: int) -> None:
        number = np.arange(count, dtype=np.uint64)
        lane, page = number & np.uint64(0x3FFFF), number >> np.uint64(18)
        golden = np.uint64(0x9E3779B97F4A7C15)
        mixed = (lane + np.uint64(1)) * golden
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        self._lane_of_word = mixed ^ (mixed >> np.uint64(31))
        self._page_of_word = page * golden
