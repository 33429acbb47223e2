"""The servers that other tests believe: what each of them must do, and cannot be made to do.

Not about the tier. A server that took any signature, or lost its data when it was started again,
would make tests pass that should not.
"""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, HTTPClientError, SSLError

from kv_tier_s3._harness import Certificates, Rights, S3Access

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kv_tier_s3._harness import S3Server

    MakeUser = Callable[[str, Rights], S3Access]

pytestmark = pytest.mark.s3

BUCKET: Final = "kv-faults"
SERVERS: Final = ("seaweedfs", "rgw")
# No patience: what hangs or is refused is what is asked about.
IMPATIENT: Final[dict[str, Any]] = {"read_timeout": 1, "retries": {"total_max_attempts": 1}}


@pytest.fixture(params=SERVERS)
def server(servers: Any, request: pytest.FixtureRequest) -> S3Server:
    """Return each server in turn."""
    found: S3Server = servers(request.param)
    return found


@pytest.fixture
def user(server: S3Server) -> Iterator[MakeUser]:
    """Return a function that makes a user with rights in the bucket of the tests."""
    made: list[str] = []

    def run(name: str, rights: Rights) -> S3Access:
        made.append(name)
        return server.add_user(name, BUCKET, rights)

    yield run
    for name in made:
        server.remove_user(name)


def code_of(ask: Callable[[], object]) -> str:
    """Return the code of S3 with which a request is refused; nothing if it is not."""
    try:
        ask()
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return ""


def put(client: Any, name: str, body: bytes = b"body") -> None:
    """Put an object."""
    client.put_object(Bucket=BUCKET, Key=name, Body=body)


def get(client: Any, name: str) -> bytes:
    """Return an object."""
    body: bytes = client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
    return body


def test_the_version_is_told(server: S3Server) -> None:
    """In one line, for reports."""
    assert server.version().split()[-1].partition(".")[0].isdigit()


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_an_object_comes_back(server: S3Server, tls: bool) -> None:
    """By each way, and over https with a certificate that is checked."""
    access = server.tls_access if tls else server.access
    assert access.endpoint_url.startswith("https://" if tls else "http://")
    put(access.client(), "object", body := bytes(range(256)) * 1000)
    assert get(access.client(), "object") == body


def test_another_authority_is_not_trusted(server: S3Server, tmp_path: Path) -> None:
    """The certificate is not one that any client would take."""
    stranger = Certificates.make(tmp_path)
    client = replace(server.tls_access, ca_file=stranger.authority).client(**IMPATIENT)
    with pytest.raises(SSLError):
        client.head_bucket(Bucket=BUCKET)


def test_signatures_are_checked(server: S3Server) -> None:
    """A wrong secret and an unknown key are refused, each with its code."""
    wrong = replace(server.access, secret_key="another").client()
    unknown = replace(server.access, access_key="AKIDNOBODY0000000000").client()
    assert code_of(lambda: put(wrong, "object")) == "SignatureDoesNotMatch"
    assert code_of(lambda: put(unknown, "object")) == "InvalidAccessKeyId"


def test_what_is_missing_is_told_apart(server: S3Server) -> None:
    """The object, or the bucket; and a put makes no bucket."""
    client = server.access.client()
    assert code_of(lambda: get(client, "no-such-object")) == "NoSuchKey"
    nowhere: dict[str, Any] = {"Bucket": "no-such-bucket", "Key": "object"}
    assert code_of(lambda: client.get_object(**nowhere)) == "NoSuchBucket"
    assert code_of(lambda: client.put_object(**nowhere, Body=b"")) == "NoSuchBucket"
    assert code_of(lambda: client.head_bucket(Bucket="no-such-bucket")) == "404"


def test_rights_are_what_they_are_called(server: S3Server, user: MakeUser) -> None:
    """Who may read cannot write, and the other way round."""
    put(server.access.client(), "given")
    reader = user("reader", Rights.READ).client()
    writer = user("writer", Rights.WRITE).client()
    assert get(reader, "given") == b"body"
    assert code_of(lambda: put(reader, "object")) == "AccessDenied"
    assert code_of(lambda: reader.delete_object(Bucket=BUCKET, Key="given")) == "AccessDenied"
    assert code_of(lambda: reader.list_objects_v2(Bucket=BUCKET)) == "AccessDenied"
    assert code_of(lambda: put(writer, "object")) == ""
    assert code_of(lambda: get(writer, "given")) == "AccessDenied"


def test_rights_change_at_once(server: S3Server, user: MakeUser) -> None:
    """Taken away and given back, for the same credentials."""
    put(server.access.client(), "given")
    client = user("fickle", Rights.READ | Rights.LIST).client()
    for _ in range(2):
        assert get(client, "given") == b"body"
        server.allow("fickle", BUCKET, Rights.NONE)
        assert code_of(lambda: get(client, "given")) == "AccessDenied"
        server.allow("fickle", BUCKET, Rights.READ | Rights.LIST)


def test_credentials_of_a_removed_user_are_unknown(server: S3Server) -> None:
    """At once, although they have just worked."""
    access = server.add_user("short-lived", BUCKET, Rights.ALL)
    put(access.client(), "object")
    server.remove_user("short-lived")
    assert code_of(lambda: put(access.client(), "object")) == "InvalidAccessKeyId"


def test_a_frozen_server_hangs_and_goes_on(server: S3Server) -> None:
    """Connections are made, by the kernel; nothing is answered before it goes on."""
    put(server.access.client(), "kept")
    port = int(server.endpoint_url.rpartition(":")[2])
    server.freeze()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        with pytest.raises(HTTPClientError):
            get(server.access.client(**IMPATIENT), "kept")
    finally:
        server.thaw()
    assert get(server.access.client(), "kept") == b"body"


def test_a_killed_server_refuses_and_keeps_its_data(server: S3Server, user: MakeUser) -> None:
    """At the same address, with the same users."""
    reader = user("survivor", Rights.READ)
    put(server.access.client(), "kept")
    server.kill()
    with pytest.raises(EndpointConnectionError):
        get(server.access.client(**IMPATIENT), "kept")
    server.restart()
    assert get(server.access.client(), "kept") == b"body"
    assert get(reader.client(), "kept") == b"body"


def test_another_process_shares_a_server(server: S3Server) -> None:
    """By what is pickled, or by the environment."""
    put(server.access.client(), "shared")
    assert pickle.loads(pickle.dumps(server.tls_access)) == server.tls_access  # noqa: S301
    script = (
        "from kv_tier_s3._harness import S3Access\n"
        "access, bucket = S3Access.from_environment()\n"
        "answer = access.client().get_object(Bucket=bucket, Key='shared')\n"
        "assert answer['Body'].read() == b'body'\n"
    )
    environment = server.tls_access.environment(BUCKET)
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_does_not_take_the_server_with_it(server: S3Server) -> None:
    """The child inherits the object, stops it, and ends; the server is the parent's."""
    child = multiprocessing.get_context("fork").Process(target=server.stop)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    put(server.access.client(), "object")


def test_secrets_are_not_shown(server: S3Server) -> None:
    """A failing test shows what it holds."""
    assert server.secret_key not in repr(server.access)
