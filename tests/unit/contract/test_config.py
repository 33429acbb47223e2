"""parse_tier_config: every problem is named at once, and no secret is repeated."""

from __future__ import annotations

import pickle
import traceback

import pytest
from pydantic import Field, Secret, SecretBytes, SecretStr, ValidationError, field_validator

from kv_core.contract import TierConfig, parse_tier_config
from kv_core.errors import ConfigError
from kv_core.units import parse_bytes


class _Config(TierConfig):
    root: str
    depth: int = Field(default=1, ge=1)
    token: SecretStr = SecretStr("")
    room: int = 1

    @field_validator("root")
    @classmethod
    def _known_root(cls, value: str) -> str:
        if value == "bad":
            raise ValueError("this root is no good")
        return value

    @field_validator("room", mode="before")
    @classmethod
    def _read_size(cls, value: str) -> int:
        return parse_bytes(value, setting="room")


def test_valid_settings_become_the_model() -> None:
    """Defaults are filled in."""
    config = parse_tier_config("disk", _Config, {"root": "/x", "depth": 3})
    assert (config.root, config.depth) == ("/x", 3)


def test_all_problems_are_named_at_once() -> None:
    """Missing, unknown and invalid settings in one message (CONF-1)."""
    with pytest.raises(ConfigError) as caught:
        parse_tier_config("disk", _Config, {"depth": 0, "dpeth": 2})
    message = str(caught.value)
    assert "tier 'disk'" in message
    assert "'root' is required but missing" in message
    assert (
        "'dpeth' is not a setting (did you mean 'depth'? known: depth, room, root, token)"
        in message
    )
    assert "'depth': Input should be greater than or equal to 1" in message
    assert caught.value.setting == "disk.root"


def test_the_message_of_a_validator_is_kept() -> None:
    """An author's own explanation reaches the user."""
    with pytest.raises(ConfigError, match="'root': this root is no good"):
        parse_tier_config("disk", _Config, {"root": "bad"})


def test_the_code_of_an_error_is_there_once() -> None:
    """A validator may raise an error of ours, which names the setting and has a code itself."""
    with pytest.raises(ConfigError) as caught:
        parse_tier_config("disk", _Config, {"root": "/x", "room": "20Gib"})
    message = str(caught.value)
    assert message.startswith("tier 'disk': 'room': '20Gib' has the unknown unit 'Gib'")
    assert message.count("KVC101") == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"root": "/x", "token": ["hunter2"]},
        {"root": ["hunter2"]},
        {"root": "/x", "depth": "hunter2"},
        {"root": "/x", "tokn": "hunter2"},
    ],
)
def test_values_are_never_repeated(settings: dict[str, object]) -> None:
    """A secret in a wrong place is in no message and no traceback (CONF-2)."""
    with pytest.raises(ConfigError) as caught:
        parse_tier_config("disk", _Config, settings)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_secrets_are_masked_in_foreign_texts() -> None:
    """A text of a client library loses every secret, nested ones, bytes and URL forms too."""

    class _Account(TierConfig):
        keys: tuple[SecretBytes, ...]
        url_password: Secret[str]

    class _Deep(TierConfig):
        token: SecretStr
        account: _Account
        empty: SecretStr = SecretStr("")

    config = _Deep(
        token=SecretStr("abc"),
        account=_Account(keys=(SecretBytes(b"abcdef"),), url_password=Secret("p/w d")),
    )
    text = config.hide_secrets("abcdef, abc; http://me:p%2Fw%20d@host p/w d xyz")
    mask = "**********"
    assert text == f"{mask}, {mask}; http://me:{mask}@host {mask} xyz"


def test_secrets_are_in_no_repr_or_dump() -> None:
    """A config can be logged (CONF-2)."""
    config = parse_tier_config("disk", _Config, {"root": "/x", "token": "hunter2"})
    assert config.token.get_secret_value() == "hunter2"
    for text in (repr(config), str(config), config.model_dump_json(), str(config.model_dump())):
        assert "hunter2" not in text


def test_a_config_is_frozen() -> None:
    """Settings do not change while a tier runs."""
    config = parse_tier_config("disk", _Config, {"root": "/x"})
    with pytest.raises(ValidationError, match="frozen"):
        config.root = "/y"


def test_settings_are_copied() -> None:
    """Changing the mapping afterwards changes nothing."""
    settings = {"root": "/x"}
    config = parse_tier_config("disk", _Config, settings)
    settings["root"] = "/y"
    assert config.root == "/x"


def test_a_config_survives_pickling() -> None:
    """Worker processes get the same settings."""
    config = parse_tier_config("disk", _Config, {"root": "/x", "token": "hunter2"})
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - our own bytes
