"""The server that is measured on: started here, or somebody else's."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kv_tier_s3._harness import Rgw, S3Access, SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["SERVERS", "Place", "serving"]

SERVERS: Final = ("seaweed", "rgw")
_BUCKET: Final = "kv-benchmark"


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket of a server.

    Attributes:
        name: Of the server, for reports.
        access: Where it is, and as whom to ask it.
        bucket: The bucket; it exists.
    """

    name: str
    access: S3Access
    bucket: str


@contextmanager
def serving(which: str, folder: Path) -> Iterator[Place]:
    """Start a server, or find the one that an address names.

    Args:
        which: ``seaweed``, ``rgw``, or the address of a server; then bucket and key come from the
            environment: ``KV_TIER_S3_BUCKET``, ``KV_TIER_S3_ACCESS_KEY``,
            ``KV_TIER_S3_SECRET_KEY``.
        folder: Where data of a started server lie.
    """
    if which not in SERVERS:
        environ = {**os.environ, "KV_TIER_S3_ENDPOINT": which}
        access, bucket = S3Access.from_environment(environ)
        yield Place(which, access, bucket)
        return
    kinds: dict[str, type[SeaweedServer | Rgw]] = {"seaweed": SeaweedServer, "rgw": Rgw}
    with kinds[which](folder) as server:
        server.make_bucket(_BUCKET)
        yield Place(which, server.access, _BUCKET)
