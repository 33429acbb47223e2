"""Eviction policies of the primary tier, built in or installed as plugins."""

from kv_core.cpu.policies._arc import ARCCachePolicy
from kv_core.cpu.policies._base import CachePolicy
from kv_core.cpu.policies._lru import LRUCachePolicy
from kv_core.cpu.policies._registry import (
    POLICY_ENTRY_POINT_GROUP,
    create_policy,
    installed_policies,
)

__all__ = [
    "POLICY_ENTRY_POINT_GROUP",
    "ARCCachePolicy",
    "CachePolicy",
    "LRUCachePolicy",
    "create_policy",
    "installed_policies",
]
