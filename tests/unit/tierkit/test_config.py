"""Settings and error translation."""

from __future__ import annotations

import errno

import pytest
from typing_extensions import override

from kv_core.contract import JobErrorKind, parse_tier_config
from kv_core.errors import BlockDamagedError, ConfigError
from kv_core.tierkit import TierKitConfig
from kv_core.tierkit._errors import (
    Occasionally,
    describe_error,
    load_error_kind,
    store_error_kind,
    without_frames,
)
from kv_core.tierkit.testing import ManualClock


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("io_threads", 1),
        ("io_threads", 257),
        ("job_deadline_s", 0),
        ("job_deadline_s", float("inf")),
        ("lookup_deadline_s", float("nan")),
        ("lookup_deadline_s", -1),
        ("error_backoff_s", 0),
    ],
)
def test_settings_have_bounds(setting: str, value: float) -> None:
    """A value that cannot work is refused by name (CONF-1)."""
    with pytest.raises(ConfigError, match=f"'{setting}'"):
        parse_tier_config("mine", TierKitConfig, {setting: value})


def test_limits_carry_the_settings() -> None:
    """What the operator sets is what the engine acts on."""
    config = TierKitConfig(job_deadline_s=7, lookup_deadline_s=2, error_backoff_s=0.5)
    limits = config.limits(
        min_retained_blocks=9, staging_bytes=1, max_job_keys=64, min_free_bytes=7
    )
    assert (limits.job_deadline_s, limits.lookup_deadline_s, limits.error_backoff_s) == (7, 2, 0.5)
    assert (limits.min_retained_blocks, limits.staging_bytes, limits.max_job_keys) == (9, 1, 64)
    assert limits.min_free_bytes == 7


def test_a_full_backend_is_no_fault_of_a_load() -> None:
    """Only stores can be declined."""
    full = OSError(errno.ENOSPC, "No space left on device")
    assert store_error_kind(full) is JobErrorKind.DECLINED
    assert load_error_kind(full) is JobErrorKind.FAILED
    assert store_error_kind(BlockDamagedError("odd")) is JobErrorKind.FAILED


def test_a_description_is_one_short_line() -> None:
    """Messages fit a log line, whatever a library puts into its exceptions."""
    text = describe_error(ValueError("two\nlines " + "x" * 1000))
    assert text.startswith("ValueError: two lines xxx")
    assert text.endswith("...")
    assert len(text) < 320
    assert describe_error(KeyError()) == "KeyError"


def test_an_error_without_a_text_is_described_all_the_same() -> None:
    """The engine's thread describes errors: a text that cannot be made must not stop it."""

    class MuteError(Exception):
        @override
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert describe_error(MuteError()) == "MuteError: (an error without a readable text)"


def test_a_description_hides_secrets() -> None:
    """What must not be repeated is masked before the text is shortened (CONF-2)."""
    error = ValueError("x" * 290 + " hunter2")
    text = describe_error(error, lambda text: text.replace("hunter2", "***"))
    assert text.endswith("x ***")


def test_frames_are_dropped_along_the_chain() -> None:
    """No frame of a hook is kept alive by its exception, nor by what led to it."""
    try:
        try:
            int("first")
        except ValueError as cause:
            raise OSError("second") from cause
    except OSError as error:
        caught = without_frames(error)
    assert caught.__traceback__ is None
    assert caught.__cause__ is not None
    assert caught.__cause__.__traceback__ is None


def test_a_warning_is_due_occasionally() -> None:
    """A thousand equal warnings become one a minute."""
    clock = ManualClock()
    warning = Occasionally(clock, every_s=60)
    assert [warning.due(), warning.due()] == [True, False]
    clock.turn(60)
    assert warning.due()
