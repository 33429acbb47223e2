"""How tests name a server and its users to each other; no server needed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from kv_conformance.harness import HarnessError
from kv_tier_s3._harness import Certificates, Rights, S3Access
from kv_tier_s3._harness._daemon import Daemon, find_program
from kv_tier_s3._harness._ports import free_ports
from kv_tier_s3._harness._server import policy_of

ACCESS: Final = S3Access(
    endpoint_url="https://127.0.0.1:1234",
    access_key="key",
    secret_key="not to be shown",
    ca_file=Path("/folder/authority.pem"),
)


def test_the_environment_carries_an_access() -> None:
    """What one process writes, another reads."""
    assert S3Access.from_environment(ACCESS.environment("bucket")) == (ACCESS, "bucket")


@pytest.mark.parametrize("missing", ["KV_TIER_S3_ENDPOINT", "KV_TIER_S3_BUCKET"])
def test_an_environment_that_names_half_a_server_is_refused(missing: str) -> None:
    """And the message names what is missing."""
    environment = {**ACCESS.environment("bucket"), missing: ""}
    with pytest.raises(HarnessError, match=missing):
        S3Access.from_environment(environment)


def test_settings_are_those_of_the_tier() -> None:
    """With the bundle of the authority, without a token where there is none."""
    assert ACCESS.settings("bucket") == {
        "bucket": "bucket",
        "endpoint_url": "https://127.0.0.1:1234",
        "region": "us-east-1",
        "access_key_id": "key",
        "secret_access_key": "not to be shown",
        "ca_bundle": "/folder/authority.pem",
    }


def test_a_policy_grants_what_was_asked_for_and_no_more() -> None:
    """In the bucket and its objects."""
    (statement,) = policy_of("bucket", Rights.READ | Rights.LIST)["Statement"]
    assert statement == {
        "Effect": "Allow",
        "Action": ["s3:GetObject", "s3:ListBucket"],
        "Resource": ["arn:aws:s3:::bucket", "arn:aws:s3:::bucket/*"],
    }


def test_ports_are_free_and_distinct() -> None:
    """Also at an offset, where that is asked for."""
    ports = free_ports(20, also_free_at=10_000)
    assert len(set(ports)) == 20
    for port in (*ports, *(port + 10_000 for port in ports)):
        with socket.socket() as attempt:
            attempt.bind(("127.0.0.1", port))


def test_a_missing_program_is_told_with_what_to_do() -> None:
    """Not as a file that was not found."""
    with pytest.raises(HarnessError, match=r"'no-such-program' is missing: run 'this'"):
        find_program("no-such-program", "run 'this'")


def test_certificates_are_made_once(tmp_path: Path) -> None:
    """A server that starts again keeps its own, and nobody else can read the key."""
    made = Certificates.make(tmp_path)
    content = made.certificate.read_bytes()
    assert Certificates.make(tmp_path) == made
    assert made.certificate.read_bytes() == content
    assert made.key.stat().st_mode & 0o077 == 0


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """However that ends: here by a signal that nothing can catch."""
    script = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from kv_tier_s3._harness._daemon import Daemon\n"
        "daemon = Daemon('sleep', Path(sys.argv[1]))\n"
        "daemon.start(['sh', '-c', 'echo $$; exec sleep 60'])\n"
        "while not daemon.log_tail():\n"
        "    time.sleep(0.01)\n"
        "print(daemon.log_tail(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "log")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == -signal.SIGKILL
    child = int(process.stdout)
    end = time.monotonic() + 20
    while _runs(child):
        assert time.monotonic() < end


def _runs(process: int) -> bool:
    """Say whether a process runs, and not only waits for somebody to collect it."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "\nState:\tZ" not in status


def test_a_process_is_killed_once(tmp_path: Path) -> None:
    """And signals to what has ended go nowhere."""
    daemon = Daemon("sleep", tmp_path / "log")
    daemon.start(["sleep", "60"])
    assert daemon.runs
    for _ in range(2):
        daemon.kill()
        daemon.freeze()
        assert not daemon.runs
