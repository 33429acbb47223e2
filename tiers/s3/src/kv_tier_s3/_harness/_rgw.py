"""Ceph's S3 gateway as a server of the tests: the strict second opinion.

One monitor, one storage daemon on a sparse file, one gateway; all of them with authentication, as
in a cluster, and none of them keeps a copy of anything. The programs come with Debian's packages
``radosgw``, ``ceph-mon``, ``ceph-osd`` and ``ceph-common``; their services are not used, and
nothing outside of the folder is read or written.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import struct
import subprocess
import uuid
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

from typing_extensions import override

from kv_conformance.harness import HarnessError
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
    from pathlib import Path

__all__ = ["Rgw"]

_ADVICE: Final = (
    "run 'apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common', or "
    "'make s3-servers' as root"
)
_OWNER: Final = "suite"
_COMMAND_S: Final = 60.0

# What an unprivileged user of the machine may have set for a cluster of his own.
_ENVIRONMENT: Final = {"CEPH_ARGS": "", "CEPH_CONF": ""}

_GRANTS: Final = {
    "mon.": 'caps mon = "allow *"',
    "client.admin": 'caps mon = "allow *"\n\tcaps osd = "allow *"',
    "client.rgw": 'caps mon = "allow rw"\n\tcaps osd = "allow rwx"',
}

_CONFIGURATION: Final = """\
[global]
fsid = {cluster}
mon host = [v2:127.0.0.1:{monitor_port}]
public addr = 127.0.0.1
ms bind msgr1 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
run dir = {folder}
admin socket =
pid file =
crash dir = {folder}/crash
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
debug ms = 0/0
debug osd = 0/0
debug rocksdb = 0/0
debug bluestore = 0/0
debug bluefs = 0/0
debug bdev = 0/0
# One of everything, no copies, and pools with few parts: they start faster.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
mon max pg per osd = 10000
mon osd min up ratio = 0
# Nobody else will join.
mon clock drift allowed = 60
paxos propose interval = 0.05
paxos min wait = 0.01

[client]
keyring = {folder}/$name.keyring

[mon.a]
mon data = {folder}/mon
keyring = {folder}/mon/keyring

[osd.0]
osd data = {folder}/osd
keyring = {folder}/osd/keyring
osd objectstore = bluestore
bluestore block size = {capacity_bytes}
bluestore block create = true
bluestore block db create = false
bluestore block wal create = false
bluestore fsck on mount = false
osd memory target = 939524096
# A gateway that was killed keeps others waiting for so long.
osd client watch timeout = 5
osd class update on start = false
osd crush update on start = true
osd pg object context cache count = 64

