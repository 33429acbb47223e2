"""What a replay needs to know besides the trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kv_core.cpu import ROW_ALIGNMENT_BYTES, PrimaryGeometry
from kv_core.engine import KVCacheGroupConfig, OffloadingConfig
from kv_core.errors import ConfigError
from kv_core.keys import GroupGeometry, Namespace
from kv_core.simple import RankMemory, SimpleOffloadConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_core.workload._trace import Trace

__all__ = ["REPLAY_MODES", "ReplayConfig"]

REPLAY_MODES: Final = ("offloading", "simple-eager", "simple-lazy")
"""What is below the GPU pool: primary and secondary tiers, or the simple mode in its two forms."""

_LAYER_NAMES: Final = ("layers.0",)

# Settings of the engine that fields of the replay's own decide.
_DECIDED_BY_FIELDS: Final = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "cpu_bytes_to_use",
        "eviction_policy",
        "secondary_tiers",
        "shm_dir",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """Sizes and limits of one replay.

    The defaults run every trace that the project knows.

    Attributes:
        mode: One of :data:`REPLAY_MODES`. The simple modes have no tiers, one worker, and none of
            the engine's settings.
        cpu_bytes: Bytes of the primary tier, or of CPU memory in the simple modes.
        gpu_blocks: Blocks of the GPU pool; one is the null block.
        block_bytes: Bytes of one GPU block.
        block_size_factor: GPU blocks in one offloaded block.
        workers: Ranks, each with a GPU pool of that size and a page of every block. Several are
            processes of their own.
        policy: Eviction policy of the primary tier.
        secondary_tiers: Settings of the secondary tiers in lookup order; may be empty.
        max_seqs: Most requests that run or load at the same time; as many may wait.
        tokens_per_step: Most prompt tokens computed in one step, over all requests.
        decode_tokens_per_step: Output tokens that a running request gains per step. One step of
            the replay stands for one prefill-sized step of an engine, during which a decoding
            request gains several tokens.
        max_output_tokens: Longest output; longer ones of the trace are cut.
        stall_deadline_s: Seconds without any progress after which the replay gives up; also those
            that a worker process may take for one step.
        shm_dir: Folder of the shared region.
        engine_options: Further settings for the offloading engine.

    Raises:
        ConfigError: A number is out of range, an engine option repeats a field, the mode is
            unknown, or a setting has no meaning in it.
    """

    mode: str = "offloading"
    cpu_bytes: int = 64 * 2**20
    gpu_blocks: int = 4096
    block_bytes: int = 4096
    block_size_factor: int = 1
    workers: int = 1
    policy: str = "lru"
    secondary_tiers: Sequence[Mapping[str, Any]] = ()
    max_seqs: int = 16
    tokens_per_step: int = 8192
    decode_tokens_per_step: int = 32
    max_output_tokens: int = 2048
    stall_deadline_s: float = 60.0
    shm_dir: str = "/dev/shm"  # noqa: S108 - the shared memory file system, not a temporary file
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in REPLAY_MODES:
            raise ConfigError(
                f"'mode' must be one of {', '.join(REPLAY_MODES)}; found {self.mode!r}",
                setting="mode",
            )
        for name, least in (
            ("cpu_bytes", 1),
            ("gpu_blocks", 2),
            ("block_bytes", 1),
            ("block_size_factor", 1),
            ("workers", 1),
            ("max_seqs", 1),
            ("tokens_per_step", 1),
            ("decode_tokens_per_step", 1),
            ("max_output_tokens", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name!r} must be at least {least}, found {value}", setting=name)
        if not self.stall_deadline_s > 0:
            raise ConfigError(
                f"'stall_deadline_s' must be positive, found {self.stall_deadline_s}",
                setting="stall_deadline_s",
            )
        repeated = sorted(_DECIDED_BY_FIELDS.intersection(self.engine_options))
        if repeated:
            raise ConfigError(
                f"'engine_options' must not set {', '.join(repeated)}: a field of the replay's "
                "config does",
                setting=f"engine_options.{repeated[0]}",
            )
        if self.is_simple:
            self._check_simple_mode()
        elif self.cpu_bytes < self.row_bytes:
            raise ConfigError(
                f"'cpu_bytes' is {self.cpu_bytes}, but one offloaded block takes {self.row_bytes} "
                f"bytes of the primary tier (blocks are rounded up to {ROW_ALIGNMENT_BYTES}); give "
                "it room for at least one",
                setting="cpu_bytes",
            )

    def _check_simple_mode(self) -> None:
        """Refuse what the simple mode would have to ignore."""
        for name, only, reason in (
            ("secondary_tiers", (), "has no tiers"),
            ("block_size_factor", 1, "stores each GPU block by itself"),
            ("workers", 1, "is replayed with a single worker"),
            ("policy", "lru", "evicts what was used least recently"),
            ("engine_options", {}, "has no settings of the tiering engine"),
        ):
            value = getattr(self, name)
            if value != only and (value or only):
                raise ConfigError(
                    f"{name!r} is {value!r}, but mode {self.mode!r} {reason}. Leave it out, or use "
                    "mode 'offloading'",
                    setting=name,
                )
        if self.cpu_bytes < self.block_bytes:
            raise ConfigError(
                f"'cpu_bytes' is {self.cpu_bytes}, but one block takes {self.block_bytes} bytes of "
                "CPU memory; give it room for at least one",
                setting="cpu_bytes",
            )

    @property
    def is_simple(self) -> bool:
        """Whether the mode is a simple one."""
        return self.mode != "offloading"

    def simple_config(self, tokens_per_block: int) -> SimpleOffloadConfig:
        """Describe the replay to the simple mode.

        Args:
            tokens_per_block: Tokens of one block of the trace.
        """
        group = KVCacheGroupConfig(tokens_per_block=tokens_per_block, layer_names=_LAYER_NAMES)
        return SimpleOffloadConfig(
            groups=(group,),
            tokens_per_hash=tokens_per_block,
            gpu_blocks=self.gpu_blocks,
            ranks=(RankMemory(self.gpu_blocks * self.block_bytes, self.cpu_bytes),),
            max_batched_tokens=self.tokens_per_step,
            lazy=self.mode == "simple-lazy",
        )

    @property
    def row_bytes(self) -> int:
        """Bytes that one offloaded block takes in the primary tier."""
        page_bytes = self.block_bytes * self.block_size_factor
        return PrimaryGeometry.stride_of(page_bytes, self.workers)

    def offloading_config(self, trace: Trace, engine_id: str) -> OffloadingConfig:
        """Describe the replay to the offloading engine.

        Args:
            trace: Gives the tokens of a block.
            engine_id: Unique name of this replay on this host.
        """
        extra: dict[str, Any] = {
            "cpu_bytes_to_use": self.cpu_bytes,
            "eviction_policy": self.policy,
            "blocks_per_chunk": self.block_size_factor,
            "secondary_tiers": list(self.secondary_tiers),
            "shm_dir": self.shm_dir,
            **self.engine_options,
        }
        namespace = Namespace(
            model=f"replay/{trace.format}",
            model_fingerprint="replay-content-1",
            revision="local",
            dtype="int8",
            kv_layout="replay-flat",
            groups=(
                GroupGeometry(
                    tokens_per_block=trace.block_tokens * self.block_size_factor,
                    bytes_per_block=self.block_bytes * self.block_size_factor,
                    num_layers=len(_LAYER_NAMES),
                ),
            ),
            block_bytes=self.row_bytes,
            tokens_per_hash=trace.block_tokens,
            block_size_factor=self.block_size_factor,
            tensor_parallel_size=self.workers,
            hash_algorithm="trace-chain",
            hash_seed="0",
        )
        return OffloadingConfig(
            groups=(
                KVCacheGroupConfig(tokens_per_block=trace.block_tokens, layer_names=_LAYER_NAMES),
            ),
            worker_block_bytes=self.block_bytes,
            tokens_per_cache_block=trace.block_tokens,
            namespace=namespace,
            engine_id=engine_id,
            num_workers=self.workers,
            tensor_parallel_size=self.workers,
            extra_config=extra,
        )
