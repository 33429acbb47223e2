"""What the engine tells a tier about requests and steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OffloadPolicy", "ReqContext", "RequestOffloadingContext", "ScheduleEndContext"]

_NO_PARAMS: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ReqContext:
    """The request on whose behalf a call is made.

    Attributes:
        req_id: Unique among live requests.
        kv_transfer_params: What the client sent along for KV transfer; often empty.
    """

    req_id: str
    kv_transfer_params: Mapping[str, Any] = field(default_factory=lambda: _NO_PARAMS, hash=False)


class OffloadPolicy(enum.Enum):
    """Which blocks of a request a tier wants to be offered."""

    BLOCK_LEVEL = "block_level"
    """Blocks that are new to the primary tier. The default."""
    REQUEST_LEVEL = "request_level"
    """Every full block of the request, also those the primary tier had already."""


@dataclass(frozen=True, slots=True)
class RequestOffloadingContext:
    """A tier's answer to a new request.

    Attributes:
        policy: Which blocks of this request the tier wants to be offered.
    """

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


@dataclass(frozen=True, slots=True)
class ScheduleEndContext:
    """What the scheduler did in the step that just ended.

    Attributes:
        new_req_ids: Requests scheduled for the first time in this step.
        preempted_req_ids: Requests that lost their GPU blocks in this step.
    """

    new_req_ids: frozenset[str] = frozenset()
    preempted_req_ids: frozenset[str] = frozenset()
