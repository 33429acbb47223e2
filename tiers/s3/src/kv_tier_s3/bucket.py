"""What a tier needs that moves the blocks of a bucket with a client of its own.

:class:`Bucket` is what everything beside the blocks goes through: the start, the description of the
namespace, the removal of damaged objects, and the question why a request failed.
:class:`S3Error` and :func:`kind_of` say what an answer of a store means, whoever received it.
"""

from __future__ import annotations

from kv_tier_s3._advice import cannot_open
from kv_tier_s3._bucket import Bucket
from kv_tier_s3._config import DEFAULT_REGION, BucketConfig, S3Config
from kv_tier_s3._errors import S3Error, S3ErrorKind, kind_of
from kv_tier_s3._s3fs_store import S3fsStore

__all__ = [
    "DEFAULT_REGION",
    "Bucket",
    "BucketConfig",
    "S3Config",
    "S3Error",
    "S3ErrorKind",
    "S3fsStore",
    "cannot_open",
    "kind_of",
]
