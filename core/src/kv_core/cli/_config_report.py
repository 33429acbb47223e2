"""Checks a whole configuration, as far as that goes without opening anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kv_core.cli._host_advice import HostFacts, host_advice
from kv_core.connector import (
    SPEC_FACTORY,
    Advice,
    OffloadingSettings,
    config_advice,
    effective_config,
    staging_bytes,
)
from kv_core.cpu import PrimaryGeometry
from kv_core.errors import ConfigError, KVCoreError
from kv_core.plugins import (
    check_tier,
    parse_secondary_tiers,
    require_block_size,
    require_space_limit,
)
from kv_core.tiering import EngineReset

if TYPE_CHECKING:
    from kv_core.cli._config_input import ConfigInput
    from kv_core.plugins import CheckedTier, TierRegistry, TierSettings

__all__ = ["ConfigReport", "ModelShape", "PrimarySize", "check"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What only the model and the inference engine know.

    Attributes:
        block_bytes: Bytes of one GPU block of one worker, all layers, or ``None``.
        tokens_per_block: Tokens in one GPU block, or ``None``.
        num_workers: Workers that share the primary tier.
    """

    block_bytes: int | None = None
    tokens_per_block: int | None = None
    num_workers: int = 1


@dataclass(frozen=True, slots=True)
class PrimarySize:
    """What fits into the primary tier.

    Attributes:
        num_blocks: Offloaded blocks.
        row_bytes: Bytes of one of them, all workers and padding.
        used_bytes: Bytes of all of them.
        lease_blocks: Blocks of the share for promotions and waiting requests.
        tokens: Tokens that fit, or ``None`` when the tokens of a block are not known.
    """

    num_blocks: int
    row_bytes: int
    used_bytes: int
    lease_blocks: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class ConfigReport:
    """Everything that the check found.

    Attributes:
        errors: Why an engine would refuse the configuration; empty if it would not.
        warnings: What is allowed and probably not meant.
        notes: What could not be computed, and what to keep in mind.
        effective: Every setting with its value in effect, without secrets; ``None`` when the
            settings have errors.
        tiers: The secondary tiers that could be checked.
        primary: Size of the primary tier, when it could be computed.
    """

    errors: tuple[KVCoreError, ...]
    warnings: tuple[Advice, ...]
    notes: tuple[Advice, ...]
    effective: Mapping[str, Any] | None
    tiers: tuple[CheckedTier, ...]
    primary: PrimarySize | None

    @property
    def staging_bytes(self) -> int:
        """Memory that the tiers take beside the primary tier at most."""
        return staging_bytes(self.tiers)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "errors": [
                {
                    "code": error.code,
                    "setting": getattr(error, "setting", None),
                    "message": error.message,
                }
                for error in self.errors
            ],
            "warnings": [asdict(advice) for advice in self.warnings],
            "notes": [asdict(advice) for advice in self.notes],
            "primary": None if self.primary is None else asdict(self.primary),
            "staging_bytes": self.staging_bytes,
            "config": self.effective,
            "tiers": [
                {
                    "name": tier.name,
                    "type": tier.spec.type,
                    "distribution": tier.origin,
                    "capabilities": sorted(c.value for c in tier.spec.capabilities),
                    "settings": tier.shown_settings(),
                    "limits": asdict(tier.limits),
                }
                for tier in self.tiers
            ],
        }


def check(found: ConfigInput, shape: ModelShape, registry: TierRegistry) -> ConfigReport:
    """Check a configuration.

    Tiers are imported and their settings validated; nothing is opened, created or connected to.

    Args:
        found: What the operator gave.
        shape: What is known of the model.
        registry: Where tiers are looked up.
    """
    errors: list[KVCoreError] = list(found.errors)
    settings = None
    try:
        settings = OffloadingSettings.from_extra_config(found.settings)
    except ConfigError as error:
        errors.extend(error.problems)
    tiers = []
    for entry in _readable_entries(found.settings.get("secondary_tiers")):
        try:
            tier = check_tier(
                entry.type, name=entry.name, settings=entry.settings, registry=registry
            )
        except KVCoreError as error:
            errors.append(error)
            continue
        tiers.append(tier)
        try:
            require_space_limit(tier, read_only=entry.read_only)
        except ConfigError as error:
            errors.append(error)
    if settings is None:
        return ConfigReport(tuple(errors), found.warnings, (), None, tuple(tiers), None)
    errors.extend(_spec_errors(settings))
    notes = list(_notes(settings))
    primary = None
    try:
        primary = _primary_size(settings, shape, notes)
    except ConfigError as error:
        errors.append(error)
    if primary is not None:
        errors.extend(_too_large(tiers, primary))
    # Without a geometry the budget stands for what the region takes, which is hardly less.
    needed_bytes = settings.cpu_bytes_to_use if primary is None else primary.used_bytes
    warnings = (
        *found.warnings,
        *host_advice(settings, tiers, needed_bytes, HostFacts.read(settings.shm_dir)),
        *config_advice(settings, tiers),
    )
    effective = effective_config(settings, tiers)
    return ConfigReport(tuple(errors), warnings, tuple(notes), effective, tuple(tiers), primary)


