"""What the tiers in a bucket have in common, whatever moves their blocks.

**Who owns what.** Coroutines run on the loop's thread, which owns the bucket; the engine's thread
reads its counters.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from kv_core.errors import BlockDeclinedError
from kv_tier_fsspec.store import ObjectTier
from kv_tier_s3._advice import cannot_open
from kv_tier_s3._authorities import check_authorities
from kv_tier_s3._bucket import Bucket
from kv_tier_s3._counts import METRIC_DEFINITIONS
from kv_tier_s3._errors import S3Error, S3ErrorKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_core.contract import MetricDefinition
    from kv_core.errors import KVCoreError
    from kv_tier_fsspec.store import ObjectStore
    from kv_tier_s3._bucket import S3Client
    from kv_tier_s3._config import BucketConfig

__all__ = ["BucketTier", "refusal"]

_LOGGER: Final = logging.getLogger(__name__)

_OPEN_SHARE: Final = 0.75
"""Sooner than whoever waits for the opening, so that it is said what did not answer."""

_DECLINED: Final = frozenset({S3ErrorKind.THROTTLED, S3ErrorKind.FULL})
"""Errors of stores that say nothing against the store."""


def refusal(error: S3Error) -> KVCoreError:
    """Return what a store of a block raises for an error: one that asks for patience declines."""
    return BlockDeclinedError(error.message) if error.kind in _DECLINED else error


class BucketTier(ObjectTier):
    """One checksummed object a block, in one bucket. Write :meth:`make_client`."""

    config: BucketConfig

    @abstractmethod
    def make_client(self) -> S3Client:
        """Return the client of the bucket, not open yet. Called on the event loop."""

    @override
    async def open(self) -> None:
        check_authorities(self.config.ca_bundle)
        limit_s = self.open_deadline_s * _OPEN_SHARE
        try:
            await asyncio.wait_for(self.open_bucket(), limit_s)
        except asyncio.TimeoutError:
            detail = f"no answer within {limit_s:g} s"
            error = S3Error(S3ErrorKind.TIMEOUT, "open", self.config.bucket, None, None, detail)
            raise cannot_open(self.config, error) from None
        except S3Error as error:
            raise cannot_open(self.config, error) from None

    async def open_bucket(self) -> None:
        """See that the bucket can be used.

        Raises:
            S3Error: It cannot.
        """
        await super().open()
        # Who may not write finds out now.
        try:
            await self._write_description()
        except S3Error as error:
            if error.kind is not S3ErrorKind.DENIED:
                raise
            await self._stop_keeping_description()
            _LOGGER.warning(
                'tier %r: blocks can be read and not written (%s). With "mode": "read_only" '
                "that is as it should be; otherwise every store will fail",
                self.context.tier_name,
                error.message,
            )

    @override
    def make_store(self) -> ObjectStore:
        self._bucket = Bucket(self.make_client(), self.context)
        return self._bucket

    @override
    def root(self, store: ObjectStore) -> str:
        return self.config.prefix

    @override
    def get_stats(self) -> Mapping[str, float]:
        return {**super().get_stats(), **self._bucket.counts.stats()}

    @override
    def build_metric_definitions(self) -> Sequence[MetricDefinition]:
        return METRIC_DEFINITIONS
