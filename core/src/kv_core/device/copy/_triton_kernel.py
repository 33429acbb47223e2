"""The Triton kernel. Imported where it is launched; needs Triton, which comes with torch.

Its own module, because Triton decides when a kernel is defined whether it will be compiled or
interpreted, and reads its source.
"""

# ruff: noqa: N803 - constants of a kernel are written in capitals
# mypy: disable-error-code="untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["copy_pages"]


# Never another compilation for another number of pages: it would stop the engine for seconds.
@triton.jit(do_not_specialize=["num_pages"])
def copy_pages(
    sources: Any,
    destinations: Any,
    sizes: Any,
    num_pages: Any,
    CHUNK_WORDS: tl.constexpr,
) -> None:
    """Copy pages, in words of 8 bytes; each program takes every n-th page.

    Args:
        sources: Pointer to the addresses of the sources, ``int64``.
        destinations: Pointer to the addresses of the destinations, ``int64``.
        sizes: Pointer to the sizes in bytes, ``int64``, multiples of 8.
        num_pages: Entries of each.
        CHUNK_WORDS: Words that a program moves at a time, a power of two.
    """
    words = tl.arange(0, CHUNK_WORDS)
    for page in range(tl.program_id(0), num_pages, tl.num_programs(0)):
        source = tl.load(sources + page).to(tl.pointer_type(tl.int64))
        destination = tl.load(destinations + page).to(tl.pointer_type(tl.int64))
        num_words = tl.load(sizes + page) // 8
        for first in range(0, num_words, CHUNK_WORDS):
            place = first + words
            is_inside = place < num_words
            chunk = tl.load(source + place, mask=is_inside)
            tl.store(destination + place, chunk, mask=is_inside)
