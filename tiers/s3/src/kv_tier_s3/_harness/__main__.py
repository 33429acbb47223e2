"""Starts each server once, puts and gets an object, and prints versions and seconds.

``python -m kv_tier_s3._harness``: exit status 1 if a server is missing or does not work.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kv_conformance.harness import HarnessError
from kv_tier_s3._harness._rgw import Rgw
from kv_tier_s3._harness._seaweed import SeaweedServer

if TYPE_CHECKING:
    from kv_tier_s3._harness._server import S3Access, S3Server

_BUCKET: Final = "kv-servers"
_BODY: Final = bytes(range(256)) * 4096


def _try(access: S3Access) -> None:
    client = access.client()
    client.put_object(Bucket=_BUCKET, Key="object", Body=_BODY)
    if client.get_object(Bucket=_BUCKET, Key="object")["Body"].read() != _BODY:
        raise HarnessError(f"{access.endpoint_url} returned other bytes than it was given")


def _check(server: S3Server) -> str:
    """Use a server, and return a line about it."""
    began = time.monotonic()
    with server:
        up_s = time.monotonic() - began
        server.make_bucket(_BUCKET)
        _try(server.access)
        _try(server.tls_access)
        began = time.monotonic()
        server.restart()
        return (
            f"{server.version()}: up in {up_s:.1f} s, put and get over http and https, again in "
            f"{time.monotonic() - began:.1f} s after a kill"
        )


def main() -> int:
    """Check all servers, and return the exit status."""
    status = 0
    for kind in (SeaweedServer, Rgw):
        with tempfile.TemporaryDirectory(prefix="kv-servers-") as folder:
            try:
                print(_check(kind(Path(folder))), flush=True)
            except HarnessError as error:
                print(f"{kind.name}: {error}", file=sys.stderr)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
