"""The common shape of a real object store that tests start, freeze, kill and start again.

**Who owns what.** A server belongs to the process that started it, and is used from one thread at
a time. In a fork of that process every method that would touch its processes does nothing, so that
a child that ends does not take the server with it. Other processes share a server through its
:class:`S3Access`, which can be pickled and passed on in the environment.
"""

from __future__ import annotations

import enum
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from kv_conformance.harness import HarnessError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from kv_tier_s3._harness._daemon import Daemon

__all__ = ["Rights", "S3Access", "S3Server", "policy_of"]

ACCESS_KEY: Final = "AKIDSUITE0123456789"
SECRET_KEY: Final = "not-a-secret-on-loopback"  # noqa: S105 - the server is ours, for a minute

_POLL_S: Final = 0.05
_FIRST_BUCKET: Final = "kv-first-bucket"


class Rights(enum.Flag):
    """What a user may do in a bucket."""

    NONE = 0
    READ = enum.auto()
    """Get and head objects."""
    WRITE = enum.auto()
    """Put objects, and remove them."""
    LIST = enum.auto()
    """List the bucket, and so learn that an object is not there."""
    ALL = READ | WRITE | LIST


_ACTIONS: Final = {
    Rights.READ: ("s3:GetObject",),
    Rights.WRITE: ("s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"),
    Rights.LIST: ("s3:ListBucket",),
}


