"""What can go wrong with a request to S3, and the one table that tells it apart.

Only "there is no such object" is a miss. Client libraries do not keep to that: s3fs raises
``FileNotFoundError`` for a bucket that does not exist as well, and an answer to HEAD has no code.
So errors are told apart by HTTP status and S3 code, whatever class they came as.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, final

from kv_core.errors import TierError

__all__ = ["S3Error", "S3ErrorKind", "kind_of"]


class S3ErrorKind(enum.Enum):
    """Kinds of errors, as metrics and logs name them."""

    MISSING = "missing"
    """There is no such object."""
    NO_BUCKET = "no_bucket"
    """There is no such bucket."""
    DENIED = "denied"
    """The credentials are wrong, or are not allowed to do this."""
    EXPIRED = "expired"
    """The credentials were right once."""
    REDIRECTED = "redirected"
    """The bucket is in another region, or at another endpoint."""
    THROTTLED = "throttled"
    """Too many requests; the store asks for patience."""
    SERVER = "server"
    """The store has trouble of its own (5xx)."""
    TIMEOUT = "timeout"
    """No answer in time."""
    TLS = "tls"
    """The certificate of the store is not trusted, or it does not speak TLS."""
    DNS = "dns"
    """The host of the store has no address."""
    NETWORK = "network"
    """No connection, or one that broke off."""
    NOT_S3 = "not_s3"
    """What answers is no store that speaks S3: a web server, a gateway without one behind it."""
    NO_CREDENTIALS = "no_credentials"
    """There are no credentials to sign with, or they cannot be renewed."""
    CLOCK = "clock"
    """The clocks of this machine and of the store differ too much for signatures."""
    FULL = "full"
    """The store, or the share of it that is ours, is full."""
    PRECONDITION = "precondition"
    """A conditional request whose condition did not hold."""
    UNSUPPORTED = "unsupported"
    """The store does not know what it was asked for."""
    RANGE = "range"
    """The object is shorter than the range that was asked for."""
    OTHER = "other"
    """Anything else: see its status and code."""


# By code first: it says more than the status.
_CODES: Final = {
    "NoSuchKey": S3ErrorKind.MISSING,
    "NoSuchVersion": S3ErrorKind.MISSING,
    # Moved to an archive by a lifecycle rule: it cannot be read, and may be stored anew.
    "InvalidObjectState": S3ErrorKind.MISSING,
    "NoSuchBucket": S3ErrorKind.NO_BUCKET,
    "AccessDenied": S3ErrorKind.DENIED,
    "AccountProblem": S3ErrorKind.DENIED,
    "AllAccessDisabled": S3ErrorKind.DENIED,
    "InvalidAccessKeyId": S3ErrorKind.DENIED,
    "SignatureDoesNotMatch": S3ErrorKind.DENIED,
    "AuthorizationQueryParametersError": S3ErrorKind.DENIED,
    "UnauthorizedAccess": S3ErrorKind.DENIED,
    "RequestTimeTooSkewed": S3ErrorKind.CLOCK,
    "QuotaExceeded": S3ErrorKind.FULL,
    "InsufficientCapacity": S3ErrorKind.FULL,
    "InsufficientStorage": S3ErrorKind.FULL,
    "XMinioStorageFull": S3ErrorKind.FULL,
    "XMinioAdminBucketQuotaExceeded": S3ErrorKind.FULL,
    "ExpiredToken": S3ErrorKind.EXPIRED,
    "ExpiredTokenException": S3ErrorKind.EXPIRED,
    "RequestExpired": S3ErrorKind.EXPIRED,
    "TokenRefreshRequired": S3ErrorKind.EXPIRED,
    "InvalidToken": S3ErrorKind.EXPIRED,
    "PermanentRedirect": S3ErrorKind.REDIRECTED,
    "TemporaryRedirect": S3ErrorKind.REDIRECTED,
    "Redirect": S3ErrorKind.REDIRECTED,
    "AuthorizationHeaderMalformed": S3ErrorKind.REDIRECTED,
    "IllegalLocationConstraintException": S3ErrorKind.REDIRECTED,
    "SlowDown": S3ErrorKind.THROTTLED,
    "Throttling": S3ErrorKind.THROTTLED,
    "ThrottlingException": S3ErrorKind.THROTTLED,
    "RequestLimitExceeded": S3ErrorKind.THROTTLED,
    "TooManyRequests": S3ErrorKind.THROTTLED,
    "RequestTimeout": S3ErrorKind.TIMEOUT,
    "InternalError": S3ErrorKind.SERVER,
    "ServiceUnavailable": S3ErrorKind.SERVER,
    "PreconditionFailed": S3ErrorKind.PRECONDITION,
    "ConditionalRequestConflict": S3ErrorKind.PRECONDITION,
    "NotImplemented": S3ErrorKind.UNSUPPORTED,
    "InvalidRange": S3ErrorKind.RANGE,
}

_STATUSES: Final = {
    301: S3ErrorKind.REDIRECTED,
    302: S3ErrorKind.REDIRECTED,
    307: S3ErrorKind.REDIRECTED,
    308: S3ErrorKind.REDIRECTED,
    401: S3ErrorKind.DENIED,
    403: S3ErrorKind.DENIED,
    404: S3ErrorKind.MISSING,
    408: S3ErrorKind.TIMEOUT,
    409: S3ErrorKind.PRECONDITION,
    412: S3ErrorKind.PRECONDITION,
    416: S3ErrorKind.RANGE,
    429: S3ErrorKind.THROTTLED,
    501: S3ErrorKind.UNSUPPORTED,
    504: S3ErrorKind.TIMEOUT,
    507: S3ErrorKind.FULL,
}
_FIRST_SERVER_STATUS: Final = 500

# What S3 explains with a code, so that what comes without one comes from somebody else.
_EXPLAINED: Final = frozenset({400, 404, 405})


def kind_of(status: int | None, code: str | None, *, has_body: bool = True) -> S3ErrorKind:
    """Return the kind of an answer that is an error.

    Args:
        status: HTTP status, if there was an answer.
        code: Code of S3, if the answer had one.
        has_body: Whether the answer could have had a code. Answers to HEAD have none.
    """
    known = _CODES.get(code or "")
    if known is not None:
        return known
    if status is None:
        return S3ErrorKind.OTHER
    if has_body and not code and status in _EXPLAINED:
        return S3ErrorKind.NOT_S3
    if status >= _FIRST_SERVER_STATUS:
        return _STATUSES.get(status, S3ErrorKind.SERVER)
    return _STATUSES.get(status, S3ErrorKind.OTHER)


@final
@dataclass(eq=False)
class S3Error(TierError):
    """A request that failed.

    Attributes:
        kind: Why.
        operation: What was asked for: ``get``, ``put``, ...
        name: Bucket and key.
        status: HTTP status; ``None`` without an answer.
        s3_code: Code of S3; ``None`` when the answer had none.
        detail: What the store or the client library said. No secrets.
    """

    kind: S3ErrorKind
    operation: str
    name: str
    status: int | None
    s3_code: str | None
    detail: str

    def __post_init__(self) -> None:
        """Make the text."""
        answer = " ".join(str(part) for part in (self.status, self.s3_code) if part is not None)
        super().__init__(
            f"{f'{self.operation} {self.name}'.rstrip()}: {self.kind.value}"
            f"{f' ({answer})' if answer else ''}{f': {self.detail}' if self.detail else ''}"
        )
