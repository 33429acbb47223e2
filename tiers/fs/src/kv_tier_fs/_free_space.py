"""The floor of free space, which other tiers on file systems keep as well."""

from kv_core.tierkit._free_space import LOOK_EVERY_S, FreeSpace

__all__ = ["LOOK_EVERY_S", "FreeSpace"]
