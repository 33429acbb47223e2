"""Known deviations: what an author knows to be wrong, why, and until when.

A clause that is listed still runs. The outcome of a run with deviations is at best ``partial``: the
file explains a failure, it does not excuse it.
"""

from __future__ import annotations

import datetime as dt
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kv_conformance.clauses import UnknownClauseError, clause_of
from kv_conformance.harness import HarnessError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Deviation", "read_deviations"]

_FIELDS: Final = frozenset({"clause", "reason", "issue", "expiry", "tier"})
_REQUIRED: Final = ("clause", "reason", "issue", "expiry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One clause that a tier is known to break.

    Attributes:
        clause: Id of the clause.
        reason: Why it is broken.
        issue: Where that is tracked.
        expiry: After this day the deviation no longer counts.
        tier: The tier, or ``None`` for every tier of the run.
    """

    clause: str
    reason: str
    issue: str
    expiry: dt.date
    tier: str | None = None


def read_deviations(path: Path, today: dt.date) -> list[Deviation]:
    """Read a file of deviations.

    Args:
        path: A TOML file with tables ``[[deviation]]``.
        today: To find expired ones.

    Raises:
        HarnessError: The file cannot be read, an entry is incomplete, has expired, is there
            twice, or names no clause of the contract.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise HarnessError(f"{path} cannot be read: {error}") from error
    entries = content.get("deviation")
    if set(content) != {"deviation"} or not isinstance(entries, list):
        raise HarnessError(
            f"{path} must hold [[deviation]] tables and nothing else, found {sorted(content)}"
        )
    found = [_parse(path, number, entry, today) for number, entry in enumerate(entries, start=1)]
    places = [(deviation.clause, deviation.tier) for deviation in found]
    for clause, tier in places:
        if places.count((clause, tier)) > 1 or (tier is not None and (clause, None) in places):
            raise HarnessError(
                f"{path}: {clause} is listed twice for {tier or 'every tier'}: keep one entry"
            )
    return found


def _parse(path: Path, number: int, entry: Any, today: dt.date) -> Deviation:
    where = f"{path}, deviation {number}"
    if not isinstance(entry, dict):
        raise HarnessError(f"{where}: must be a table [[deviation]], found {entry!r}")
    missing = [name for name in _REQUIRED if not entry.get(name)]
    unknown = sorted(set(entry) - _FIELDS)
    if missing or unknown:
        raise HarnessError(
            f"{where}: missing {missing}, unknown {unknown}. An entry has {sorted(_FIELDS)}, of "
            "which 'tier' may be left out"
        )
    if type(entry["expiry"]) is not dt.date:
        raise HarnessError(
            f"{where}: expiry must be a day such as 2030-01-31 without quotes, found "
            f"{entry['expiry']!r}"
        )
    if entry["expiry"] < today:
        raise HarnessError(
            f"{where}: expired on {entry['expiry']}. Repair {entry['clause']}, or look at its "
            "issue and set a new day"
        )
    try:
        clause = clause_of(str(entry["clause"]))
    except UnknownClauseError as error:
        raise HarnessError(f"{where}: {error}") from error
    return Deviation(
        clause=clause.id,
        reason=str(entry["reason"]),
        issue=str(entry["issue"]),
        expiry=entry["expiry"],
        tier=entry.get("tier"),
    )