def _readable_entries(entries: object) -> list[TierSettings]:
    """Return the entries that can be read, each by itself: errors of one hide no other's."""
    if isinstance(entries, (str, bytes)) or not isinstance(entries, Sequence):
        return []
    readable: list[TierSettings] = []
    for entry in entries:
        try:
            readable.extend(parse_secondary_tiers([entry]))
        except ConfigError:
            # The settings as a whole have told of it.
            continue
    return readable


def _spec_errors(settings: OffloadingSettings) -> list[ConfigError]:
    registered = SPEC_FACTORY.registered()
    if settings.spec_name not in registered and settings.spec_module_path is None:
        return [
            ConfigError(
                f"unknown offloading spec {settings.spec_name!r} (known: {', '.join(registered)});"
                " set 'spec_module_path' for a spec of your own",
                setting="spec_name",
            )
        ]
    if settings.spec_name == "CPUOffloadingSpec":
        try:
            settings.require_two_levels()
        except ConfigError as error:
            return [error]
    return []


def _notes(settings: OffloadingSettings) -> list[Advice]:
    notes = []
    if settings.secondary_tiers and settings.engine_reset is EngineReset.CACHE:
        notes.append(
            Advice(
                "engine_reset",
                "'engine_reset' is 'cache': when the engine resets its prefix cache, the tiers "
                "keep their blocks. If weights change under the same model name while the engine "
                "runs, set it to 'epoch', or blocks of the old weights will be loaded",
            )
        )
    if settings.spec_name not in SPEC_FACTORY.registered():
        notes.append(
            Advice(
                "spec_name",
                f"{settings.spec_name!r} is not a spec of kv-core: it is not imported here and may "
                "read the settings differently",
            )
        )
    return notes


def _primary_size(
    settings: OffloadingSettings, shape: ModelShape, notes: list[Advice]
) -> PrimarySize | None:
    """Compute what fits, or note what is missing for that.

    Raises:
        ConfigError: Not even one block fits, or ``block_size`` does not fit the model.
    """
    factor = _block_size_factor(settings, shape)
    if shape.block_bytes is None:
        notes.append(
            Advice(
                "--block-bytes",
                "the blocks that fit cannot be computed without the model: give the bytes of one "
                "GPU block of one worker (all layers) with --block-bytes, and --workers and "
                "--tokens-per-block besides",
            )
        )
        return None
    if factor is None:
        notes.append(
            Advice(
                "--tokens-per-block",
                "'block_size' counts tokens, so the blocks that fit cannot be computed without "
                "the tokens in one GPU block: give them with --tokens-per-block",
            )
        )
        return None
    geometry = PrimaryGeometry.fit(
        budget_bytes=settings.cpu_bytes_to_use,
        num_workers=shape.num_workers,
        worker_page_bytes=shape.block_bytes * factor,
    )
    tokens = None
    if shape.tokens_per_block is None:
        notes.append(
            Advice(
                "--tokens-per-block",
                "the tokens that fit cannot be computed without the tokens in one GPU block: give "
                "them with --tokens-per-block",
            )
        )
    else:
        tokens = geometry.num_blocks * factor * shape.tokens_per_block
    return PrimarySize(
        num_blocks=geometry.num_blocks,
        row_bytes=geometry.row_stride,
        used_bytes=geometry.region_bytes,
        lease_blocks=settings.lease_blocks(geometry.num_blocks),
        tokens=tokens,
    )


def _block_size_factor(settings: OffloadingSettings, shape: ModelShape) -> int | None:
    if settings.block_size is None:
        return settings.blocks_per_chunk or 1
    if shape.tokens_per_block is None:
        return None
    factor, rest = divmod(settings.block_size, shape.tokens_per_block)
    if rest:
        raise ConfigError(
            f"'block_size' {settings.block_size} is not a multiple of the GPU block size "
            f"{shape.tokens_per_block} tokens",
            setting="block_size",
        )
    return factor


def _too_large(tiers: Sequence[CheckedTier], primary: PrimarySize) -> Iterator[ConfigError]:
    for tier in tiers:
        try:
            require_block_size(tier, primary.row_bytes)
        except ConfigError as error:
            yield error
