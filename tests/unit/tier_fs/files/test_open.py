"""Opening: settings, the root folder, the description of the namespace, direct I/O."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.contract import parse_tier_config
from kv_core.errors import ConfigError, TierOpenError
from kv_core.keys import Namespace
from kv_core.tierkit.testing import example_namespace
from kv_tier_fs import FsConfig
from kv_tier_fs.files import _open as opening

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_core.contract import OffloadKey
    from kv_core.tierkit.testing import TierDriver

    Drive = Callable[..., TierDriver]


def config_path(root: Path) -> Path:
    """Return the one description below a root."""
    (path,) = root.glob("*/config.json")
    return path


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "'root_dir' is required but missing"),
        ({"root_dir": "/x", "rootdir": "/y"}, "'rootdir' is not a setting"),
        ({"root_dir": 7}, "'root_dir'"),
        ({"root_dir": ""}, "'root_dir'.* must not be empty"),
        ({"root_dir": "/x", "io_threads": 1}, "'io_threads'"),
        ({"root_dir": "/x", "direct_io": "perhaps"}, "'direct_io'"),
    ],
)
def test_settings_are_named(settings: dict[str, Any], named: str) -> None:
    """Missing, unknown and invalid settings are refused by name (CONF-1, llm-d-kv-cache#499)."""
    with pytest.raises(ConfigError, match=named):
        parse_tier_config("disk", FsConfig, settings)


def test_the_root_is_made(drive: Drive, tmp_path: Path) -> None:
    """A root that does not exist is made, with its parents, for the owner only."""
    root = tmp_path / "a" / "b"
    drive(root)
    assert root.stat().st_mode & 0o777 == 0o700


def test_an_existing_root_keeps_its_mode(drive: Drive, tmp_path: Path) -> None:
    """What the operator has set up is not changed."""
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o2750)
    drive(root)
    assert root.stat().st_mode & 0o7777 == 0o2750


