"""How the conformance suite drives this tier, and reaches the objects below it.

Needs the extra ``kv-tier-s3[conformance]``; the tier itself never imports this.
"""

from kv_tier_s3._harness._harness import ObstoreHarness, S3Harness

__all__ = ["ObstoreHarness", "S3Harness"]
