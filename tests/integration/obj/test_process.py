"""What a process with the tier says, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from kv_tier_s3._harness import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.s3

BUCKET = "kv-process"
SECRET = "no-secret-that-the-store-knows"
# NIXL's client gives a silent store up after three seconds, and then joins its threads.
END_S = 45

PROGRAM = """
import json, sys, threading
from kv_core.contract import parse_tier_config
from kv_core.errors import TierOpenError
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_obj import ObjConfig
from kv_tier_obj._tier import ObjTier

config = parse_tier_config("obj", ObjConfig, json.loads(sys.argv[1]))
try:
    driver = TierDriver(ObjTier, config, num_blocks=64, block_bytes=65536)
except TierOpenError as error:
    print("cannot open:", error)
    raise SystemExit(3)
keys = [example_key(number) for number in range(32)]
missing = [example_key(number) for number in range(100, 108)]
print(driver.store(keys).success, driver.load(keys).success, driver.load(missing).success,
      flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A store with a bucket."""
    with SeaweedServer(tmp_path_factory.mktemp("seaweedfs")) as server:
        server.make_bucket(BUCKET)
        yield server


def settings(server: SeaweedServer, **changes: Any) -> str:
    """Return settings of a tier as a program takes them."""
    return json.dumps({**server.access.settings(BUCKET), "max_attempts": 1, **changes})


def start(program: str, argument: str) -> subprocess.Popen[str]:
    """Start a program."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-X", "faulthandler", "-c", program, argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_nixl_says_nothing(server: SeaweedServer) -> None:
    """Nothing is printed beside the program's own line, also when objects are missing.

    The tier is never shut down.
    """
    process = start(PROGRAM, settings(server))
    output, _ = process.communicate(timeout=60)
    assert output == "True True False\n"
    assert process.returncode == 0


def test_a_wrong_secret_is_said_and_not_shown(server: SeaweedServer) -> None:
    """The start fails with what to check, and neither NIXL nor the tier repeats the secret."""
    process = start(PROGRAM, settings(server, secret_access_key=SECRET))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "SignatureDoesNotMatch" in output
    assert "secret_access_key" in output
    assert SECRET not in output


def test_a_bucket_that_does_not_exist_is_not_made(server: SeaweedServer, tmp_path: Path) -> None:
    """The start fails, and the bucket is still not there."""
    process = start(PROGRAM, settings(server, bucket="kv-not-made"))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "Make the bucket, or correct 'bucket'" in output
    buckets = server.access.client().list_buckets()["Buckets"]
    assert "kv-not-made" not in {bucket["Name"] for bucket in buckets}


@pytest.mark.parametrize("shut_down", [False, True])
def test_a_process_ends_while_requests_hang(server: SeaweedServer, shut_down: bool) -> None:
    """With a store that is frozen the interpreter ends by itself, without a crash."""
    program = PROGRAM + (
        "sys.stdin.readline()\n"
        "load, store = driver.submit_load(keys[:16]), driver.submit_store(keys[16:])\n"
        "threading.Event().wait(0.5)\n"
        + ("driver.close()\n" if shut_down else "")
        + "print('ended', flush=True)\n"
    )
    process = start(program, settings(server, job_deadline_s=2, request_timeout_s=1))
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "True True False\n"
    server.freeze()
    try:
        process.stdin.write("go\n")
        process.stdin.flush()
        began = time.monotonic()
        output, _ = process.communicate(timeout=END_S)
        took_s = time.monotonic() - began
    finally:
        server.thaw()
        process.kill()
    assert process.returncode == 0, output
    assert output.splitlines()[-1] == "ended"
    assert took_s < END_S
