"""The fsspec tier over a real blob store with Azure's interface."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from azure.storage.blob import BlobServiceClient

from kv_core.contract import JobErrorKind
from kv_core.errors import TierOpenError
from kv_core.tierkit.testing import example_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.contract import ReqContext
    from kv_core.tierkit.testing import TierDriver
    from kv_tier_fsspec._harness._azurite import AzuriteServer
    from kv_tier_fsspec._harness._gate import ConnectionGate

    Drive = Callable[..., TierDriver]

KEYS = [example_key(number) for number in range(16)]

_OPEN_AND_END = """
import json, sys
from kv_core.contract import parse_tier_config
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_fsspec import kv_core_register_tier
spec = kv_core_register_tier()
config = parse_tier_config("cold", spec.config_model, json.loads(sys.argv[1]))
driver = TierDriver(spec.factory, config, block_bytes=4096)
assert driver.store([example_key(1)]).success
if sys.argv[2] == "close":
    driver.close()
"""


def another_request(driver: TierDriver, name: str) -> ReqContext:
    """Return a request that has not asked yet."""
    request = driver.request.__class__(name)
    driver.tier.on_new_request(request)
    return request


def test_another_process_finds_the_blocks(drive: Drive, az: dict[str, Any]) -> None:
    """What one tier stored, another that had looked before finds and loads."""
    reader, writer = drive(az), drive(az)
    assert reader.resolve(KEYS) == [False] * 16
    assert writer.store(KEYS).success
    assert reader.resolve(KEYS, another_request(reader, "later")) == [True] * 16
    assert reader.load(KEYS).success
    assert reader.loaded(KEYS) == KEYS


def test_a_block_that_is_there_is_not_replaced(
    drive: Drive, az: dict[str, Any], azurite: AzuriteServer
) -> None:
    """The second store is answered by the condition of its request."""
    driver = drive(az)
    driver.store(KEYS[:1])
    name = driver.tier._blocks.names.block(KEYS[0]).partition("/")[2]  # type: ignore[attr-defined]
    with BlobServiceClient.from_connection_string(azurite.connection_string()) as service:
        blob = service.get_blob_client("kv-tests", name)
        before = blob.get_blob_properties().etag
        assert driver.store(KEYS[:1]).success
        assert blob.get_blob_properties().etag == before


def test_a_container_that_does_not_exist_is_told(drive: Drive, az: dict[str, Any]) -> None:
    """A tier is not opened where every lookup would be a miss."""
    with pytest.raises(TierOpenError, match="ContainerNotFound"):
        drive({**az, "url": "az://no-such-container/prefix"})


def test_a_container_that_goes_is_an_error_and_no_miss(
    drive: Drive, az: dict[str, Any], azurite: AzuriteServer
) -> None:
    """The answer has the status of a blob that does not exist, and another code."""
    with BlobServiceClient.from_connection_string(azurite.connection_string()) as service:
        service.create_container("short-lived")
        driver = drive({**az, "url": "az://short-lived/prefix"})
        assert driver.resolve(KEYS[:2]) == [False] * 2
        service.delete_container("short-lived")
    driver.resolve(KEYS[2:6], another_request(driver, "afterwards"))
    stats = driver.tier.get_stats()
    assert (stats["lookup_misses"], stats["lookup_errors"]) == (2, 4)


def test_a_wrong_key_is_refused_access(
    drive: Drive, az: dict[str, Any], azurite: AzuriteServer
) -> None:
    """The message says so, and does not show the key."""
    wrong = "d3Jvbmcga2V5IGJ1dCBhIGtleQ=="
    options = {"connection_string": azurite.connection_string(key=wrong)}
    with pytest.raises(TierOpenError, match="The storage refuses access") as caught:
        drive({**az, "storage_options": options})
    assert wrong not in str(caught.value)


def test_options_without_an_account_are_told(drive: Drive, az: dict[str, Any]) -> None:
    """With what can be given instead."""
    with pytest.raises(Exception, match="'account_name' and a credential"):
        drive({**az, "storage_options": {"anon": True}})


def test_broken_connections_are_errors_until_they_hold(
    drive: Drive, az: dict[str, Any], gate: ConnectionGate
) -> None:
    """Lookups count as errors and jobs fail; then all goes on in the same tier."""
    driver = drive(az)
    assert driver.store(KEYS[:8]).success
    gate.shut()
    driver.resolve(KEYS[8:], another_request(driver, "meanwhile"))
    stats = driver.tier.get_stats()
    assert (stats["lookup_misses"], stats["lookup_errors"]) == (0, 8)
    result = driver.load(KEYS[:8])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.FAILED
    gate.open()
    assert driver.load(KEYS[:8]).success
    assert driver.loaded(KEYS[:8]) == KEYS[:8]


def test_a_frozen_server_fails_jobs_in_time(
    drive: Drive, az: dict[str, Any], azurite: AzuriteServer
) -> None:
    """They end with their deadline, as what is waited for can be given up."""
    driver = drive(az)
    assert driver.store(KEYS[:8]).success
    azurite.freeze()
    began = time.monotonic()
    load, store = driver.submit_load(KEYS[:8]), driver.submit_store(KEYS[8:])
    results = [driver.wait(load), driver.wait(store)]
    assert time.monotonic() - began < 2 * az["job_deadline_s"]
    assert [result.success for result in results] == [False, False]
    azurite.thaw()
    assert driver.load(KEYS[:8]).success
    assert driver.loaded(KEYS[:8]) == KEYS[:8]


@pytest.mark.parametrize("end", ["close", "exit"])
def test_a_process_ends_without_a_traceback(az: dict[str, Any], end: str) -> None:
    """What adlfs plans for the end of a process would fail there."""
    settings = json.dumps(az)
    done = subprocess.run(
        [sys.executable, "-c", _OPEN_AND_END, settings, end],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    # Of a tier that is left open, a client library may say so.
    assert end == "exit" or done.stderr == ""


def test_a_closed_tier_is_collected(drive: Drive, az: dict[str, Any]) -> None:
    """Nothing of the process keeps its filesystem."""
    driver = drive(az)
    tier: Any = driver.tier
    filesystem = weakref.ref(tier._store.fs)
    driver.close()
    del tier._store, tier
    gc.collect()
    assert filesystem() is None
