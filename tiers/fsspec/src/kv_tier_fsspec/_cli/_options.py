"""Makes the options of a filesystem of what stands on the command line, and in a file."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from kv_core.contract import parse_tier_config
from kv_core.errors import ConfigError
from kv_tier_fsspec._config import FsspecConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["config_of"]

# No engine waits: a large block may take its time on a slow line.
_PATIENCE_S: Final = 600.0
# A password of digits is text to clients, and masked only as such.
_SECRET: Final = re.compile(r"(?:.*_)?(?:key|secret|token|password|passphrase|pwd)")


def config_of(url: str, options: Sequence[str], options_file: Path | None) -> FsspecConfig:
    """Return the settings for a URL.

    Args:
        url: The URL.
        options: ``key=value`` each; values that are JSON are read as such, but a password of digits
            stays text; dots in a key go into groups: ``client_kwargs.verify=false``.
        options_file: A file with the options as one JSON object; those of ``options`` win.

    Raises:
        ConfigError: Something of it cannot be used. Values are never repeated.
    """
    merged: dict[str, Any] = {} if options_file is None else _read_file(options_file)
    for option in options:
        key, is_pair, value = option.partition("=")
        path = key.split(".")
        if not is_pair or not all(path):
            raise ConfigError(
                f"--option {key!r} is no option; expected key=value", setting="--option"
            )
        group = merged
        for part in path[:-1]:
            group = group.setdefault(part, {})
            if not isinstance(group, dict):
                raise ConfigError(
                    f"--option {key!r}: {part!r} has a value already, and is no group",
                    setting="--option",
                )
        read = _value(value)
        is_digits = isinstance(read, (int, float)) and _SECRET.fullmatch(path[-1])
        group[path[-1]] = value if is_digits else read
    settings = {"url": url, "storage_options": merged, "job_deadline_s": _PATIENCE_S}
    return parse_tier_config("object", FsspecConfig, settings)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--options: {path} cannot be read ({error})", setting="--options"
        ) from error
    except ValueError as error:
        # Without the text, which holds secrets.
        raise ConfigError(f"--options: {path} is no JSON", setting="--options") from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"--options: {path} holds no JSON object; expected the 'storage_options' of a tier",
            setting="--options",
        )
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
