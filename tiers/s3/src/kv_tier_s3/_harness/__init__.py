"""How the conformance suite drives this tier, and the real servers that it is tested on.

Needs the extra ``kv-tier-s3[conformance]``; the tier itself never imports this.
"""

from kv_tier_s3._harness._certificates import Certificates
from kv_tier_s3._harness._harness import (
    ObstoreHarness,
    RgwHarness,
    RgwObstoreHarness,
    S3Harness,
)
from kv_tier_s3._harness._proxy import FaultProxy
from kv_tier_s3._harness._rgw import Rgw
from kv_tier_s3._harness._seaweed import SeaweedServer
from kv_tier_s3._harness._server import Rights, S3Access, S3Server

__all__ = [
    "Certificates",
    "FaultProxy",
    "ObstoreHarness",
    "Rgw",
    "RgwHarness",
    "RgwObstoreHarness",
    "Rights",
    "S3Access",
    "S3Harness",
    "S3Server",
    "SeaweedServer",
]
