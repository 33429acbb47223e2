"""Imports one plugin and makes sure that its hooks are what they claim to be."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Set as AbstractSet
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pluggy

from kv_core.contract import Capability, TierConfig, TierSpec
from kv_core.errors import BrokenPluginError, KVCoreError
from kv_core.plugins import hookspecs
from kv_core.plugins._contract_version import check_contract_version
from kv_core.plugins._foreign import describe_foreign, locate_foreign, show_foreign
from kv_core.plugins._settings import RESERVED_KEYS

if TYPE_CHECKING:
    from kv_core.plugins._installed import InstalledTier

__all__ = ["Hooks", "find_problem", "load_plugin", "register_tier"]

Hooks: TypeAlias = pluggy.HookRelay
"""The hooks of one plugin. A relay of its own keeps each plugin's failures to itself."""

_PREFIX: Final = "kv_core_"


def load_plugin(installed: InstalledTier) -> Hooks:
    """Import a plugin and check its hooks against the specifications.

    Raises:
        BrokenPluginError: It does not import, or has hooks that are none.
    """
    try:
        module = installed.entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # even an exit at import ends this plugin only
        raise _broken(
            installed,
            f"does not import ({_describe(error)}). Repair it with 'pip install "
            f"--force-reinstall {installed.distribution}' or remove it with 'pip uninstall "
            f"{installed.distribution}'",
        ) from error
    if not isinstance(module, ModuleType):
        raise _broken(
            installed,
            f"has the entry point '{installed.entry_point.value}', which names a "
            f"{type(module).__name__}, expected a module",
        )
    _refuse_unmarked_hooks(module, installed)
    manager = pluggy.PluginManager("kv_core")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(module, name=installed.type)
        manager.check_pending()
    except Exception as error:  # pluggy raises its own errors and those of odd attributes
        raise _broken(
            installed, f"has a wrong hook: {error}. The hooks are: {_hook_list()}"
        ) from error
    return manager.hook


def register_tier(hooks: Hooks, installed: InstalledTier) -> TierSpec:
    """Ask a plugin for its tier and check what it declares.

    Raises:
        BrokenPluginError: The hook is missing or fails, or declares what cannot be.
        IncompatibleTierError: The tier is written for another contract version.
    """
    if not hooks.kv_core_register_tier.get_hookimpls():
        raise _broken(
            installed,
            "has no hook 'kv_core_register_tier'. The entry point must name the module that "
            "defines it, marked with @kv_core.hookimpl",
        )
    try:
        spec = hooks.kv_core_register_tier()
    except KVCoreError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as at import: a plugin ends only itself
        raise _broken(installed, f"fails in kv_core_register_tier ({_describe(error)})") from error
    if not isinstance(spec, TierSpec):
        raise _broken(
            installed,
            f"returned {show_foreign(spec)} from kv_core_register_tier, expected a "
            "kv_core.contract.TierSpec",
        )
    if spec.type != installed.type:
        raise _broken(
            installed,
            f"registers the tier type {spec.type!r}, but its entry point is named "
            f"{installed.type!r}. The two names must be equal",
        )
    check_contract_version(spec, installed)
    _check_declarations(spec, installed)
    return spec


def _refuse_unmarked_hooks(module: ModuleType, installed: InstalledTier) -> None:
    """Find functions that look like hooks but would be ignored by pluggy."""
    for name, value in vars(module).items():
        if not name.startswith(_PREFIX) or not inspect.isroutine(value):
            continue
        if name not in hookspecs.__all__:
            close = difflib.get_close_matches(name, hookspecs.__all__, n=1)
            hint = f"Did you mean '{close[0]}'? " if close else ""
            raise _broken(
                installed,
                f"defines '{name}', which is no hook of kv-core. {hint}The hooks are: "
                f"{_hook_list()}",
            )
        if getattr(value, "kv_core_impl", None) is None:
            raise _broken(
                installed, f"defines the hook '{name}' without marking it with @kv_core.hookimpl"
            )


def _check_declarations(spec: TierSpec, installed: InstalledTier) -> None:
    # Plugins are not type-checked by us: what they hand over is looked at before it is used.
    model: Any = spec.config_model
    if not (isinstance(model, type) and issubclass(model, TierConfig)):
        raise _broken(
            installed,
            f"declares the config model {show_foreign(model)}, no subclass of TierConfig. "
            "Derive it from kv_core.contract.TierConfig, or for a tier made with the kit from "
            "kv_core.tierkit.TierKitConfig",
        )
    reserved = sorted(RESERVED_KEYS & set(model.model_fields))
    if reserved:
        raise _broken(
            installed,
            f"has a setting named {', '.join(map(repr, reserved))}; these names belong to the "
            "engine and never reach a tier",
        )
    problem = find_problem(spec)
    if problem is not None:
        raise _broken(installed, problem)


def find_problem(spec: TierSpec) -> str | None:
    """Say what a declaration has that cannot be, where any settings could have led to it."""
    capabilities: Any = spec.capabilities
    if not isinstance(capabilities, AbstractSet):
        return f"declares the capabilities {show_foreign(capabilities)}, expected a frozenset"
    unknown = [item for item in capabilities if not isinstance(item, Capability)]
    if unknown:
        return f"declares unknown capabilities: {show_foreign(unknown)}"
    for name in ("factory", "limits"):
        if not callable(getattr(spec, name)):
            return f"declares a {name} that cannot be called"
    refine: Any = spec.refine
    if refine is not None and not callable(refine):
        return "declares a refine that cannot be called"
    return None


def _describe(error: BaseException) -> str:
    return f"{describe_foreign(error)}{locate_foreign(error)}"


def _hook_list() -> str:
    return ", ".join(hookspecs.__all__)


def _broken(installed: InstalledTier, problem: str) -> BrokenPluginError:
    return BrokenPluginError(
        f"tier plugin {installed.type!r} of {installed.origin} {problem}",
        plugin=installed.type,
        distribution=installed.origin,
    )
