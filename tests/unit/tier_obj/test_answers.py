"""What a store sends instead of an object, and what the tier reads in it."""

from __future__ import annotations

import pytest

from kv_tier_obj._answers import HEAD_BYTES, error_in
from kv_tier_s3.bucket import S3ErrorKind

from ._fakes import document

K = S3ErrorKind


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("NoSuchKey", K.MISSING),
        ("NoSuchBucket", K.NO_BUCKET),
        ("AccessDenied", K.DENIED),
        ("SignatureDoesNotMatch", K.DENIED),
        ("ExpiredToken", K.EXPIRED),
        ("SlowDown", K.THROTTLED),
        ("InternalError", K.SERVER),
        ("InvalidRange", K.RANGE),
        ("SomethingNew", K.OTHER),
    ],
)
def test_a_document_says_why(code: str, kind: S3ErrorKind) -> None:
    """Codes mean what they mean to the tier s3."""
    error = error_in(document(code, "a message"), "get", "b/k")
    assert error is not None
    assert error.kind is kind
    assert error.s3_code == code
    assert error.detail == "a message"


def test_old_contents_behind_a_document_are_not_read() -> None:
    """The memory may hold another document behind the one that was written last."""
    head = document("NoSuchKey") + b"\0" * 10 + document("AccessDenied")
    error = error_in(head, "get", "b/k")
    assert error is not None
    assert error.kind is K.MISSING


def test_ceph_writes_documents_another_way() -> None:
    """Without a line between the declaration and the document, and with other fields in it."""
    head = (
        b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>NoSuchKey</Code>'
        b"<BucketName>b</BucketName><RequestId>tx1</RequestId><HostId>h</HostId></Error>"
    )
    error = error_in(head, "get", "b/k")
    assert error is not None
    assert (error.kind, error.detail) == (K.MISSING, "no message")


@pytest.mark.parametrize(
    "head",
    [
        b"",
        bytes(HEAD_BYTES),
        b"\0" + document("NoSuchKey"),
        b"<html><body>Bad Gateway</body></html>",
        b"<?xml version='1.0'?><Error><Message>no code</Message></Error>",
        b"payload <Code>NoSuchKey</Code>",
        b"<?xml version='1.0'?><Error><Code>No Such Key</Code></Error>",
    ],
)
def test_what_is_no_document_says_nothing(head: bytes) -> None:
    """Nothing is guessed: the reason is asked for in another way then."""
    assert error_in(head, "get", "b/k") is None
