"""Plugins made on the spot: real modules and real package metadata in a folder of the test."""

from __future__ import annotations

import itertools
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Final

import pytest

from kv_core.plugins import ENTRY_POINT_GROUP, TierRegistry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_COUNTER: Final = itertools.count()

_TIER: Final = """
import kv_core
from kv_core.contract import ContractVersion, TierConfig, TierLimits, TierSpec

@kv_core.hookimpl
def kv_core_register_tier():
    return TierSpec(
        type={tier_type!r},
        summary="a tier of the tests",
        contract=ContractVersion(*{contract!r}),
        factory=lambda context: None,
        config_model=TierConfig,
        limits=lambda config: TierLimits(
            job_deadline_s=1.0, lookup_deadline_s=1.0, min_free_bytes=1),
    )
"""


class FakeSite:
    """A folder on ``sys.path`` that packages are installed into."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copies: list[Path] = []
        self.modules: dict[str, str] = {}

    def add(
        self,
        tier_type: str,
        source: str | None = None,
        *,
        distribution: str | None = None,
        version: str = "1.0",
        contract: tuple[int, int] = (1, 0),
        also: str = "",
    ) -> str:
        """Install a package with one plugin and return the name of its module.

        Args:
            tier_type: Name of the entry point.
            source: The module; by default a valid tier, followed by ``also``.
            distribution: Name of the package.
            version: Version of the package.
            contract: Contract version of the default tier.
            also: Further code of the default module.
        """
        number = next(_COUNTER)
        module = f"kv_test_plugin_{number}"
        distribution = distribution or f"kv-tier-{tier_type}"
        if source is None:
            source = _TIER.format(tier_type=tier_type, contract=contract) + also
        (self._folder / f"{module}.py").write_text(source)
        # One folder a package: the same package may be there twice, as in two site folders.
        copy = self._folder / f"site-{number}"
        info = copy / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{tier_type} = {module}\n")
        self._copies.append(copy)
        self.modules[tier_type] = module
        return module

    def registry(self) -> TierRegistry:
        """Return a registry of what was installed, in this order of precedence."""
        return TierRegistry(
            entry_point
            for copy in self._copies
            for distribution in metadata.distributions(path=[str(copy)])
            for entry_point in distribution.entry_points
        )

    def imported(self) -> set[str]:
        """Return the types whose modules were imported."""
        return {name for name, module in self.modules.items() if module in sys.modules}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """Provide an empty folder to install plugins into."""
    monkeypatch.syspath_prepend(str(tmp_path))
    fake = FakeSite(tmp_path)
    yield fake
    for module in fake.modules.values():
        sys.modules.pop(module, None)
