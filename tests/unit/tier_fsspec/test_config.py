"""Settings of the fsspec tier: what is refused, and what is shown nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from kv_core.contract import Capability, parse_tier_config
from kv_core.errors import ConfigError, TierOpenError
from kv_core.plugins import check_tier
from kv_tier_fsspec import FsspecConfig, _filesystem, kv_core_register_tier
from kv_tier_fsspec._filesystem import filesystem_class, make_filesystem, publication_of
from kv_tier_fsspec._protocols import Publication

SECRET = "hunter2-very-secret"


def config(**settings: Any) -> FsspecConfig:
    """Return validated settings."""
    return parse_tier_config("cold", FsspecConfig, {"url": "memory://kv", **settings})


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("/mnt/kv", "must begin with a protocol"),
        ("", "must begin with a protocol"),
        ("simplecache::s3://bucket", "chains several filesystems"),
        ("blockcache://x::s3://bucket", "chains several filesystems"),
        ("sftp://user:secret@host/kv", "holds a password"),
        ("s3://", "names no place"),
        ("file:///", "names no place"),
        ("file://mnt/kv", r"relative folder 'mnt/kv'.*file:///mnt/kv"),
        ("FILE://localhost/kv", r"relative folder 'localhost/kv'"),
        ("sftp://host", r"no folder on the server.*sftp://host/"),
        ("ssh://host:22/", r"no folder on the server.*ssh://host:22/"),
        ("sftp://host:abc/kv", "port 'abc'"),
        ("az://container/x?sv=1&sig=secret", "has a query"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, told: str) -> None:
    """With the name of the setting and what to write instead, and without the URL's secrets."""
    with pytest.raises(ConfigError, match=told) as caught:
        config(url=url)
    assert caught.value.setting == "cold.url"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("FILE:///mnt/KV", "file:///mnt/KV"),
        ("file://~/kv", "file://~/kv"),
        ("sftp://user@[::1]:22/kv", "sftp://user@[::1]:22/kv"),
        ("file:///odd?name", "file:///odd?name"),
    ],
)
def test_a_url_goes_to_the_filesystem_with_its_protocol_in_small_letters(
    url: str, found: str
) -> None:
    """Another spelling would be a name below the working folder."""
    assert config(url=url).url == found


def test_options_that_only_look_like_secrets_are_shown() -> None:
    """Which key file is missing is what the reader has to know."""
    options = {"key_filename": "/etc/kv/id", "host_key_policy": "warning", "passphrase": SECRET}
    found = config(url="sftp://host/kv", storage_options=options)
    text = found.hide_secrets(f"warning: no file '/etc/kv/id' for {SECRET}")
    assert text == "warning: no file '/etc/kv/id' for **********"


def test_a_policy_for_host_keys_is_one_of_three() -> None:
    """Told without a connection, with what was found."""
    with pytest.raises(ConfigError, match=r"'host_key_policy'.*'yes'.*auto_add"):
        config(url="sftp://host/kv", storage_options={"host_key_policy": "yes"})


def test_an_unknown_setting_is_named() -> None:
    """Together with those that exist."""
    with pytest.raises(ConfigError, match=r"'uri' is not a setting.*storage_options"):
        config(uri="s3://bucket")


def test_secrets_are_not_shown() -> None:
    """Neither by repr, nor in a dump, nor in what a library says (CONF-2)."""
    found = config(
        storage_options={
            "key": "AK" + SECRET,
            "client_kwargs": {"region_name": "eu", "token": SECRET},
        }
    )
    shown = [repr(found), str(found.model_dump()), found.model_dump_json()]
    shown.append(found.hide_secrets(f"denied: AK{SECRET} and {SECRET} in eu"))
    assert not [text for text in shown if SECRET in text]
    assert shown[-1] == "denied: ********** and ********** in eu"


def test_sizes_may_be_text() -> None:
    """As everywhere else."""
    found = config(staging_bytes="96MiB", min_free_bytes="2GiB")
    assert (found.staging_bytes, found.min_free_bytes) == (96 * 2**20, 2 * 2**30)


