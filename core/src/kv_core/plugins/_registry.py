"""The registry of installed tiers: imports a tier only when it is asked for by name."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, final

from kv_core.errors import (
    BrokenPluginError,
    DuplicateTierError,
    KVCoreError,
    UnknownTierError,
    UnsupportedError,
)
from kv_core.plugins._commands import add_commands
from kv_core.plugins._foreign import describe_foreign
from kv_core.plugins._installed import list_installed
from kv_core.plugins._loader import load_plugin, register_tier

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint
    from pathlib import Path

    import typer

    from kv_core.contract import TierSpec
    from kv_core.plugins._installed import InstalledTier
    from kv_core.plugins._loader import Hooks

__all__ = ["TierRegistry"]


@final
class TierRegistry:
    """Finds tiers by type.

    Package metadata is read once, at the first question. A tier is imported when it is asked
    for, and no other with it: a broken plugin is noticed only by those who want that very tier.
    Failures are not remembered, so a repaired plugin works at the next question.

    Not thread-safe.
    """

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        """Look in the given entry points, or by default in this environment.

        Args:
            entry_points: Entry points of the group ``kv_core.tiers``, in order of precedence.
        """
        self._entry_points = None if entry_points is None else tuple(entry_points)
        self._claims: list[InstalledTier] | None = None
        self._loaded: dict[str, tuple[Hooks, TierSpec]] = {}

    def installed(self) -> list[InstalledTier]:
        """Return what packages claim to provide, sorted by type, without importing anything.

        A type that two packages claim appears twice.
        """
        if self._claims is None:
            self._claims = list_installed(self._entry_points)
        return list(self._claims)

    def spec(self, tier_type: str) -> TierSpec:
        """Return what a tier declares about itself, importing its plugin if need be.

        Raises:
            UnknownTierError: No package provides the type.
            DuplicateTierError: Several packages claim the type.
            BrokenPluginError: The plugin does not import, or its hooks are wrong.
            IncompatibleTierError: The tier is written for another contract version.
        """
        return self._load(tier_type)[1]

    def conformance_harness(self, tier_type: str, workdir: Path) -> object:
        """Return the harness that a tier offers to the conformance suite.

        Args:
            tier_type: The tier.
            workdir: An empty folder for its storage.

        Raises:
            UnsupportedError: The plugin has no harness.
            BrokenPluginError: Making the harness failed, or as for :meth:`spec`.
        """
        hooks, _ = self._load(tier_type)
        if not hooks.kv_core_conformance_harness.get_hookimpls():
            raise UnsupportedError(
                f"the plugin of tier {tier_type!r} does not implement the hook "
                "'kv_core_conformance_harness', which the conformance suite needs: write it in the "
                "module that the entry point names (docs/write-a-tier.md, 'The harness')"
            )
        try:
            harness: object = hooks.kv_core_conformance_harness(workdir=workdir)
        except KVCoreError:
            raise
        except Exception as error:
            origin = self._claim(tier_type).origin
            raise BrokenPluginError(
                f"tier plugin {tier_type!r} of {origin} fails in kv_core_conformance_harness "
                f"({describe_foreign(error)})",
                plugin=tier_type,
                distribution=origin,
            ) from error
        return harness

    def command_plugins(self, app: typer.Typer) -> list[KVCoreError]:
        """Add the commands of all installed tiers to a command line.

        Returns:
            Why tiers could not add theirs; the others did all the same.
        """
        problems: list[KVCoreError] = []
        for tier_type in sorted({claim.type for claim in self.installed()}):
            try:
                hooks, _ = self._load(tier_type)
                add_commands(app, hooks, self._claim(tier_type))
            except KVCoreError as error:
                problems.append(error)
        return problems

    def _load(self, tier_type: str) -> tuple[Hooks, TierSpec]:
        if tier_type not in self._loaded:
            claim = self._claim(tier_type)
            hooks = load_plugin(claim)
            self._loaded[tier_type] = (hooks, register_tier(hooks, claim))
        return self._loaded[tier_type]

    def _claim(self, tier_type: str) -> InstalledTier:
        """Return the one claim of a type."""
        claims = [claim for claim in self.installed() if claim.type == tier_type]
        if not claims:
            raise _unknown(tier_type, self.installed())
        if len(claims) > 1:
            origins = [claim.origin for claim in claims]
            raise DuplicateTierError(
                f"tier type {tier_type!r} is provided by {len(claims)} installed packages: "
                f"{' and '.join(origins)}. Keep one and remove the other with 'pip uninstall'",
                tier_type=tier_type,
                distributions=origins,
            )
        return claims[0]


def _unknown(tier_type: str, installed: list[InstalledTier]) -> UnknownTierError:
    names = sorted({claim.type for claim in installed})
    of_package = [claim.type for claim in installed if claim.distribution == tier_type]
    close = of_package or difflib.get_close_matches(tier_type, names, n=1)
    hint = f"Did you mean {close[0]!r}? Otherwise install" if close else "Install"
    return UnknownTierError(
        f"no installed package provides the tier type {tier_type!r} (installed: "
        f"{', '.join(names) or 'none'}). {hint} its package, by convention: "
        f"pip install kv-tier-{tier_type.removeprefix('kv-tier-')}",
        tier_type=tier_type,
        installed=names,
    )
