"""The tier obj with credentials that are not in its settings: two clients, one of them NIXL's."""

from __future__ import annotations

import os
import random
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.integration.s3._credentials import without_key

from kv_core.errors import ConfigError
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_s3._harness import Rights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.integration.s3._credentials import CredentialServer

    from kv_tier_s3._harness import S3Access, S3Server

pytestmark = [pytest.mark.s3, pytest.mark.timeout(120)]

BUCKET: Final = "kv-faults"
KEYS: Final = [example_key(number) for number in range(8)]
OF_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
OF_PROFILES: Final = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
_serial = count()


@pytest.fixture
def open_without_key(
    seaweed: S3Server, open_obj: Callable[..., TierDriver]
) -> Callable[..., TierDriver]:
    """Return a function that opens a tier without a key in its settings."""

    def run(**changes: Any) -> TierDriver:
        settings = {
            **without_key(seaweed.access.settings(BUCKET)),
            "prefix": f"obj-credentials-{os.getpid()}-{next(_serial)}",
            "job_deadline_s": 20.0,
            "lookup_deadline_s": 20.0,
            "threads": 4,
            **changes,
        }
        return open_obj(settings)

    return run


def user_of(server: S3Server) -> tuple[str, S3Access]:
    """Return the name of a new user who may do everything in the bucket, and its credentials."""
    name = f"obj-{random.getrandbits(32):x}"
    return name, server.add_user(name, BUCKET, Rights.ALL)


def expect_all_to_work(tier: TierDriver) -> None:
    """Store, look up and load, with bytes compared."""
    assert tier.store(KEYS).success
    assert tier.resolve(KEYS) == [True] * len(KEYS)
    assert tier.load(KEYS).success
    assert tier.loaded(KEYS) == KEYS
    assert tier.tier.get_stats()["s3_errors_denied"] == 0


@pytest.fixture
def profiles(seaweed: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Write a profile ``team`` that is valid, and a default one and ``other`` that are not."""
    _, access = user_of(seaweed)
    wrong = "aws_access_key_id = nobody\naws_secret_access_key = nothing\n"
    file = tmp_path / "credentials"
    file.write_text(
        f"[default]\n{wrong}[other]\n{wrong}"
        f"[team]\naws_access_key_id = {access.access_key}\n"
        f"aws_secret_access_key = {access.secret_key}\n"
    )
    for name in (*OF_KEYS, *OF_PROFILES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.usefixtures("profiles")
@pytest.mark.parametrize("exported", [None, "other"])
def test_the_profile_of_the_settings_is_that_of_both_clients(
    open_without_key: Callable[..., TierDriver],
    monkeypatch: pytest.MonkeyPatch,
    exported: str | None,
) -> None:
    """Whatever profile the environment names; and that name is there again afterwards."""
    if exported is not None:
        for name in OF_PROFILES:
            monkeypatch.setenv(name, exported)
    expect_all_to_work(open_without_key(profile="team"))
    assert [os.environ.get(name) for name in OF_PROFILES] == [exported] * 2


@pytest.mark.usefixtures("profiles")
def test_a_profile_beside_a_key_in_the_environment_is_refused(
    open_without_key: Callable[..., TierDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client within NIXL prefers that key, and would sign as somebody else."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    with pytest.raises(ConfigError, match="unset AWS_ACCESS_KEY_ID"):
        open_without_key(profile="team")


def test_both_clients_get_credentials_from_the_container(
    seaweed: S3Server, open_without_key: Callable[..., TierDriver], container: CredentialServer
) -> None:
    """Without a key in the settings, the chain ends there."""
    _, container.access = user_of(seaweed)
    expect_all_to_work(open_without_key())
    assert container.asked >= 2


def test_credentials_that_expire_are_renewed_by_nixl(
    seaweed: S3Server, open_without_key: Callable[..., TierDriver], container: CredentialServer
) -> None:
    """Shortly before their end, without a restart; until then a revoked key fails loads."""
    old, first = user_of(seaweed)
    _, second = user_of(seaweed)
    container.access, container.lifetime_s = first, 10.0
    tier = open_without_key()
    assert tier.store(KEYS).success
    container.access, container.lifetime_s = second, 3600.0
    seaweed.remove_user(old)
    end = time.monotonic() + 60
    # Loads and stores have a client each, which renew at different times.
    while not (tier.load(KEYS).success and tier.store([example_key(9)]).success):
        assert time.monotonic() < end
        threading.Event().wait(0.2)
    assert tier.loaded(KEYS) == KEYS
