"""Which contract versions this core accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_core.contract import CONTRACT_VERSION
from kv_core.errors import BrokenPluginError, IncompatibleTierError

if TYPE_CHECKING:
    from kv_core.contract import TierSpec
    from kv_core.plugins._installed import InstalledTier

__all__ = ["check_contract_version"]


def check_contract_version(spec: TierSpec, installed: InstalledTier | None) -> None:
    """Refuse a tier that was written for a contract this core does not speak.

    The same major version is needed, and a minor version that this core knows already.

    Args:
        spec: What the tier declares.
        installed: The package it comes from, or ``None`` when it was not found as a plugin.

    Raises:
        IncompatibleTierError: The versions do not fit.
        BrokenPluginError: What is declared is no version.
    """
    declared: Any = spec.contract
    origin = "this program" if installed is None else installed.origin
    if not (
        isinstance(declared, tuple)
        and len(declared) == 2
        and all(type(part) is int for part in declared)
    ):
        raise BrokenPluginError(
            f"tier {spec.type!r} of {origin} declares the contract version {declared!r}, expected "
            "for example ContractVersion(1, 0)",
            plugin=spec.type,
            distribution=origin,
        )
    major, minor = declared
    if major == CONTRACT_VERSION.major and minor <= CONTRACT_VERSION.minor:
        return
    if (major, minor) > CONTRACT_VERSION:
        outdated = "kv-core"
    else:
        outdated = f"kv-tier-{spec.type}" if installed is None else installed.distribution
    raise IncompatibleTierError(
        f"tier {spec.type!r} of {origin} is written for contract version {major}.{minor}, this "
        f"kv-core speaks {CONTRACT_VERSION} (the same major version and no later minor version "
        f"are accepted). Upgrade the older of the two: pip install --upgrade {outdated}",
        tier_type=spec.type,
        tier_contract=(major, minor),
        core_contract=(CONTRACT_VERSION.major, CONTRACT_VERSION.minor),
    )