def test_a_relative_root_survives_a_change_of_directory(
    drive: Drive, tmp_path: Path, keys: list[OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root is fixed when the tier opens."""
    monkeypatch.chdir(tmp_path)
    driver = drive(type(tmp_path)("relative"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert driver.store(keys).success
    assert driver.load(keys).success
    assert (tmp_path / "relative").is_dir()


@pytest.mark.parametrize("below", ["", "sub"])
def test_a_root_that_is_a_file_is_refused(drive: Drive, tmp_path: Path, below: str) -> None:
    """The message names the path and what to do; nothing is left (LIFE-4)."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TierOpenError, match=r"is not a directory.*Name a folder"):
        drive(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, "full file system.*Free some space"),
        (errno.EROFS, "not writable for user id.*Change its owner"),
        (errno.EIO, "cannot be used: Input/output error .errno 5, EIO.*Choose a folder"),
    ],
)
def test_errors_of_the_system_are_explained(
    drive: Drive, tmp_path: Path, code: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel says becomes what was found and what to do."""

    def fail(path: Path) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(opening, "make_folder", fail)
    with pytest.raises(TierOpenError, match=expected):
        drive(tmp_path)


def test_the_description_is_complete(drive: Drive, tmp_path: Path) -> None:
    """The namespace can be rebuilt from ``config.json``."""
    drive()
    content = json.loads(config_path(tmp_path / "root").read_text())
    namespace = Namespace.from_description(content.pop("namespace"))
    assert namespace == example_namespace(4096)
    assert content == {
        "format": "kv-tier-fs",
        "format_version": 1,
        "layout": "files",
        "fingerprint": namespace.fingerprint,
    }


def test_an_existing_description_is_kept(drive: Drive, tmp_path: Path) -> None:
    """A second tier checks the description and does not write it again."""
    drive()
    before = config_path(tmp_path / "root").stat()
    drive()
    assert config_path(tmp_path / "root").stat().st_ino == before.st_ino


def test_another_namespace_under_the_same_name_is_refused(drive: Drive, tmp_path: Path) -> None:
    """Twelve equal digits are not enough: the fields that differ are named."""
    drive().close()
    path = config_path(tmp_path / "root")
    content = json.loads(path.read_text())
    content["namespace"]["kv_layout"] = "other"
    path.write_text(json.dumps(content))
    with pytest.raises(TierOpenError, match=r"these fields differ: kv_layout\. Use another root"):
        drive()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format_version": 1, "layout": "files"}']
)
def test_a_broken_description_is_refused(drive: Drive, tmp_path: Path, content: str) -> None:
    """A description that says nothing is not overwritten."""
    drive().close()
    path = config_path(tmp_path / "root")
    path.write_text(content)
    with pytest.raises(TierOpenError, match="is not a description written by this tier"):
        drive()
    assert path.read_text() == content


@pytest.mark.parametrize("change", [{"layout": "segments"}, {"format_version": 2}])
def test_other_layouts_and_versions_are_refused(
    drive: Drive, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Files of a layout that this tier does not know are left alone."""
    drive().close()
    path = config_path(tmp_path / "root")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(TierOpenError, match="this tier writes layout 'files', version 1"):
        drive()


def test_a_failed_open_leaves_no_writer(drive: Drive, tmp_path: Path) -> None:
    """A constructor that raises leaves no lock and no temporary file (LIFE-4)."""
    drive().close()
    config_path(tmp_path / "root").write_text("")
    with pytest.raises(TierOpenError):
        drive()
    (writers,) = (tmp_path / "root").glob("*/writers")
    assert list(writers.iterdir()) == []


@pytest.mark.parametrize("suffix", ["", "_r0"])
def test_no_link_leads_out_of_the_root(drive: Drive, tmp_path: Path, suffix: str) -> None:
    """Whoever can make a link in the root cannot have blocks written elsewhere."""
    drive().close()
    namespace_dir = config_path(tmp_path / "root").parent
    folder = namespace_dir.with_name(namespace_dir.name + suffix)
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    with pytest.raises(TierOpenError, match="is a symbolic link"):
        drive()


def test_a_link_to_the_root_is_fine(drive: Drive, tmp_path: Path, keys: list[OffloadKey]) -> None:
    """Where the cache lies is the operator's choice."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert drive(tmp_path / "link").store(keys).success


@pytest.mark.parametrize("name", ["..lock", "...lock", ".lock", "1-0123456789abcdef.old.lock"])
def test_only_writers_are_reclaimed(
    drive: Drive, tmp_path: Path, keys: list[OffloadKey], name: str
) -> None:
    """A file that looks like a dead writer's lock, but is none, costs nobody's files (PERS-3)."""
    living = drive()
    (writers,) = (tmp_path / "root").glob("*/writers")
    before = sorted(writers.parent.rglob("*"))
    (writers / name).touch()
    drive().close()
    assert sorted(writers.parent.rglob("*")) == sorted([*before, writers / name])
    assert living.store(keys).success


def test_direct_io_is_tried_with_the_real_block(
    drive: Drive, caplog: pytest.LogCaptureFixture, keys: list[OffloadKey]
) -> None:
    """A stride at which direct I/O fails is found out at open, with one warning per direction."""
    driver = drive(block_bytes=1000, row_stride=1000)
    assert caplog.text.count("for writing blocks of 1000 bytes here (errno 22, EINVAL)") == 1
    assert caplog.text.count("for reading blocks of 1000 bytes here (errno 22, EINVAL)") == 1
    caplog.clear()
    assert driver.store(keys).success
    assert driver.load(keys).success
    assert caplog.text == ""


def test_direct_io_can_be_switched_off(
    drive: Drive, caplog: pytest.LogCaptureFixture, keys: list[OffloadKey]
) -> None:
    """Without direct_io nothing is tried and nothing is warned of."""
    driver = drive(direct_io=False, block_bytes=1000)
    assert driver.store(keys).success
    assert caplog.text == ""


def test_opening_does_not_touch_the_slots(drive: Drive, keys: list[OffloadKey]) -> None:
    """The first I/O reads a slot and writes none (DATA-3)."""
    driver = drive(num_blocks=2)
    with driver.primary.block(0) as slot:
        assert bytes(slot) == bytes(4096)
