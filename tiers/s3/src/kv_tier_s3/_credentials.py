"""Credentials that come from the usual chain, and change while the tier is open.

The chain is botocore's: environment, profile, web identity, container and instance roles. It knows
when credentials expire and renews them. What it does not know is that the store refuses them: keys
that were revoked early, or replaced in a file. Then :meth:`CredentialChain.renew` asks a new chain.

**Who owns what.** Everything here runs on the tier's loop. The chain itself may read files, run
programs and ask servers, so it is asked on a thread of the loop's pool.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, final

import botocore.exceptions
import botocore.session

from kv_tier_fsspec.store import hide_what_looks_secret
from kv_tier_s3._errors import S3Error, S3ErrorKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from botocore.credentials import ReadOnlyCredentials

    from kv_tier_s3._config import S3Config

__all__ = ["CredentialChain", "chain_of"]

_MASK: Final = "**********"

_KEPT_S: Final = 5.0
"""How long credentials are used without asking the chain, which costs a change of threads. It
renews what expires minutes before that."""

_LEAST_BETWEEN_RENEWALS_S: Final = 1.0
"""What the store refuses for other reasons must not keep the chain's servers busy."""

_SECRETS_KEPT: Final = 8
"""Credentials of before may still be in what a library logs."""


def chain_of(config: S3Config, hide: Callable[[str], str]) -> CredentialChain | None:
    """Return the chain, or ``None`` when the settings hold a key."""
    return CredentialChain(config.profile, hide) if config.access_key_id is None else None


@final
class CredentialChain:
    """What the chain says now.

    Args:
        profile: Profile of the AWS configuration files; by default what the environment says.
        hide: Masks the secrets of the settings in a text.
    """

    def __init__(self, profile: str | None, hide: Callable[[str], str] = str) -> None:
        self._profile = profile
        self._hide = hide
        self._found: Any = None
        self._frozen: ReadOnlyCredentials | None = None
        self._kept_until = 0.0
        self._renewed_at = float("-inf")
        self._lock = asyncio.Lock()
        self._thread: asyncio.Future[tuple[Any, ReadOnlyCredentials]] | None = None
        self._secrets: deque[str] = deque(maxlen=2 * _SECRETS_KEPT)

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return credentials that are valid now. The name is what aiobotocore calls.

        Raises:
            S3Error: There are none (``NO_CREDENTIALS``).
        """
        if self._frozen is not None and time.monotonic() < self._kept_until:
            return self._frozen
        async with self._lock:
            if self._frozen is None or time.monotonic() >= self._kept_until:
                try:
                    self._take(*await self._ask(self._found))
                except Exception as error:  # noqa: BLE001 - told with its kind
                    raise self._error(error) from None
            return self._frozen

    def get_deferred_property(self, name: str) -> Callable[[], None]:  # noqa: ARG002
        """Return what botocore calls for the number of the account, which S3 does not ask for."""
        return lambda: None

    async def get_account_id(self) -> None:
        """Return the number of the account for aiobotocore: none."""

    async def renew(self, refused: ReadOnlyCredentials) -> bool:
        """Look for other credentials than those that the store refuses.

        Returns:
            Whether there are any.
        """
        async with self._lock:
            if self._frozen != refused:
                return True
            now = time.monotonic()
            if now < self._renewed_at + _LEAST_BETWEEN_RENEWALS_S:
                return False
            self._renewed_at = now
            try:
                found, frozen = await self._ask(None)
            except Exception:  # noqa: BLE001 - what the store said is told, which is why it matters
                return False
            self._take(found, frozen)
            return bool(frozen != refused)

    def hide(self, text: str) -> str:
        """Mask what is, was, or looks like a secret."""
        for secret in self._secrets:
            text = text.replace(secret, _MASK)
        return hide_what_looks_secret(self._hide(text))

    def _take(self, found: Any, frozen: ReadOnlyCredentials) -> None:
        if frozen != self._frozen:
            self._secrets += [secret for secret in (frozen.secret_key, frozen.token) if secret]
        self._found, self._frozen = found, frozen
        self._kept_until = time.monotonic() + _KEPT_S

    async def _ask(self, found: Any) -> tuple[Any, ReadOnlyCredentials]:
        # A chain that hangs takes one thread of the pool, however many have given it up.
        if self._thread is None or self._thread.done():
            asking = asyncio.to_thread(_find, self._profile, found)
            self._thread = asyncio.ensure_future(asking)
        return await asyncio.shield(self._thread)

    def _error(self, error: Exception) -> S3Error:
        detail = " ".join(self.hide(str(error)).split()) or type(error).__name__
        return S3Error(S3ErrorKind.NO_CREDENTIALS, "credentials", "", None, None, detail)


def _find(profile: str | None, found: Any) -> tuple[Any, ReadOnlyCredentials]:
    """Return credentials and what they are now. On a thread of the pool."""
    if found is None:
        found = botocore.session.Session(profile=profile).get_credentials()
    if found is None:
        raise botocore.exceptions.NoCredentialsError
    return found, found.get_frozen_credentials()
