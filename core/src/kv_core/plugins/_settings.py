"""The list of secondary tiers, as users write it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from kv_core.errors import ConfigError

__all__ = ["RESERVED_KEYS", "TierSettings", "parse_secondary_tiers"]

_MODES: Final = {"read_write": False, "read_only": True}

RESERVED_KEYS: Final = frozenset({"fill_on_promotion", "mode", "name", "type"})
"""Keys of an entry that belong to the engine; no tier can have a setting of that name."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

# Events and statistics name the media of the engine itself in the same place as tiers.
_MEDIA: Final = frozenset({"cpu", "gpu"})


@dataclass(frozen=True, slots=True)
class TierSettings:
    """One entry of ``secondary_tiers``, split into what the engine and what the tier reads.

    Attributes:
        type: Type of the tier.
        name: Name of this instance, unique among its neighbours; default the type.
        read_only: Whether blocks are only loaded from the tier (``mode: read_only``).
        fill_on_promotion: Whether a block that a tier further down provides is stored here too.
        settings: All other keys, not validated yet. May hold secrets, hence not in the repr.
    """

    type: str
    name: str
    read_only: bool = False
    fill_on_promotion: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)


def parse_secondary_tiers(entries: object) -> tuple[TierSettings, ...]:
    """Read the value of ``secondary_tiers``.

    The order is kept: lookups ask the tiers from first to last.

    Args:
        entries: A list of mappings with the keys ``type``, optionally ``name``, ``mode`` and
            ``fill_on_promotion``, and the settings of the tier. ``None`` and an empty list mean
            no secondary tier.

    Raises:
        ConfigError: The list or an entry has another form, or two entries have one name. All
            faults are named at once.
    """
    if entries is None:
        return ()
    if isinstance(entries, (str, bytes)) or not isinstance(entries, Sequence):
        raise ConfigError(
            "'secondary_tiers' must be a list with one mapping for each tier, for example "
            f'[{{"type": "fs", "root": "..."}}], found a value of type {type(entries).__name__}',
            setting="secondary_tiers",
        )
    parsed: dict[str, TierSettings] = {}
    problems: list[ConfigError] = []
    for index, entry in enumerate(entries):
        try:
            tier = _parse_entry(entry, f"secondary_tiers[{index}]")
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        if tier.name in parsed:
            problem = ConfigError(
                f"two secondary tiers are named {tier.name!r}. The name defaults to the type; "
                "give each tier of one type a 'name' of its own",
                setting=f"secondary_tiers[{index}].name",
            )
            problems.append(problem)
        parsed[tier.name] = tier
    if problems:
        raise ConfigError.joined(problems)
    return tuple(parsed.values())


def _parse_entry(entry: object, where: str) -> TierSettings:
    # Values are never repeated in a message: the entry may hold secrets.
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"'{where}' must be a mapping with the key 'type' and the settings of the tier, "
            f"found a value of type {type(entry).__name__}",
            setting=where,
        )
    problems: list[ConfigError] = []
    if "type" not in entry:
        problem = ConfigError(
            f"'{where}.type' is missing; set it to the type of an installed tier ('kv-core tiers' "
            "lists them)",
            setting=f"{where}.type",
        )
        problems.append(problem)
    if not all(isinstance(key, str) for key in entry):
        problems.append(ConfigError(f"'{where}' has a key that is no string", setting=where))
    read: dict[str, Any] = {}
    for key, reader in _READERS.items():
        if key in entry:
            try:
                read[key] = reader(entry[key], f"{where}.{key}")
            except ConfigError as error:
                problems.append(error)
    name = read.get("name", read.get("type", ""))
    if name.lower() in _MEDIA:
        problem = ConfigError(
            f"'{where}.name' must not be {name!r}, which names a medium of the engine itself",
            setting=f"{where}.name",
        )
        problems.append(problem)
    if problems:
        raise ConfigError.joined(problems)
    return TierSettings(
        type=read["type"],
        name=name,
        read_only=read.get("mode", False),
        fill_on_promotion=read.get("fill_on_promotion", False),
        settings=MappingProxyType(
            {key: value for key, value in entry.items() if key not in RESERVED_KEYS}
        ),
    )


def _word(value: object, setting: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(
            f"{setting!r} must be a word of letters, digits, '_', '.' and '-' that starts with a "
            f"letter or digit, found {_shown(value)}",
            setting=setting,
        )
    return value


def _is_read_only(value: object, setting: str) -> bool:
    if not isinstance(value, str) or value not in _MODES:
        raise ConfigError(
            f"{setting!r} must be 'read_write' or 'read_only', found {_shown(value)}",
            setting=setting,
        )
    return _MODES[value]


def _flag(value: object, setting: str) -> bool:
    # Command lines write words.
    words = {"true": True, "false": False}
    answer = words.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(answer, bool):
        raise ConfigError(
            f"{setting!r} must be true or false, found {_shown(value)}", setting=setting
        )
    return answer


def _shown(value: object) -> str:
    """Show a word or number; of anything else the type only, for what it holds is unknown."""
    if isinstance(value, (str, int, float)):
        return repr(value)
    return f"a value of type {type(value).__name__}"


_READERS: Final[dict[str, Callable[[object, str], object]]] = {
    "type": _word,
    "name": _word,
    "mode": _is_read_only,
    "fill_on_promotion": _flag,
}
"""How the keys of the engine are read, by key."""
