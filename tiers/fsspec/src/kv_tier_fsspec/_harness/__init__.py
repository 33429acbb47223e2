"""How the conformance suite drives this tier, and reaches what lies below it.

Needs the extra ``kv-tier-fsspec[conformance]``; the tier itself never imports this.
"""

from kv_tier_fsspec._harness._folders import FileHarness
from kv_tier_fsspec._harness._memory import AsyncMemoryHarness, MemoryHarness
from kv_tier_fsspec._harness._served import SftpHarness

__all__ = ["AsyncMemoryHarness", "FileHarness", "MemoryHarness", "SftpHarness"]
