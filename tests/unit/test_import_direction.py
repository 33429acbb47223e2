"""The shape of the source tree: who imports whom, what is public, and what import costs.

Rooms depend on each other one way only, so that a tier author does not get the engine, a worker
does not get the scheduler, and nobody gets torch who did not ask for it. Imports under
``TYPE_CHECKING`` count as well: a type is a dependency.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest
from typing_extensions import override

from kv_core import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
CORE: Final = ROOT / "core" / "src" / "kv_core"

# Rooms that a room may use directly; what those may use, it may use, too.
DIRECT: Final[dict[str, set[str]]] = {
    "errors": set(),
    "units": {"errors"},
    "keys": {"errors", "units"},
    "terminal": set(),
    "contract": {"keys"},
    "model_identity": {"keys"},
    "tierkit": {"contract"},
    "plugins": {"contract"},
    "events": {"contract"},
    "metrics": {"contract"},
    "engine": {"contract"},
    "cpu": {"engine", "events", "metrics"},
    "device": {"engine", "metrics"},
    "tiering": {"cpu", "plugins"},
    "simple": {"cpu", "device"},
    "connector": {"device", "tiering"},
    "vllm": {"connector", "model_identity", "simple"},
    "workload": {"connector", "simple"},
    "cli": {"model_identity", "terminal", "workload"},
    "__main__": {"cli"},
}

# The package itself: its version and the hook marker.
FOR_ALL: Final = {""}

# What the packages of tiers may use of kv-core.
FOR_TIERS: Final = {"", "contract", "errors", "keys", "terminal", "tierkit", "units"}


class Import(NamedTuple):
    """One import of a module, and where it stands."""

    source: Path
    line: int
    module: str

    @override
    def __str__(self) -> str:
        return f"{self.source.relative_to(ROOT)}:{self.line} imports {self.module}"


def _allowed(room: str) -> set[str]:
    allowed, todo = {room} | FOR_ALL, [room]
    while todo:
        for used in DIRECT[todo.pop()] - allowed:
            allowed.add(used)
            todo.append(used)
    return allowed


def _module_name(source: Path, top: Path) -> tuple[str, ...]:
    parts = source.relative_to(top).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def _imports(source: Path, top: Path) -> Iterator[Import]:
    """Yield every module that a file imports, wherever the statement stands."""
    package = _module_name(source, top)
    if source.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(source.read_text(), source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(source, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += [node.module] if node.module else []
            module = ".".join(base)
            yield Import(source, node.lineno, module)
            for alias in node.names:
                path = top.joinpath(*module.split("."), alias.name)
                if path.is_dir() or path.with_suffix(".py").is_file():
                    yield Import(source, node.lineno, f"{module}.{alias.name}")


def _room(module: str) -> str | None:
    """Return the room of a module of kv-core, ``""`` for the package itself, else ``None``."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == "kv_core" else None


def _core_sources() -> list[Path]:
    return sorted(CORE.rglob("*.py"))


def _package_sources() -> Iterator[tuple[Path, Path]]:
    """Yield (file, source folder) of every distribution besides the core."""
    for top in (ROOT / "conformance" / "src", *sorted((ROOT / "tiers").glob("*/src"))):
        for source in sorted(top.rglob("*.py")):
            yield source, top


def test_every_room_has_a_place() -> None:
    """A new room is given its place in the order before anything imports it."""
    rooms = {_module_name(source, CORE.parent)[1:2] for source in _core_sources()}
    unknown = {room[0] for room in rooms if room} - set(DIRECT)
    assert unknown == set()


def test_the_order_has_no_cycle() -> None:
    """No room can use itself through others."""
    for room in DIRECT:
        for used in _allowed(room) - {room} - FOR_ALL:
            assert room not in _allowed(used), f"{room} and {used} depend on each other"


def test_rooms_import_only_what_is_below_them() -> None:
    """The one-way rule holds for every import of the core."""
    violations = []
    for source in _core_sources():
        room = next(iter(_module_name(source, CORE.parent)[1:2]), "")
        allowed = _allowed(room) if room else FOR_ALL
        violations += [
            str(found)
            for found in _imports(source, CORE.parent)
            if (target := _room(found.module)) is not None and target not in allowed
        ]
    assert violations == []


def test_no_room_reaches_into_another() -> None:
    """Private modules are imported by their own room only."""
    violations = []
    for source in _core_sources():
        own = _module_name(source, CORE.parent)[:2]
        for found in _imports(source, CORE.parent):
            parts = tuple(found.module.split("."))
            hidden = any(part.startswith("_") and part != "__main__" for part in parts)
            if parts[0] == "kv_core" and hidden and parts[:2] != own:
                violations.append(str(found))
    assert violations == []


def test_the_core_knows_no_tier() -> None:
    """The core imports neither a tier package nor the conformance suite.

    Harnesses for the tiers of other projects are imported by the suite itself, and by nobody else.
    Some need a server, and there is one that the suite uses for a tier of ours.
    """
    harnesses = CORE / "vllm" / "conformance"
    for_harnesses = ("kv_conformance", "kv_tier_s3._harness")
    violations = [
        str(found)
        for source in _core_sources()
        for found in _imports(source, CORE.parent)
        if found.module.startswith(("kv_tier_", "kv_conformance"))
        and not (harnesses in source.parents and found.module.startswith(for_harnesses))
    ]
    assert violations == []


