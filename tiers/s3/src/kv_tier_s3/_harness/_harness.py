"""The harnesses: one server for a run, a prefix of one bucket for a storage."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar, Final, final
from urllib.parse import urlsplit

from botocore.exceptions import ClientError
from typing_extensions import override

from kv_conformance.harness import BaseHarness, Corruption, Fault, HarnessError
from kv_core.tierkit.objects import TRAILER_BYTES, ObjectNames, read_trailer
from kv_tier_s3 import Engine, kv_core_register_tier
from kv_tier_s3._harness._proxy import FaultProxy
from kv_tier_s3._harness._seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer, make_client

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from kv_conformance.harness import Opening, Subject
    from kv_core.contract import OffloadKey

__all__ = ["ObstoreHarness", "S3Harness"]

_ENDPOINT: Final = "KV_TIER_S3_ENDPOINT"
_BUCKET: Final = "KV_TIER_S3_BUCKET"
_ACCESS_KEY: Final = "KV_TIER_S3_ACCESS_KEY"
_SECRET_KEY: Final = "KV_TIER_S3_SECRET_KEY"  # noqa: S105 - the name of a variable

_ABSENT_STATUS: Final = 404


class S3Harness(BaseHarness):
    """The harness of the tier ``s3``.

    Starts a SeaweedFS, unless the environment names a server: ``KV_TIER_S3_ENDPOINT``, and with it
    ``KV_TIER_S3_BUCKET``, ``KV_TIER_S3_ACCESS_KEY`` and ``KV_TIER_S3_SECRET_KEY``. Tiers that will
    see faults reach the server through a proxy.
    """

    engine: ClassVar[Engine] = Engine.S3FS

    spec = kv_core_register_tier()
    # A request that hangs is given up.
    stall_can_be_interrupted = True
    faults = frozenset({Fault.STALL, Fault.ERROR})

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self._server: SeaweedServer | None = None
        self._proxy: FaultProxy | None = None
        self._endpoint = os.environ.get(_ENDPOINT, "")
        self._bucket = os.environ.get(_BUCKET, "kv-conformance")
        self._keys = (
            os.environ.get(_ACCESS_KEY, ACCESS_KEY),
            os.environ.get(_SECRET_KEY, SECRET_KEY),
        )
        self._client: Any = None

    @override
    def start(self) -> None:
        if not self._endpoint:
            self._server = SeaweedServer(self.workdir / "seaweedfs", self._bucket)
            self._server.start()
            self._endpoint = self._server.endpoint
        parts = urlsplit(self._endpoint)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise HarnessError(
                f"{_ENDPOINT} must be 'http://<host>:<port>', found {self._endpoint!r}: faults are "
                "made by a proxy, which cannot look into TLS"
            )
        self._proxy = FaultProxy(parts.hostname, parts.port)
        self._client = make_client(self._endpoint, *self._keys)

    @override
    def stop(self) -> None:
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None
        if self._server is not None:
            self._server.stop()
            self._server = None

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings for a prefix; through the proxy if faults will be injected."""
        endpoint = self._endpoint
        if opening.faults and self._proxy is not None:
            endpoint = f"http://127.0.0.1:{self._proxy.port}"
        access_key, secret_key = self._keys
        return {
            "bucket": self._bucket,
            "prefix": self._prefix(opening),
            "endpoint_url": endpoint,
            "access_key_id": access_key,
            "secret_access_key": secret_key,
            # Once more would be later than the deadlines that the suite sets.
            "max_attempts": 1,
            "engine": self.engine.value,
            "job_deadline_s": opening.deadlines.job_s,
            "lookup_deadline_s": opening.deadlines.lookup_s,
            "error_backoff_s": opening.deadlines.error_backoff_s,
        }

    @override
    def unusable_settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return settings with a bucket that does not exist."""
        return {**self.settings(opening), "bucket": "no-such-bucket-for-the-suite"}

    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Remove the object of a key.

        Raises:
            KeyError: There is none.
        """
        self._read(subject, key)
        self._client.delete_object(Bucket=self._bucket, Key=self._names(subject).block(key))

    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        """Replace the object of a key by a damaged one.

        Raises:
            KeyError: There is none.
        """
        damaged = how.damage(self._read(subject, key))
        name = self._names(subject).block(key)
        self._client.put_object(Bucket=self._bucket, Key=name, Body=damaged)

    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys that have an object."""
        names = self._names(subject)
        found = set()
        for name in self._list(f"{names.blocks}/"):
            key = names.key_of(name)
            if key is None:
                content = self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read()
                trailer = read_trailer(content[-TRAILER_BYTES:])
                key = None if trailer is None else trailer.key
            if key is not None:
                found.add(key)
        return found

    @override
    def count_leftovers(self, subject: Subject) -> int:
        answer = self._client.list_multipart_uploads(
            Bucket=self._bucket, Prefix=self._names(subject).folder
        )
        return len(answer.get("Uploads", ()))

    def inject(self, subject: Subject, fault: Fault) -> None:  # noqa: ARG002
        """Set a fault of the proxy."""
        if self._proxy is not None:
            self._proxy.inject(fault)

    def heal(self, subject: Subject) -> None:  # noqa: ARG002
        """End it. Idempotent."""
        if self._proxy is not None:
            self._proxy.heal()

    def _prefix(self, opening: Opening) -> str:
        # A server that is not ours keeps what an earlier run has left.
        return f"{self.workdir.name}-{os.getpid()}/{opening.storage}"

    def _names(self, subject: Subject) -> ObjectNames:
        return ObjectNames(self._prefix(subject.opening), subject.namespace)

    def _read(self, subject: Subject, key: OffloadKey) -> bytes:
        name = self._names(subject).block(key)
        try:
            content: bytes = self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read()
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == _ABSENT_STATUS:
                raise KeyError(key) from None
            raise
        return content

    def _list(self, prefix: str) -> Iterator[str]:
        for page in self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=prefix
        ):
            for item in page.get("Contents", ()):
                yield item["Key"]


@final
class ObstoreHarness(S3Harness):
    """The same with the other engine."""

    engine = Engine.OBSTORE
