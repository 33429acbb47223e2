"""The harnesses: one server for a run, a prefix of one bucket for a storage."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, final
from urllib.parse import urlsplit

from botocore.exceptions import ClientError
from typing_extensions import override

from kv_conformance.harness import BaseHarness, Corruption, Fault, HarnessError
from kv_core.tierkit.objects import TRAILER_BYTES, ObjectNames, read_trailer
from kv_tier_s3 import Engine, kv_core_register_tier
from kv_tier_s3._harness._proxy import FaultProxy
from kv_tier_s3._harness._rgw import Rgw
from kv_tier_s3._harness._seaweed import SeaweedServer
from kv_tier_s3._harness._server import S3Access

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from kv_conformance.harness import Opening, Subject
    from kv_core.contract import OffloadKey
    from kv_tier_s3._harness._server import S3Server

__all__ = ["ObstoreHarness", "RgwHarness", "RgwObstoreHarness", "S3Harness"]

_BUCKET: Final = "kv-conformance"
_ABSENT_STATUS: Final = 404


class S3Harness(BaseHarness):
    """The harness of the tier ``s3``.

    Starts a server, unless the environment names one: ``KV_TIER_S3_ENDPOINT``, and with it
    ``KV_TIER_S3_BUCKET``, ``KV_TIER_S3_ACCESS_KEY`` and ``KV_TIER_S3_SECRET_KEY``; with https also
    ``KV_TIER_S3_CA_FILE``. Tiers that will see faults reach the server through a proxy.

    Attributes:
        engine: The client library of the tier.
        server_type: The kind of server that is started.
        tls: Whether it is reached over https.
    """

    engine: ClassVar[Engine] = Engine.S3FS
    server_type: ClassVar[type[S3Server]] = SeaweedServer
    tls: ClassVar[bool] = False

    spec = kv_core_register_tier()
    # A request that hangs is given up.
    stall_can_be_interrupted = True
    faults = frozenset({Fault.STALL, Fault.ERROR})

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self._server: S3Server | None = None
        self._proxy: FaultProxy | None = None
        self._access: S3Access | None = None
        self._bucket = _BUCKET
        self._client: Any = None

    @override
    def start(self) -> None:
        if S3Access.is_in_environment():
            self._access, self._bucket = S3Access.from_environment()
        else:
            self._server = self.server_type(self.workdir / self.server_type.name)
            self._server.start()
            self._server.make_bucket(self._bucket)
            self._access = self._server.tls_access if self.tls else self._server.access
        parts = urlsplit(self._access.endpoint_url)
        if parts.hostname is None or parts.port is None:
            raise HarnessError(
                "the address of the server must be 'http://<host>:<port>' or 'https://...', found "
                f"{self._access.endpoint_url!r}: faults are made by a proxy in front of it"
            )
        self._proxy = FaultProxy(parts.hostname, parts.port, tls=parts.scheme == "https")
        self._client = self._access.client()

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
        if self._access is None:
            raise HarnessError("the harness was not started")
        access = self._access
        if opening.faults and self._proxy is not None:
            # At the address that the certificate of a server of ours is for.
            scheme = urlsplit(access.endpoint_url).scheme
            access = replace(access, endpoint_url=f"{scheme}://127.0.0.1:{self._proxy.port}")
        return {
            **access.settings(self._bucket),
            "prefix": self._prefix(opening),
            # Once more would be later than the deadlines that the suite sets.
            "max_attempts": 1,
            "engine": self.engine.value,
            "job_deadline_s": opening.deadlines.job_s * self.server_type.patience,
            "lookup_deadline_s": opening.deadlines.lookup_s * self.server_type.patience,
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


@final
class RgwHarness(S3Harness):
    """The same on Ceph's gateway."""

    server_type = Rgw


@final
class RgwObstoreHarness(S3Harness):
    """The other engine on Ceph's gateway, over https."""

    engine = Engine.OBSTORE
    server_type = Rgw
    tls = True
