"""The fsspec tier over a real SSH server that is killed, frozen and restarted."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.contract import JobErrorKind
from kv_core.errors import ConfigError, TierOpenError
from kv_core.tierkit.testing import example_key
from kv_tier_fsspec._harness._sshd import SshServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.contract import ReqContext
    from kv_core.tierkit.testing import TierDriver

    Drive = Callable[..., TierDriver]

KEYS = [example_key(number) for number in range(16)]
MIB = 1 << 20


def another_request(driver: TierDriver, name: str) -> ReqContext:
    """Return a request that has not asked yet."""
    request = driver.request.__class__(name)
    driver.tier.on_new_request(request)
    return request


def unfinished(folder: Path) -> list[str]:
    """Return the names of temporary files below a folder."""
    return [path.name for path in folder.rglob("*.tmp")]


def test_another_process_finds_the_blocks(drive: Drive, sftp: dict[str, Any]) -> None:
    """What one tier stored, another that had looked before finds and loads."""
    reader, writer = drive(sftp), drive(sftp)
    assert reader.resolve(KEYS) == [False] * 16
    assert writer.store(KEYS).success
    assert reader.resolve(KEYS, another_request(reader, "later")) == [True] * 16
    assert reader.load(KEYS).success
    assert reader.loaded(KEYS) == KEYS


def test_a_job_outlives_its_connection(drive: Drive, sftp: dict[str, Any], ssh: SshServer) -> None:
    """The processes that serve it are killed in the middle, and no block is lost."""
    driver = drive({**sftp, "job_deadline_s": 20}, MIB)
    for load in (False, True):
        submit = driver.submit_load if load else driver.submit_store
        job = submit(KEYS)
        assert ssh.kill_sessions() > 0
        result = driver.wait(job)
        assert result.success, result.error
    assert driver.loaded(KEYS) == KEYS


def test_a_connection_may_be_killed_at_any_moment(
    drive: Drive, sftp: dict[str, Any], ssh: SshServer
) -> None:
    """In a handshake, in a transfer, between two jobs: no block is lost, no byte is wrong."""
    driver = drive({**sftp, "job_deadline_s": 20}, MIB // 4)
    moments = random.Random(5)
    for round_number in range(6):
        keys = [example_key(number) for number in range(round_number * 16, round_number * 16 + 16)]
        for load in (False, True):
            job = (driver.submit_load if load else driver.submit_store)(keys)
            time.sleep(moments.uniform(0, 0.2))
            ssh.kill_sessions()
            result = driver.wait(job)
            assert result.success, (round_number, load, result.error)
        assert driver.loaded(keys) == keys


def test_a_killed_connection_leaves_nothing_unfinished(
    drive: Drive, sftp: dict[str, Any], ssh: SshServer, tmp_path: Path
) -> None:
    """What could not be removed when its store failed is removed by those that follow."""
    driver = drive({**sftp, "job_deadline_s": 20}, MIB)
    job = driver.submit_store(KEYS)
    ssh.kill_sessions()
    driver.wait(job)
    assert driver.store([example_key(number) for number in range(100, 116)]).success
    assert unfinished(tmp_path) == []


def test_a_server_that_is_gone_is_an_error_and_no_miss(
    drive: Drive, sftp: dict[str, Any], ssh: SshServer
) -> None:
    """Lookups count as errors and jobs fail until it is back; then all goes on."""
    driver = drive(sftp)
    assert driver.store(KEYS[:8]).success
    ssh.stop()
    assert driver.resolve(KEYS[8:], another_request(driver, "meanwhile")) == [False] * 8
    stats = driver.tier.get_stats()
    assert (stats["lookup_errors"], stats["lookup_misses"]) == (8, 0)
    result = driver.load(KEYS[:8])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.FAILED
    ssh.start()
    assert driver.load(KEYS[:8]).success
    assert driver.loaded(KEYS[:8]) == KEYS[:8]
    assert driver.store(KEYS[8:]).success


def test_a_frozen_server_fails_jobs_in_time(
    drive: Drive, sftp: dict[str, Any], ssh: SshServer
) -> None:
    """A load and a store end within the deadline, and nothing is written to the slots later."""
    driver = drive(sftp, MIB)
    assert driver.store(KEYS[:8]).success
    ssh.freeze()
    began = time.monotonic()
    load, store = driver.submit_load(KEYS[:8]), driver.submit_store(KEYS[8:])
    results = [driver.wait(load), driver.wait(store)]
    assert time.monotonic() - began < 3 * sftp["job_deadline_s"]
    assert [result.success for result in results] == [False, False]
    for block_id in range(16):
        driver.poison(block_id, 0x55)
    ssh.thaw()
    assert driver.store(KEYS[8:12]).success
    with driver.primary.block(15) as slot:
        assert bytes(slot) == b"\x55" * MIB
    assert driver.load(KEYS[:8]).success
    assert driver.loaded(KEYS[:8]) == KEYS[:8]


def test_fewer_sessions_than_threads_are_enough(
    drive: Drive, tmp_path: Path, sftp: dict[str, Any]
) -> None:
    """A server that allows two at a time serves eight threads, one after the other."""
    server = SshServer(tmp_path / "sshd", max_sessions=2)
    server.start()
    try:
        driver = drive({**sftp, "storage_options": server.options, "job_deadline_s": 20})
        assert driver.store(KEYS).success
        assert driver.load(KEYS).success
        assert driver.loaded(KEYS) == KEYS
        driver.close()
    finally:
        server.stop()


def test_an_unknown_host_key_is_refused(drive: Drive, sftp: dict[str, Any], tmp_path: Path) -> None:
    """Who cannot tell the server from another one is told what to do, and can say otherwise."""
    empty = tmp_path / "known_hosts"
    empty.touch()
    options = {**sftp["storage_options"], "known_hosts": str(empty)}
    port = options["port"]
    remedy = f"ssh-keyscan -p {port} 127.0.0.1 >> {empty}"
    with pytest.raises(
        TierOpenError, match=r"HostKeyError: the host key of .* is not known"
    ) as told:
        drive({**sftp, "storage_options": options})
    assert remedy in str(told.value)
    trusting = {**options, "host_key_policy": "auto_add"}
    assert drive({**sftp, "storage_options": trusting}).store(KEYS[:1]).success


def test_a_changed_host_key_is_refused(drive: Drive, sftp: dict[str, Any], tmp_path: Path) -> None:
    """Also by who trusts hosts that are new."""
    other = tmp_path / "known_hosts"
    known = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJKyGqZ2mVJQ1jZ8m9Z3kq7c5rW3o5b8f7Jk0m2V4x1a"
    other.write_text(f"[127.0.0.1]:{sftp['storage_options']['port']} {known}\n")
    options = {
        **sftp["storage_options"],
        "known_hosts": str(other),
        "host_key_policy": "auto_add",
    }
    with pytest.raises(TierOpenError, match="another host key than the known one") as told:
        drive({**sftp, "storage_options": options})
    assert f"ssh-keygen -f {other} -R '[127.0.0.1]:{options['port']}'" in str(told.value)


@pytest.mark.parametrize("option", ["key_filename", "known_hosts"])
def test_files_of_options_are_found_and_missed(
    drive: Drive, sftp: dict[str, Any], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """'~' is the home folder, and a file that is not there is told before anybody connects."""
    file = Path(sftp["storage_options"][option])
    monkeypatch.setenv("HOME", str(file.parent))
    options = {**sftp["storage_options"], option: f"~/{file.name}"}
    assert drive({**sftp, "storage_options": options}).store(KEYS[:1]).success
    options[option] = 5
    with pytest.raises(ConfigError, match=rf"'{option}' in 'storage_options' is a int; expected"):
        drive({**sftp, "storage_options": options})
    options[option] = "~/nosuch"
    with pytest.raises(ConfigError, match=rf"'{option}' in 'storage_options' names .*/nosuch'"):
        drive({**sftp, "storage_options": options})


def test_a_wrong_user_is_refused_access(drive: Drive, sftp: dict[str, Any], tmp_path: Path) -> None:
    """The message says so, and shows no password."""
    options = {**sftp["storage_options"], "password": "open-sesame"}
    del options["key_filename"]
    with pytest.raises(TierOpenError, match="The storage refuses access") as caught:
        drive({**sftp, "storage_options": options})
    assert "open-sesame" not in str(caught.value)


def test_a_misspelt_option_is_named(drive: Drive, sftp: dict[str, Any]) -> None:
    """What paramiko does not know is told by name."""
    options = {**sftp["storage_options"], "usrename": "somebody"}
    with pytest.raises(TierOpenError, match=r"refuses its 'storage_options'.*usrename"):
        drive({**sftp, "storage_options": options})


def test_a_folder_that_the_server_does_not_make_is_told(drive: Drive, sftp: dict[str, Any]) -> None:
    """Some say "no such file" of one whose parent is there; the connection is as good as before."""
    host = sftp["url"].partition("://")[2].partition("/")[0]
    with pytest.raises(TierOpenError, match=r"FileNotFoundError.*cannot be made"):
        drive({**sftp, "url": f"sftp://{host}/proc/kv"})


def test_a_folder_in_the_place_of_a_block_is_damage(
    drive: Drive, sftp: dict[str, Any], tmp_path: Path
) -> None:
    """It is retired, and the block stored anew."""
    driver = drive(sftp)
    driver.store(KEYS[:1])
    (path,) = tmp_path.rglob("*.kv")
    path.unlink()
    path.mkdir()
    result = driver.load(KEYS[:1])
    assert result.error is not None
    assert result.error.kind is JobErrorKind.DAMAGED
    assert driver.store(KEYS[:1]).success
    assert driver.load(KEYS[:1]).success


def test_a_closed_tier_leaves_no_thread(drive: Drive, sftp: dict[str, Any]) -> None:
    """Neither of the kit, nor of the connection, nor the one that watches it."""
    before = set(threading.enumerate())
    driver = drive(sftp)
    driver.store(KEYS)
    driver.close()
    assert set(threading.enumerate()) <= before
