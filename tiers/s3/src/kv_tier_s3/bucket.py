"""What a tier needs that moves the blocks of a bucket with a client of its own.

:class:`BucketTier` has everything beside the blocks: the start, the description of the namespace,
the removal of damaged objects. :class:`Bucket` says why a request failed.
:class:`S3Error` and :func:`kind_of` say what an answer of a store means, whoever received it.
"""

from __future__ import annotations

from kv_tier_s3._bucket import Bucket, S3Client
from kv_tier_s3._bucket_tier import BucketTier, refusal
from kv_tier_s3._config import DEFAULT_REGION, BucketConfig, S3Config
from kv_tier_s3._counts import METRIC_DEFINITIONS
from kv_tier_s3._errors import S3Error, S3ErrorKind, kind_of
from kv_tier_s3._s3fs_store import S3fsStore

__all__ = [
    "DEFAULT_REGION",
    "METRIC_DEFINITIONS",
    "Bucket",
    "BucketConfig",
    "BucketTier",
    "S3Client",
    "S3Config",
    "S3Error",
    "S3ErrorKind",
    "S3fsStore",
    "kind_of",
    "refusal",
]
