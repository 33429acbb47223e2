"""What a user reads when a tier cannot be opened, on real stores: found, expected, what to do."""

from __future__ import annotations

import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_core.errors import ConfigError, TierOpenError
from kv_core.tierkit.testing import example_key
from kv_tier_s3._harness import Certificates, Rights
from kv_tier_s3._harness._meddler import Answer, error_answer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_tier_s3._harness import S3Server
    from kv_tier_s3._harness._meddler import Meddler

pytestmark = pytest.mark.s3

BUCKET: Final = "kv-faults"
SERVERS: Final = ("seaweedfs", "rgw")


@pytest.fixture(params=SERVERS)
def server(servers: Any, request: pytest.FixtureRequest) -> S3Server:
    """Return each server in turn."""
    found: S3Server = servers(request.param)
    return found


@pytest.fixture
def refused(open_tier: Any) -> Callable[..., str]:
    """Return a function that opens a tier, which must not open, and returns what a user reads."""

    def run(settings: dict[str, Any]) -> str:
        threads = set(threading.enumerate())
        with pytest.raises((TierOpenError, ConfigError)) as caught:
            open_tier(settings)
        # Nothing is left behind (LIFE-4), and nothing secret is told (CONF-2).
        assert {t for t in threading.enumerate() if t.name.startswith("kv-")} <= threads
        message = str(caught.value)
        assert str(settings.get("secret_access_key", "no secret")) not in message
        # To be read by whoever changes one: pytest -rP shows them.
        print(message)
        return message

    return run


