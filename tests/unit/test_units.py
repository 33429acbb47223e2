"""Tests of sizes as people write them."""

from __future__ import annotations

import contextlib
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import ConfigError
from kv_core.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        (" 64MiB ", 64 * 1024**2),
        ("64 MiB", 64 * 1024**2),
        ("1KiB", 1024),
        ("2GiB", 2 * 1024**3),
        ("3TiB", 3 * 1024**4),
        ("1kB", 1000),
        ("1KB", 1000),
        ("5MB", 5_000_000),
        ("50GB", 50_000_000_000),
        ("1TB", 1_000_000_000_000),
        ("1.5GiB", 3 * 512 * 1024**2),
        ("0.5kB", 500),
        ("0.001kB", 1),
        ("007", 7),
    ],
)
def test_accepts_sizes(value: str | int, expected: int) -> None:
    """Binary units are powers of 1024, decimal ones powers of 1000."""
    assert parse_bytes(value) == expected


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (0, "must be positive"),
        (-5, "must be positive"),
        ("0", "must be positive"),
        ("0GiB", "must be positive"),
        ("-1MiB", "must be positive"),
        ("1.0001kB", r"is 1000\.1 bytes, which is no whole number"),
        ("0.5", r"is 0\.5 bytes, which is no whole number"),
        ("64mib", r"has the unknown unit 'mib' \(did you mean 'MiB'\?\)"),
        ("64Mb", r"has the unknown unit 'Mb' \(did you mean 'MB'\?\)"),
        ("64M", r"has the unknown unit 'M' \(did you mean 'MiB' or 'MB'\?\)"),
        ("64k", r"has the unknown unit 'k' \(did you mean 'KiB' or 'KB'\?\)"),
        ("64PiB", r"has the unknown unit 'PiB'"),
        ("", "is no size"),
        ("MiB", "is no size"),
        ("1e9", "is no size"),
        ("1,000", "is no size"),
        ("1_000", "is no size"),
        ("64  MiB", "is no size"),
        ("+64", "is no size"),
        ("0x40", "is no size"),
        ("٤٠٩٦", "is no size"),
        (".5GiB", "is no size"),
        ("1.GiB", "is no size"),
        ("9" * 5000, "is no size"),
        (1.5, "is no size"),
        (True, "is no size"),
        (None, "is no size"),
        ([], "is no size"),
    ],
)
def test_refuses_what_is_no_size(value: Any, problem: str) -> None:
    """The error names the setting, what was found and what is accepted."""
    message = (
        rf"^cpu\.size: .* {problem}; expected a whole number of bytes, or a number with B, KiB"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        parse_bytes(value, setting="cpu.size")
    assert caught.value.setting == "cpu.size"
    assert len(str(caught.value)) < 300


@given(text=st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    """No text raises anything else."""
    with contextlib.suppress(ConfigError):
        assert parse_bytes(text) > 0


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (1025, "1.00 KiB"),
        (1024**2 - 1, "1023.99 KiB"),
        (64 * 1024**2, "64 MiB"),
        (1_536_000_000, "1.43 GiB"),
        (3 * 1024**4, "3 TiB"),
        (5000 * 1024**4, "5000 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_formats_in_the_largest_unit(size_bytes: int, expected: str) -> None:
    """Whole numbers have no decimals, others are cut to two."""
    assert format_bytes(size_bytes) == expected


@given(number=st.integers(1, 1023), power=st.integers(0, 4))
def test_exact_sizes_read_back(number: int, power: int) -> None:
    """A size without decimals is read back as it was."""
    size_bytes = number * 1024**power
    assert parse_bytes(format_bytes(size_bytes)) == size_bytes


@given(size_bytes=st.integers(1, 2**60))
def test_shown_size_is_never_more_than_there_is(size_bytes: int) -> None:
    """The shown size is at most the real one, and less than one part in a hundred below it."""
    number, unit = format_bytes(size_bytes).split()
    shown = Fraction(number) * parse_bytes(f"1{unit}")
    assert shown <= size_bytes < shown * Fraction(101, 100)
