"""``kv-core new-tier``: writes a tier package that works, to be changed into another."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kv_core import __version__
from kv_core.contract import CONTRACT_VERSION
from kv_core.errors import ConfigError
from kv_core.plugins import TierRegistry

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from importlib.resources.abc import Traversable
    else:
        from importlib.abc import Traversable

__all__ = ["new_tier"]

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
# Longer ones would break the lines of the templates.
_MOST_CHARS: Final = 20
_OWN_TYPES: Final = frozenset({"example", "fs", "fsspec", "hostile", "obj", "s3"})
_IMPORTED: Final = frozenset({"AsyncioTier", "BaseHarness", "ThreadedTier", "TierKitConfig"})

# Where a template goes; the others go into the package itself.
_PLACES: Final = {
    ".gitignore": ".gitignore",
    "README.md": "README.md",
    "pyproject.toml": "pyproject.toml",
    "test_acme.py": "tests/test_acme.py",
}


def new_tier(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Type of the tier, such as 'acme'.", show_default=False)
    ],
    use_asyncio: Annotated[
        bool, typer.Option("--asyncio", help="For an asynchronous client: coroutines.")
    ] = False,
    parent: Annotated[
        Path, typer.Option("--dir", help="Folder in which the package's folder is made.")
    ] = Path(),
) -> None:
    """Write the package of a new tier: it works, and 'pytest --conformance NAME' passes."""
    check_name(name, context.obj)
    if not parent.is_dir():
        raise ConfigError(
            f"'--dir': {str(parent)!r} is no folder. Make it first, or leave the option out to use "
            "the working directory",
            setting="--dir",
        )
    folder = parent / f"kv-tier-{_dashed(name)}"
    files = dict(render(name, use_asyncio=use_asyncio))
    try:
        folder.mkdir()
    except FileExistsError:
        raise ConfigError(
            f"{str(folder)!r} exists already, and nothing is overwritten. Choose another name or "
            "another folder (--dir), or remove it",
            setting="NAME",
        ) from None
    for place, text in files.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    typer.echo(
        f"{folder}: a tier that keeps its blocks in a folder, until you put your storage there.\n"
        f"\n"
        f"  pip install -e '{folder}[test]'\n"
        f"  pytest --conformance {name}\n"
        f"\n"
        f"{folder / 'README.md'} says which file is for what."
    )


def check_name(name: str, registry: TierRegistry) -> None:
    """Refuse a name that cannot be that of a new tier.

    Raises:
        ConfigError: It has another form, or is taken.
    """
    if not _NAME.fullmatch(name) or len(name) > _MOST_CHARS:
        raise _refused(
            name,
            f"expected a lower-case word such as 'acme' or 'acme-disk', at most {_MOST_CHARS} "
            f"characters{_suggestion(name)}",
        )
    if name.startswith(("kv-tier", "kv_tier")):
        raise _refused(
            name, f"the package is named kv-tier-NAME anyway{_suggestion(name[len('kv-tier-') :])}"
        )
    own = _OWN_TYPES & {name}
    taken = [claim for claim in registry.installed() if _dashed(claim.type) == _dashed(name)]
    if taken or own:
        origin = f"{taken[0].origin}, which is installed," if taken else "kv-core itself"
        raise _refused(name, f"{origin} provides a tier of this type: choose another name")
    module = _module(name)
    if importlib.util.find_spec(module) is not None:
        raise _refused(
            name, f"there is a package {module!r} in this environment: choose another name"
        )
    if {f"{_camel(name)}{part}" for part in ("Config", "Harness", "Tier")} & _IMPORTED:
        raise _refused(
            name, "its classes would have the names of classes of the kit: choose another name"
        )


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"{name!r} cannot be the name of a new tier: {reason}", setting="NAME")


def _suggestion(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower())
    better = "-".join(words)
    usable = _NAME.fullmatch(better) and len(better) <= _MOST_CHARS
    return f". Did you mean {better!r}?" if usable else ""


def render(name: str, *, use_asyncio: bool) -> Iterator[tuple[str, str]]:
    """Yield (path in the package's folder, content) of every file.

    The templates are a package of their own for the tier ``acme``, so they can be read as such.

    Args:
        name: Type of the tier.
        use_asyncio: Coroutines instead of threads.
    """
    words = {
        "@VERSION@": __version__,
        "@CONTRACT@": f"{CONTRACT_VERSION.major}, {CONTRACT_VERSION.minor}",
        "kv_tier_acme": _module(name),
        "kv-tier-acme": f"kv-tier-{_dashed(name)}",
        "test_acme": f"test_{_module(name).removeprefix('kv_tier_')}",
        "Acme": _camel(name),
        "acme": name,
    }
    pattern = re.compile("|".join(map(re.escape, words)))

    def fill(text: str) -> str:
        return pattern.sub(lambda match: words[match.group()], text)

    for template in _templates("asyncio" if use_asyncio else "threaded"):
        file = template.name.removesuffix(".txt").replace("gitignore", ".gitignore")
        place = _PLACES.get(file, f"src/kv_tier_acme/{file}")
        yield fill(place), fill(template.read_text(encoding="utf-8"))
    yield fill("src/kv_tier_acme/py.typed"), ""


def _templates(kind: str) -> Iterator[Traversable]:
    root = resources.files("kv_core.cli") / "_scaffold"
    for folder in (root / "package", root / kind):
        yield from sorted(folder.iterdir(), key=lambda template: template.name)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _module(name: str) -> str:
    return f"kv_tier_{name.replace('-', '_')}"


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in re.split("[-_]", name))
