"""Options of ``kv-core object``: what stands on the command line, and in a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.cli import main
from kv_core.errors import ConfigError
from kv_tier_fsspec._cli._options import config_of

if TYPE_CHECKING:
    from pathlib import Path

URL = "s3://bucket/prefix"
SECRET = "not-to-be-repeated"


def options_of(options: list[str], file: Path | None = None) -> dict[str, Any]:
    """Return the options that come out."""
    return config_of(URL, options, file).storage_options.get_secret_value()


def test_values_are_text_unless_they_are_json() -> None:
    """Numbers, truth values and lists are what JSON says; everything else stays as it is."""
    found = options_of(["port=22", "anon=true", "name=kv", "hosts=[1, 2]", "empty="])
    assert found == {"port": 22, "anon": True, "name": "kv", "hosts": [1, 2], "empty": ""}


def test_a_password_of_digits_is_text() -> None:
    """As a number it would be refused by the client, and not be masked in messages."""
    found = options_of(["password=123456", "account_key=42", "auth_timeout=10"])
    assert found == {"password": "123456", "account_key": "42", "auth_timeout": 10}
    found = options_of(['password="123"', 'token={"a": 1}', "key=null"])
    assert found == {"password": "123", "token": {"a": 1}, "key": None}


def test_only_the_first_equals_sign_divides() -> None:
    """Keys in base 64 end with some."""
    assert options_of(["account_key=YWJj=="]) == {"account_key": "YWJj=="}


def test_dots_make_groups() -> None:
    """As client libraries have them."""
    found = options_of(["client_kwargs.verify=false", "client_kwargs.region_name=eu-west-1"])
    assert found == {"client_kwargs": {"verify": False, "region_name": "eu-west-1"}}


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    """What stands in both is that of the command line."""
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"key": "file", "secret": SECRET}))
    assert options_of(["key=line"], file) == {"key": "line", "secret": SECRET}


@pytest.mark.parametrize("option", [f"{SECRET}", f"={SECRET}", f"a..b={SECRET}"])
def test_what_is_no_option_is_told(option: str) -> None:
    """By what was expected."""
    with pytest.raises(ConfigError, match="expected key=value"):
        options_of([option])


def test_a_value_is_no_group() -> None:
    """Two options that contradict each other are told, without their values."""
    with pytest.raises(ConfigError, match="'a' has a value already") as caught:
        options_of([f"a={SECRET}", "a.b=1"])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("content", [f"secret: {SECRET}", f'["{SECRET}"]'])
def test_a_file_that_holds_no_options_is_told(tmp_path: Path, content: str) -> None:
    """By its name, and without what it holds."""
    file = tmp_path / "options.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"options\.json") as caught:
        options_of([], file)
    assert SECRET not in str(caught.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        options_of([], tmp_path / "nowhere.json")


def test_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It ends with the tier: nobody else can look into it."""
    assert main(["object", "ls", "memory://blocks"]) == 2
    assert "ends with the tier that opened it" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rather than reported as one without blocks."""
    assert main(["object", "du", f"file://{tmp_path}/nothing"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_folder_without_blocks_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nothing to list, and nothing wrong; but a check that checks nothing is none."""
    (tmp_path / "something-else").mkdir()
    assert main(["object", "ls", f"file://{tmp_path}"]) == 0
    assert "holds no namespace" in capsys.readouterr().out
    assert main(["object", "fsck", f"file://{tmp_path}"]) == 2
    assert "holds no namespace; name the folder" in capsys.readouterr().err


def test_an_unknown_namespace_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the command that lists them."""
    assert main(["object", "fsck", f"file://{tmp_path}", "--namespace", "llama"]) == 2
    assert "'kv-core object ls' lists them" in capsys.readouterr().err
