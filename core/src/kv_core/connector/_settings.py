"""Everything that a user may write for the offloading engine, as one model.

``docs/configuration.md`` describes each setting: what it does, why its default is what it is, and
what happens when it is too small or too large.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, final

from pydantic import Field, PlainValidator, StrictBool, ValidationError, field_validator

from kv_core.cpu.policies import installed_policies
from kv_core.errors import ConfigError
from kv_core.plugins import TierSettings, parse_secondary_tiers
from kv_core.tiering import TieringConfig
from kv_core.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import ValidationInfo
    from pydantic_core import ErrorDetails

__all__ = ["OffloadingSettings"]

_LONGEST_SHOWN_VALUE: Final = 60
_LEAST_STORE_THRESHOLD: Final = 2


@final
class OffloadingSettings(TieringConfig):
    """The extra config of the connector, validated.

    Make one with :meth:`from_extra_config`, whose errors are written for users.
    """

    spec_name: str = Field(
        default="CPUOffloadingSpec",
        min_length=1,
        description=(
            "'CPUOffloadingSpec' (GPU and CPU), 'TieringOffloadingSpec' (and tiers below), or a "
            "class in 'spec_module_path'."
        ),
    )
    spec_module_path: str | None = Field(
        default=None, min_length=1, description="Module of a spec that kv-core does not bring."
    )
    cpu_bytes_to_use: int = Field(
        ge=1, le=2**63 - 1, description="Size of the primary tier: bytes, or text such as '64GiB'."
    )
    block_size: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        description="Tokens of an offloaded block; or give 'blocks_per_chunk'.",
    )
    blocks_per_chunk: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        description="GPU blocks in an offloaded block, 1 when neither is given.",
    )
    offload_prompt_only: StrictBool = Field(
        default=True, description="Whether blocks of the output stay on the GPU."
    )
    eviction_policy: str = Field(
        default="lru",
        description="Eviction policy of the primary tier: lru, arc or an installed one.",
    )
    store_threshold: int = Field(
        default=0,
        strict=True,
        ge=0,
        description="From 2 on: requests that must offer a block before it is stored.",
    )
    max_tracker_size: int = Field(
        default=64_000,
        strict=True,
        ge=1,
        description="Blocks whose offers 'store_threshold' keeps count of.",
    )
    epoch_run: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Name of the run whose weight updates the epochs count; by default each start of an "
            "engine is a run of its own."
        ),
    )
    shm_dir: Path = Field(
        default=Path("/dev/shm"),  # noqa: S108 - memory is meant to be shared here
        description="Folder on a memory file system, where the primary tier lives.",
    )
    # Left out of dumps: the settings of tiers may hold secrets.
    secondary_tiers: Annotated[tuple[TierSettings, ...], PlainValidator(parse_secondary_tiers)] = (
        Field(
            default=(),
            exclude=True,
            description="Tiers below, in lookup order; each with a 'type' and settings of its own.",
        )
    )

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> OffloadingSettings:
        """Validate what a user wrote.

        Raises:
            ConfigError: Settings are missing, unknown or invalid. All of them are named at once
                (see :attr:`ConfigError.problems`); values of tiers are not repeated.
        """
        problems = _contradictions(extra_config)
        settings = None
        try:
            settings = cls.model_validate(dict(extra_config))
        except ValidationError as error:
            for details in error.errors(include_url=False):
                problems.extend(_problems(details))
        if settings is None or problems:
            raise ConfigError.joined(problems)
        return settings

    @property
    def reuse_filter(self) -> tuple[int, int] | None:
        """Threshold and tracker size of the reuse filter, or ``None`` without one."""
        if self.store_threshold < _LEAST_STORE_THRESHOLD:
            return None
        return self.store_threshold, self.max_tracker_size

    def require_two_levels(self) -> None:
        """Refuse secondary tiers, for a spec that has none.

        Raises:
            ConfigError: There are some.
        """
        if self.secondary_tiers:
            raise ConfigError(
                '\'secondary_tiers\' needs "spec_name": "TieringOffloadingSpec"; '
                "CPUOffloadingSpec has two levels only",
                setting="secondary_tiers",
            )

    @field_validator("cpu_bytes_to_use", "max_inflight_store_bytes", mode="before")
    @classmethod
    def _read_size(cls, value: Any, info: ValidationInfo) -> int:
        return parse_bytes(value, setting=str(info.field_name))

    @field_validator("shm_dir")
    @classmethod
    def _check_folder(cls, folder: Path) -> Path:
        try:
            usable = b"\0" not in os.fsencode(folder)
        except UnicodeEncodeError:
            usable = False
        if not usable:
            raise ConfigError(
                f"'shm_dir': {str(folder)!r} is no path that an operating system can have; give "
                "a folder on a memory file system, such as '/dev/shm'",
                setting="shm_dir",
            )
        return folder

    @field_validator("eviction_policy")
    @classmethod
    def _find_policy(cls, name: str) -> str:
        known = installed_policies()
        if name not in known:
            raise ConfigError(
                f"'eviction_policy': unknown eviction policy {name!r}"
                f"{_suggestion(name, known)}; known are {', '.join(known)}",
                setting="eviction_policy",
            )
        return name


def _contradictions(extra_config: Mapping[str, Any]) -> list[ConfigError]:
    """Find what no single setting shows; here, so that it shows together with everything else."""
    given = [extra_config.get(name) for name in ("block_size", "blocks_per_chunk")]
    if None in given:
        return []
    return [
        ConfigError(
            "'block_size' and 'blocks_per_chunk' say the same thing in two ways; set one",
            setting="block_size",
        )
    ]


def _problems(details: ErrorDetails) -> tuple[ConfigError, ...]:
    """Translate one finding of pydantic."""
    original = details.get("ctx", {}).get("error")
    if isinstance(original, ConfigError):
        return original.problems
    setting = ".".join(str(part) for part in details["loc"])
    return (ConfigError(_explain(setting, details), setting=setting),)


def _explain(setting: str, details: ErrorDetails) -> str:
    if details["type"] == "missing":
        # The only one without a default.
        return (
            f"{setting!r} is missing: set it to the bytes of CPU memory that the KV cache may "
            "use, for example '64GiB'"
        )
    if details["type"] in ("extra_forbidden", "invalid_key"):
        # The value is not shown: it may be a secret that belongs into the entry of a tier.
        known = sorted(OffloadingSettings.model_fields)
        hint = _suggestion(setting, known)
        return f"{setting!r} is not a setting" + (
            hint
            or f"; known are {', '.join(known)}. Settings of a tier stand in its entry of "
            "'secondary_tiers'"
        )
    expected = details["msg"][:1].lower() + details["msg"][1:]
    shown = repr(details["input"])
    if len(shown) > _LONGEST_SHOWN_VALUE:
        shown = f"{shown[:_LONGEST_SHOWN_VALUE]}..."
    return f"{setting!r}: {expected}, found {shown}"


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
