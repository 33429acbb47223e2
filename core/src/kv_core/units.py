"""Sizes as people write them: ``"64MiB"`` and back.

Units are written as in the table below, and only so: ``KiB``, ``MiB``, ``GiB`` and ``TiB`` are
powers of 1024, ``kB`` (or ``KB``), ``MB``, ``GB`` and ``TB`` powers of 1000, ``B`` and no unit
are bytes. Other spellings are refused with a hint, because ``Mb`` means bits elsewhere and a
bare ``M`` means 1000 to one tool and 1024 to the next.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from kv_core.errors import ConfigError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
    "kB": 1000,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
}
_BINARY: Final = ("TiB", "GiB", "MiB", "KiB")
_ACCEPTED: Final = (
    "a whole number of bytes, or a number with B, KiB, MiB, GiB, TiB, kB, MB, GB or TB"
)
# Bounded: no size has twenty digits, and int() refuses thousands with an error of its own.
_SIZE: Final = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z]*)")


def parse_bytes(value: str | int, *, setting: str = "size") -> int:
    """Return the number of bytes that a setting asks for.

    Args:
        value: An integer, or text such as ``"4096"``, ``"64MiB"``, ``"1.5 GB"``; one space may
            stand before the unit.
        setting: Dotted name of the setting, for the message.

    Raises:
        ConfigError: The value is no size, not positive, or no whole number of bytes.
    """
    if type(value) is int:
        if value <= 0:
            raise _refusal(setting, value, "must be positive")
        return value
    if not isinstance(value, str):
        raise _refusal(setting, value, "is no size")
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        negative = value.strip().startswith("-")
        raise _refusal(setting, value, "must be positive" if negative else "is no size")
    number, unit = match.groups()
    if unit not in _UNITS:
        raise _refusal(setting, value, f"has the unknown unit {unit!r}{_hint(unit)}")
    exact = Fraction(number) * _UNITS[unit]
    if exact <= 0:
        raise _refusal(setting, value, "must be positive")
    if exact.denominator != 1:
        raise _refusal(setting, value, f"is {float(exact):g} bytes, which is no whole number")
    return exact.numerator


def format_bytes(size_bytes: int) -> str:
    """Return a size for people, in the largest binary unit that it fills.

    A size that is a whole number of its unit is shown without decimals and reads back exactly;
    others are cut, not rounded, to two: ``"64 MiB"``, ``"1.43 GiB"``, ``"500 B"``.
    """
    if size_bytes < 0:
        return f"-{format_bytes(-size_bytes)}"
    for unit in _BINARY:
        whole, rest = divmod(size_bytes, _UNITS[unit])
        if whole:
            decimals = f".{rest * 100 // _UNITS[unit]:02}" if rest else ""
            return f"{whole}{decimals} {unit}"
    return f"{size_bytes} B"


def _hint(unit: str) -> str:
    for known in _UNITS:
        if known and known.lower() == unit.lower():
            return f" (did you mean {known!r}?)"
    if len(unit) == 1 and unit.upper() in "KMGT":
        return f" (did you mean '{unit.upper()}iB' or '{unit.upper()}B'?)"
    return ""


def _refusal(setting: str, value: object, problem: str) -> ConfigError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return ConfigError(
        f"{setting}: {shown} {problem}; expected {_ACCEPTED}, for example '64MiB'", setting=setting
    )
