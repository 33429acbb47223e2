"""TierRegistry: what it finds, and that it imports no more than it was asked for."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from kv_core.errors import DuplicateTierError, IncompatibleTierError, UnknownTierError
from kv_core.plugins import TierRegistry

if TYPE_CHECKING:
    from tests.unit.plugins.conftest import FakeSite


def test_installed_lists_without_importing(site: FakeSite) -> None:
    """The list comes from package metadata alone, sorted by type."""
    site.add("zeta", version="2.5")
    site.add("alpha", "raise RuntimeError", distribution="some-package")
    listed = [(t.type, t.distribution, t.version) for t in site.registry().installed()]
    assert listed == [("alpha", "some-package", "1.0"), ("zeta", "kv-tier-zeta", "2.5")]
    assert site.imported() == set()


def test_only_the_named_tier_is_imported(site: FakeSite) -> None:
    """Asking for one tier imports that one."""
    site.add("alpha")
    site.add("beta")
    assert site.registry().spec("beta").type == "beta"
    assert site.imported() == {"beta"}


def test_a_spec_is_made_once(site: FakeSite) -> None:
    """The second question gets the very same spec."""
    site.add("alpha")
    registry = site.registry()
    assert registry.spec("alpha") is registry.spec("alpha")


def test_a_broken_neighbour_goes_unnoticed(site: FakeSite) -> None:
    """One broken plugin does not keep another from loading."""
    site.add("broken", "raise RuntimeError('no')")
    site.add("sound")
    assert site.registry().spec("sound").summary == "a tier of the tests"


def test_unknown_type_names_what_is_installed_and_what_to_install(site: FakeSite) -> None:
    """An unknown type lists the installed ones and the package to try."""
    site.add("beta")
    site.add("alpha")
    with pytest.raises(UnknownTierError) as caught:
        site.registry().spec("acme")
    assert caught.value.tier_type == "acme"
    assert caught.value.installed == ("alpha", "beta")
    assert "installed: alpha, beta" in str(caught.value)
    assert "pip install kv-tier-acme" in str(caught.value)
    assert "Did you mean" not in str(caught.value)


def test_unknown_type_suggests_a_close_one(site: FakeSite) -> None:
    """A slip of the keyboard gets a suggestion."""
    site.add("fsspec")
    with pytest.raises(UnknownTierError, match="Did you mean 'fsspec'"):
        site.registry().spec("fspec")


def test_the_name_of_a_package_suggests_its_type(site: FakeSite) -> None:
    """What was installed is not what the tier is called."""
    site.add("disk", distribution="kv-tier-acme")
    with pytest.raises(UnknownTierError, match="Did you mean 'disk'") as caught:
        site.registry().spec("kv-tier-acme")
    assert "pip install kv-tier-acme" in str(caught.value)


def test_nothing_installed_is_said_so() -> None:
    """Without any plugin the message says so."""
    with pytest.raises(UnknownTierError, match="installed: none"):
        TierRegistry(()).spec("fs")


def test_two_packages_with_one_type_are_refused_by_name(site: FakeSite) -> None:
    """A contested type is refused when asked for, naming both; others are not affected."""
    site.add("fs", distribution="kv-tier-fs", version="1.2")
    site.add("fs", distribution="acme-fs", version="3.4")
    site.add("other")
    registry = site.registry()
    assert registry.spec("other").type == "other"
    with pytest.raises(DuplicateTierError) as caught:
        registry.spec("fs")
    assert set(caught.value.distributions) == {"kv-tier-fs 1.2", "acme-fs 3.4"}
    assert "kv-tier-fs 1.2" in str(caught.value)
    assert "acme-fs 3.4" in str(caught.value)
    assert site.imported() == {"other"}


def test_one_package_seen_twice_is_no_duplicate(site: FakeSite) -> None:
    """An editable install besides a wheel of the same package: the first on the path counts."""
    site.add("fs", distribution="kv-tier-fs", version="2.0")
    site.add("fs", "raise RuntimeError('stale')", distribution="KV_Tier.FS", version="1.0")
    registry = site.registry()
    assert [(t.type, t.version) for t in registry.installed()] == [("fs", "2.0")]
    assert registry.spec("fs").type == "fs"


def test_entry_points_of_other_groups_are_ignored() -> None:
    """Only the group of tiers counts."""
    other = metadata.EntryPoint("fs", "somewhere", "console_scripts")
    assert TierRegistry([other]).installed() == []


def test_an_entry_point_without_a_package_is_listed() -> None:
    """A claim without metadata has the origin 'unknown'."""
    bare = metadata.EntryPoint("fs", "somewhere", "kv_core.tiers")
    assert TierRegistry([bare]).installed()[0].origin == "unknown unknown"


def test_this_environment_is_the_default() -> None:
    """Without entry points of its own the registry reads those of the environment."""
    expected = {point.name for point in metadata.entry_points(group="kv_core.tiers")}
    assert {tier.type for tier in TierRegistry().installed()} == expected


@pytest.mark.parametrize(
    ("contract", "outdated"),
    [((1, 1), "kv-core"), ((2, 0), "kv-core"), ((0, 9), "kv-tier-acme")],
)
def test_another_contract_version_is_refused(
    site: FakeSite, contract: tuple[int, int], outdated: str
) -> None:
    """Both versions are named, and the command that upgrades the older side."""
    site.add("acme", contract=contract)
    with pytest.raises(IncompatibleTierError) as caught:
        site.registry().spec("acme")
    error = caught.value
    assert (error.tier_type, error.tier_contract, error.core_contract) == ("acme", contract, (1, 0))
    assert f"version {contract[0]}.{contract[1]}" in str(error)
    assert "speaks 1.0" in str(error)
    assert f"pip install --upgrade {outdated} " in str(error) + " "


def test_a_repaired_plugin_loads_at_the_next_question(site: FakeSite) -> None:
    """Failures are not remembered."""
    site.add(
        "acme",
        also="""
from pathlib import Path
marker = Path(__file__).with_suffix(".repaired")
if not marker.exists():
    marker.touch()
    raise ImportError("not yet")
""",
    )
    registry = site.registry()
    with pytest.raises(ImportError, match="not yet"):
        registry.spec("acme")
    assert registry.spec("acme").type == "acme"
