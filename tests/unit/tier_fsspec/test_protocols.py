"""The table of protocols, and what becomes of those that are not in it."""

from __future__ import annotations

from typing import Any

import pytest

from kv_core.contract import Capability, parse_tier_config
from kv_core.errors import ConfigError, KVCoreError
from kv_tier_fsspec import FsspecConfig, kv_core_register_tier
from kv_tier_fsspec._filesystem import publication_of, warn_of_assumption
from kv_tier_fsspec._protocols import Publication, protocol_named

LASTING = frozenset({Capability.INTEGRITY, Capability.PERSISTENT, Capability.SHARED})


def config(url: str, **settings: Any) -> FsspecConfig:
    """Return validated settings."""
    return parse_tier_config("cold", FsspecConfig, {"url": url, **settings})


@pytest.mark.parametrize(
    ("url", "publication"),
    [
        ("file:///folder", Publication.RENAME),
        ("sftp://host/folder", Publication.RENAME),
        ("s3://bucket/prefix", Publication.PUT),
        ("az://container/prefix", Publication.PUT),
    ],
)
def test_storages_outside_the_process_last_and_are_shared(
    url: str, publication: Publication
) -> None:
    """The tier declares so, and publishes as the table says."""
    spec = kv_core_register_tier()
    assert spec.refine is not None
    assert spec.refine(config(url)).capabilities == LASTING
    assert publication_of(config(url)) is publication


@pytest.mark.parametrize(
    ("url", "settings", "told"),
    [
        ("foo://x/y", {}, "no filesystem for the protocol 'foo'"),
        ("foo://x/y", {"publication": "put"}, "no filesystem for the protocol 'foo'"),
        ("gs://bucket/prefix", {}, "Install"),
        ("webhdfs://host/folder", {}, "Set 'publication'"),
        ("abfs://container/x", {"publication": "rename"}, "store an object in one request"),
    ],
)
def test_what_no_engine_could_open_is_refused_before(
    url: str, settings: dict[str, Any], told: str
) -> None:
    """Whoever checks a configuration hears of it."""
    spec = kv_core_register_tier()
    assert spec.refine is not None
    with pytest.raises(KVCoreError, match=told):
        spec.refine(config(url, **settings))


def test_memory_neither_lasts_nor_is_shared() -> None:
    """A tier in memory declares nothing but that it sees damage."""
    spec = kv_core_register_tier()
    assert spec.refine is not None
    assert spec.refine(config("memory://blocks")).capabilities == {Capability.INTEGRITY}


@pytest.mark.parametrize("protocol", ["http", "https", "github", "zip", "simplecache", "reference"])
def test_what_cannot_keep_blocks_is_refused(protocol: str) -> None:
    """With the reason, whatever 'publication' says."""
    reason = protocol_named(protocol).refusal
    with pytest.raises(ConfigError, match="cannot keep blocks") as caught:
        config(f"{protocol}://place/folder", publication="put")
    assert reason
    assert reason in str(caught.value)


def test_an_unknown_protocol_must_say_how_blocks_appear() -> None:
    """Readers would see parts of them otherwise."""
    with pytest.raises(ConfigError, match="Set 'publication'"):
        publication_of(config("webhdfs://host/folder"))


def test_an_unknown_protocol_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """What is assumed is said."""
    chosen = config("webhdfs://host/folder", publication="rename")
    assert publication_of(chosen) is Publication.RENAME
    warn_of_assumption(chosen)
    warn_of_assumption(config("sftp://host/folder"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'webhdfs'" in caplog.text


def test_what_is_called_tested_has_a_line_for_each_name() -> None:
    """The names that the documentation calls supported."""
    tested = ("file", "local", "memory", "sftp", "ssh", "s3", "s3a", "az", "abfs", "abfss")
    assert all(protocol_named(name).is_tested for name in tested)
    assert not protocol_named("gs").is_tested


def test_parts_of_a_connection_string_are_secret() -> None:
    """Client libraries repeat the key rather than all of the text."""
    secret = "c2VjcmV0IGtleQ=="
    text = f"DefaultEndpointsProtocol=https;AccountName=kv;AccountKey={secret};"
    found = config("az://container/x", storage_options={"connection_string": text})
    assert found.hide_secrets(f"bad key {secret}") == "bad key **********"
    assert secret not in repr(found)
