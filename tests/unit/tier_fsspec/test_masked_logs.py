"""Secrets in the logs of client libraries: masked while a tier or a command is at work."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

import pytest
from typing_extensions import override

from kv_core.cli import main
from kv_core.contract import parse_tier_config
from kv_core.errors import TierOpenError
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_fsspec import FsspecConfig, kv_core_register_tier
from kv_tier_fsspec._filesystem import masked_logs
from kv_tier_fsspec.store import MaskedLogs, hide_what_looks_secret

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET: Final = "hunter2-very-secret"
MASK: Final = "**********"
LIBRARY: Final = "library.of.the.test"


def hide(text: str) -> str:
    """Mask the secret."""
    return text.replace(SECRET, MASK)


@contextmanager
def masking(mask: MaskedLogs) -> Iterator[None]:
    """Mask for as long as the block lasts."""
    mask.begin()
    try:
        yield
    finally:
        mask.end()


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Have all loggers say all they can."""
    caplog.set_level(logging.DEBUG)


def filters_of(*packages: str) -> list[logging.Filter]:
    """Return what filters the loggers of packages."""
    return [
        found
        for name in list(logging.root.manager.loggerDict)
        if name.partition(".")[0] in packages
        for found in logging.getLogger(name).filters
        if isinstance(found, logging.Filter)
    ]


# -- the mask -------------------------------------------------------------------------------------


def test_what_a_library_logs_is_masked_while_the_client_is_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Botocore prints the headers of every request at level DEBUG, session tokens included."""
    logger = logging.getLogger(LIBRARY)
    masked = MaskedLogs([logger.name], hide)
    masked.begin()
    logger.debug("header %s of %d", SECRET, 3)
    masked.end()
    masked.end()
    logger.debug("after %s", "that")
    assert [record.getMessage() for record in caplog.records] == [
        f"header {MASK} of 3",
        "after that",
    ]


def test_all_loggers_of_a_package_are_masked(caplog: pytest.LogCaptureFixture) -> None:
    """Also those that a library makes later on, once it is looked again; and no others."""
    early = logging.getLogger("package_of_the_test.early")
    masked = MaskedLogs((), hide, packages=("package_of_the_test",))
    masked.begin()
    late = logging.getLogger("package_of_the_test.late")
    other = logging.getLogger("package_of_the_test_is_not.this")
    masked.begin()
    for logger in (logging.getLogger("package_of_the_test"), early, late, other):
        logger.debug(SECRET)
    masked.end()
    assert [record.getMessage() for record in caplog.records] == [MASK, MASK, MASK, SECRET]
    assert filters_of("package_of_the_test") == []


def test_a_line_that_cannot_be_made_does_not_fail_a_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A mistake of a library in its logging is none of the tier's."""
    wrong = "%d of " + SECRET
    with masking(MaskedLogs([LIBRARY], hide)):
        logging.getLogger(LIBRARY).debug(wrong, "not a number")
    assert [record.getMessage() for record in caplog.records] == [f"%d of {MASK}"]


def test_the_traceback_of_a_line_is_masked(caplog: pytest.LogCaptureFixture) -> None:
    """The error in it may repeat a request."""
    logger = logging.getLogger(LIBRARY)
    with masking(MaskedLogs([LIBRARY], hide)):
        for text in (f"no answer to {SECRET}", "no answer at all"):
            logger.debug("again", exc_info=ConnectionError(text))
    assert SECRET not in caplog.text
    assert f"ConnectionError: no answer to {MASK}" in caplog.text
    assert "ConnectionError: no answer at all" in caplog.text


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("x-amz-security-token:abc\nhost:x", f"x-amz-security-token:{MASK}\nhost:x"),
        (
            "{'x-amz-security-token': b'abc', 'a': 1}",
            f"{{'x-amz-security-token': b'{MASK}', 'a': 1}}",
        ),
        ('{"SecretAccessKey" : "abc"}', f'{{"SecretAccessKey" : "{MASK}"}}'),
        (
            '{"access_token": "abc", "expires_in": 1}',
            f'{{"access_token": "{MASK}", "expires_in": 1}}',
        ),
        ('"refresh_token":"abc"', f'"refresh_token":"{MASK}"'),
        ("x-aws-ec2-metadata-token: abc", f"x-aws-ec2-metadata-token: {MASK}"),
        ("Authorization: Bearer abc", f"Authorization: Bearer {MASK}"),
        ("GET /blob?sv=1&sig=abc%3D&se=2030", f"GET /blob?sv=1&sig={MASK}&se=2030"),
        ("a token of no use", "a token of no use"),
    ],
)
def test_what_nobody_has_told_is_known_by_its_name(text: str, hidden: str) -> None:
    """Credentials of the environment are in no settings."""
    assert hide_what_looks_secret(text) == hidden


