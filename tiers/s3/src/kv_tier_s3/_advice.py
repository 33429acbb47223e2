"""What an operator reads when a bucket cannot be used: what was found, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_core.errors import TierOpenError
from kv_tier_s3._errors import S3Error, S3ErrorKind

if TYPE_CHECKING:
    from kv_tier_s3._config import BucketConfig

__all__ = ["cannot_open"]

_PERMISSIONS: Final = (
    "The credentials are known to the store, and not allowed to do this. The tier needs "
    "s3:GetObject, s3:PutObject and s3:DeleteObject below the prefix, and s3:ListBucket, without "
    "which a missing object is answered with 403, too. Check the policies of the user and of the "
    "bucket"
)

_ADVICE_BY_CODE: Final = {
    "InvalidAccessKeyId": (
        "The store knows no such access key: check 'access_key_id', or where the usual chain takes "
        "it from, and that 'endpoint_url' names the store that the key belongs to"
    ),
    "SignatureDoesNotMatch": (
        "The store knows the access key, and the secret does not belong to it: check "
        "'secret_access_key', or where the usual chain takes it from; a gateway that changes the "
        "Host header has the same effect"
    ),
    "AccessDenied": _PERMISSIONS,
}

_ADVICE: Final = {
    S3ErrorKind.NO_BUCKET: "Make the bucket, or correct 'bucket'; the tier makes none itself",
    S3ErrorKind.DENIED: (
        "The credentials are wrong, or lack s3:GetObject, s3:PutObject or s3:DeleteObject below "
        "the prefix, or s3:ListBucket, without which a missing object is answered with 403, too. "
        "Check 'access_key_id' or 'profile', and the policy of the bucket"
    ),
    S3ErrorKind.EXPIRED: "Renew the credentials, or leave them out so that the usual chain does",
    S3ErrorKind.NO_CREDENTIALS: (
        "Set 'access_key_id' and 'secret_access_key', or give the usual chain something to find: "
        "variables of the environment, a 'profile', a role of the container or the instance"
    ),
    S3ErrorKind.REDIRECTED: (
        "The bucket is in another region, or at another address: set 'region' to that of the "
        "bucket, and 'endpoint_url' to where the store itself listens"
    ),
    S3ErrorKind.TIMEOUT: (
        "Nothing answers in time: check 'endpoint_url', the network and its proxies, and that the "
        "store is well"
    ),
    S3ErrorKind.DNS: "The host has no address: correct 'endpoint_url', or repair its DNS",
    S3ErrorKind.NETWORK: (
        "No connection: check the host and port of 'endpoint_url', that the store runs, and the "
        "network and its proxies"
    ),
    S3ErrorKind.TLS: (
        "The certificate of the store is not trusted, or it speaks no TLS there: set 'ca_bundle' "
        "to the certificate of the authority that has signed it, or begin 'endpoint_url' with "
        "'http://' if that is what it speaks"
    ),
    S3ErrorKind.NOT_S3: (
        "Something answers there, and it does not speak S3: check the host and port of "
        "'endpoint_url' (a console or a web server often has the next port), and the gateways and "
        "proxies in between"
    ),
    S3ErrorKind.CLOCK: "Set the clock of this machine; requests are signed with its time",
    S3ErrorKind.FULL: "Make room in the store, or raise the quota of the user or the bucket",
    S3ErrorKind.THROTTLED: "The store asks for patience; start again later",
    S3ErrorKind.SERVER: "The store has trouble of its own; look at its log",
}

_BROKE_OFF: Final = frozenset({S3ErrorKind.NETWORK, S3ErrorKind.NOT_S3, S3ErrorKind.TIMEOUT})


def cannot_open(config: BucketConfig, error: S3Error) -> TierOpenError:
    """Return what an operator reads when the bucket cannot be used."""
    advice = _ADVICE_BY_CODE.get(error.s3_code or "") or _ADVICE.get(
        error.kind, "See what the store said, and check all settings"
    )
    if (config.endpoint_url or "").startswith("http://"):
        if error.kind is S3ErrorKind.TLS:
            advice = "Check 'endpoint_url' and the proxies of the network"
        elif error.kind in _BROKE_OFF:
            advice += ". If it speaks TLS, begin 'endpoint_url' with 'https://'"
    return TierOpenError(
        f"bucket {config.bucket!r} at {config.where} cannot be used: {error.message}. {advice}"
    )