def test_copies_in_flight_fit_the_staging() -> None:
    """A third of it is the largest block, and many small ones may be in flight at a time."""
    found = config(staging_bytes=3 * 2**20)
    assert found.most_block_bytes == 2**20
    assert found.most_transfers(2**20) == 1
    assert found.most_transfers(2**10) == 1024
    assert found.most_transfers(2**30) == 1


# -- what the settings decide ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "persistent"), [("memory://kv", False), ("file:///kv", True), ("s3://kv", True)]
)
def test_what_lives_in_memory_is_not_persistent(url: str, persistent: bool) -> None:
    """The engine acts on it, so the declaration follows the URL."""
    checked = check_tier(kv_core_register_tier(), name="cold", settings={"url": url})
    assert Capability.INTEGRITY in checked.spec.capabilities
    for capability in (Capability.PERSISTENT, Capability.SHARED):
        assert (capability in checked.spec.capabilities) is persistent


def test_a_folder_keeps_a_floor_of_free_space() -> None:
    """And an object store, whose space has no end that shows, any floor at all."""
    for url, floor in (("file:///kv", 5), ("s3://kv", 1)):
        settings = {"url": url, "min_free_bytes": 5}
        checked = check_tier(kv_core_register_tier(), name="cold", settings=settings)
        assert checked.limits.min_free_bytes == floor


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file:///kv", Publication.RENAME),
        ("SFTP://host/kv", Publication.RENAME),
        ("s3://kv", Publication.PUT),
        ("az://kv", Publication.PUT),
    ],
)
def test_how_a_known_protocol_publishes(url: str, expected: Publication) -> None:
    """Whole objects where they exist, renames where those replace atomically."""
    assert publication_of(config(url=url)) is expected


def test_an_unknown_protocol_is_refused_until_somebody_says_how_it_publishes() -> None:
    """Readers would see parts of blocks (DATA-9)."""
    with pytest.raises(ConfigError, match=r"'publication' to 'put'.*or to 'rename'") as caught:
        publication_of(config(url="ftp://host/kv"))
    assert caught.value.setting == "publication"
    assert publication_of(config(url="ftp://host/kv", publication="rename")) is Publication.RENAME


# -- the filesystem -------------------------------------------------------------------------------


def test_a_protocol_that_does_not_exist_is_named() -> None:
    """And so is the setting to correct."""
    with pytest.raises(TierOpenError, match=r"protocol 'nosuch'.*'url'"):
        filesystem_class("nosuch")


@pytest.mark.parametrize(("protocol", "extra"), [("sftp", "sftp"), ("abfs", "az"), ("s3", "s3")])
def test_the_extra_that_brings_a_driver_is_named(
    monkeypatch: pytest.MonkeyPatch, protocol: str, extra: str
) -> None:
    """A driver that is not installed is a command away."""

    def missing(_: str) -> None:
        raise ImportError("Install something to use this")

    monkeypatch.setattr(_filesystem, "get_filesystem_class", missing)
    with pytest.raises(TierOpenError, match=rf"pip install 'kv-tier-fsspec\[{extra}\]'"):
        filesystem_class(protocol)


def test_no_instance_is_shared() -> None:
    """Two tiers over one storage share neither connections nor remembered listings."""
    first, second = (make_filesystem(config(url="file:///kv")) for _ in range(2))
    assert first is not second
    assert first.dircache.use_listings_cache is False


def test_memory_belongs_to_one_tier() -> None:
    """The filesystem's own store would keep every block for as long as the process lives."""
    first, second = (make_filesystem(config()) for _ in range(2))
    first.pipe_file("/kv/x", b"1")
    assert second.find("/") == []
    assert type(first)().find("/kv") == []


class Strict:
    """A filesystem that knows its options."""

    def __init__(self, *, skip_instance_cache: bool, use_listings_cache: bool) -> None:
        pass

    @staticmethod
    def _get_kwargs_from_urls(_: str) -> dict[str, Any]:
        return {}


def test_options_that_a_filesystem_refuses_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and without values."""
    monkeypatch.setattr(_filesystem, "filesystem_class", lambda _: Strict)
    with pytest.raises(TierOpenError, match=r"'memory' refuses its 'storage_options'.*'nonsense'"):
        make_filesystem(config(storage_options={"nonsense": SECRET}))
