"""The list of known deviations: complete, alive, and about clauses that there are."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import pytest

from kv_conformance.harness import HarnessError
from kv_conformance.run._deviations import Deviation, read_deviations

if TYPE_CHECKING:
    from pathlib import Path

TODAY = dt.date(2030, 6, 15)

ENTRY = {
    "clause": '"LOOK-3"',
    "reason": '"the index is rebuilt in the background"',
    "issue": '"acme/tier#7"',
    "expiry": "2030-12-31",
}


def write(folder: Path, **changes: str | None) -> Path:
    """Write a file of one entry, with fields changed or left out."""
    fields = {**ENTRY, **changes}
    lines = [f"{name} = {value}" for name, value in fields.items() if value is not None]
    path = folder / "conformance-deviations.toml"
    path.write_text("\n".join(["[[deviation]]", *lines]) + "\n")
    return path


def refusal(path: Path) -> str:
    """Return why a file is refused."""
    with pytest.raises(HarnessError) as caught:
        read_deviations(path, TODAY)
    return str(caught.value)


def test_a_complete_entry(tmp_path: Path) -> None:
    """Every field arrives."""
    assert read_deviations(write(tmp_path), TODAY) == [
        Deviation(
            clause="LOOK-3",
            reason="the index is rebuilt in the background",
            issue="acme/tier#7",
            expiry=dt.date(2030, 12, 31),
        )
    ]


def test_an_entry_for_one_tier(tmp_path: Path) -> None:
    """An entry may be about one tier of several."""
    (found,) = read_deviations(write(tmp_path, tier='"acme"'), TODAY)
    assert found.tier == "acme"


def test_it_counts_on_its_last_day(tmp_path: Path) -> None:
    """The day of the expiry is included."""
    assert len(read_deviations(write(tmp_path, expiry=TODAY.isoformat()), TODAY)) == 1


def test_an_expired_entry(tmp_path: Path) -> None:
    """A deviation does not last for ever."""
    message = refusal(write(tmp_path, expiry="2030-06-14"))
    assert "expired on 2030-06-14" in message
    assert "LOOK-3" in message


def test_an_unknown_clause(tmp_path: Path) -> None:
    """An id that matches nothing is an error, with the nearest one."""
    message = refusal(write(tmp_path, clause='"LOOK-33"'))
    assert "no clause 'LOOK-33'" in message
    assert "Did you mean LOOK-3?" in message


@pytest.mark.parametrize("field", ["clause", "reason", "issue", "expiry"])
def test_a_missing_field(tmp_path: Path, field: str) -> None:
    """An entry says which clause, why, where it is tracked and until when."""
    assert f"missing ['{field}']" in refusal(write(tmp_path, **{field: None}))


def test_an_empty_reason(tmp_path: Path) -> None:
    """A reason of no words is none."""
    assert "missing ['reason']" in refusal(write(tmp_path, reason='""'))


def test_an_unknown_field(tmp_path: Path) -> None:
    """A misspelt field is not ignored."""
    assert "unknown ['skip']" in refusal(write(tmp_path, skip="true"))


@pytest.mark.parametrize("expiry", ['"2030-12-31"', "2030-12-31T00:00:00", "20301231"])
def test_an_expiry_that_is_no_day(tmp_path: Path, expiry: str) -> None:
    """The expiry is a day of TOML, so that it can be compared."""
    assert "expiry must be a day" in refusal(write(tmp_path, expiry=expiry))


def test_a_clause_twice(tmp_path: Path) -> None:
    """Two entries on one clause would hide each other."""
    path = write(tmp_path)
    path.write_text(path.read_text() * 2)
    assert "LOOK-3 is listed twice" in refusal(path)


@pytest.mark.parametrize(
    "text", ["deviation = 3", "deviation = [3]", "[other]", "not TOML", "", "[deviation]\na = 1"]
)
def test_other_content(tmp_path: Path, text: str) -> None:
    """A file that says something else is refused, and so is an empty one."""
    path = tmp_path / "deviations.toml"
    path.write_text(text)
    assert str(path) in refusal(path)


def test_a_missing_file(tmp_path: Path) -> None:
    """A file that was named must be there."""
    assert "cannot be read" in refusal(tmp_path / "none.toml")
