"""Adds the commands of one plugin to the command line, all of them or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_core.errors import BrokenPluginError
from kv_core.plugins._foreign import describe_foreign

if TYPE_CHECKING:
    from collections.abc import Iterator

    import typer

    from kv_core.plugins._installed import InstalledTier
    from kv_core.plugins._loader import Hooks

__all__ = ["add_commands", "command_names"]


def command_names(app: typer.Typer) -> Iterator[str]:
    """Yield the names of the commands and groups that an application has so far."""
    for command in app.registered_commands:
        if command.name:
            yield command.name
        elif command.callback is not None:
            yield command.callback.__name__.lower().replace("_", "-")
    for group in app.registered_groups:
        name = group.name
        if not isinstance(name, str) and group.typer_instance is not None:
            name = group.typer_instance.info.name
        if isinstance(name, str):
            yield name


def add_commands(app: typer.Typer, hooks: Hooks, installed: InstalledTier) -> None:
    """Let a plugin add its commands.

    The plugin works on an application of its own first: one that fails half-way, or takes a
    name that is in use, has then changed nothing.

    Raises:
        BrokenPluginError: The hook failed, or a name is taken.
    """
    # Typer takes a tenth of a second to import; engines that open tiers have no use for it.
    import typer

    if not hooks.kv_core_register_commands.get_hookimpls():
        return
    own = typer.Typer()
    try:
        hooks.kv_core_register_commands(app=own)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an exit, too, must not end the command line
        raise BrokenPluginError(
            f"tier plugin {installed.type!r} of {installed.origin} fails in "
            f"kv_core_register_commands ({describe_foreign(error)})",
            plugin=installed.type,
            distribution=installed.origin,
        ) from error
    taken = sorted(set(command_names(app)) & set(command_names(own)))
    if taken:
        raise BrokenPluginError(
            f"tier plugin {installed.type!r} of {installed.origin} adds the command "
            f"{', '.join(map(repr, taken))}, which is taken already; its commands are left out",
            plugin=installed.type,
            distribution=installed.origin,
        )
    app.registered_commands.extend(own.registered_commands)
    app.registered_groups.extend(own.registered_groups)
