"""Copies between memory that is nobody else's meanwhile, while other threads run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

__all__ = ["copy_bytes", "scatter"]


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy all of one buffer over another of the same length.

    By numpy, which lets other threads run: a slice of a memoryview holds them up for as long as the
    copy takes, a millisecond for a large block, and the engine's thread is one of them.

    Raises:
        ValueError: The lengths differ.
    """
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes are to be copied over {len(target)}")
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def scatter(found: Buffer, parts: Sequence[memoryview]) -> int:
    """Copy an object into several buffers, one behind the other; return the object's length."""
    with memoryview(found) as view:
        start = 0
        for part in parts:
            stop = min(start + len(part), len(view))
            if start < stop:
                with part[: stop - start] as target, view[start:stop] as source:
                    copy_bytes(target, source)
            start = stop
        return len(view)
