"""Reference tiers, from which the mutants and the legal extremes are made. Not meant for use.

:class:`FolderTier` declares nearly every capability and is made with the kit.
"""

from kv_conformance.reference._folder_harness import FolderHarness, folder_spec
from kv_conformance.reference._folder_store import FolderStore
from kv_conformance.reference._folder_tier import FolderConfig, FolderTier

__all__ = [
    "FolderConfig",
    "FolderHarness",
    "FolderStore",
    "FolderTier",
    "folder_spec",
]