def test_tiers_use_the_contract_and_the_kit() -> None:
    """First-party tiers import no more of the core than a third party may."""
    violations = [
        str(found)
        for source, top in _package_sources()
        if top.parent.parent.name == "tiers"
        for found in _imports(source, top)
        if (target := _room(found.module)) is not None and target not in FOR_TIERS
    ]
    assert violations == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import kv_core.cli", ["kv_core.cli"]),
        ("def f():\n    from kv_core.cli import main", ["kv_core.cli"]),
        ("from kv_core import cli", ["kv_core", "kv_core.cli"]),
        ("from ..cli import main", ["kv_core.cli"]),
        ("from . import keys", ["kv_core.engine"]),
    ],
)
def test_the_check_sees_every_form_of_import(
    code: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nested, relative and ``from package import module`` imports are found."""
    monkeypatch.setattr(Path, "read_text", lambda _self: code)
    source = CORE / "engine" / "_made_up.py"
    assert [found.module for found in _imports(source, CORE.parent)] == expected


def _public_modules() -> list[Path]:
    sources = [*_core_sources(), *(source for source, _ in _package_sources())]
    return [
        source
        for source in sources
        if not any(
            part.startswith("_") and part != "__init__.py"
            for part in source.relative_to(ROOT).parts
        )
        # The conformance suite itself: pytest collects it, nobody imports from it.
        and not source.name.startswith("test_")
    ]


def _sort_key(name: str) -> tuple[int, str]:
    # Constants, classes, functions: the order that ruff's RUF022 keeps.
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("source", _public_modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_public_modules_say_what_is_public(source: Path) -> None:
    """Every public module has a sorted ``__all__`` without repetitions."""
    exported: list[str] | None = None
    for node in ast.parse(source.read_text(), source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = ast.literal_eval(node.value)
        # A list of nothing needs a type.
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "__all__":
            exported = ast.literal_eval(node.value) if node.value is not None else None
    assert exported is not None
    assert exported == sorted(set(exported), key=_sort_key)


def test_every_distribution_carries_the_licence() -> None:
    """Each wheel is built from its own folder, so each folder has the text."""
    text = (ROOT / "LICENSE").read_text()
    folders = [path.parent for path in ROOT.glob("*/pyproject.toml")]
    folders += [path.parent for path in ROOT.glob("tiers/*/pyproject.toml")]
    assert len(folders) >= 4
    assert [folder for folder in folders if (folder / "LICENSE").read_text() != text] == []


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("kv_core", {"numpy", "pydantic", "rich", "torch", "typer"}),
        ("kv_core.errors", {"numpy", "pydantic", "rich", "torch", "typer"}),
        ("kv_core.keys", {"numpy", "pydantic", "rich", "torch", "typer"}),
        ("kv_core.contract", {"rich", "torch", "triton", "typer", "prometheus_client"}),
        ("kv_core.plugins", {"rich", "torch", "triton", "typer", "prometheus_client"}),
        ("kv_core.tierkit", {"rich", "torch", "triton", "typer", "prometheus_client"}),
        # In every process of every vLLM that has kv-core installed.
        ("kv_core.vllm", {"rich", "torch", "triton", "typer", "vllm", "kv_core.tiering"}),
    ],
)
def test_import_stays_light(module: str, unwanted: set[str]) -> None:
    """Importing a room loads nothing that its users have no need of."""
    done = _run(f"import sys, {module}; print(*sorted({unwanted!r} & set(sys.modules)))")
    assert (done.stdout, done.stderr) == ("\n", "")


def test_the_core_imports_without_torch() -> None:
    """Every room imports where there is no torch."""
    rooms = [
        f"kv_core.{room}"
        for room in DIRECT
        if room not in {"__main__", "vllm"} and any(CORE.glob(f"{room}*"))
    ]
    # None in sys.modules makes an import fail as if the package were not installed.
    blocked = "import sys; sys.modules.update({'torch': None, 'triton': None, 'vllm': None})\n"
    done = _run(blocked + f"import {', '.join(rooms)}")
    assert done.stderr == ""


def _error_classes() -> list[type[errors.KVCoreError]]:
    return [getattr(errors, name) for name in errors.__all__]


def test_error_codes_are_unique() -> None:
    """A code stands for one class."""
    codes = [error.code for error in _error_classes()]
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"KVC\d{3}", code) for code in codes)


def test_every_error_code_is_documented() -> None:
    """docs/errors.md has a section for each code, in order, and for no other."""
    text = (ROOT / "docs" / "errors.md").read_text()
    sections = re.findall(r"^## (KVC\d{3}): (\w+)$", text, flags=re.MULTILINE)
    assert sections == sorted((error.code, error.__name__) for error in _error_classes())
