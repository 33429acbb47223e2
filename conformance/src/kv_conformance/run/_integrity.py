"""What shares the process with the suite, and whether the suite is still what was installed.

A tier's package, and every pytest plugin, runs in the process of the suite and could replace
parts of it, usually without meaning to: a monkeypatch that is never undone, a plugin that
rewrites reports. Two looks find it. One compares the suite with what it was before the tier was
imported; the other asks where its code comes from, for what was replaced even earlier. This module
does not stop a determined forger, who could patch it as well. It makes a quiet change loud.
"""

from __future__ import annotations

import enum
import hashlib
import os
import signal
import sys
import sysconfig
import time
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Final

import kv_conformance

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pytest

__all__ = ["find_changes", "find_strangers", "foreign_plugins", "snapshot", "suite_digest"]

# What is tested belongs to its author, mutants and reference tiers included.
_SUBJECTS: Final = ("kv_conformance.reference", "kv_conformance.mutants", "kv_conformance.extremes")

_OWN_PLUGINS: Final = ("_pytest", "pytest.", "kv_conformance", "kv_conformance_supervised")

# What the suite measures and stops with: with another clock, nothing takes any time.
_INSTRUMENTS: Final = (
    (time, ("monotonic", "perf_counter", "thread_time")),
    (signal, ("signal", "setitimer")),
    (os, ("write",)),
)

_MEMBERS: Final = (FunctionType, staticmethod, classmethod, property)
# Nothing that changes by being used.
_CONSTANTS: Final = (int, float, str, bytes, tuple, frozenset, enum.Enum)
_CODE: Final = ".__code__"

# Where the code of the suite may come from, besides Python's own library. Dataclasses write some.
_MADE_WITH: Final = (
    "kv_conformance",
    "kv_core",
    "hypothesis",
    "pydantic",
    "_pytest",
    "pytest",
    "typing_extensions",
)
_GENERATED: Final = ("<string>", "<frozen ")
_LIBRARY: Final = sysconfig.get_path("stdlib") + os.sep

_HOME: Final = Path(kv_conformance.__file__).parent


def suite_digest() -> str:
    """Return the SHA-256 of all source files of the suite, names included."""
    digest = hashlib.sha256()
    for file in sorted(_HOME.rglob("*.py")):
        digest.update(file.relative_to(_HOME).as_posix().encode() + b"\0")
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
    """Return every part of the suite that is imported by now, by its full name.

    Parts are functions, classes and plain constants, and what the suite measures with. Functions
    are kept with their code, so that both a replaced name and a replaced body show.
    """
    found: dict[str, object] = {}
    for name, part in _all_parts():
        found[name] = part
        if isinstance(part, FunctionType):
            found[name + _CODE] = part.__code__
    return found


def find_changes(before: Mapping[str, object]) -> list[str]:
    """Return the names of what is no longer what it was in a snapshot."""
    now = snapshot()
    changed = [name for name, part in before.items() if now.get(name) is not part]
    return sorted({name.removesuffix(_CODE) for name in changed})


def find_strangers() -> list[str]:
    """Return the names of parts of the suite whose code is not in a file of the suite.

    Nor in one of what it is made with. This finds what was replaced before the first snapshot could
    be taken: by a plugin, or when Python started.
    """
    homes = tuple(_homes())
    return sorted({name for name, part in _all_parts() if not _is_at_home(part, homes)})


def _homes() -> Iterator[str]:
    yield from _GENERATED
    for name in _MADE_WITH:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            path = Path(file)
            yield str(path.parent) + os.sep if path.stem == "__init__" else str(path)


def _is_at_home(part: object, homes: tuple[str, ...]) -> bool:
    if isinstance(part, property):
        return all(_is_at_home(f, homes) for f in (part.fget, part.fset) if f is not None)
    if isinstance(part, (staticmethod, classmethod)):
        return _is_at_home(part.__func__, homes)
    if not isinstance(part, FunctionType):
        return True
    file = part.__code__.co_filename
    return file.startswith(homes) or (file.startswith(_LIBRARY) and "site-packages" not in file)


def _all_parts() -> Iterator[tuple[str, object]]:
    for module_name, module in sorted(sys.modules.items()):
        if (module_name + ".").startswith("kv_conformance.") and not module_name.startswith(
            _SUBJECTS
        ):
            yield from _parts(module_name, module)
    for owner, names in _INSTRUMENTS:
        yield from ((f"{owner.__name__}.{name}", getattr(owner, name)) for name in names)


def _parts(module_name: str, module: ModuleType) -> Iterator[tuple[str, object]]:
    for name, value in list(vars(module).items()):
        full_name = f"{module_name}.{name}"
        if isinstance(value, FunctionType) or (
            isinstance(value, _CONSTANTS) and not name.startswith("__")
        ):
            yield full_name, value
        elif isinstance(value, type):
            yield full_name, value
            if value.__module__ == module_name:
                for member_name, member in list(vars(value).items()):
                    if isinstance(member, _MEMBERS):
                        yield f"{full_name}.{member_name}", member
