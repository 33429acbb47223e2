"""The engine mode: our tiering engine as one of vLLM's offloading specs."""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_core.connector import RegionRole, TieringOffloadingSpec
from kv_core.cpu import SharedOffloadRegion
from kv_core.device.copy import host_registrar_of
from kv_core.vllm import _compat
from kv_core.vllm._config import ENGINE_ID_PREFIX, engine_config, region_nonce
from kv_core.vllm._logs import log_where_vllm_does
from kv_core.vllm._manager import KVCoreOffloadingManager
from kv_core.vllm._metrics import StatsFeed, metric_definitions
from kv_core.vllm._vllm_config import find_config
from kv_core.vllm._worker import CopyBackends, KVCoreOffloadingWorker, canonical_kv_caches

if TYPE_CHECKING:
    from kv_core.device import CanonicalKVCaches

__all__ = ["KVCoreOffloadingSpec"]

# The scheduler comes after the warm-up and the graph captures of the workers: minutes, for large
# models. Should it never come, vLLM ends its workers.
_SCHEDULER_DEADLINE_S: Final = 3600.0

# Workers wait already; each makes its pages present, at 2 GiB/s or so.
_WORKER_DEADLINE_S: Final = 60.0
_SLOWEST_BYTES_PER_S: Final = 2**28

# Batches in flight beyond the stages of the pipeline: one more with asynchronous scheduling, and
# another one in case a version of vLLM has more.
_SPARE_BATCHES: Final = 2


@final
class KVCoreOffloadingSpec(_compat.OffloadingSpec):  # type: ignore[misc]  # vLLM is not typed
    """``spec_name: "KVCoreOffloadingSpec"`` under vLLM's ``OffloadingConnector``.

    Tiering manager, policies, primary tier, copies and settings are ours; what is offered and
    loaded when is decided by vLLM's connector. vLLM makes one of these in its scheduler and one in
    each worker, which may be processes of their own or share one.
    """

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Declare what the manager reports, whatever the configuration."""
        return metric_definitions()

    def __init__(self, config: Any) -> None:
        """Check the configuration; memory is taken and tiers are opened later.

        Args:
            config: vLLM's ``OffloadingConfig``.

        Raises:
            ConfigError: Settings are missing, unknown or invalid, or sizes do not fit.
            NamespaceError: Something that makes bytes interchangeable is not known.
        """
        log_where_vllm_does()
        super().__init__(config)
        vllm_config = find_config().vllm
        self._engine_config = engine_config(config, vllm_config.parallel_config)
        self._role = RegionRole(nonce=region_nonce(config.engine_id, vllm_config.instance_id))
        # Settings and sizes are checked here, in every process and before anything is started.
        spec = TieringOffloadingSpec(self._engine_config, role=self._role)
        self._settings, self._geometry = spec.settings, spec.geometry
        self._manager: KVCoreOffloadingManager | None = None
        self._worker: KVCoreOffloadingWorker | None = None

    @override
    def get_manager(self) -> KVCoreOffloadingManager:
        """Create the primary tier, open the tiers, and wait for the workers to attach.

        Raises:
            KVCoreError: It cannot be done; everything that was opened is closed again.
        """
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    def _make_manager(self) -> KVCoreOffloadingManager:
        tiers = self._settings.secondary_tiers
        spec: TieringOffloadingSpec
        feed = StatsFeed(
            lambda: spec.get_manager().get_stats(),
            [tier.name for tier in tiers],
            self._geometry.block_bytes,
        )
        spec = TieringOffloadingSpec(self._engine_config, role=self._role, observer=feed)
        # vLLM draws a new id for each start: nobody else would come for what a killed one left.
        SharedOffloadRegion.remove_leftovers(ENGINE_ID_PREFIX, self._settings.shm_dir)
        try:
            manager = spec.get_manager()
            spec.wait_until_attached(
                _WORKER_DEADLINE_S + self._geometry.region_bytes / _SLOWEST_BYTES_PER_S
            )
        except BaseException:
            spec.shutdown()
            raise
        # Not every way to end vLLM shuts its scheduler down, and blocks may be on their way down.
        atexit.register(spec.shutdown)

        def shutdown() -> None:
            atexit.unregister(spec.shutdown)
            spec.shutdown()

        return KVCoreOffloadingManager(
            manager,
            feed=feed,
            take_failed=spec.take_failed,
            shutdown=shutdown,
            engine_reset=self._settings.engine_reset,
            flush_steps=1 + self.config.parallel.pp_size + _SPARE_BATCHES,
            has_windows=self._has_windows(),
            level_types={tier.name: tier.type for tier in tiers},
        )

    def _has_windows(self) -> bool:
        """Say whether layers may forget blocks of a request that runs."""
        groups = self._engine_config.namespace.groups
        # vLLM makes several groups of a model where some keep less than others.
        return len(groups) > 1 or groups[0].sliding_window is not None

    @override
    def get_worker(self, kv_caches: Any) -> KVCoreOffloadingWorker:
        """Return this process's worker, which attaches to the primary tier when there is one.

        Raises:
            ValueError: The KV caches are not what they are said to be.
        """
        if self._worker is None:
            self._worker = self._make_worker(canonical_kv_caches(kv_caches))
        return self._worker

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> KVCoreOffloadingWorker:
        gpu_tensors = [tensor.tensor for tensor in kv_caches.tensors]
        backends = CopyBackends(gpu_tensors)
        stop = threading.Event()
        role = self._role.of_worker(
            self.config.parallel.rank, deadline_s=_SCHEDULER_DEADLINE_S, stop=stop
        )
        spec = TieringOffloadingSpec(
            self._engine_config,
            role=role,
            copy_backend=backends.make_usual,
            host_registrar=host_registrar_of(gpu_tensors[0]),
        )
        return KVCoreOffloadingWorker(spec, kv_caches, backends, stop)
