"""The option ``--tier``: both forms, and what is refused without repeating it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.cli._tier_option import parse_setting_options, parse_tier_options
from kv_core.errors import ConfigError

_WORDS = st.text(alphabet="abcxyz_09", min_size=1)
_VALUES = st.text(min_size=1).filter(lambda text: "," not in text)


@pytest.mark.parametrize(
    ("option", "entry"),
    [
        ("fs", {"type": "fs"}),
        ("fs:", {"type": "fs"}),
        ("fs:root_dir=/cache", {"type": "fs", "root_dir": "/cache"}),
        ("fs:root_dir=a=b:c,x=1", {"type": "fs", "root_dir": "a=b:c", "x": "1"}),
        ("fs:root_dir= a ", {"type": "fs", "root_dir": " a "}),
        ('{"type": "fs", "root_dir": "a,b"}', {"type": "fs", "root_dir": "a,b"}),
        (' {"type": "s3", "prefix": "", "n": [1]}', {"type": "s3", "prefix": "", "n": [1]}),
    ],
)
def test_both_forms(option: str, entry: dict[str, Any]) -> None:
    """The first colon ends the type, the first equals sign of a part ends its key."""
    assert parse_tier_options([option]) == [entry]


def test_order_is_kept() -> None:
    """The order on the command line is the order of lookups."""
    assert [entry["type"] for entry in parse_tier_options(["c", "a", '{"type": "b"}'])] == [
        "c",
        "a",
        "b",
    ]
    assert parse_tier_options([]) == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("", "expected TYPE:KEY=VALUE,KEY=VALUE or TYPE alone, found no type"),
        (":a=b", "found no type"),
        ("fs:a", "part 1 after the colon has no key or no value"),
        ("fs:a=1,", "part 2 after the colon"),
        ("fs:=1", "part 1 after the colon"),
        ("fs:a=", "part 1 after the colon"),
        ("fs:a=1,a=2", "'a' is given twice"),
        ("fs:type=s3", "'type' is given twice"),
        ('{"type": "fs",}', "begins like JSON but is not"),
        ('{"type": "fs"} x', "begins like JSON but is not"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ('{"a":' * 100_000, "begins like JSON but is not"),
    ],
)
def test_other_forms_are_refused(option: str, message: str) -> None:
    """Each says what was expected; nothing is guessed."""
    with pytest.raises(ConfigError) as caught:
        parse_tier_options([option])
    assert message in caught.value.message
    assert caught.value.setting.startswith("--tier")


@pytest.mark.parametrize("option", ["s3:token=hunter,sesame", '{"token": "hunter,sesame'])
def test_values_are_not_repeated(option: str) -> None:
    """A secret with a comma in it does not end up in a log (CONF-2)."""
    with pytest.raises(ConfigError) as caught:
        parse_tier_options([option])
    assert "hunter" not in caught.value.message
    assert "sesame" not in caught.value.message


@given(_WORDS, st.dictionaries(_WORDS.filter("type".__ne__), _VALUES))
def test_what_is_written_is_read(tier_type: str, settings: dict[str, str]) -> None:
    """Any settings without commas come back from the short form, and all from JSON."""
    entry = {"type": tier_type, **settings}
    short = ",".join(f"{key}={value}" for key, value in settings.items())
    assert parse_tier_options([f"{tier_type}:{short}", json.dumps(entry)]) == [entry, entry]


def test_settings_read_as_json_where_they_can() -> None:
    """Numbers and truth values are what they say; anything else is a word."""
    options = ["lease_share=0.3", "offload_prompt_only=false", "engine_reset=epoch", "a=b=c"]
    assert parse_setting_options(options) == {
        "lease_share": 0.3,
        "offload_prompt_only": False,
        "engine_reset": "epoch",
        "a": "b=c",
    }


@pytest.mark.parametrize("options", [["lease_share"], ["=3"], ["a=1", "a=2"]])
def test_malformed_settings_are_refused(options: list[str]) -> None:
    """No key, no value or a key twice is a message, not a guess."""
    with pytest.raises(ConfigError, match="--set"):
        parse_setting_options(options)
