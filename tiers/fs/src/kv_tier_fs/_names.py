"""Names of the folders of namespaces."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kv_core.contract import Namespace

__all__ = ["namespace_folder_name"]

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")
_MOST_MODEL_CHARS: Final = 100


def namespace_folder_name(namespace: Namespace) -> str:
    """Return ``<model>_<12 hex digits>``, safe as the name of a folder."""
    # The fingerprint tells models apart; the name is for people, so it may be mangled. A leading
    # dot would hide the folder, and ".." must not come through in any disguise.
    model = _UNSAFE.sub("_", namespace.model)[:_MOST_MODEL_CHARS]
    if model.startswith("."):
        model = "_" + model[1:]
    return f"{model}_{namespace.fingerprint[:12]}"
