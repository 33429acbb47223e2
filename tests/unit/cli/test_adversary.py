"""What a search for weak spots of ``kv-core check-config`` has found."""

from __future__ import annotations

import pytest

from kv_core.cli import main


@pytest.mark.parametrize(
    "text",
    [
        '{"a": ' + "[" * 100_000,
        '{"cpu_bytes_to_use": ' + "9" * 5000 + "}",
        '{"cpu_bytes_to_use": "1GiB", "shm_dir": "/dev/shm\\u0000x"}',
        '{"cpu_bytes_to_use": "1GiB", "shm_dir": "\\ud800"}',
        '{"cpu_bytes_to_use": 1' + "0" * 400 + "}",
    ],
)
def test_odd_configurations_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """Too deep, too many digits, no path: a message, not a traceback."""
    assert main(["check-config", text]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("text", ['\'{"password": "hunter2"}\'', '[{"password": "hunter2"}]'])
def test_text_that_is_taken_for_a_file_is_not_repeated(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """A slip of quoting must not bring the secrets of a configuration into a log."""
    assert main(["check-config", text]) == 2
    message = capsys.readouterr().err
    assert "hunter2" not in message
    assert "the argument cannot be read as a configuration" in message
