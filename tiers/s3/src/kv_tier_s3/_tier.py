"""The tier ``s3``: chooses the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from typing_extensions import override

from kv_core.errors import TierOpenError
from kv_tier_s3._bucket_tier import BucketTier, refusal
from kv_tier_s3._config import Engine
from kv_tier_s3._errors import S3Error

if TYPE_CHECKING:
    from kv_core.contract import OffloadKey
    from kv_tier_s3._bucket import S3Client
    from kv_tier_s3._config import S3Config

__all__ = ["S3Tier"]


@final
class S3Tier(BucketTier):
    """One checksummed object a block, in one bucket."""

    config: S3Config

    @override
    async def write_block(self, key: OffloadKey, data: memoryview) -> int:
        try:
            return await super().write_block(key, data)
        except S3Error as error:
            raise refusal(error) from None

    @override
    def make_client(self) -> S3Client:
        if self.config.chosen_engine is Engine.S3FS:
            from kv_tier_s3._s3fs_store import S3fsStore

            return S3fsStore(self.config)
        try:
            from kv_tier_s3._obstore_store import ObstoreStore
        except ImportError as error:
            raise TierOpenError(
                f"'engine' is {self.config.engine.value!r}, and obstore cannot be imported "
                f"({error}). Run: pip install 'kv-tier-s3[obstore]', or set 'engine' to 's3fs'"
            ) from error
        return ObstoreStore(self.config)
