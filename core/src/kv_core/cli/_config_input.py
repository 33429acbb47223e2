"""Finds the settings of the offloading engine in what an operator has at hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kv_core.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from kv_core.connector import Advice

__all__ = ["ConfigInput", "read_config_input"]

_STDIN: Final = "-"
_EXTRA: Final = "kv_connector_extra_config"
_CONNECTOR: Final = "OffloadingConnector"
_MULTI: Final = "MultiConnector"
_ROLE: Final = "kv_both"
# Our engine behind vLLM's spec, and what vLLM's connector and the model's identity read beside it.
_VLLM_SPEC: Final = "KVCoreOffloadingSpec"
_READ_ELSEWHERE: Final = frozenset({"model_id", "self_describing_kv_events"})
_MARKS_OF_JSON: Final = frozenset('{"\n')


@dataclass(frozen=True, slots=True)
class ConfigInput:
    """The settings, and what is odd about what they stand in.

    Attributes:
        settings: What belongs to the offloading engine, not validated yet.
        errors: What keeps settings from being seen.
        warnings: What the inference engine may not like.
    """

    settings: Mapping[str, Any]
    errors: tuple[ConfigError, ...] = ()
    warnings: tuple[Advice, ...] = ()


def read_config_input(source: str) -> ConfigInput:
    """Read a configuration.

    Args:
        source: A file with JSON or TOML, ``-`` for the same on stdin, or a JSON object itself. It
            holds the settings, or a vLLM ``KVTransferConfig`` around them.

    Raises:
        ConfigError: It is neither JSON nor TOML, or has no settings. The text is not repeated.
        OSError: The file cannot be read.
    """
    document = _parse(_text(source), "the argument" if _is_json(source) else source)
    if any(key.startswith("kv_") for key in document):
        return _from_transfer_config(document, "")
    return ConfigInput(_as_our_engine_reads(document))


def _as_our_engine_reads(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of our engine from those of its door in vLLM, or any others unchanged."""
    if settings.get("spec_name") != _VLLM_SPEC:
        return settings
    ours = {name: value for name, value in settings.items() if name not in _READ_ELSEWHERE}
    has_tiers = bool(settings.get("secondary_tiers"))
    return {**ours, "spec_name": "TieringOffloadingSpec" if has_tiers else "CPUOffloadingSpec"}


def _is_json(text: str) -> bool:
    return text.lstrip().startswith("{")


def _text(source: str) -> str:
    if _is_json(source):
        return source
    data = sys.stdin.buffer.read() if source == _STDIN else _read_file(source)
    try:
        # Editors on Windows put a mark first, which is no part of either format.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(source, f"byte {error.start} is not UTF-8") from None


def _read_file(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not _MARKS_OF_JSON.intersection(name):
            raise
        # Text whose quoting went wrong on its way here. It may hold secrets.
        raise _unreadable(
            "the argument", "it is no file, and does not begin with '{' like a JSON object"
        ) from None


def _parse(text: str, source: str) -> dict[str, Any]:
    """Parse by content: TOML cannot begin with a brace, and a JSON object has to."""
    try:
        return _parse_object(text, source)
    except RecursionError:
        raise _unreadable(source, "it is nested too deeply") from None


def _parse_object(text: str, source: str) -> dict[str, Any]:
    if _is_json(text):
        try:
            document: dict[str, Any] = json.loads(text, object_pairs_hook=_without_repetitions)
        except ConfigError:
            raise
        except ValueError as error:
            # Also of a number with thousands of digits, which is no error of the syntax.
            raise _unreadable(source, f"it begins like JSON, but {error}") from None
        return document
    if not text.strip():
        raise _unreadable(source, "it is empty")
    if text.lstrip().startswith(("[", '"')) and _is_other_json(text):
        raise _unreadable(source, "it is JSON, but no object")
    try:
        document = tomllib.loads(text)
    except ValueError as error:
        raise _unreadable(
            source, f"it does not begin with '{{' like a JSON object and is no TOML: {error}"
        ) from None
    return document


def _is_other_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _without_repetitions(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{key!r} is given twice in one JSON object; remove one", setting=key)
        found[key] = value
    return found


def _unreadable(source: str, problem: str) -> ConfigError:
    shown = "stdin" if source == _STDIN else source
    return ConfigError(
        f"{shown} cannot be read as a configuration: {problem}. Expected the settings, or a vLLM "
        "KVTransferConfig around them, as a JSON object or as TOML",
        setting=shown,
    )


def _from_transfer_config(transfer: Mapping[str, Any], where: str) -> ConfigInput:
    from kv_core.connector import Advice, OffloadingSettings

    connector = transfer.get("kv_connector")
    extra = transfer.get(_EXTRA, {})
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"'{where}{_EXTRA}' must be an object with the settings, found a value of type "
            f"{type(extra).__name__}",
            setting=f"{where}{_EXTRA}",
        )
    if connector == _MULTI:
        return _from_multi_connector(extra, f"{where}{_EXTRA}.connectors")
    # Only here because someone took them for fields of the engine: they would be ignored there.
    stray = [name for name in transfer if name in OffloadingSettings.model_fields]
    errors = [
        ConfigError(
            f"'{where}{name}' stands beside '{_EXTRA}', where nobody reads it; move it inside",
            setting=f"{where}{name}",
        )
        for name in stray
    ]
    warnings = []
    if connector != _CONNECTOR:
        found = "is missing" if connector is None else f"is {connector!r}"
        warnings.append(
            Advice(
                f"{where}kv_connector",
                f"'{where}kv_connector' {found}; the settings are checked as those of "
                f"{_CONNECTOR!r}",
            )
        )
    role = transfer.get("kv_role")
    if role != _ROLE:
        found = "is missing" if role is None else f"is {role!r}"
        warnings.append(
            Advice(
                f"{where}kv_role",
                f"'{where}kv_role' {found}; blocks are stored and loaded by one engine, which is "
                f"{_ROLE!r}",
            )
        )
    return ConfigInput(_as_our_engine_reads(extra), tuple(errors), tuple(warnings))


def _from_multi_connector(extra: Mapping[str, Any], where: str) -> ConfigInput:
    children = extra.get("connectors")
    indices = [
        index
        for index, child in enumerate(children if isinstance(children, list) else ())
        if isinstance(child, Mapping) and child.get("kv_connector") == _CONNECTOR
    ]
    if len(indices) != 1 or not isinstance(children, list):
        raise ConfigError(
            f"'{where}' of {_MULTI!r} has {len(indices)} entries with \"kv_connector\": "
            f'"{_CONNECTOR}"; expected one. Give the settings of the one to check',
            setting=where,
        )
    return _from_transfer_config(children[indices[0]], f"{where}[{indices[0]}].")
