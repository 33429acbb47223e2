"""The list of secondary tiers, as users write it."""

from __future__ import annotations

import pytest

from kv_core.errors import ConfigError
from kv_core.plugins import parse_secondary_tiers


def test_type_and_name_are_split_from_the_settings() -> None:
    """The tier gets what is left."""
    (tier,) = parse_secondary_tiers([{"type": "fs", "name": "nvme", "root": "/x", "depth": 2}])
    assert (tier.type, tier.name, dict(tier.settings)) == ("fs", "nvme", {"root": "/x", "depth": 2})


def test_the_name_defaults_to_the_type_and_the_order_is_kept() -> None:
    """Lookups ask the tiers in the order of the list."""
    tiers = parse_secondary_tiers([{"type": "s3"}, {"type": "fs"}])
    assert [tier.name for tier in tiers] == ["s3", "fs"]


@pytest.mark.parametrize("empty", [None, [], ()])
def test_no_tier_is_fine(empty: object) -> None:
    """The list may be absent or empty."""
    assert parse_secondary_tiers(empty) == ()


def test_two_tiers_of_one_type_need_names() -> None:
    """A name that is used twice is refused, naming it and its place."""
    with pytest.raises(ConfigError, match="two secondary tiers are named 'fs'") as caught:
        parse_secondary_tiers([{"type": "fs"}, {"type": "fs"}])
    assert caught.value.setting == "secondary_tiers[1].name"
    named = parse_secondary_tiers([{"type": "fs"}, {"type": "fs", "name": "fs-2"}])
    assert [tier.name for tier in named] == ["fs", "fs-2"]


@pytest.mark.parametrize(
    ("entries", "setting"),
    [
        ("fs", "secondary_tiers"),
        ({"type": "fs"}, "secondary_tiers"),
        (7, "secondary_tiers"),
        (["fs"], "secondary_tiers[0]"),
        ([{"type": "a"}, {"name": "x"}], "secondary_tiers[1].type"),
        ([{"type": 3}], "secondary_tiers[0].type"),
        ([{"type": ""}], "secondary_tiers[0].type"),
        ([{"type": "fs", "name": "../x"}], "secondary_tiers[0].name"),
        ([{"type": "fs", "name": None}], "secondary_tiers[0].name"),
        ([{"type": "fs", "name": "CPU"}], "secondary_tiers[0].name"),
        ([{"type": "gpu"}], "secondary_tiers[0].name"),
        ([{"type": "fs", 3: 4}], "secondary_tiers[0]"),
    ],
)
def test_other_forms_are_refused_by_place(entries: object, setting: str) -> None:
    """Each mistake names where it is."""
    with pytest.raises(ConfigError) as caught:
        parse_secondary_tiers(entries)
    assert caught.value.setting == setting


def test_mode_and_filling_are_the_engines() -> None:
    """They are read, and not passed on to the tier; command lines may write words."""
    (tier,) = parse_secondary_tiers(
        [{"type": "fs", "mode": "read_only", "fill_on_promotion": "True", "root": "/x"}]
    )
    assert (tier.read_only, tier.fill_on_promotion) == (True, True)
    assert dict(tier.settings) == {"root": "/x"}


@pytest.mark.parametrize("value", [True, "read-only", ["read_only"], None])
def test_an_unknown_mode_is_refused(value: object) -> None:
    """The message has the two that there are."""
    with pytest.raises(ConfigError, match="'read_write' or 'read_only'") as caught:
        parse_secondary_tiers([{"type": "fs", "mode": value}])
    assert caught.value.setting == "secondary_tiers[0].mode"


def test_all_faults_are_named_at_once() -> None:
    """Each entry and each key of the engine is looked at, whatever the others are."""
    with pytest.raises(ConfigError) as caught:
        parse_secondary_tiers(
            [7, {"mode": "x", "fill_on_promotion": {}}, {"type": "a"}, {"type": "a"}]
        )
    assert [problem.setting for problem in caught.value.problems] == [
        "secondary_tiers[0]",
        "secondary_tiers[1].type",
        "secondary_tiers[1].mode",
        "secondary_tiers[1].fill_on_promotion",
        "secondary_tiers[3].name",
    ]
    assert all(problem.message in caught.value.message for problem in caught.value.problems)


def test_settings_do_not_show_in_the_repr() -> None:
    """Settings may hold secrets (CONF-2)."""
    (tier,) = parse_secondary_tiers([{"type": "s3", "secret_key": "hunter2"}])
    assert "hunter2" not in repr(tier)
    assert "name='s3'" in repr(tier)


@pytest.mark.parametrize("entries", ["hunter2", [["hunter2"]], [{"secret_key": "hunter2"}]])
def test_errors_do_not_repeat_settings(entries: object) -> None:
    """A malformed list is not quoted: it may hold secrets (CONF-2)."""
    with pytest.raises(ConfigError) as caught:
        parse_secondary_tiers(entries)
    assert "hunter2" not in str(caught.value)


def test_settings_cannot_be_changed() -> None:
    """What was read stays as it was read."""
    entry = {"type": "fs", "root": "/x"}
    (tier,) = parse_secondary_tiers([entry])
    entry["root"] = "/y"
    assert tier.settings["root"] == "/x"
    with pytest.raises(TypeError):
        tier.settings["root"] = "/z"  # type: ignore[index]  # the point of the test
