"""``kv-core object`` on real storages, beside tiers that are open."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import override

from kv_core.cli import main
from kv_core.tierkit.testing import example_key
from kv_tier_fsspec import _filesystem
from kv_tier_fsspec._cli._access import BlockingAccess, Entry
from kv_tier_fsspec._cli._check import check_blocks
from kv_tier_fsspec._cli._survey import find_namespaces, report_on

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_core.tierkit.testing import TierDriver
    from kv_tier_s3._harness import S3Access

    Drive = Callable[..., TierDriver]

KEYS = [example_key(number) for number in range(12)]
OBJECT_BYTES = 4096 + 256
STORAGES = ("file", "sftp", "s3", "az")


@pytest.fixture(params=STORAGES)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return settings for each kind of storage."""
    found: dict[str, Any] = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def arguments(settings: dict[str, Any], tmp_path: Path) -> list[str]:
    """Return the arguments that name the storage."""
    options = tmp_path / "options.json"
    options.write_text(json.dumps(settings.get("storage_options", {})))
    return [settings["url"], "--options", str(options), "--json"]


def damage(driver: TierDriver, key: Any, content: bytes) -> str:
    """Put something else in the place of a block; return the name of its object."""
    tier: Any = driver.tier
    name: str = tier._blocks.names.block(key)
    if hasattr(tier, "_thread"):
        future = asyncio.run_coroutine_threadsafe(tier._store.put(name, content), tier._thread.loop)
        future.result(30)
    else:
        tier._files.run(lambda fs: write(fs, name, content))
    return name


def write(fs: Any, name: str, content: bytes) -> None:
    """Write a file as it is."""
    with fs.open(name, "wb") as file:
        file.write(content)
        getattr(file, "finish", lambda _: None)(b"")


