"""Settings: those of the tier s3 where they mean the same, and what NIXL makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kv_core.contract import Capability, parse_tier_config
from kv_core.errors import ConfigError
from kv_tier_obj import ObjConfig, kv_core_register_tier
from kv_tier_obj._config import slot_bytes_of

SECRET = "the-secret-of-the-test"
TOKEN = "the-token-of-the-test"


def config(**settings: Any) -> ObjConfig:
    """Return settings."""
    return parse_tier_config("obj", ObjConfig, {"bucket": "kv-cache", **settings})


def test_a_bucket_is_enough() -> None:
    """At AWS nothing else is needed: region and credentials are found by NIXL."""
    assert config().nixl_parameters("us-east-1") == {
        "bucket": "kv-cache",
        "num_threads": "8",
        "req_checksum": "required",
        "resp_checksum": "required",
        "use_virtual_addressing": "true",
    }


def test_everything_reaches_nixl() -> None:
    """Endpoint, scheme, region, addressing, credentials, certificates, checksums and threads do."""
    found = config(
        endpoint_url="https://store.example:9000/",
        region="eu-central-1",
        addressing_style="virtual",
        access_key_id="AKID",
        secret_access_key=SECRET,
        session_token=TOKEN,
        ca_bundle="/etc/ca.pem",
        req_checksum="supported",
        threads=3,
    ).nixl_parameters("us-east-1")
    assert found == {
        "bucket": "kv-cache",
        "endpoint_override": "https://store.example:9000",
        "scheme": "https",
        "region": "eu-central-1",
        "use_virtual_addressing": "true",
        "access_key": "AKID",
        "secret_key": SECRET,
        "session_token": TOKEN,
        "ca_bundle": "/etc/ca.pem",
        "req_checksum": "supported",
        "resp_checksum": "required",
        "num_threads": "3",
    }


def test_another_store_is_addressed_by_path() -> None:
    """A store that is not AWS gets the bucket in the path, and a region to sign with."""
    found = config(endpoint_url="http://127.0.0.1:9000").nixl_parameters("us-east-1")
    assert found["scheme"] == "http"
    assert found["use_virtual_addressing"] == "false"
    assert found["region"] == "us-east-1"


def test_the_other_client_has_the_same_settings() -> None:
    """What opens the bucket and says why a request failed goes where NIXL goes."""
    ours = config(
        endpoint_url="https://store.example:9000",
        prefix="caches/",
        region="eu-central-1",
        profile="ops",
        access_key_id="AKID",
        secret_access_key=SECRET,
        ca_bundle="/etc/ca.pem",
        max_attempts=7,
        job_deadline_s=11,
        lookup_deadline_s=3,
        request_timeout_s=4,
        staging_bytes="8MiB",
        io_threads=64,
    )
    control = ours.control()
    assert control.endpoint_url == "https://store.example:9000"
    assert (control.bucket, control.prefix, control.region) == (
        "kv-cache",
        "caches",
        "eu-central-1",
    )
    assert control.profile == "ops"
    assert control.secret_access_key is not None
    assert control.secret_access_key.get_secret_value() == SECRET
    assert control.ca_bundle == Path("/etc/ca.pem")
    assert control.max_attempts == 7
    assert (control.job_deadline_s, control.lookup_deadline_s) == (11, 3)
    assert control.read_timeout_s == 4


def test_attempts_and_profile_are_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL has no parameter for them, and its client tries eleven times by itself."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    found = config(max_attempts=2, profile="ops")
    assert found.nixl_defaults() == {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "2"}
    assert found.nixl_environment() == {"AWS_DEFAULT_PROFILE": "ops", "AWS_PROFILE": "ops"}
    assert config().nixl_environment() == {}


def test_a_profile_that_nixl_would_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key in the environment comes first; without a profile that is what is meant."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    with pytest.raises(ConfigError, match="unset AWS_ACCESS_KEY_ID") as caught:
        config(profile="ops").nixl_environment()
    assert caught.value.setting == "profile"
    assert config().nixl_environment() == {}
    # A key of the settings is NIXL's, whatever the environment says.
    ours = config(profile="ops", access_key_id="AKID", secret_access_key=SECRET)
    assert ours.nixl_environment() == {}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")
    assert config(profile="ops").nixl_environment()["AWS_PROFILE"] == "ops"


def test_secrets_are_shown_nowhere() -> None:
    """Neither the text nor the dump of settings has them, and texts are masked."""
    ours = config(access_key_id="AKID", secret_access_key=SECRET, session_token=TOKEN)
    for shown in (repr(ours), str(ours), repr(ours.model_dump()), ours.model_dump_json()):
        assert SECRET not in shown
        assert TOKEN not in shown
    assert SECRET not in ours.hide_secrets(f"refused: {SECRET}")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"bucket": "a/b"}, "bucket"),
        ({"engine": "obstore"}, "engine"),
        ({"access_key_id": "AKID"}, "secret_access_key"),
        ({"session_token": TOKEN}, "session_token"),
        ({"req_checksum": "sometimes"}, "req_checksum"),
        ({"threads": 0}, "threads"),
        ({"endpoint_url": "store.example:9000"}, "endpoint_url"),
        ({"request_timeout_s": 0}, "request_timeout_s"),
        ({"staging_bytes": "1KiB"}, "staging_bytes"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], named: str) -> None:
    """A setting that cannot be is refused by name, without its value."""
    with pytest.raises(ConfigError, match=named) as raised:
        config(**settings)
    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize("block_bytes", [512, 4096, 100_000, 2**20, 2**26])
def test_staging_memory_is_what_was_declared(block_bytes: int) -> None:
    """All slots together stay within ``staging_bytes``, and there are at least two."""
    ours = config()
    limits = kv_core_register_tier().limits(ours)
    assert limits.max_block_bytes is not None
    assert block_bytes <= limits.max_block_bytes
    object_bytes = block_bytes + 256
    slots = ours.most_slots(object_bytes)
    assert 2 <= slots <= 64
    assert slots * slot_bytes_of(object_bytes) <= limits.staging_bytes


def test_the_largest_block_has_two_slots() -> None:
    """Two objects of the largest block fit, whatever the staging memory is."""
    for staging in ("64KiB", "1MiB", "100MB", "256MiB"):
        ours = config(staging_bytes=staging)
        assert 2 * slot_bytes_of(ours.most_block_bytes + 256) <= ours.staging_bytes


def test_jobs_can_be_withdrawn() -> None:
    """The tier declares that its jobs end in time without exception."""
    assert Capability.WITHDRAWS_IO in kv_core_register_tier().capabilities
