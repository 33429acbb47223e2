"""Reference tiers, from which the mutants and the legal extremes are made. Not meant for use.

:class:`DictTier` is written on the bare contract and declares next to nothing.
:class:`FolderTier` declares nearly every capability and is made with the kit.
"""

from kv_conformance.reference._dict_harness import DictHarness, dict_spec
from kv_conformance.reference._dict_store import DictStore
from kv_conformance.reference._dict_tier import DictConfig, DictTier
from kv_conformance.reference._folder_harness import FolderHarness, folder_spec
from kv_conformance.reference._folder_store import FolderStore
from kv_conformance.reference._folder_tier import FolderConfig, FolderTier

__all__ = [
    "DictConfig",
    "DictHarness",
    "DictStore",
    "DictTier",
    "FolderConfig",
    "FolderHarness",
    "FolderStore",
    "FolderTier",
    "dict_spec",
    "folder_spec",
]