# -- tiers and commands ---------------------------------------------------------------------------


class Refusing(BaseHTTPRequestHandler):
    """Refuses everything, as an object store does."""

    def do_GET(self) -> None:
        """Say no."""
        answer = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def refusing_store() -> Iterator[str]:
    """Return the address of a store that refuses everything."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def options(refusing_store: str) -> dict[str, Any]:
    """Return the options of a client of that store."""
    return {"key": "AK", "secret": "irrelevant", "token": SECRET, "endpoint_url": refusing_store}


def assert_masked(caplog: pytest.LogCaptureFixture) -> None:
    """See that the token was logged and cannot be read, and that the masks are gone."""
    assert f"x-amz-security-token:{MASK}" in caplog.text
    assert SECRET not in caplog.text
    assert filters_of("aiobotocore", "botocore", "fsspec", "s3fs") == []


def test_a_tier_masks_what_its_client_logs(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """With ``s3://``, whose client prints the headers of every request."""
    spec = kv_core_register_tier()
    settings = {"url": "s3://bucket/prefix", "storage_options": options}
    config = parse_tier_config("cold", spec.config_model, settings)
    with pytest.raises(TierOpenError):
        TierDriver(spec.factory, config, block_bytes=4096, tier_name="cold")
    assert_masked(caplog)


@pytest.mark.parametrize("command", ["ls", "du", "fsck"])
def test_a_command_masks_what_its_client_logs(
    command: str,
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a tier does."""
    given = [part for name, value in options.items() for part in ("--option", f"{name}={value}")]
    assert main(["object", command, "s3://bucket/prefix", *given]) == 2
    assert "PermissionError" in capsys.readouterr().err
    assert_masked(caplog)


def test_credentials_of_the_environment_are_masked(
    refusing_store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which the client finds, and the tier does not know."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "irrelevant")
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET)
    option = f"endpoint_url={refusing_store}"
    assert main(["object", "ls", "s3://bucket/prefix", "--option", option]) == 2
    assert_masked(caplog)


def test_a_blocking_tier_masks_while_it_is_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From its first request to its last, whatever another one does in the meantime."""
    spec = kv_core_register_tier()

    def drive(folder: str, secret: str) -> TierDriver:
        settings = {"url": f"file://{tmp_path}/{folder}", "storage_options": {"password": secret}}
        config = parse_tier_config("cold", spec.config_model, {"min_free_bytes": 1, **settings})
        return TierDriver(spec.factory, config, block_bytes=4096, tier_name="cold")

    # The names of files are logged.
    with drive(SECRET, SECRET) as driver:
        drive("other", "another").close()
        assert driver.store([example_key(1)]).success
        assert driver.load([example_key(1)]).success
    opened = [record for record in caplog.records if record.name == "fsspec.local"]
    assert len(opened) > 2
    assert SECRET not in caplog.text
    assert filters_of("fsspec") == []


@pytest.mark.parametrize(
    ("url", "packages"),
    [
        ("file:///kv", {"fsspec"}),
        ("s3://bucket/kv", {"fsspec", "s3fs", "botocore", "aiobotocore"}),
        ("az://container/kv", {"fsspec", "adlfs", "azure"}),
        ("sftp://host/kv", {"fsspec", "paramiko"}),
    ],
)
def test_driver_and_client_of_each_protocol_are_masked(url: str, packages: set[str]) -> None:
    """What is below the driver is in the table of protocols."""
    config = parse_tier_config("cold", FsspecConfig, {"url": url})
    with masking(masked_logs(config)):
        for package in packages:
            assert len(logging.getLogger(package).filters) == 1
    assert filters_of(*packages) == []


class _Keep(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[logging.LogRecord] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record)


def test_a_line_without_a_secret_is_left_alone() -> None:
    """Others in the process may log by the same library, and tell lines apart by their template."""
    record = logging.LogRecord("lib", logging.DEBUG, "", 1, "%d of %d", (1, 2), None)
    handler = _Keep()
    logger = logging.getLogger("kv-test-masked")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    masked = MaskedLogs(["kv-test-masked"], lambda text: text.replace("hunter2", "***"))
    masked.begin()
    try:
        logger.handle(record)
        logger.debug("%s", "hunter2")
        logger.debug("%d", "hunter2")
    finally:
        masked.end()
        logger.removeHandler(handler)
    assert (handler.seen[0].msg, handler.seen[0].args) == ("%d of %d", (1, 2))
    assert [(line.msg, line.args) for line in handler.seen[1:]] == [("***", ()), ("%d", ())]
    assert not logger.filters
