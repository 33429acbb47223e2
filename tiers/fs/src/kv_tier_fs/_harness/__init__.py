"""How the conformance suite drives this tier, and reaches the files below it.

Needs the extra ``kv-tier-fs[conformance]``; the tier itself never imports this.
"""

from kv_tier_fs._harness._files import FilesHarness
from kv_tier_fs._harness._segments import FsHarness

__all__ = ["FilesHarness", "FsHarness"]
