"""Discovery of installed tiers: which there are, what they declare, and how one is opened.

A tier package names its entry-point module in the group ``kv_core.tiers``::

    [project.entry-points."kv_core.tiers"]
    acme = "kv_tier_acme"

and that module implements the hooks of :mod:`kv_core.plugins.hookspecs`, marked with
``kv_core.hookimpl``. Listing tiers imports none of them; asking for one imports only that one.
"""

from kv_core.plugins import hookspecs
from kv_core.plugins._check import CheckedTier, check_tier
from kv_core.plugins._demands import require_block_size, require_space_limit
from kv_core.plugins._installed import ENTRY_POINT_GROUP, InstalledTier
from kv_core.plugins._open import OpenTier, open_tier
from kv_core.plugins._registry import TierRegistry
from kv_core.plugins._settings import RESERVED_KEYS, TierSettings, parse_secondary_tiers

__all__ = [
    "ENTRY_POINT_GROUP",
    "RESERVED_KEYS",
    "CheckedTier",
    "InstalledTier",
    "OpenTier",
    "TierRegistry",
    "TierSettings",
    "check_tier",
    "hookspecs",
    "open_tier",
    "parse_secondary_tiers",
    "require_block_size",
    "require_space_limit",
]
