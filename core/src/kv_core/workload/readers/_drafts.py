"""The step that all readers share: from records in file order to a trace in time order."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Draft", "in_time_order"]

_Payload = TypeVar("_Payload")


@final
@dataclass(frozen=True, slots=True)
class Draft(Generic[_Payload]):
    """A request that was read and checked, but not hashed yet.

    Attributes:
        req_id: As in the trace.
        arrival_s: As in the trace.
        prompt_tokens: As in the trace.
        output_tokens: As in the trace.
        payload: What the hashes will be made of.
    """

    req_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    payload: _Payload


def in_time_order(drafts: Iterable[Draft[_Payload]], limit: int | None) -> list[Draft[_Payload]]:
    """Return the first drafts in time order; equal times keep the order of the file.

    All drafts are consumed, for a file may put an early request late (RAGPulse does), but only
    ``limit`` of them are held at a time, and the caller hashes no others.
    """
    key: Any = attrgetter("arrival_s")
    if limit is None:
        return sorted(drafts, key=key)
    return heapq.nsmallest(limit, drafts, key=key)
