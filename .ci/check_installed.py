"""Checks one freshly installed wheel from inside its environment: ``python - WHEEL``.

Also checks what must not be there: a stray tier, or PyTorch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

GROUP = "kv_core.tiers"


def required_tiers(
    distribution: importlib.metadata.Distribution,
) -> list[importlib.metadata.Distribution]:
    """Return the tiers that a tier is built on."""
    names = [
        re.split(r"[^A-Za-z0-9_-]", requirement)[0]
        for requirement in distribution.requires or ()
        if "extra ==" not in requirement
    ]
    return [importlib.metadata.distribution(name) for name in names if name.startswith("kv-tier-")]


def check(wheel: str) -> str:
    """Check the wheel's distribution and return one line about it."""
    name, version = Path(wheel).name.split("-")[:2]
    distribution = importlib.metadata.distribution(name)
    files = {str(file) for file in distribution.files or ()}
    require(distribution.version == version, f"version is {distribution.version}")
    require(f"{name}/py.typed" in files, "py.typed is missing: type checkers see no types")
    require(any(file.endswith("/LICENSE") for file in files), "the licence text is missing")
    module = importlib.import_module(name)
    declared = getattr(module, "__version__", version)
    require(declared == version, f"__version__ is {declared!r}")
    require(importlib.util.find_spec("torch") is None, "PyTorch came along")

    for command in ([sys.executable, "-m", "kv_core"], [str(Path(sys.prefix, "bin", "kv-core"))]):
        done = subprocess.run(  # noqa: S603 - our own command
            [*command, "tiers", "--json"], capture_output=True, text=True, check=True
        )
        tiers = json.loads(done.stdout)["tiers"]
        listed = sorted(tier["type"] for tier in tiers)
        expected = sorted(
            entry.name
            for owner in (distribution, *required_tiers(distribution))
            for entry in owner.entry_points.select(group=GROUP)
        )
        require(listed == expected, f"kv-core tiers lists {listed}, expected {expected}")
        problems = [tier["error"] for tier in tiers if tier["error"]]
        require(not problems, f"broken: {problems}")
    return f"{name} {version}: fine, tiers {', '.join(expected) or 'none'}"


def require(fulfilled: bool, problem: str) -> None:
    """End with a message unless a condition holds."""
    if not fulfilled:
        sys.exit(f"{sys.argv[1]}: {problem}")


if __name__ == "__main__":
    sys.stdout.write(f"-- {check(sys.argv[1])}\n")
