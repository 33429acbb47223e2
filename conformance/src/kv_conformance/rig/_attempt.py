"""Opening a tier that may fail to open."""

from __future__ import annotations

import gc
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from kv_conformance.rig._memory import Region
from kv_conformance.rig._rigs import RecordedMetrics, namespace_of
from kv_core.errors import KVCoreError
from kv_core.plugins import open_tier

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from kv_core.contract import TierSpec

__all__ = ["Attempt", "attempt_open"]


@final
@dataclass(frozen=True, slots=True)
class Attempt:
    """The outcome of an attempt. Not the exception itself: its frames would keep things alive.

    Attributes:
        error: Type and message of the error; empty when the tier opened.
        error_type: Type of the error, or ``None``.
        setting: The setting that a ConfigError names.
        traceback: All that a log would show of the error.
        kept: Why the memory could not be unmapped afterwards, or ``None``.
    """

    error: str = ""
    error_type: type[BaseException] | None = None
    setting: str = ""
    traceback: str = ""
    kept: str | None = None


def attempt_open(
    spec: TierSpec,
    settings: Mapping[str, Any],
    *,
    under: AbstractContextManager[object] | None = None,
    block_bytes: int = 4096,
) -> Attempt:
    """Open a tier and, when that succeeds, shut it down again.

    Args:
        spec: The tier.
        settings: Its settings.
        under: Entered while the tier is opened.
        block_bytes: Payload bytes of a block.
    """
    region = Region(4, block_bytes, block_bytes)
    error, error_type, setting, trace = "", None, "", ""
    manager = None
    try:
        with under or nullcontext():
            manager = open_tier(
                spec,
                name=spec.type,
                settings=settings,
                namespace=namespace_of(block_bytes),
                primary=region.primary,
                clock=time.monotonic,
                metrics=RecordedMetrics(),
            ).manager
    except KVCoreError as raised:
        error, error_type = f"{type(raised).__name__}: {raised}", type(raised)
        setting = str(getattr(raised, "setting", ""))
        trace = "".join(traceback.format_exception(raised)) + repr(raised)
    if manager is not None:
        manager.shutdown()
        del manager
    kept = region.unmap()
    if kept is not None:
        # What hangs in a cycle is not kept, only not collected yet.
        gc.collect()
        kept = region.unmap()
    return Attempt(error, error_type, setting, trace, kept)
