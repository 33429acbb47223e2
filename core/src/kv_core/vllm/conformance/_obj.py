"""The harness of vLLM's tier ``obj``: a storage is a prefix of one bucket, an object a key.

The tier reaches the server through NIXL, which is native code with the AWS SDK inside, and has its
settings in the environment where the tier has none. Those that the tier needs are set here, each
with its reason, so that what is judged is the tier and not the lack of a variable; the published
page says what happens without them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, final
from urllib.parse import urlsplit

from botocore.exceptions import ClientError
from typing_extensions import override

from kv_conformance.harness import BaseHarness, Fault, HarnessError
from kv_core.contract import Capability, ContractVersion, TierSpec, make_offload_key
from kv_core.vllm.conformance._adapter import VllmTier, prepare_process
from kv_core.vllm.conformance._settings import UncheckedConfig, limits_of
from kv_tier_s3._harness import FaultProxy, Rgw, SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from kv_conformance.harness import Corruption, Opening, Subject
    from kv_core.contract import OffloadKey, TierContext
    from kv_tier_s3._harness import S3Access, S3Server

__all__ = ["SPEC", "ObjHarness", "RgwObjHarness"]

_BUCKET: Final = "kv-conformance"
_ABSENT_STATUS: Final = 404

_ENVIRONMENT: Final = {
    # Without it the first transfer that ends raises in the tier (vllm#55576).
    "NIXL_TELEMETRY_ENABLE": "y",
    # Without them a request that fails is tried for 25 s, and one that hangs for a minute, which
    # no deadline of the suite waits for.
    "AWS_RETRY_MODE": "standard",
    "AWS_MAX_ATTEMPTS": "1",
    # Without it Ceph's RGW refuses every object, as many servers do.
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    # It writes a line for each failed request.
    "NIXL_LOG_LEVEL": "FATAL",
}


class ObjConfig(UncheckedConfig):
    """The settings of vLLM's tier ``obj``, as its constructor names them."""

    store_config: dict[str, str]
    prefix: str = ""
    io_threads: int = 4
    enable_kv_events: bool = False
    locality: str | None = None


def _make(context: TierContext) -> VllmTier:
    return VllmTier(context, "obj")


SPEC: Final = TierSpec(
    type="vllm-obj",
    summary="vLLM's own object store tier, unmodified, behind an adapter.",
    contract=ContractVersion(1, 0),
    factory=_make,
    config_model=ObjConfig,
    limits=limits_of,
    # Its objects outlive the process, and its keys are the same for all that use the bucket.
    capabilities=frozenset({Capability.PERSISTENT, Capability.SHARED}),
)


class ObjHarness(BaseHarness):
    """The harness of vLLM's ``obj``, on SeaweedFS.

    A tier that will see faults reaches the server through a proxy. What the suite does to objects,
    it does with a client of its own.

    Attributes:
        server_type: The kind of server that is started.
    """

    server_type: ClassVar[type[S3Server]] = SeaweedServer

    spec = SPEC
    # A request is in the hands of a native library.
    stall_can_be_interrupted = False
    faults = frozenset({Fault.STALL, Fault.ERROR})

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self._server: S3Server | None = None
        self._proxy: FaultProxy | None = None
        self._client: Any = None

    @override
    def start(self) -> None:
        # Helper processes inherit it.
        os.environ.update(_ENVIRONMENT)
        prepare_process("obj")
        self._server = self.server_type(self.workdir / self.server_type.name)
        self._server.start()
        self._server.make_bucket(_BUCKET)
        parts = urlsplit(self._server.endpoint_url)
        if parts.hostname is None or parts.port is None:
            raise HarnessError(f"no address of a server: {self._server.endpoint_url!r}")
        self._proxy = FaultProxy(parts.hostname, parts.port)
        self._client = self._server.access.client()

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
        access = self._access
        if opening.faults and self._proxy is not None:
            access = replace(access, endpoint_url=f"http://127.0.0.1:{self._proxy.port}")
        return {
            "store_config": {
                "bucket": _BUCKET,
                "endpoint_override": access.endpoint_url,
                "scheme": "http",
                "region": access.region,
                "access_key": access.access_key,
                "secret_key": access.secret_key,
            },
            "prefix": opening.storage,
            "job_deadline_s": opening.deadlines.job_s,
            "lookup_deadline_s": opening.deadlines.lookup_s,
            "error_backoff_s": opening.deadlines.error_backoff_s,
        }

    @override
    def unusable_settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return settings with a secret that is not the server's.

        A bucket that does not exist would not do: the tier takes it for an empty one.
        """
        settings = self.settings(opening)
        return {**settings, "store_config": {**settings["store_config"], "secret_key": "wrong"}}

    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Remove the object of a key.

        Raises:
            KeyError: There is none.
        """
        self._read(subject, key)
        self._client.delete_object(Bucket=_BUCKET, Key=self._name(subject, key))

    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        """Replace the object of a key by a damaged one. It holds the row of the block alone.

        Raises:
            KeyError: There is none.
        """
        damaged = how.damage(self._read(subject, key))
        self._client.put_object(Bucket=_BUCKET, Key=self._name(subject, key), Body=damaged)

    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys that have an object."""
        mapper = _mapper(subject)
        # <base>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin. A server may take the two slashes in the
        # base for one.
        folder = f"{mapper.base_path}_r{mapper.rank}".rpartition("/")[2]
        found = set()
        for name in self._list(f"{subject.opening.storage}/"):
            parts = name.split("/")
            if folder in parts and name.endswith(".bin"):
                group = int(parts[-2].rpartition("_g")[2])
                found.add(make_offload_key(bytes.fromhex(parts[-1].removesuffix(".bin")), group))
        return found

    @override
    def count_leftovers(self, subject: Subject) -> int:
        answer = self._client.list_multipart_uploads(
            Bucket=_BUCKET, Prefix=f"{subject.opening.storage}/"
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

    @property
    def _access(self) -> S3Access:
        if self._server is None:
            raise HarnessError("the harness was not started")
        return self._server.access

    def _name(self, subject: Subject, key: OffloadKey) -> str:
        name: str = _mapper(subject).get_file_name(key)
        return name

    def _read(self, subject: Subject, key: OffloadKey) -> bytes:
        name = self._name(subject, key)
        try:
            content: bytes = self._client.get_object(Bucket=_BUCKET, Key=name)["Body"].read()
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == _ABSENT_STATUS:
                raise KeyError(key) from None
            raise
        return content

    def _list(self, prefix: str) -> Iterator[str]:
        for page in self._client.get_paginator("list_objects_v2").paginate(
            Bucket=_BUCKET, Prefix=prefix
        ):
            for item in page.get("Contents", ()):
                yield item["Key"]


@final
class RgwObjHarness(ObjHarness):
    """The same on Ceph's RGW."""

    server_type = Rgw


def _mapper(subject: Subject) -> Any:
    """Return what the tier names its objects with."""
    if not isinstance(subject.tier, VllmTier):
        raise HarnessError(f"a VllmTier expected, found a {type(subject.tier).__name__}")
    return subject.tier.inner._file_mapper
