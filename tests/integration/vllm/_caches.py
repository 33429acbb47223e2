"""Configurations of vLLM's connector, and what an engine has moved with them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ._engine import Engine

__all__ = ["BLOCK_BYTES", "Cache", "Moved"]

# Keys and values of 32 tokens in the four layers of the tiny model, in float32.
BLOCK_BYTES: Final = 64 << 10
_STATS_PERIOD_S: Final = 0.3
_PATIENCE_S: Final = 60.0


@final
@dataclass(frozen=True, slots=True)
class Moved:
    """What was moved, from vLLM's metrics, in blocks of one engine block each.

    Attributes:
        stored: From the engine to the CPU tier.
        loaded: From the CPU tier to the engine.
        cascaded: From the CPU tier to the tier below.
        promoted: From the tier below to the CPU tier.
        tier_hits: Lookups that the tier below answered with yes.
        failed_stores: Jobs to the tier below that failed.
        failed_loads: Jobs from the tier below that failed.
        errors: Blocks that the tier below did not deliver because of an error.
        declined: Blocks that the tier below did not take.
        stalled: Jobs of the tier below that did not end in time.
        preemptions: Requests that lost their place in the engine.
    """

    stored: float
    loaded: float
    cascaded: float
    promoted: float
    tier_hits: float
    failed_stores: float
    failed_loads: float
    errors: float
    declined: float
    stalled: float
    preemptions: float

    def __sub__(self, earlier: Moved) -> Moved:
        """Return what was moved since."""
        return Moved(
            *(getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self))
        )


@final
@dataclass(frozen=True, slots=True)
class Cache:
    """A configuration of vLLM's connector: which of our doors, above which tier.

    Attributes:
        mode: ``tier``: vLLM's own manager above our tier; ``engine``: our manager, CPU tier and
            workers; ``vllm``: nothing of ours, which shows what the tests themselves are worth.
        tier: The type of the tier.
        folder: Where the tier and the test keep their files.
        options: vLLM's engine arguments that belong to it.
        settings: Settings of our tier; where its files are, if it has any, need not be said.
        is_lasting: Whether the tier finds after a restart what it has stored.
    """

    mode: str
    tier: str
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_lasting: bool = True

    @property
    def store(self) -> Path:
        """The folder of a tier that has one."""
        return self.folder / "store"

    @property
    def sabotage(self) -> Path:
        """The file that says what a worker that can be sabotaged does."""
        return self.folder / "sabotage"

    def connector(
        self,
        *,
        blocks: int,
        block_bytes: int = BLOCK_BYTES,
        store: Path | None = None,
        sabotaged: bool = False,
        tier_settings: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        """Return vLLM's ``KVTransferConfig``.

        Args:
            blocks: Capacity of the CPU tier.
            block_bytes: Bytes of all ranks in one block.
            store: Another folder for the tier's files.
            sabotaged: Whether the worker can be made to do its loads wrong.
            tier_settings: More settings of the tier.
            settings: More of ``kv_connector_extra_config``.
        """
        tier: dict[str, Any] = {"type": f"kv:{self.tier}" if self.mode == "tier" else self.tier}
        folder = store or self.store
        if self.tier == "fs":
            tier["root_dir"] = str(folder)
        elif self.tier == "fsspec":
            tier["url"] = folder.as_uri()
        if self.mode != "vllm":
            if self.tier in {"fs", "fsspec"}:
                tier["min_free_bytes"] = "1MiB"
            tier |= self.settings
        extra: dict[str, Any] = {
            "cpu_bytes_to_use": blocks * block_bytes,
            "secondary_tiers": [tier | dict(tier_settings or {})],
        }
        if self.mode != "engine":
            # vLLM's own spec refuses the CPU.
            extra["spec_name"] = "CPUTieringOffloadingSpec"
            extra["spec_module_path"] = "engine_process.workers"
        elif sabotaged:
            extra["spec_name"] = "SabotagedKVCoreOffloadingSpec"
            extra["spec_module_path"] = "engine_process.sabotaged_engine_mode"
        else:
            extra["spec_name"] = "KVCoreOffloadingSpec"
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra | settings,
        }

    def moved(self, engine: Engine) -> Moved:
        """Read the metrics of an engine.

        They are collected four times a second at most, in steps. So time passes first, and then
        the engine answers a prompt that is shorter than a block.
        """
        time.sleep(_STATS_PERIOD_S)
        engine.generate([[7, 7, 7]], max_tokens=2)
        samples = engine.metrics("")

        def total(name: str) -> float:
            return sum(
                value
                for sample, value in samples.items()
                if sample.partition("{")[0] == name and not sample.endswith("{0:primary}")
            )

        def of_tier(name: str) -> float:
            begin = f"vllm:kv_core_tier_value{{{name},"
            return sum(value for sample, value in samples.items() if sample.startswith(begin))

        return Moved(
            stored=total("vllm:kv_offload_store_bytes_total") / BLOCK_BYTES,
            loaded=total("vllm:kv_offload_load_bytes_total") / BLOCK_BYTES,
            cascaded=total("vllm:kv_offload_tiering_write_bytes_total") / BLOCK_BYTES,
            promoted=total("vllm:kv_offload_tiering_read_bytes_total") / BLOCK_BYTES,
            tier_hits=total("vllm:kv_offload_tiering_chunk_hits_total"),
            failed_stores=total("vllm:kv_offload_tiering_cascade_job_failures_total"),
            failed_loads=total("vllm:kv_offload_tiering_promotion_job_failures_total"),
            errors=total("vllm:kv_core_tier_lookup_errors_total") + of_tier("lookup_errors"),
            declined=total("vllm:kv_core_tier_declined_blocks_total"),
            stalled=total("vllm:kv_core_tier_stalled_jobs_total") + of_tier("stalled_jobs"),
            preemptions=total("vllm:num_preemptions_total"),
        )

    def wait_until(
        self,
        engine: Engine,
        condition: Callable[[Moved], bool],
        *,
        between: Callable[[], object] | None = None,
    ) -> None:
        """Wait until the metrics of an engine say something.

        Args:
            engine: The engine.
            condition: What to wait for.
            between: Called between two looks at the metrics.
        """
        end = time.monotonic() + _PATIENCE_S
        while not condition(moved := self.moved(engine)):
            assert time.monotonic() < end, f"did not happen in {_PATIENCE_S:g} s: {moved}"
            if between is not None:
                between()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for something that is to be seen from outside of the engine."""
        end = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"did not happen in {_PATIENCE_S:g} s"
            time.sleep(0.005)
