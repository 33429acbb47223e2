"""Finds eviction policies by name: the built-in ones and those of installed packages."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Final

from kv_core.cpu.policies._arc import ARCCachePolicy
from kv_core.cpu.policies._base import CachePolicy
from kv_core.cpu.policies._lru import LRUCachePolicy
from kv_core.errors import BrokenPluginError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["POLICY_ENTRY_POINT_GROUP", "create_policy", "installed_policies"]

POLICY_ENTRY_POINT_GROUP: Final = "kv_core.cache_policies"
"""Entry points of this group map the name of a policy to its class."""

_BUILT_IN: Final[dict[str, type[CachePolicy]]] = {"arc": ARCCachePolicy, "lru": LRUCachePolicy}


def installed_policies() -> tuple[str, ...]:
    """Return the names of all policies, sorted. Loads none, so a broken one hides no other."""
    entry_points = importlib.metadata.entry_points(group=POLICY_ENTRY_POINT_GROUP)
    return tuple(sorted({*_BUILT_IN, *(entry_point.name for entry_point in entry_points)}))


def create_policy(name: str, num_blocks: int, ref_counts: Sequence[int]) -> CachePolicy:
    """Make the policy of a name. A built-in name always means the built-in policy.

    Args:
        name: ``"lru"``, ``"arc"`` or the name of an installed policy.
        num_blocks: Slots of the tier.
        ref_counts: State by slot id; the policy keeps the sequence and reads it live.

    Raises:
        ConfigError: There is no such policy, or several packages claim the name.
        BrokenPluginError: The policy is installed but cannot be used.
    """
    policy_class = _BUILT_IN.get(name)
    if policy_class is not None:
        return policy_class(num_blocks, ref_counts)
    entry_point = _find(name)
    try:
        return _load(entry_point)(num_blocks, ref_counts)
    except (BrokenPluginError, KeyboardInterrupt):
        raise
    except BaseException as error:  # foreign code may raise anything, even an exit
        raise _broken(
            entry_point,
            f"cannot be used ({_describe(error)}). Reinstall or uninstall it, or choose another "
            "'eviction_policy'",
        ) from error


def _find(name: str) -> importlib.metadata.EntryPoint:
    found = tuple(importlib.metadata.entry_points(group=POLICY_ENTRY_POINT_GROUP).select(name=name))
    if not found:
        raise ConfigError(
            f"unknown eviction policy {name!r}; known are {', '.join(installed_policies())}. "
            f"Policies are installed as entry points of the group {POLICY_ENTRY_POINT_GROUP!r}.",
            setting="eviction_policy",
        )
    values = sorted({entry_point.value for entry_point in found})
    if len(values) > 1:
        raise ConfigError(
            f"eviction policy {name!r} is claimed by {len(values)} classes: {', '.join(values)}; "
            "uninstall all but one of their packages",
            setting="eviction_policy",
        )
    return found[0]


def _load(entry_point: importlib.metadata.EntryPoint) -> type[CachePolicy]:
    policy_class = entry_point.load()
    if not (isinstance(policy_class, type) and issubclass(policy_class, CachePolicy)):
        raise _broken(entry_point, "is not a subclass of kv_core.cpu.policies.CachePolicy")
    return policy_class


def _broken(entry_point: importlib.metadata.EntryPoint, problem: str) -> BrokenPluginError:
    distribution = (
        f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "unknown"
    )
    return BrokenPluginError(
        f"eviction policy {entry_point.name!r} of {distribution}: {entry_point.value} {problem}",
        plugin=entry_point.name,
        distribution=distribution,
    )


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the text, too, is made by foreign code
        return type(error).__name__
