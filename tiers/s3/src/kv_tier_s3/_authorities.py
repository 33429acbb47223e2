"""The file of certificates to trust, looked at before anybody is asked.

The client libraries tell of a file that is not there, or is something else, in words that do not
name it.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from kv_core.errors import TierOpenError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_authorities"]


def check_authorities(ca_bundle: Path | None) -> None:
    """See that the file can be read and holds certificates.

    Raises:
        TierOpenError: It cannot, or does not.
    """
    if ca_bundle is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca_bundle)
    except ssl.SSLError as error:
        raise TierOpenError(
            f"'ca_bundle' names {ca_bundle}, which holds no certificates ({error.reason}). Name a "
            "file of certificates in PEM format, '-----BEGIN CERTIFICATE-----'; not the key"
        ) from None
    except OSError as error:
        raise TierOpenError(
            f"'ca_bundle' names {ca_bundle}, which cannot be read: {error.strerror}. Correct the "
            "path, or leave it out to trust what the system trusts"
        ) from None
