"""The first five minutes of an author: what ``kv-core new-tier`` writes is a conformant tier.

The packages are put on the path with metadata of their own instead of being installed, so that no
build tool and no network is needed.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pytest

from kv_conformance.clauses import clause_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT: Final = Path(__file__).parents[2]
_DEADLINE_S: Final = 240

# What notices that a statement of read_block is gone: a clause of the suite, or a test of the
# author's own where the contract leaves room.
NOTICED_BY: Final = {
    "try:": "DATA-1",
    "size = self.storage.read(self.name_of(key), buffer)": "DATA-1",
    "raise BlockMissingError": "test_a_block_that_is_gone_is_missing",
    "if size != len(buffer):": "DATA-10",
    "raise BlockDamagedError": "DATA-10",
}

RunFunction: TypeAlias = "Callable[..., subprocess.CompletedProcess[str]]"


@pytest.fixture(params=["threaded", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    """Name the kind of tier."""
    return str(request.param)


@pytest.fixture
def package(kind: str, tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> Path:
    """Write a package, as if into the folder of somebody's project, and make it known."""
    options = ["--asyncio"] if kind == "asyncio" else []
    status, _, err = command("new-tier", "acme", *options)
    assert (status, err) == (0, "")
    folder = tmp_path / "kv-tier-acme"
    _make_known(folder, tmp_path / "site")
    return folder


def _make_known(package: Path, site: Path) -> None:
    """Write the metadata that an installer would derive from the package's pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    metadata = site / f"kv_tier_acme-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = ["[kv_core.tiers]"]
    lines += [f"{key} = {value}" for key, value in project["entry-points"]["kv_core.tiers"].items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def run(package: Path, tmp_path: Path) -> RunFunction:
    """Return a function that runs a module of Python where the package is installed."""

    def start(*arguments: str, cwd: Path = package) -> subprocess.CompletedProcess[str]:
        search = [str(package / "src"), str(tmp_path / "site")]
        environment = {key: value for key, value in os.environ.items() if key != "CI"}
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=cwd,
            env={**environment, "PYTHONPATH": os.pathsep.join(search), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )

    return start


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_is_conformant_as_generated(run: RunFunction, tmp_path: Path) -> None:
    """In an empty folder, with all clauses, nothing skipped and nothing left open."""
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run("pytest", "-p", "no:cacheprovider", "--conformance", "acme", cwd=empty)
    assert done.returncode == 0, done.stdout
    assert "acme (kv-tier-acme 0.1.0): conformant" in done.stdout
    # Folders of tools aside, the report is all that is left.
    assert {path.name for path in empty.iterdir() if path.is_file()} == {
        "conformance-badge-acme.json",
        "conformance-report.json",
        "conformance-report.md",
    }


def test_its_own_tests_pass(run: RunFunction) -> None:
    """A plain ``pytest`` in the project is the author's, not the suite."""
    done = run("pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_the_command_line_lists_it(run: RunFunction) -> None:
    """It is an installed tier like any other, with its settings explained."""
    done = run("kv_core", "tiers")
    assert done.returncode == 0
    assert "kv-tier-acme 0.1.0" in done.stdout
    assert "Nothing is stored while the file system has less free than this." in done.stdout


def test_it_is_written_as_our_own_code_is(run: RunFunction, package: Path) -> None:
    """The rules of this repository hold for what it writes for others."""
    config = str(ROOT / "pyproject.toml")
    ruff = ["ruff", "{}", "--no-cache", "--config", config, "--config", 'src=["src", "tests"]', "."]
    for part in ("check", "format"):
        options = ["--check"] if part == "format" else []
        done = run(*(word.format(part) for word in ruff), *options)
        assert done.returncode == 0, done.stdout
    # From below src, where the package has one name only.
    mypy = ["mypy", "--config-file", config, "-p", "kv_tier_acme"]
    done = run(*mypy, cwd=package / "src")
    assert done.returncode == 0, done.stdout


def _without_statements(text: str, function: str) -> Iterator[tuple[str, str]]:
    """Yield (statement, text without it) for every statement of a function."""
    (found,) = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function
    )
    lines = text.splitlines()
    for node in ast.walk(found):
        if isinstance(node, ast.stmt) and node is not found:
            assert node.end_lineno is not None
            rest = lines[node.end_lineno :]
            left = [*lines[: node.lineno - 1], " " * node.col_offset + "pass", *rest]
            yield lines[node.lineno - 1].strip(), "\n".join(left)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["threaded"])
def test_every_statement_of_the_read_path_is_needed(
    run: RunFunction, package: Path, kind: str
) -> None:
    """Without one of them the run is red, and says which promise is broken and where it is."""
    tier = package / "src" / "kv_tier_acme" / "_tier.py"
    seen = set()
    for statement, text in _without_statements(tier.read_text(), "read_block"):
        (start,) = (start for start in NOTICED_BY if statement.startswith(start))
        noticed_by = NOTICED_BY[start]
        seen.add(start)
        tier.write_text(text)
        if noticed_by.startswith("test_"):
            done = run("pytest", "-q", "-p", "no:cacheprovider")
            expected = [f"FAILED tests/test_acme.py::{noticed_by}"]
        else:
            clause = clause_of(noticed_by)
            done = run("pytest", "--conformance", "acme", "--conformance-clause", clause.id)
            expected = [f"{clause.id} failed: {clause.sentence}", clause.link, "non-conformant"]
        assert done.returncode == 1, (statement, done.stdout)
        for part in expected:
            assert part in done.stdout, (statement, done.stdout)
    assert seen == set(NOTICED_BY)
