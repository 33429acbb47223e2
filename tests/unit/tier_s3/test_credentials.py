"""Credentials of the chain: kept, renewed, found anew when they are refused, and never shown."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from kv_core.contract import parse_tier_config
from kv_tier_s3 import S3Config
from kv_tier_s3._credentials import CredentialChain
from kv_tier_s3._errors import S3Error, S3ErrorKind
from kv_tier_s3._s3fs_store import S3fsStore

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "hunter2-very-secret"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the credentials file that is the whole chain."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return path


def write(file: Path, access_key: str, secret: str, profile: str = "default") -> None:
    """Replace the credentials."""
    file.write_text(
        f"[{profile}]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret}\n"
    )


def test_credentials_come_from_the_chain(file: Path) -> None:
    """Of the profile that is asked for."""
    write(file, "AK1", "s1", profile="team")

    async def find() -> tuple[str, str]:
        found = await CredentialChain("team").get_frozen_credentials()
        return found.access_key, found.secret_key

    assert asyncio.run(find()) == ("AK1", "s1")


def test_a_client_is_made_with_the_chain(file: Path) -> None:
    """Everything that botocore wants of credentials when it makes one is there."""
    write(file, "AK1", "s1")
    settings = {"bucket": "kv-cache", "endpoint_url": "http://127.0.0.1:1"}

    async def make() -> None:
        store = S3fsStore(parse_tier_config("cold", S3Config, settings))
        await store.open()
        await store.close()

    asyncio.run(make())


def test_no_credentials_is_an_error_of_its_own(file: Path) -> None:
    """It is no refusal: nobody was asked."""
    with pytest.raises(S3Error) as caught:
        asyncio.run(CredentialChain(None).get_frozen_credentials())
    assert caught.value.kind is S3ErrorKind.NO_CREDENTIALS


def test_a_profile_that_is_not_there_is_named(file: Path) -> None:
    """In the words of the library."""
    with pytest.raises(S3Error, match="nobody") as caught:
        asyncio.run(CredentialChain("nobody").get_frozen_credentials())
    assert caught.value.kind is S3ErrorKind.NO_CREDENTIALS


def test_refused_credentials_are_found_anew(file: Path) -> None:
    """The file has changed meanwhile."""
    write(file, "AK1", "s1")

    async def renew() -> tuple[bool, str]:
        chain = CredentialChain(None)
        old = await chain.get_frozen_credentials()
        write(file, "AK2", "s2")
        assert await chain.get_frozen_credentials() == old
        renewed = await chain.renew(old)
        return renewed, (await chain.get_frozen_credentials()).access_key

    assert asyncio.run(renew()) == (True, "AK2")


def test_who_was_refused_with_older_credentials_is_told_so_at_once(file: Path) -> None:
    """Of many requests that are refused together, one renews for all."""
    write(file, "AK1", "s1")

    async def renew() -> list[bool]:
        chain = CredentialChain(None)
        old = await chain.get_frozen_credentials()
        write(file, "AK2", "s2")
        return await asyncio.gather(*(chain.renew(old) for _ in range(10)))

    assert asyncio.run(renew()) == [True] * 10


def test_the_same_credentials_are_not_renewed_again_and_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused for another reason must not keep the servers of the chain busy."""
    write(file, "AK1", "s1")
    monkeypatch.setattr("kv_tier_s3._credentials._LEAST_BETWEEN_RENEWALS_S", 3600.0)

    async def renew() -> list[bool]:
        chain = CredentialChain(None)
        old = await chain.get_frozen_credentials()
        first = await chain.renew(old)
        write(file, "AK2", "s2")
        return [first, await chain.renew(old)]

    assert asyncio.run(renew()) == [False, False]


def test_a_chain_that_fails_leaves_the_refusal_to_be_told(file: Path) -> None:
    """What the store said is why it matters."""
    write(file, "AK1", "s1")

    async def renew() -> bool:
        chain = CredentialChain(None)
        old = await chain.get_frozen_credentials()
        file.unlink()
        return await chain.renew(old)

    assert asyncio.run(renew()) is False


def test_a_chain_that_hangs_takes_one_thread(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests have given it up."""
    write(file, "AK1", "s1")
    gate, begun = threading.Event(), []

    def hang(profile: str | None, found: object) -> None:
        begun.append(profile)
        gate.wait(20)

    monkeypatch.setattr("kv_tier_s3._credentials._find", hang)

    async def ask() -> None:
        chain = CredentialChain(None)
        for _ in range(5):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(chain.get_frozen_credentials(), 0.01)
        gate.set()

    try:
        asyncio.run(ask())
    finally:
        gate.set()
    assert len(begun) == 1


def test_secrets_of_now_and_before_are_masked(file: Path) -> None:
    """A library may log those of before still (CONF-2)."""
    write(file, "AK1", "first-secret")

    async def hidden() -> str:
        chain = CredentialChain(None)
        old = await chain.get_frozen_credentials()
        write(file, "AK2", "second-secret")
        await chain.renew(old)
        return chain.hide("first-secret, second-secret, AK2")

    assert asyncio.run(hidden()) == "**********, **********, AK2"


@pytest.mark.parametrize(
    "text",
    [
        f'{{"SecretAccessKey": "{SECRET}", "Expiration": "soon"}}',
        f'{{"AccessKeyId": "AK", "Token" : "{SECRET}"}}',
        f"<SessionToken>{SECRET}</SessionToken>",
        f"x-amz-security-token:{SECRET}\nx-amz-date",
        f"'X-Amz-Security-Token': b'{SECRET}', 'Date'",
        f"'x-amz-server-side-encryption-customer-key': '{SECRET}'",
    ],
)
def test_what_looks_like_a_secret_is_masked_before_it_is_known(text: str) -> None:
    """The answer of a server of credentials is logged before anybody has read it."""

    async def hidden() -> str:
        return CredentialChain(None).hide(text)

    assert SECRET not in asyncio.run(hidden())