def test_a_bucket_that_can_be_used_is_opened(
    server: S3Server, settings: Any, open_tier: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a word."""
    tier = open_tier(settings(server.access))
    assert tier.store([example_key(1)]).success
    assert caplog.records == []


def test_over_tls_with_the_right_authority(
    server: S3Server, settings: Any, open_tier: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As 'ca_bundle'."""
    tier = open_tier(settings(server.tls_access, job_deadline_s=30.0))
    assert tier.store([example_key(1)]).success
    assert tier.load([example_key(1)]).success
    assert caplog.records == []


def test_no_bucket(server: S3Server, settings: Any, refused: Any) -> None:
    """The bucket is named."""
    message = refused(settings(server.access, bucket="no-such-bucket-here"))
    assert f"bucket 'no-such-bucket-here' at {server.endpoint_url} cannot be used" in message
    assert "no_bucket (404 NoSuchBucket)" in message
    assert "Make the bucket, or correct 'bucket'" in message


def test_a_key_that_nobody_knows(server: S3Server, settings: Any, refused: Any) -> None:
    """A wrong access key is not a missing permission."""
    message = refused(settings(server.access, access_key_id="NOBODYSKEY0123456789"))
    assert "denied (403 InvalidAccessKeyId)" in message
    assert "knows no such access key" in message


def test_a_secret_of_another_key(server: S3Server, settings: Any, refused: Any) -> None:
    """Neither is a wrong secret."""
    message = refused(settings(server.access, secret_access_key="of-another-key"))
    assert "denied (403 SignatureDoesNotMatch)" in message
    assert "the secret does not belong to it" in message


def test_no_permission(server: S3Server, settings: Any, refused: Any) -> None:
    """A user that the store knows, with rights in no bucket."""
    access = server.add_user(f"nobody-{random.getrandbits(32):x}", BUCKET, Rights.NONE)
    message = refused(settings(access))
    assert "denied (403 AccessDenied)" in message
    assert "not allowed to do this. The tier needs s3:GetObject" in message


def test_a_user_who_may_only_read(
    server: S3Server, settings: Any, open_tier: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Opens with a warning: it is right for a tier that is only read."""
    open_tier(settings(server.access)).store([example_key(1)])
    access = server.add_user(
        f"reader-{random.getrandbits(32):x}", BUCKET, Rights.READ | Rights.LIST
    )
    tier = open_tier(settings(access))
    assert [record.getMessage() for record in caplog.records] != []
    assert "blocks can be read and not written (put" in caplog.text
    assert 'With "mode": "read_only" that is as it should be' in caplog.text
    assert tier.load([example_key(1)]).success


def test_a_user_who_may_only_read_an_empty_bucket(
    server: S3Server, settings: Any, refused: Any
) -> None:
    """Does not open: there is nothing to read, and never will be."""
    access = server.add_user(
        f"reader-{random.getrandbits(32):x}", BUCKET, Rights.READ | Rights.LIST
    )
    message = refused(settings(access))
    assert "namespace.json: denied (403 AccessDenied)" in message
    assert "s3:PutObject" in message


def test_the_wrong_authority(server: S3Server, settings: Any, refused: Any, tmp_path: Path) -> None:
    """Whose certificate is not the one that has signed the store's."""
    other = Certificates.make(tmp_path / "other")
    message = refused(settings(server.tls_access, ca_bundle=str(other.authority)))
    assert ": tls: " in message
    assert "certificate" in message.lower()
    assert "set 'ca_bundle' to the certificate of the authority" in message


def test_no_authority(server: S3Server, settings: Any, refused: Any) -> None:
    """A certificate of one's own is not among those of the system."""
    message = refused(settings(server.tls_access, ca_bundle=None))
    assert ": tls: " in message
    assert "set 'ca_bundle'" in message


def test_a_file_of_authorities_that_is_not_there(
    seaweed: S3Server, settings: Any, refused: Any, tmp_path: Path
) -> None:
    """The file is named."""
    message = refused(settings(seaweed.tls_access, ca_bundle=str(tmp_path / "nothing.pem")))
    assert "'ca_bundle'" in message
    assert "nothing.pem" in message


def test_a_file_of_authorities_that_is_none(
    seaweed: S3Server, settings: Any, refused: Any, tmp_path: Path
) -> None:
    """Neither is a text, or a key."""
    text = tmp_path / "text.pem"
    text.write_text("no certificate\n")
    message = refused(settings(seaweed.tls_access, ca_bundle=str(text)))
    assert "'ca_bundle'" in message
    assert "text.pem" in message


def test_tls_where_none_is_spoken(server: S3Server, settings: Any, refused: Any) -> None:
    """The other way round is next."""
    url = server.endpoint_url.replace("http://", "https://")
    message = refused(settings(server.access, endpoint_url=url))
    assert ": tls: " in message
    assert "begin 'endpoint_url' with 'http://' if that is what it speaks" in message


def test_no_tls_where_it_is_spoken(server: S3Server, settings: Any, refused: Any) -> None:
    """A store says so, or hangs up."""
    url = server.tls_access.endpoint_url.replace("https://", "http://")
    message = refused(settings(server.access, endpoint_url=url))
    assert ": not_s3" in message or ": network: " in message
    assert "If it speaks TLS, begin 'endpoint_url' with 'https://'" in message


def test_nothing_listens(engine: str, settings: Any, refused: Any, seaweed: S3Server) -> None:
    """The system's word for it is passed on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    message = refused(settings(seaweed.access, endpoint_url=url))
    assert f"at {url} cannot be used" in message
    assert ": network: " in message
    assert "Connect" in message
    assert "check the host and port of 'endpoint_url'" in message


def test_a_host_without_an_address(
    engine: str, settings: Any, refused: Any, seaweed: S3Server
) -> None:
    """DNS is told apart from a host that does not answer."""
    message = refused(settings(seaweed.access, endpoint_url="http://no-such-host.invalid:9000"))
    assert ": dns: " in message
    assert "The host has no address: correct 'endpoint_url', or repair its DNS" in message


def test_a_host_that_says_nothing(
    engine: str, settings: Any, refused: Any, seaweed: S3Server
) -> None:
    """Connections are accepted, and that is all."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        message = refused(settings(seaweed.access, endpoint_url=url, max_attempts=1))
    assert ": timeout: " in message
    assert "Nothing answers in time: check 'endpoint_url'" in message


def test_an_opening_that_takes_too_long_says_what_did_not_answer(
    engine: str,
    settings: Any,
    refused: Any,
    seaweed: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attempts times timeouts may be more than anybody waits."""
    monkeypatch.setattr("kv_core.tierkit.AsyncioTier.open_deadline_s", 2.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        message = refused(settings(seaweed.access, endpoint_url=url, read_timeout_s=60.0))
    assert time.monotonic() - began < 5
    assert "open kv-faults: timeout: no answer within 1.5 s" in message


WEB: Final = {
    "everything is a page": Answer(200, b"<html>welcome</html>", {"Content-Type": "text/html"}),
    "nothing is there": Answer(404, b"<html>not here</html>", {"Content-Type": "text/html"}),
    "nothing, in no words": Answer(404),
    "plain http on a port for TLS": Answer(400, b"<html>The plain HTTP request was sent</html>"),
}


@pytest.mark.parametrize("page", WEB)
def test_a_web_server(
    engine: str, settings: Any, refused: Any, seaweed: S3Server, meddler: Any, page: str
) -> None:
    """A console, a gateway without a store behind it: no missing bucket, no missing object."""
    proxy: Meddler = meddler(seaweed.access)
    proxy.rule = lambda _: WEB[page]
    message = refused(settings(seaweed.access, endpoint_url=proxy.endpoint_url))
    assert ": not_s3" in message
    assert "Something answers there, and it does not speak S3" in message


def test_an_address_that_sends_elsewhere(
    engine: str, settings: Any, refused: Any, seaweed: S3Server, meddler: Any
) -> None:
    """A bucket of another region. Nobody is asked three hundred times where it is."""
    proxy: Meddler = meddler(seaweed.access)
    proxy.rule = lambda _: error_answer(301, "PermanentRedirect")
    message = refused(settings(seaweed.access, endpoint_url=proxy.endpoint_url))
    assert ": redirected" in message
    assert "set 'region' to that of the bucket" in message
    assert len(proxy.requests) < 5


def test_no_credentials(
    engine: str,
    settings: Any,
    refused: Any,
    seaweed: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Neither in the settings nor anywhere else."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    without = settings(seaweed.access, access_key_id=None, secret_access_key=None)
    message = refused(without)
    assert "no_credentials: Unable to locate credentials" in message
    assert "Set 'access_key_id' and 'secret_access_key', or give the usual chain" in message
    message = refused({**without, "profile": "nobody"})
    assert "no_credentials: The config profile (nobody) could not be found" in message
