"""Settings of the s3 tier: what is refused, and what is shown nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.contract import parse_tier_config
from kv_core.errors import ConfigError
from kv_tier_s3 import Engine, S3Config

if TYPE_CHECKING:
    from collections.abc import Mapping

SECRET = "hunter2-very-secret"


def config(**settings: Any) -> S3Config:
    """Return validated settings."""
    return parse_tier_config("cold", S3Config, {"bucket": "kv-cache", **settings})


@pytest.mark.parametrize(
    ("settings", "setting", "told"),
    [
        ({"bucket": "b/prefix"}, "bucket", "the rest as 'prefix'"),
        ({"bucket": ""}, "bucket", "2 to 255 letters"),
        ({"bucket": "s3://b"}, "bucket", "holds a slash"),
        ({"endpoint_url": "minio:9000"}, "endpoint_url", "must begin with 'http://'"),
        ({"endpoint_url": "https://"}, "endpoint_url", "name a host"),
        ({"endpoint_url": "https://u:p@minio"}, "endpoint_url", "holds credentials"),
        ({"endpoint_url": "https://minio/bucket"}, "endpoint_url", "more than a host"),
        ({"access_key_id": "AK"}, "", "'secret_access_key' is missing"),
        ({"secret_access_key": SECRET}, "", "'access_key_id' is missing"),
        ({"session_token": SECRET}, "", "belongs to an 'access_key_id'"),
        ({"sse_kms_key_id": "k"}, "", "'server_side_encryption' to be 'aws:kms'"),
        ({"sse_customer_key": SECRET}, "sse_customer_key", "32 bytes in base64"),
        ({"sse_customer_key": "c2hvcnQ="}, "sse_customer_key", "openssl rand -base64 32"),
        (
            {"sse_customer_key": "A" * 43 + "=", "server_side_encryption": "AES256"},
            "",
            "leave out 'server_side_encryption'",
        ),
        ({"engine": "boto"}, "engine", "s3fs"),
        ({"bukcet": "b"}, "bukcet", "is not a setting"),
    ],
)
def test_what_cannot_be_used_is_refused(
    settings: Mapping[str, Any], setting: str, told: str
) -> None:
    """With the name of the setting and what to write, and without the secret."""
    with pytest.raises(ConfigError, match=told) as caught:
        config(**settings)
    if setting:
        assert caught.value.setting == f"cold.{setting}"
    assert SECRET not in str(caught.value)


def test_the_bucket_is_required() -> None:
    """And named."""
    with pytest.raises(ConfigError, match="'bucket' is required but missing"):
        parse_tier_config("cold", S3Config, {})


def test_a_prefix_has_no_slashes_around_it() -> None:
    """Or objects would have empty names in their path."""
    assert config(prefix="/team/kv/").prefix == "team/kv"


@pytest.mark.parametrize(
    ("settings", "path_style"),
    [
        ({}, False),
        ({"endpoint_url": "http://minio:9000"}, True),
        ({"endpoint_url": "http://minio:9000", "addressing_style": "virtual"}, False),
        ({"addressing_style": "path"}, True),
    ],
)
def test_where_the_bucket_is_in_a_request(settings: Mapping[str, Any], path_style: bool) -> None:
    """In the path where a host per bucket is not to be expected."""
    assert config(**settings).uses_path_style is path_style


def test_secrets_are_not_shown() -> None:
    """Neither by repr nor in a dump (CONF-2)."""
    found = config(access_key_id="AK" + SECRET, secret_access_key=SECRET, session_token=SECRET)
    shown = [repr(found), str(found), str(found.model_dump()), found.model_dump_json()]
    assert not [text for text in shown if SECRET in text]


@pytest.mark.parametrize(
    ("setting", "installed", "chosen"),
    [
        ("auto", True, Engine.OBSTORE),
        ("auto", False, Engine.S3FS),
        ("s3fs", True, Engine.S3FS),
        ("obstore", False, Engine.OBSTORE),
    ],
)
def test_the_faster_engine_is_taken_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, setting: str, *, installed: bool, chosen: Engine
) -> None:
    """And the one that is named always."""
    found = object() if installed else None
    monkeypatch.setattr("kv_tier_s3._config.find_spec", {"obstore": found}.__getitem__)
    assert config().engine is Engine.AUTO
    assert config(engine=setting).chosen_engine is chosen
