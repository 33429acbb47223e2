"""How the conformance suite drives this tier, and reaches what lies below it.

Needs the extra ``kv-tier-fsspec[conformance]``; the tier itself never imports this. What needs a
client library of its own is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_tier_fsspec._harness._folders import FileHarness
from kv_tier_fsspec._harness._memory import AsyncMemoryHarness, MemoryHarness

if TYPE_CHECKING:
    from kv_tier_fsspec._harness._blobs import AzHarness
    from kv_tier_fsspec._harness._served import SftpHarness

__all__ = ["AsyncMemoryHarness", "AzHarness", "FileHarness", "MemoryHarness", "SftpHarness"]


def __getattr__(name: str) -> Any:
    if name == "AzHarness":
        from kv_tier_fsspec._harness._blobs import AzHarness

        return AzHarness
    if name == "SftpHarness":
        from kv_tier_fsspec._harness._served import SftpHarness

        return SftpHarness
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
