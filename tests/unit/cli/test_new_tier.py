"""``kv-core new-tier``: what is written, and what is refused."""

from __future__ import annotations

import ast
import re
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from kv_core.cli import main
from kv_core.plugins import TierRegistry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODULES = {"__init__.py", "_config.py", "_harness.py", "_storage.py", "_tier.py", "py.typed"}


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the command, which must refuse and leave no file."""

    def run(*arguments: str, installed: tuple[str, ...] = ()) -> str:
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        entries = [metadata.EntryPoint(name, "nothing", "kv_core.tiers") for name in installed]
        status = main(
            ["new-tier", "--dir", str(tmp_path), *arguments], registry=TierRegistry(entries)
        )
        captured = capsys.readouterr()
        assert (status, captured.out) == (2, "")
        assert captured.err.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return captured.err

    return run


def generate(folder: Path, name: str, *options: str) -> Path:
    """Write a package and return its folder."""
    arguments = ["new-tier", name, "--dir", str(folder), *options]
    assert main(arguments, registry=TierRegistry(())) == 0
    return folder / f"kv-tier-{name.replace('_', '-')}"


def relative_files(folder: Path) -> set[str]:
    """Return the paths of all files."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("options", [[], ["--asyncio"]])
def test_a_package_is_complete(tmp_path: Path, options: list[str]) -> None:
    """Metadata, code, types, a test and a page that says what is what."""
    package = generate(tmp_path, "acme", *options)
    assert relative_files(package) == {
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "tests/test_acme.py",
        *(f"src/kv_tier_acme/{name}" for name in MODULES),
    }
    kind = "AsyncioTier" if options else "ThreadedTier"
    assert f"class AcmeTier({kind})" in (package / "src/kv_tier_acme/_tier.py").read_text()


def test_the_metadata_names_the_tier(tmp_path: Path) -> None:
    """An entry point, and the extra with which the suite is installed."""
    text = (generate(tmp_path, "acme") / "pyproject.toml").read_text()
    assert '[project.entry-points."kv_core.tiers"]\nacme = "kv_tier_acme"' in text
    assert re.search(r'^dependencies = \["kv-core>=[\d.]+"\]$', text, re.MULTILINE)
    assert re.search(r'^test = \["kv-conformance>=[\d.]+", "pytest>=8\.0"\]$', text, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "module", "class_name"),
    [
        ("acme-disk", "kv_tier_acme_disk", "AcmeDiskTier"),
        ("acme_disk", "kv_tier_acme_disk", "AcmeDiskTier"),
        ("s4", "kv_tier_s4", "S4Tier"),
        ("class", "kv_tier_class", "ClassTier"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--asyncio"]])
def test_the_name_goes_everywhere(
    tmp_path: Path, name: str, module: str, class_name: str, options: list[str]
) -> None:
    """Nothing of the template's own name is left, and every module is valid code."""
    package = generate(tmp_path, name, *options)
    assert f"class {class_name}(" in (package / "src" / module / "_tier.py").read_text()
    for file in relative_files(package):
        text = (package / file).read_text()
        assert "@" not in file
        assert "@VERSION@" not in text
        assert "@CONTRACT@" not in text
        if name.replace("_", "-") != "acme-disk":
            assert "acme" not in (text + file).lower()
        if file.endswith(".py"):
            ast.parse(text, feature_version=(3, 10))


@pytest.mark.parametrize("options", [[], ["--asyncio"]])
def test_the_tier_is_short(tmp_path: Path, options: list[str]) -> None:
    """What an author has to understand fits on a screen."""
    text = (generate(tmp_path, "acme", *options) / "src/kv_tier_acme/_tier.py").read_text()
    (tier,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    assert tier.end_lineno is not None
    assert tier.end_lineno - tier.lineno < 50


def test_it_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two commands that can be copied, with the folder as it was given."""
    package = generate(tmp_path, "acme")
    out = capsys.readouterr().out
    assert f"  pip install -e '{package}[test]'\n" in out
    assert "  pytest --conformance acme\n" in out


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Acme", "Did you mean 'acme'?"),
        ("AcmeDisk", "Did you mean 'acme-disk'?"),
        ("acme disk", "Did you mean 'acme-disk'?"),
        ("../acme", "Did you mean 'acme'?"),
        ("acme/", "Did you mean 'acme'?"),
        ("acme--disk", "Did you mean 'acme-disk'?"),
        ("3com", "expected a lower-case word"),
        ("", "expected a lower-case word"),
        ("ácme", "expected a lower-case word"),
        ("a" * 21, "at most 20 characters"),
        ("kv-tier-acme", "Did you mean 'acme'?"),
    ],
)
def test_an_odd_name_is_refused(refusal: Callable[..., str], name: str, hint: str) -> None:
    """With the name that was probably meant."""
    assert hint in refusal("--", name)


def test_a_name_that_is_taken_is_refused(refusal: Callable[..., str]) -> None:
    """By an installed tier, however it spells its type, or by one of kv-core's own."""
    assert "provides a tier of this type" in refusal("acme-disk", installed=("acme_disk",))
    assert "kv-core itself provides" in refusal("s3")


def test_a_module_that_is_there_is_refused(
    refusal: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of the same name would shadow the new one, or the other way round."""
    (tmp_path / "kv_tier_shadowed").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert "there is a package 'kv_tier_shadowed'" in refusal("shadowed")


@pytest.mark.parametrize("name", ["asyncio", "threaded", "tier-kit", "base"])
def test_a_class_of_the_kit_is_not_shadowed(refusal: Callable[..., str], name: str) -> None:
    """The generated classes would derive from themselves."""
    assert "names of classes of the kit" in refusal(name)


def test_nothing_is_overwritten(refusal: Callable[..., str], tmp_path: Path) -> None:
    """Neither a folder that is there nor a file."""
    generate(tmp_path, "acme")
    (tmp_path / "kv-tier-other").touch()
    assert "exists already" in refusal("acme", "--asyncio")
    assert "exists already" in refusal("other")


def test_a_parent_that_is_not_there_is_refused(refusal: Callable[..., str]) -> None:
    """A typo makes no folders."""
    assert "is no folder. Make it first" in refusal("acme", "--dir", "no/such/folder")
