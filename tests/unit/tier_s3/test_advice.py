"""What an operator reads when a bucket cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from kv_core.contract import parse_tier_config
from kv_tier_s3 import S3Config
from kv_tier_s3._advice import cannot_open
from kv_tier_s3._errors import S3Error, S3ErrorKind


def message(kind: S3ErrorKind, code: str | None = None, **settings: Any) -> str:
    """Return the message for an error."""
    config = parse_tier_config("cold", S3Config, {"bucket": "kv-cache", **settings})
    return str(cannot_open(config, S3Error(kind, "get", "kv-cache/x", None, code, "why")))


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (S3ErrorKind.NO_BUCKET, "Make the bucket"),
        (S3ErrorKind.DENIED, "s3:ListBucket, without which a missing object is answered with 403"),
        (S3ErrorKind.EXPIRED, "Renew the credentials"),
        (S3ErrorKind.NO_CREDENTIALS, "Set 'access_key_id' and 'secret_access_key', or"),
        (S3ErrorKind.REDIRECTED, "set 'region'"),
        (S3ErrorKind.TLS, "set 'ca_bundle'"),
        (S3ErrorKind.TIMEOUT, "check 'endpoint_url'"),
        (S3ErrorKind.DNS, "correct 'endpoint_url'"),
        (S3ErrorKind.NETWORK, "that the store runs"),
        (S3ErrorKind.NOT_S3, "does not speak S3"),
        (S3ErrorKind.CLOCK, "Set the clock"),
        (S3ErrorKind.FULL, "Make room"),
        (S3ErrorKind.THROTTLED, "start again later"),
        (S3ErrorKind.SERVER, "look at its log"),
        (S3ErrorKind.OTHER, "check all settings"),
    ],
)
def test_why_a_bucket_cannot_be_used_says_what_to_do(kind: S3ErrorKind, advice: str) -> None:
    """No bucket, no permission, a wrong endpoint and TLS trouble are told apart."""
    found = message(kind)
    assert f"bucket 'kv-cache' at AWS cannot be used: get kv-cache/x: {kind.value}: why." in found
    assert advice in found


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("InvalidAccessKeyId", "knows no such access key"),
        ("SignatureDoesNotMatch", "the secret does not belong to it"),
        ("AccessDenied", "not allowed to do this"),
    ],
)
def test_what_is_wrong_with_credentials_is_told_apart(code: str, advice: str) -> None:
    """A wrong key, a wrong secret and a missing permission are repaired in different places."""
    assert advice in message(S3ErrorKind.DENIED, code)


@pytest.mark.parametrize("kind", [S3ErrorKind.NETWORK, S3ErrorKind.NOT_S3, S3ErrorKind.TIMEOUT])
def test_who_speaks_no_tls_is_told_to_try(kind: S3ErrorKind) -> None:
    """A store that speaks TLS drops what does not, or answers like a web server."""
    hint = "begin 'endpoint_url' with 'https://'"
    assert hint in message(kind, endpoint_url="http://minio.example:9000")
    assert hint not in message(kind, endpoint_url="https://minio.example:9000")
