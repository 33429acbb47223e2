"""What an eviction has to spare."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, final

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_core.keys import OffloadKey

__all__ = ["protect"]


@final
class _Union(Collection["OffloadKey"]):
    """Several sets as one, without a copy: an eviction asks about few keys of large sets."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Collection[OffloadKey]]) -> None:
        self._parts = parts

    @override
    def __contains__(self, key: object) -> bool:
        for part in self._parts:  # noqa: SIM110 - any() costs a generator for each candidate
            if key in part:
                return True
        return False

    @override
    def __iter__(self) -> Iterator[OffloadKey]:
        for part in self._parts:
            yield from part

    @override
    def __len__(self) -> int:
        return sum(map(len, self._parts))


def protect(*parts: Collection[OffloadKey]) -> Collection[OffloadKey]:
    """Return one collection with constant-time ``in`` over all parts."""
    filled: list[Collection[OffloadKey]] = [
        part if isinstance(part, AbstractSet | dict) else frozenset(part) for part in parts if part
    ]
    if len(filled) > 1:
        return _Union(filled)
    return filled[0] if filled else ()