def test_all_that_was_stored_is_listed_and_intact(
    drive: Drive,
    settings: dict[str, Any],
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With every field of the namespace, its objects, bytes and ages."""
    driver = drive(settings)
    assert driver.store(KEYS).success
    assert main(["object", "ls", *arguments]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    tier: Any = driver.tier
    assert row["description"] == json.loads(json.dumps(tier.context.namespace.describe()))
    assert (row["objects"], row["object_bytes"]) == (12, 12 * OBJECT_BYTES)
    assert row["problem"] is None
    assert row["oldest_s"] <= row["latest_s"]
    assert main(["object", "du", *arguments]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["objects"], row["object_bytes"]) == (12, 12 * OBJECT_BYTES)
    assert main(["object", "fsck", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["objects"], found["checked_bytes"]) == (12, 12 * OBJECT_BYTES)
    assert found["findings"] == []


def test_damage_is_found_and_deleted(
    drive: Drive,
    settings: dict[str, Any],
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A cut and a forged object are told with status 1, go with --delete, and are stored anew."""
    driver = drive(settings)
    assert driver.store(KEYS).success
    names = {damage(driver, KEYS[0], b"cut"), damage(driver, KEYS[1], bytes(OBJECT_BYTES))}
    assert main(["object", "fsck", *arguments]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {line["name"] for line in found} == names
    assert not any(line["is_deleted"] for line in found)
    assert main(["object", "fsck", "--delete", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [line["is_deleted"] for line in found] == [True, True]
    assert main(["object", "fsck", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["objects"] == 10
    assert driver.store(KEYS[:2]).success
    assert driver.load(KEYS).success
    assert driver.loaded(KEYS) == KEYS


def test_blocks_in_memory_are_checked_in_process(drive: Drive) -> None:
    """Whoever holds a filesystem can look into it, whatever its kind."""
    driver = drive({"url": "memory://blocks"})
    assert driver.store(KEYS).success
    name = damage(driver, KEYS[3], bytes(OBJECT_BYTES))
    tier: Any = driver.tier

    async def look() -> tuple[int, list[str]]:
        access = BlockingAccess(tier._files)
        (found,) = await find_namespaces(access, "/blocks")
        report = await report_on(access, found)
        findings = check_blocks(
            access, found, delete=False, reads=2, describe=str, advance=lambda _: None
        )
        return report.objects, [finding.name async for finding in findings]

    assert asyncio.run(look()) == (12, [name])


def test_only_so_many_blocks_are_read_at_a_time(drive: Drive, file: dict[str, Any]) -> None:
    """However many there are: memory is bounded by the reads under way."""
    driver = drive(file)
    assert driver.store(KEYS).success
    tier: Any = driver.tier
    running, most = 0, 0

    class Counting(BlockingAccess):  # type: ignore[misc]  # final for everybody else
        @override
        async def read(self, name: str) -> bytes:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(0)
                return await super().read(name)
            finally:
                running -= 1

    async def look() -> int:
        access = Counting(tier._files)
        (found,) = await find_namespaces(access, file["url"].removeprefix("file://"))
        return sum(
            [
                1
                async for _ in check_blocks(
                    access, found, delete=False, reads=3, describe=str, advance=lambda _: None
                )
            ]
        )

    assert (asyncio.run(look()), most) == (0, 3)


def test_what_cannot_be_read_is_no_damage(
    drive: Drive, file: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Status 3, and nothing is deleted."""
    driver = drive(file)
    assert driver.store(KEYS).success
    read = BlockingAccess.read

    async def failing(self: BlockingAccess, name: str) -> bytes:
        if name.endswith(".kv"):
            raise TimeoutError("no answer")
        return await read(self, name)

    monkeypatch.setattr(BlockingAccess, "read", failing)
    assert main(["object", "fsck", "--delete", file["url"]]) == 3
    assert "12 not readable" in capsys.readouterr().out
    monkeypatch.undo()
    assert driver.load(KEYS).success


def test_a_folder_that_cannot_be_listed_does_not_end_the_check(
    drive: Drive, file: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """It is told, with status 3, and the blocks of all others are checked."""
    driver = drive(file)
    assert driver.store(KEYS).success
    name = damage(driver, KEYS[0], b"cut")
    unlisted = damage(driver, KEYS[1], b"cut").rpartition("/")[0]
    assert not name.startswith(unlisted)
    entries = BlockingAccess.entries

    async def refusing(self: BlockingAccess, folder: str) -> list[Entry]:
        if folder == unlisted:
            raise PermissionError(13, "Permission denied", folder)
        return await entries(self, folder)

    monkeypatch.setattr(BlockingAccess, "entries", refusing)
    assert main(["object", "fsck", "--json", file["url"]]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["objects"] == 11
    damaged, skipped = sorted(found["findings"], key=lambda line: line["is_damaged"], reverse=True)
    assert damaged["name"] == name
    assert (skipped["name"], skipped["is_damaged"]) == (unlisted, False)
    assert "PermissionError" in skipped["problem"]
    assert main(["object", "fsck", "--delete", file["url"]]) == 3
    assert f"{unlisted}: cannot be read: none of the blocks in this folder" in (
        capsys.readouterr().out
    )
    # A sum without it would be a wrong one.
    assert main(["object", "du", file["url"]]) == 2


def test_a_store_that_is_gone_ends_the_check(
    drive: Drive, file: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """With status 2: thousands of folders are not tried one after the other."""
    assert drive(file).store(KEYS).success
    entries, asked = BlockingAccess.entries, []

    async def failing(self: BlockingAccess, folder: str) -> list[Entry]:
        if folder.rpartition("/")[2].isalnum() and len(folder.rpartition("/")[2]) == 3:
            asked.append(folder)
            raise TimeoutError("no answer")
        return await entries(self, folder)

    monkeypatch.setattr(BlockingAccess, "entries", failing)
    assert main(["object", "fsck", file["url"]]) == 2
    assert "TimeoutError: no answer" in capsys.readouterr().err
    assert len(asked) <= 8


def test_a_description_that_may_not_be_read_is_a_problem(
    drive: Drive, file: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Of its namespace, and of no other."""
    assert drive(file).store(KEYS).success

    async def refusing(self: BlockingAccess, name: str) -> bytes:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(BlockingAccess, "read", refusing)
    assert main(["object", "fsck", file["url"]]) == 1
    assert "its description (namespace.json) may not be read" in capsys.readouterr().out


def test_a_driver_that_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything of it is imported."""

    def missing(_: str) -> None:
        raise ImportError("Install adlfs")

    monkeypatch.setattr(_filesystem, "get_filesystem_class", missing)
    monkeypatch.setitem(sys.modules, "kv_tier_fsspec._azure", None)
    assert main(["object", "ls", "az://blocks/kv"]) == 2
    assert "pip install 'kv-tier-fsspec[az]'" in capsys.readouterr().err


def test_azure_that_does_not_answer_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """By the tier's own client: that of adlfs tries for more than a minute."""
    pytest.importorskip("adlfs")
    account = (
        "DefaultEndpointsProtocol=http;AccountName=nobody;AccountKey=bm8gc2VjcmV0;"
        "BlobEndpoint=http://127.0.0.1:9/nobody;"
    )
    options = ["--option", f"connection_string={account}"]
    assert main(["object", "ls", "az://blocks/kv", *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: looking into 'az://blocks/kv'")
    assert "ConnectionError" in said
    assert "bm8gc2VjcmV0" not in said


def test_damage_that_cannot_be_deleted_is_damage(
    drive: Drive, file: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Told with both reasons, and status 1."""
    driver = drive(file)
    assert driver.store(KEYS).success
    name = damage(driver, KEYS[0], b"cut")

    async def refusing(self: BlockingAccess, name: str) -> None:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(BlockingAccess, "remove", refusing)
    assert main(["object", "fsck", "--delete", "--json", file["url"]]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["name"], found["is_damaged"], found["is_deleted"]) == (name, True, False)
    assert "3 bytes long" in found["problem"]
    assert "cannot be removed: PermissionError" in found["problem"]


def test_a_namespace_without_a_description_is_a_problem(
    drive: Drive, file: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is known of its blocks: status 1, and they are left alone."""
    drive(file).store(KEYS)
    (description,) = tmp_path.rglob("namespace.json")
    description.write_text("{}")
    assert main(["object", "fsck", "--delete", file["url"]]) == 1
    assert "its description cannot be used" in capsys.readouterr().out
    assert len(list(tmp_path.rglob("*.kv"))) == 12


def test_credentials_of_the_environment_are_enough(
    drive: Drive,
    s3: dict[str, Any],
    s3_access: S3Access,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No secret is on the command line."""
    drive(s3).store(KEYS)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_access.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_access.secret_key)
    option = f"endpoint_url={s3_access.endpoint_url}"
    assert main(["object", "du", s3["url"], "--option", option, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["objects"] == 12


def test_wrong_credentials_are_told(
    s3: dict[str, Any], s3_access: S3Access, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, one message, no secret."""
    options = [
        *("--option", f"endpoint_url={s3_access.endpoint_url}"),
        *("--option", "key=nobody", "--option", "secret=not-a-secret-either"),
    ]
    assert main(["object", "ls", s3["url"], *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: looking into 's3://")
    assert "not-a-secret-either" not in said


def test_an_entry_knows_its_last_name() -> None:
    """What follows the last slash."""
    assert Entry("bucket/r0/abc", None, None).stem == "abc"
