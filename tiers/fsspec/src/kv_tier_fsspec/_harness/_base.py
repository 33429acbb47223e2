"""What all kinds of storage have in common: objects of this format, under their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kv_conformance.harness import BaseHarness
from kv_core.tierkit.objects import TRAILER_BYTES, ObjectNames, read_trailer

if TYPE_CHECKING:
    from kv_conformance.harness import Opening
    from kv_core.contract import OffloadKey

__all__ = ["ObjectHarness", "key_of"]

_MIN_FREE_BYTES: Final = 1 << 20
"""The suite stores little, and not only on machines with a lot of room."""


class ObjectHarness(BaseHarness):
    """Settings that do not depend on the storage."""

    def object_settings(self, opening: Opening, url: str) -> dict[str, Any]:
        return {
            "url": url,
            "job_deadline_s": opening.deadlines.job_s,
            "lookup_deadline_s": opening.deadlines.lookup_s,
            "error_backoff_s": opening.deadlines.error_backoff_s,
            "min_free_bytes": _MIN_FREE_BYTES,
        }


def key_of(names: ObjectNames, name: str, content: bytes) -> OffloadKey | None:
    """Return the key of an object: by its name, or, where that is a digest, by its trailer."""
    key = names.key_of(name)
    if key is None:
        trailer = read_trailer(content[-TRAILER_BYTES:])
        key = trailer.key if trailer is not None else None
    return key
