"""What a store has answered to a request that failed, as far as NIXL lets one know.

NIXL reports that a request failed, and no more. But what a store sends instead of an object ends up
where the object should have been: a document that names the reason. Of a request to store there is
no such trace, and none when nothing answered.
"""

from __future__ import annotations

import re
from typing import Final

from kv_tier_s3.bucket import S3Error, kind_of

__all__ = ["HEAD_BYTES", "error_in"]

HEAD_BYTES: Final = 2048
"""How much of a document is looked at."""

_BEGINS: Final = (b"<?xml", b"<Error")
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")
_MESSAGE: Final = re.compile(rb"<Message>([^<]{1,200})</Message>")


def error_in(head: bytes, operation: str, name: str) -> S3Error | None:
    """Return what the document of a failed request says.

    Args:
        head: The beginning of where the object should have been; zero bytes if nothing came.
        operation: What was asked for, for the message.
        name: Bucket and name of the object, for the message.

    Returns:
        The error, or ``None`` when there is no document.
    """
    if not head.startswith(_BEGINS):
        return None
    code = _CODE.search(head)
    if code is None:
        return None
    text = code[1].decode()
    message = _MESSAGE.search(head)
    detail = "" if message is None else message[1].decode(errors="replace")
    return S3Error(kind_of(None, text), operation, name, None, text, detail or "no message")