[client.rgw]
rgw frontends = beast tcp_nodelay=1 endpoint=127.0.0.1:{http_port} \
ssl_endpoint=127.0.0.1:{https_port} ssl_certificate={certificate} ssl_private_key={key}
rgw enable usage log = false
rgw enable ops log = false
rgw thread pool size = 64
rgw init timeout = 60
# A storage daemon that was started again is found at once, not after 15 seconds.
objecter tick interval = 0.2
objecter timeout = 0.5
rgw lc debug interval = {lifecycle_day_s}
rgw enable gc threads = false
rgw crypt require ssl = false
rgw crypt s3 kms backend = testing
rgw crypt s3 kms encryption keys = {kms_key_id}={kms_key}
"""


@final
class Rgw(S3Server):
    """One Ceph cluster of one node, with its gateway.

    Args:
        folder: Where its data, logs and certificates lie.
        lifecycle_day_s: How many seconds a day of lifecycle rules lasts; ``None`` for a real one.

    Attributes:
        kms_key_id: Name of a key that objects can be encrypted with (``aws:kms``).
    """

    name: ClassVar[str] = "rgw"
    # A write is answered when it is on the disk: on a busy machine 0.3 s are not enough for that.
    patience: ClassVar[float] = 2.0
    kms_key_id: ClassVar[str] = "key-of-the-tests"

    _CAPACITY_BYTES: ClassVar[int] = 16 << 30

    def __init__(self, folder: Path, *, lifecycle_day_s: int | None = None) -> None:
        super().__init__(folder)
        self._lifecycle_day_s = lifecycle_day_s
        self._configuration = folder / "ceph.conf"
        # Rights are in the policies of buckets, where they would outlive the user.
        self._buckets_of: dict[str, set[str]] = {}
        self._monitor, self._storage, self._gateway = (
            Daemon(name, folder / f"{name}.out") for name in ("ceph-mon", "ceph-osd", "radosgw")
        )

    @property
    @override
    def _daemons(self) -> tuple[Daemon, ...]:
        return (self._monitor, self._storage, self._gateway)

    @override
    def _prepare(self) -> tuple[S3Access, S3Access]:
        certificates = Certificates.make(self.folder / "certificates")
        monitor_port, http_port, https_port = free_ports(3)
        cluster = str(uuid.uuid4())
        self._configuration.write_text(
            _CONFIGURATION.format(
                cluster=cluster,
                folder=self.folder,
                monitor_port=monitor_port,
                http_port=http_port,
                https_port=https_port,
                certificate=certificates.certificate,
                key=certificates.key,
                capacity_bytes=self._CAPACITY_BYTES,
                lifecycle_day_s=-1 if self._lifecycle_day_s is None else self._lifecycle_day_s,
                kms_key_id=self.kms_key_id,
                kms_key=base64.b64encode(secrets.token_bytes(32)).decode(),
            )
        )
        self._make_cluster(cluster, monitor_port)
        return (
            S3Access(endpoint_url=f"http://127.0.0.1:{http_port}"),
            S3Access(
                endpoint_url=f"https://127.0.0.1:{https_port}", ca_file=certificates.authority
            ),
        )

    @override
    def _start_daemons(self) -> None:
        self._start(self._monitor, "-i", "a")
        self._start(self._storage, "-i", "0")
        self._start(self._gateway, "-n", "client.rgw")

    def _start(self, daemon: Daemon, *arguments: str) -> None:
        if not daemon.runs:
            command = [_find(daemon.name), "-c", str(self._configuration), "-f", *arguments]
            daemon.start(command, _ENVIRONMENT)

    def _make_cluster(self, cluster: str, monitor_port: int) -> None:
        """Make monitor, storage daemon and owner, once."""
        storage = str(uuid.uuid4())
        keys = {name: _make_key() for name in (*_GRANTS, "osd.0")}
        granted = "".join(
            f"[{name}]\n\tkey = {keys[name]}\n\t{caps}\n" for name, caps in _GRANTS.items()
        )
        self._write(self.folder / "initial.keyring", granted)
        for name in ("client.admin", "client.rgw"):
            self._write(self.folder / f"{name}.keyring", f"[{name}]\n\tkey = {keys[name]}\n")
        for name in ("mon", "osd"):
            (self.folder / name).mkdir()
        self._write(self.folder / "osd" / "keyring", f"[osd.0]\n\tkey = {keys['osd.0']}\n")
        keyring, monitors = str(self.folder / "initial.keyring"), str(self.folder / "monmap")
        self._run(
            *("monmaptool", "--create", "--fsid", cluster),
            *("--addv", "a", f"[v2:127.0.0.1:{monitor_port}]", monitors),
        )
        self._run("ceph-mon", "--mkfs", "-i", "a", "--keyring", keyring, "--monmap", monitors)
        self._start(self._monitor, "-i", "a")
        self._run(
            *("ceph", "-n", "client.admin", "osd", "new", storage, "-i", "-"),
            stdin=json.dumps({"cephx_secret": keys["osd.0"]}),
        )
        self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", storage)
        self._start(self._storage, "-i", "0")
        self._admin(
            *("user", "create", f"--uid={_OWNER}", f"--display-name={_OWNER}"),
            *(f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"),
        )

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.touch(0o600)
        path.write_text(text)

    @override
    def version(self) -> str:
        return f"Ceph RGW {self._run('radosgw', '--version').split()[2]}"

    @override
    def add_user(self, name: str, bucket: str, rights: Rights) -> S3Access:
        made = json.loads(self._admin("user", "create", f"--uid={name}", f"--display-name={name}"))
        self.allow(name, bucket, rights)
        return S3Access(
            endpoint_url=self.endpoint_url,
            access_key=made["keys"][0]["access_key"],
            secret_key=made["keys"][0]["secret_key"],
        )

    @override
    def allow(self, name: str, bucket: str, rights: Rights) -> None:
        self._buckets_of.setdefault(name, set()).add(bucket)
        self._grant(name, bucket, rights)

    def _grant(self, name: str, bucket: str, rights: Rights) -> None:
        client = self.access.client()
        statements = [
            statement
            for statement in self._statements(client, bucket)
            if statement["Principal"] != _principal(name)
        ]
        if rights:
            statements += policy_of(bucket, rights, Principal=_principal(name))["Statement"]
        if statements:
            policy = {"Version": "2012-10-17", "Statement": statements}
            client.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
        else:
            client.delete_bucket_policy(Bucket=bucket)

    @staticmethod
    def _statements(client: Any, bucket: str) -> list[dict[str, Any]]:
        try:
            found = client.get_bucket_policy(Bucket=bucket)["Policy"]
        except client.exceptions.ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchBucketPolicy":
                return []
            raise
        statements: list[dict[str, Any]] = json.loads(found)["Statement"]
        return statements

    @override
    def remove_user(self, name: str) -> None:
        for bucket in self._buckets_of.pop(name, ()):
            self._grant(name, bucket, Rights.NONE)
        self._admin("user", "rm", f"--uid={name}")

    def _admin(self, *arguments: str) -> str:
        return self._run("radosgw-admin", "-n", "client.rgw", *arguments)

    def _run(self, program: str, *arguments: str, stdin: str = "") -> str:
        """Run one of the programs to its end, and return what it prints."""
        command: Sequence[str] = [_find(program), "-c", str(self._configuration), *arguments]
        try:
            answer = subprocess.run(  # noqa: S603 - the program was just found
                command,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=_COMMAND_S,
                check=True,
                env={**os.environ, **_ENVIRONMENT},
            )
        except subprocess.TimeoutExpired:
            raise HarnessError(f"'{program}' did not end within {_COMMAND_S:g} s") from None
        except subprocess.CalledProcessError as error:
            raise HarnessError(
                f"'{program} {' '.join(arguments[:4])}' ended with {error.returncode}: "
                f"{error.stderr.strip()[-500:]}"
            ) from None
        return answer.stdout


def _principal(name: str) -> dict[str, list[str]]:
    return {"AWS": [f"arn:aws:iam:::user/{name}"]}


def _find(program: str) -> str:
    return find_program(program, _ADVICE)


def _make_key() -> str:
    """Return a secret as Ceph writes it: type, time, length, bytes."""
    secret = secrets.token_bytes(16)
    return base64.b64encode(struct.pack("<hiih", 1, 0, 0, len(secret)) + secret).decode()
