"""The hooks that the entry-point module of a tier package may implement.

Only :func:`kv_core_register_tier` is required. Mark implementations with ``kv_core.hookimpl``;
a marked function, or one whose name starts with ``kv_core_``, that is no hook listed here is an
error, so that a misspelt hook is not silently ignored. An implementation may leave out
parameters that it does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    import typer

    from kv_core.contract import TierSpec

__all__ = [
    "kv_core_conformance_harness",
    "kv_core_register_commands",
    "kv_core_register_tier",
]

_hookspec: Final = pluggy.HookspecMarker("kv_core")


@_hookspec(firstresult=True)
def kv_core_register_tier() -> TierSpec:  # type: ignore[empty-body]  # a specification has no body
    """Return what the tier declares about itself.

    Called whenever somebody looks at the tier, not only to open it: keep it cheap, and import
    heavy libraries inside ``TierSpec.factory``.
    """


@_hookspec(firstresult=True)
def kv_core_conformance_harness(workdir: Path) -> object:
    """Return the harness through which the conformance suite drives the tier.

    Import whatever the harness needs inside the function: the entry-point module must import
    without any test library.

    Args:
        workdir: An empty folder of this run, for the tier's storage.
    """


@_hookspec
def kv_core_register_commands(app: typer.Typer) -> None:
    """Add commands of the tier to the ``kv-core`` command line.

    Add commands or groups of commands, for example ``app.add_typer(fs_app, name="fs")``. A name
    that is taken already is refused, together with everything else the tier adds.

    Args:
        app: Receives the commands. Its callback and settings are not used.
    """
