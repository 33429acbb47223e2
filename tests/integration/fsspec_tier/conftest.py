"""Real servers for the fsspec tier, and tiers on them."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_conformance.harness import HarnessError
from kv_core.contract import parse_tier_config
from kv_core.tierkit.testing import TierDriver, example_namespace
from kv_tier_fsspec import kv_core_register_tier
from kv_tier_fsspec._harness._azurite import AzuriteServer
from kv_tier_fsspec._harness._gate import ConnectionGate
from kv_tier_fsspec._harness._sshd import SshServer
from kv_tier_s3._harness import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kv_tier_s3._harness import S3Access

BLOCK: Final = 4096
CONTAINER: Final = "kv-tests"

# Short, so that every deadline passes while the server does nothing.
DEADLINES: Final = {"job_deadline_s": 2.0, "lookup_deadline_s": 1.0, "error_backoff_s": 0.05}

_serial = count()


@pytest.fixture
def drive() -> Iterator[Callable[..., TierDriver]]:
    """Return a function that opens a tier; all are closed at the end."""
    opened: list[TierDriver] = []

    def open_tier(settings: dict[str, Any], block_bytes: int = BLOCK, **more: Any) -> TierDriver:
        spec = kv_core_register_tier()
        config = parse_tier_config("cold", spec.config_model, {"min_free_bytes": 1, **settings})
        driver = TierDriver(
            spec.factory,
            config,
            block_bytes=block_bytes,
            namespace=example_namespace(block_bytes),
            tier_name="cold",
            **more,
        )
        opened.append(driver)
        return driver

    yield open_tier
    for driver in opened:
        driver.close()


# -- OpenSSH --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ssh_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """Return a running SSH server."""
    server = SshServer(tmp_path_factory.mktemp("sshd"))
    try:
        server.start()
    except HarnessError as error:
        pytest.skip(str(error))
    yield server
    server.thaw()
    server.stop()


@pytest.fixture
def ssh(ssh_server: SshServer) -> Iterator[SshServer]:
    """Return the SSH server; it is made to run again if the test has left it otherwise."""
    yield ssh_server
    ssh_server.thaw()
    if not ssh_server.is_running:
        ssh_server.start()


@pytest.fixture
def sftp(ssh: SshServer, tmp_path: Path) -> dict[str, Any]:
    """Return settings for a folder over SFTP."""
    return {
        "url": f"sftp://127.0.0.1{tmp_path}/blocks",
        "storage_options": ssh.options,
        **DEADLINES,
    }


# -- Azurite --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzuriteServer]:
    """Return a running blob store that has the container of the tests."""
    from azure.storage.blob import BlobServiceClient

    server = AzuriteServer(tmp_path_factory.mktemp("azurite"))
    try:
        server.start()
    except HarnessError as error:
        pytest.skip(str(error))
    with BlobServiceClient.from_connection_string(server.connection_string()) as service:
        service.create_container(CONTAINER)
    yield server
    server.thaw()
    server.stop()


@pytest.fixture
def azurite(azurite_server: AzuriteServer) -> Iterator[AzuriteServer]:
    """Return the blob store; it is made to go on if the test has left it frozen."""
    yield azurite_server
    azurite_server.thaw()


@pytest.fixture
def gate(azurite: AzuriteServer) -> Iterator[ConnectionGate]:
    """Return a way to the blob store that can be cut."""
    way = ConnectionGate(azurite.port)
    yield way
    way.close()


@pytest.fixture
def az(azurite: AzuriteServer, gate: ConnectionGate) -> dict[str, Any]:
    """Return settings for a prefix of the container, through the gate."""
    return {
        "url": f"az://{CONTAINER}/prefix-{next(_serial)}",
        "storage_options": {"connection_string": azurite.connection_string(gate.port)},
        **DEADLINES,
    }


# -- SeaweedFS ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def s3_access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Access]:
    """Return access to a running object store that has the bucket of the tests."""
    server = SeaweedServer(tmp_path_factory.mktemp("seaweedfs"))
    try:
        server.start()
    except HarnessError as error:
        pytest.skip(str(error))
    server.make_bucket(CONTAINER)
    yield server.access
    server.stop()


@pytest.fixture
def s3(s3_access: S3Access) -> dict[str, Any]:
    """Return settings for a prefix of the bucket."""
    return {
        "url": f"s3://{CONTAINER}/prefix-{next(_serial)}",
        "storage_options": {
            "key": s3_access.access_key,
            "secret": s3_access.secret_key,
            "endpoint_url": s3_access.endpoint_url,
        },
    }


@pytest.fixture
def file(tmp_path: Path) -> dict[str, Any]:
    """Return settings for a folder of this machine."""
    return {"url": f"file://{tmp_path}/blocks"}
