"""What shares the process with the suite, and whether the suite is still what was installed.

A tier's package, and every pytest plugin, runs in the process of the suite and could replace
parts of it, usually without meaning to: a monkeypatch that is never undone, a plugin that
rewrites reports. This module does not stop a determined forger, who could patch it as well. It
makes a quiet change loud.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Final

import kv_conformance

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pytest

__all__ = ["find_changes", "foreign_plugins", "snapshot", "suite_digest"]

# What is tested belongs to its author, mutants and reference tiers included.
_SUBJECTS: Final = ("kv_conformance.reference", "kv_conformance.mutants", "kv_conformance.extremes")
_OWN_PLUGINS: Final = ("_pytest", "pytest.", "kv_conformance", "kv_conformance_supervised")


def suite_digest() -> str:
    """Return the SHA-256 of all source files of the suite, names included."""
    root = Path(kv_conformance.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def foreign_plugins(config: pytest.Config) -> list[str]:
    """Return the pytest plugins besides pytest's own and this one, with versions where known."""
    manager = config.pluginmanager
    packaged = {id(plugin): package for plugin, package in manager.list_plugin_distinfo()}
    found = set()
    for name, plugin in manager.list_name_plugin():
        if plugin is None:
            continue
        module = plugin if isinstance(plugin, ModuleType) else type(plugin)
        origin = module.__name__ if isinstance(module, ModuleType) else module.__module__
        package = packaged.get(id(plugin))
        if package is not None:
            if package.project_name != "kv-conformance":
                found.add(f"{package.project_name} {package.version}")
        elif not origin.startswith(_OWN_PLUGINS) and not _belongs_to(origin, packaged):
            found.add(f"{name} ({origin})" if name != origin else name)
    return sorted(found)


def _belongs_to(origin: str, packaged: Mapping[int, object]) -> bool:
    """Say whether a module is of a package that is listed already: objects a plugin registers."""
    tops = {
        getattr(module, "__name__", "").partition(".")[0]
        for module in list(sys.modules.values())
        if id(module) in packaged
    }
    return origin.partition(".")[0] in tops


def snapshot() -> dict[str, object]:
    """Return every function and class of the suite that is imported by now, by its full name.

    Functions are kept with their code, so that both a replaced name and a replaced body show.
    """
    return {
        name: part
        for module_name, module in sorted(sys.modules.items())
        if (module_name + ".").startswith("kv_conformance.")
        and not module_name.startswith(_SUBJECTS)
        for name, part in _parts(module_name, module)
    }


def find_changes(before: Mapping[str, object]) -> list[str]:
    """Return the names of what is no longer what it was in a snapshot."""
    now = snapshot()
    return sorted(name for name, part in before.items() if not _is_same(now.get(name), part))


def _is_same(one: object, other: object) -> bool:
    # A tuple is made anew for each snapshot; what is in it is not.
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(a is b for a, b in zip(one, other, strict=True))
    return one is other


def _parts(module_name: str, module: ModuleType) -> Iterator[tuple[str, object]]:
    for name, value in list(vars(module).items()):
        if isinstance(value, FunctionType):
            yield f"{module_name}.{name}", (value, value.__code__)
        elif isinstance(value, type):
            yield f"{module_name}.{name}", value
            if value.__module__ == module_name:
                for member_name, member in list(vars(value).items()):
                    full_name = f"{module_name}.{name}.{member_name}"
                    if isinstance(member, FunctionType):
                        yield full_name, (member, member.__code__)
                    elif isinstance(member, (staticmethod, classmethod, property)):
                        yield full_name, member