def policy_of(bucket: str, rights: Rights, **statement: Any) -> dict[str, Any]:
    """Return a policy that grants rights in a bucket.

    Args:
        bucket: The bucket.
        rights: At least one.
        statement: More of the statement, a ``Principal`` for example.
    """
    actions = [name for right, names in _ACTIONS.items() if right in rights for name in names]
    place = f"arn:aws:s3:::{bucket}"
    granted = {"Effect": "Allow", "Action": actions, "Resource": [place, f"{place}/*"], **statement}
    return {"Version": "2012-10-17", "Statement": [granted]}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class S3Access:
    """Where a server is, and as whom to ask it.

    Attributes:
        endpoint_url: Its address.
        access_key: Who asks.
        secret_key: The secret of that key.
        session_token: Of temporary credentials.
        region: What requests are signed for.
        ca_file: Certificate of the authority that signed the server's; ``None`` without TLS.
    """

    endpoint_url: str
    access_key: str = ACCESS_KEY
    secret_key: str = field(default=SECRET_KEY, repr=False)
    session_token: str | None = field(default=None, repr=False)
    region: str = "us-east-1"
    ca_file: Path | None = None

    def client(self, **options: Any) -> Any:
        """Return a client of the suite's own.

        Args:
            options: Of botocore's ``Config``, over the defaults.
        """
        defaults = {
            "s3": {"addressing_style": "path"},
            "connect_timeout": 2,
            "read_timeout": 10,
            "retries": {"total_max_attempts": 3, "mode": "standard"},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        return self.service_client("s3", Config(**{**defaults, **options}))

    def service_client(self, service: str, config: Config) -> Any:
        """Return a client for another API of the same address."""
        return botocore.session.Session().create_client(
            service,
            endpoint_url=self.endpoint_url,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            aws_session_token=self.session_token,
            verify=None if self.ca_file is None else str(self.ca_file),
            config=config,
        )

    def settings(self, bucket: str) -> dict[str, Any]:
        """Return settings of the tier ``s3`` for a bucket, JSON-like values."""
        found: dict[str, Any] = {
            "bucket": bucket,
            "endpoint_url": self.endpoint_url,
            "region": self.region,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
        }
        if self.session_token is not None:
            found["session_token"] = self.session_token
        if self.ca_file is not None:
            found["ca_bundle"] = str(self.ca_file)
        return found

    def environment(self, bucket: str) -> dict[str, str]:
        """Return variables from which :meth:`from_environment` makes the same, elsewhere."""
        found = {
            _ENDPOINT: self.endpoint_url,
            _BUCKET: bucket,
            _ACCESS_KEY: self.access_key,
            _SECRET_KEY: self.secret_key,
        }
        if self.ca_file is not None:
            found[_CA_FILE] = str(self.ca_file)
        return found

    @staticmethod
    def is_in_environment(environ: Mapping[str, str] = os.environ) -> bool:
        """Whether the environment names a server."""
        return bool(environ.get(_ENDPOINT))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> tuple[S3Access, str]:
        """Return what the environment names, and the bucket.

        Raises:
            HarnessError: It names a server without a bucket, or no server at all.
        """
        missing = [name for name in (_ENDPOINT, _BUCKET) if not environ.get(name)]
        if missing:
            raise HarnessError(f"the environment names no server: {' and '.join(missing)} not set")
        ca_file = environ.get(_CA_FILE)
        access = cls(
            endpoint_url=environ[_ENDPOINT],
            access_key=environ.get(_ACCESS_KEY, ACCESS_KEY),
            secret_key=environ.get(_SECRET_KEY, SECRET_KEY),
            ca_file=Path(ca_file) if ca_file else None,
        )
        return access, environ[_BUCKET]


_ENDPOINT: Final = "KV_TIER_S3_ENDPOINT"
_BUCKET: Final = "KV_TIER_S3_BUCKET"
_ACCESS_KEY: Final = "KV_TIER_S3_ACCESS_KEY"
_SECRET_KEY: Final = "KV_TIER_S3_SECRET_KEY"  # noqa: S105 - the name of a variable
_CA_FILE: Final = "KV_TIER_S3_CA_FILE"


class S3Server(ABC):
    """A server on loopback, over http on one port and https on another.

    Args:
        folder: Where its data, logs and certificates lie. Empty.

    Attributes:
        name: What tests call this kind of server.
        start_s: The longest that it may take to come up.
        patience: How many times the suite's deadlines of jobs and lookups it is given.
    """

    name: ClassVar[str]
    start_s: ClassVar[float] = 60.0
    patience: ClassVar[float] = 1.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._owner = os.getpid()
        self._access: S3Access | None = None
        self._tls_access: S3Access | None = None

    # -- what kinds of servers differ in ----------------------------------------------------------

    @property
    @abstractmethod
    def _daemons(self) -> tuple[Daemon, ...]:
        """The processes, in the order in which they are started. The last answers requests."""

    @abstractmethod
    def _prepare(self) -> tuple[S3Access, S3Access]:
        """Write what the processes need, once. Return the ways to reach the server."""

    @abstractmethod
    def _start_daemons(self) -> None:
        """Start all processes; they need not be ready."""

    @abstractmethod
    def version(self) -> str:
        """Return what the program says of its version, in one line."""

    @abstractmethod
    def add_user(self, name: str, bucket: str, rights: Rights) -> S3Access:
        """Make a user with rights in one bucket and none elsewhere, and its credentials."""

    @abstractmethod
    def allow(self, name: str, bucket: str, rights: Rights) -> None:
        """Replace the rights of a user in a bucket. They hold when this returns."""

    @abstractmethod
    def remove_user(self, name: str) -> None:
        """Remove a user. Its credentials are unknown when this returns."""

    # -- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, once, and wait until it takes objects.

        Raises:
            HarnessError: A program is missing, or does not come up.
        """
        self._owner = os.getpid()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._access, self._tls_access = self._prepare()
            self._start_daemons()
            self._wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it at once. Idempotent. Its data stay in the folder."""
        if os.getpid() != self._owner:
            return
        # Those that need the others go first: a polite end would take its time.
        for daemon in reversed(self._daemons):
            daemon.kill()

    def kill(self) -> None:
        """Kill it (SIGKILL): connections break, and new ones are refused."""
        self.stop()

    def restart(self) -> None:
        """Kill it if it runs, and start it again on its data and ports.

        Raises:
            HarnessError: It does not come up.
        """
        if os.getpid() != self._owner:
            return
        self.stop()
        self._start_daemons()
        self._wait()

    def freeze(self) -> None:
        """Freeze it (SIGSTOP): connections are taken by the kernel, and requests hang."""
        if os.getpid() == self._owner:
            self._daemons[-1].freeze()

    def thaw(self) -> None:
        """Let it go on. Idempotent."""
        if os.getpid() == self._owner:
            self._daemons[-1].thaw()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- use --------------------------------------------------------------------------------------

    @property
    def access(self) -> S3Access:
        """How its owner reaches it, over http."""
        if self._access is None:
            raise HarnessError(f"{self.name} was not started")
        return self._access

    @property
    def tls_access(self) -> S3Access:
        """How its owner reaches it, over https."""
        if self._tls_access is None:
            raise HarnessError(f"{self.name} was not started")
        return self._tls_access

    @property
    def endpoint_url(self) -> str:
        """Its address, over http."""
        return self.access.endpoint_url

    @property
    def access_key(self) -> str:
        """The key of its owner."""
        return self.access.access_key

    @property
    def secret_key(self) -> str:
        """The secret of its owner."""
        return self.access.secret_key

    @property
    def region(self) -> str:
        """What requests are signed for."""
        return self.access.region

    def make_bucket(self, name: str) -> None:
        """Make a bucket, or keep the one that is there, ready to take objects."""
        client = self.access.client()
        _make_bucket(client, name)
        # The first object of a bucket takes SeaweedFS a second, which no deadline expects.
        client.put_object(Bucket=name, Key="first", Body=b"object")
        client.delete_object(Bucket=name, Key="first")

    def _wait(self) -> None:
        end = time.monotonic() + self.start_s
        # Some of what a start needs cannot answer yet, and a client would wait between attempts.
        client = self.access.client(
            connect_timeout=1, read_timeout=5, retries={"total_max_attempts": 1}
        )
        error: Exception | None = None
        while time.monotonic() < end and all(daemon.runs for daemon in self._daemons):
            try:
                _make_bucket(client, _FIRST_BUCKET)
                client.put_object(Bucket=_FIRST_BUCKET, Key="first", Body=b"object")
                if client.get_object(Bucket=_FIRST_BUCKET, Key="first")["Body"].read() == b"object":
                    return
            except (BotoCoreError, ClientError) as found:
                error = found
                time.sleep(_POLL_S)
        logs = "\n".join(f"{daemon.name}: {daemon.log_tail()}" for daemon in self._daemons)
        raise HarnessError(
            f"{self.name} did not take objects within {self.start_s:g} s ({error}); its logs end "
            f"with:\n{logs}"
        )


def _make_bucket(client: Any, name: str) -> None:
    try:
        client.create_bucket(Bucket=name)
    except ClientError as error:
        # Some servers say so, and some do not.
        if error.response["Error"]["Code"] != "BucketAlreadyOwnedByYou":
            raise
