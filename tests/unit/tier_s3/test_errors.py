"""The table of errors: only a missing object is a miss, whatever a client library makes of it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

import aiohttp
import botocore.exceptions as boto
import pytest

from kv_core.contract import parse_tier_config
from kv_core.errors import TierError
from kv_tier_s3 import S3Config
from kv_tier_s3._errors import S3Error, S3ErrorKind, kind_of
from kv_tier_s3._obstore_store import ObstoreStore
from kv_tier_s3._s3fs_store import S3fsStore

SECRET = "hunter2-very-secret"
CONFIG = parse_tier_config(
    "cold", S3Config, {"bucket": "kv-cache", "access_key_id": "AK", "secret_access_key": SECRET}
)

TABLE = [
    (404, "NoSuchKey", S3ErrorKind.MISSING),
    (404, "NoSuchVersion", S3ErrorKind.MISSING),
    (403, "InvalidObjectState", S3ErrorKind.MISSING),
    (404, "NoSuchBucket", S3ErrorKind.NO_BUCKET),
    (401, None, S3ErrorKind.DENIED),
    (403, None, S3ErrorKind.DENIED),
    (403, "AccessDenied", S3ErrorKind.DENIED),
    (403, "AccountProblem", S3ErrorKind.DENIED),
    (403, "AllAccessDisabled", S3ErrorKind.DENIED),
    (403, "InvalidAccessKeyId", S3ErrorKind.DENIED),
    (403, "SignatureDoesNotMatch", S3ErrorKind.DENIED),
    (400, "AuthorizationQueryParametersError", S3ErrorKind.DENIED),
    (403, "UnauthorizedAccess", S3ErrorKind.DENIED),
    (400, "ExpiredToken", S3ErrorKind.EXPIRED),
    (403, "ExpiredTokenException", S3ErrorKind.EXPIRED),
    (403, "RequestExpired", S3ErrorKind.EXPIRED),
    (400, "TokenRefreshRequired", S3ErrorKind.EXPIRED),
    (400, "InvalidToken", S3ErrorKind.EXPIRED),
    (301, "PermanentRedirect", S3ErrorKind.REDIRECTED),
    (307, "TemporaryRedirect", S3ErrorKind.REDIRECTED),
    (307, "Redirect", S3ErrorKind.REDIRECTED),
    (301, None, S3ErrorKind.REDIRECTED),
    (302, None, S3ErrorKind.REDIRECTED),
    (307, None, S3ErrorKind.REDIRECTED),
    (308, None, S3ErrorKind.REDIRECTED),
    (400, "AuthorizationHeaderMalformed", S3ErrorKind.REDIRECTED),
    (400, "IllegalLocationConstraintException", S3ErrorKind.REDIRECTED),
    (503, "SlowDown", S3ErrorKind.THROTTLED),
    (400, "Throttling", S3ErrorKind.THROTTLED),
    (400, "ThrottlingException", S3ErrorKind.THROTTLED),
    (503, "RequestLimitExceeded", S3ErrorKind.THROTTLED),
    (429, "TooManyRequests", S3ErrorKind.THROTTLED),
    (429, None, S3ErrorKind.THROTTLED),
    (500, "InternalError", S3ErrorKind.SERVER),
    (503, "ServiceUnavailable", S3ErrorKind.SERVER),
    (500, None, S3ErrorKind.SERVER),
    (502, None, S3ErrorKind.SERVER),
    (503, None, S3ErrorKind.SERVER),
    (400, "RequestTimeout", S3ErrorKind.TIMEOUT),
    (408, None, S3ErrorKind.TIMEOUT),
    (504, None, S3ErrorKind.TIMEOUT),
    (403, "RequestTimeTooSkewed", S3ErrorKind.CLOCK),
    (403, "QuotaExceeded", S3ErrorKind.FULL),
    (507, "InsufficientStorage", S3ErrorKind.FULL),
    (503, "InsufficientCapacity", S3ErrorKind.FULL),
    (507, "XMinioStorageFull", S3ErrorKind.FULL),
    (400, "XMinioAdminBucketQuotaExceeded", S3ErrorKind.FULL),
    (507, None, S3ErrorKind.FULL),
    (412, "PreconditionFailed", S3ErrorKind.PRECONDITION),
    (409, "ConditionalRequestConflict", S3ErrorKind.PRECONDITION),
    (409, None, S3ErrorKind.PRECONDITION),
    (412, None, S3ErrorKind.PRECONDITION),
    (501, "NotImplemented", S3ErrorKind.UNSUPPORTED),
    (501, None, S3ErrorKind.UNSUPPORTED),
    (416, "InvalidRange", S3ErrorKind.RANGE),
    (416, None, S3ErrorKind.RANGE),
    (400, None, S3ErrorKind.NOT_S3),
    (404, None, S3ErrorKind.NOT_S3),
    (405, None, S3ErrorKind.NOT_S3),
    (418, "Teapot", S3ErrorKind.OTHER),
    (418, None, S3ErrorKind.OTHER),
    (None, None, S3ErrorKind.OTHER),
]


@pytest.mark.parametrize(("status", "code", "kind"), TABLE)
def test_an_answer_has_a_kind(status: int | None, code: str | None, kind: S3ErrorKind) -> None:
    """By code where there is one: it says more than the status."""
    assert kind_of(status, code) is kind


@pytest.mark.parametrize(("code", "kind"), [(row[1], row[2]) for row in TABLE if row[1]])
def test_a_code_counts_whatever_status_it_comes_with(code: str, kind: S3ErrorKind) -> None:
    """Stores differ in the status that they send with a code."""
    if kind is not S3ErrorKind.OTHER:
        assert kind_of(500, code) is kind


def test_every_kind_that_an_answer_can_have_is_in_the_table() -> None:
    """What has no answer has a kind of its own."""
    without_answer = {
        S3ErrorKind.DNS,
        S3ErrorKind.NETWORK,
        S3ErrorKind.NO_CREDENTIALS,
        S3ErrorKind.TLS,
    }
    assert {kind for _, _, kind in TABLE} == set(S3ErrorKind) - without_answer


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, S3ErrorKind.MISSING), (400, S3ErrorKind.OTHER), (403, S3ErrorKind.DENIED)],
)
def test_an_answer_without_a_body_has_no_code_to_miss(status: int, kind: S3ErrorKind) -> None:
    """That is every answer to HEAD."""
    assert kind_of(status, None, has_body=False) is kind


def test_an_error_says_what_where_and_why() -> None:
    """HTTP status, S3 code and key, for whoever reads the log."""
    error = S3Error(S3ErrorKind.THROTTLED, "put", "kv-cache/x", 503, "SlowDown", "be patient")
    assert str(error).startswith("put kv-cache/x: throttled (503 SlowDown): be patient")
    assert isinstance(error, TierError)
    assert isinstance(error, OSError)


# -- what s3fs raises -----------------------------------------------------------------------------


def answer(status: int, code: str) -> boto.ClientError:
    """Return an error as botocore makes it."""
    response: Any = {
        "Error": {"Code": code, "Message": "m"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return boto.ClientError(response, "GetObject")


def translated(error: BaseException, operation: str = "get") -> S3Error:
    """Return what the engine makes of an error."""

    async def translate() -> S3Error:
        return S3fsStore(CONFIG)._error(operation, "kv-cache/x", error)

    return asyncio.run(translate())


def caused(error: BaseException, *causes: BaseException) -> BaseException:
    """Return an error with what led to it."""
    link = error
    for cause in causes:
        link.__cause__ = cause
        link = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answer(404, "NoSuchKey"), S3ErrorKind.MISSING),
        (answer(404, "404"), S3ErrorKind.NOT_S3),
        (answer(404, ""), S3ErrorKind.NOT_S3),
        (answer(404, "NoSuchBucket"), S3ErrorKind.NO_BUCKET),
        (answer(403, "403"), S3ErrorKind.DENIED),
        (boto.NoCredentialsError(), S3ErrorKind.NO_CREDENTIALS),
        (boto.CredentialRetrievalError(provider="x", error_msg="y"), S3ErrorKind.NO_CREDENTIALS),
        (boto.ProfileNotFound(profile="x"), S3ErrorKind.NO_CREDENTIALS),
        (boto.SSLError(endpoint_url="x", error="certificate"), S3ErrorKind.TLS),
        (ssl.SSLError("wrong version"), S3ErrorKind.TLS),
        (boto.ConnectTimeoutError(endpoint_url="x"), S3ErrorKind.TIMEOUT),
        (boto.ReadTimeoutError(endpoint_url="x"), S3ErrorKind.TIMEOUT),
        (asyncio.TimeoutError(), S3ErrorKind.TIMEOUT),
        (boto.EndpointConnectionError(endpoint_url="x"), S3ErrorKind.NETWORK),
        (
            caused(boto.EndpointConnectionError(endpoint_url="x"), socket.gaierror(-2, "unknown")),
            S3ErrorKind.DNS,
        ),
        (aiohttp.ClientPayloadError("cut short"), S3ErrorKind.NETWORK),
        (ConnectionResetError(), S3ErrorKind.NETWORK),
        (ValueError("what?"), S3ErrorKind.OTHER),
    ],
    ids=repr,
)
def test_an_error_of_the_library_has_a_kind(error: BaseException, kind: S3ErrorKind) -> None:
    """Also without an answer of the store."""
    assert translated(error).kind is kind


def test_a_missing_bucket_is_no_miss_though_python_calls_it_a_missing_file() -> None:
    """s3fs raises FileNotFoundError for both."""
    wrapped = FileNotFoundError("The specified bucket does not exist")
    wrapped.__cause__ = answer(404, "NoSuchBucket")
    found = translated(wrapped)
    assert (found.kind, found.status, found.s3_code) == (
        S3ErrorKind.NO_BUCKET,
        404,
        "NoSuchBucket",
    )


def test_a_number_is_no_code() -> None:
    """Answers to HEAD have no body, and botocore puts the status where the code would be."""
    assert translated(answer(403, "403"), "head").s3_code is None


def test_what_the_system_said_is_repeated() -> None:
    """The library says "could not connect", which may be any of a dozen things."""
    refused = ConnectionRefusedError(111, "Connect call failed")
    found = translated(caused(boto.EndpointConnectionError(endpoint_url="http://x"), refused))
    assert found.detail == "Connection refused"


def test_secrets_of_the_settings_are_masked_in_what_a_library_said() -> None:
    """Libraries like to repeat what was refused (CONF-2)."""
    assert SECRET not in str(translated(ValueError(f"no {SECRET}!")))


# -- what obstore raises --------------------------------------------------------------------------


def told(text: str, operation: str = "get") -> S3Error:
    """Return what the other engine makes of a text."""

    async def translate() -> S3Error:
        return ObstoreStore(CONFIG)._error(operation, "x", RuntimeError(text))

    return asyncio.run(translate())


# What a bucket, a prefix or a host is called must not decide what an error is taken for.
PLACE = "http://tls.certificate.example:9000/InvalidContentType/status-code-404-kind-Timeout"
LED_BY = f"Generic S3 error: Error performing GET {PLACE} in 3ms"


def without_answer(kind: str, source: str) -> str:
    """Return a text as obstore makes it of a request without an answer."""
    return (
        f"{LED_BY} - HTTP error: error sending request\n\nDebug source:\nGeneric {{\n"
        f"  uri: Some(\n  {PLACE},\n ), inner: Http(HttpError {{ kind: {kind}, source: "
        f'reqwest::Error {{ kind: Request, url: "{PLACE}", source: {source} }} }}) }}'
    )


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        (
            (
                f"{LED_BY} - Server returned non-2xx status code: 503 Service Unavailable: "
                "<Error><Code>SlowDown</Code><Message>be patient</Message></Error>"
            ),
            S3ErrorKind.THROTTLED,
            "be patient",
        ),
        (
            f"{LED_BY} - Server returned non-2xx status code: 404 Not Found: <html>no</html>",
            S3ErrorKind.NOT_S3,
            "",
        ),
        (
            without_answer(
                "Connect",
                'ConnectError("tcp connect error", Os { code: 111, kind: ConnectionRefused, '
                'message: "Connection refused" })',
            ),
            S3ErrorKind.NETWORK,
            "(Connection refused)",
        ),
        (
            without_answer(
                "Connect",
                'ConnectError("dns error", Custom { error: "failed to lookup address '
                'information: Name or service not known" })',
            ),
            S3ErrorKind.DNS,
            "Name or service not known",
        ),
        (
            without_answer(
                "Connect", "Custom { error: Custom { error: InvalidCertificate(UnknownIssuer) } }"
            ),
            S3ErrorKind.TLS,
            "InvalidCertificate(UnknownIssuer)",
        ),
        (
            without_answer("Connect", "Custom { kind: InvalidData, error: InvalidContentType }"),
            S3ErrorKind.TLS,
            "InvalidContentType",
        ),
        (without_answer("Timeout", "TimedOut"), S3ErrorKind.TIMEOUT, "error sending request"),
        (without_answer("Request", "IncompleteMessage"), S3ErrorKind.NETWORK, "error sending"),
        (
            f"{LED_BY} - Received redirect without LOCATION, this normally indicates",
            S3ErrorKind.REDIRECTED,
            "without LOCATION",
        ),
        (
            "Generic S3 error: Received non-partial response when range requested",
            S3ErrorKind.NOT_S3,
            "non-partial",
        ),
        ("something new", S3ErrorKind.OTHER, "something new"),
    ],
    ids=lambda value: value.value if isinstance(value, S3ErrorKind) else "",
)
def test_a_text_of_the_other_library_has_a_kind(text: str, kind: S3ErrorKind, reason: str) -> None:
    """It has no errors but texts; what places are called in them does not count."""
    found = told(text)
    assert found.kind is kind
    assert reason in found.detail
    assert "Debug source" not in str(found)


def test_both_engines_tell_the_same_answer_alike() -> None:
    """Whoever reads a log need not know which engine wrote it."""
    text = (
        f"{LED_BY} - Server returned non-2xx status code: 403 Forbidden: "
        "<Error><Code>AccessDenied</Code><Message>m</Message></Error>"
    )
    assert str(told(text)) == str(translated(answer(403, "AccessDenied")))
