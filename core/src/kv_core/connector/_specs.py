"""The offloading specs: two levels (CPU) and three (CPU and secondary tiers)."""

from __future__ import annotations

import logging
import time
import traceback
import uuid
from abc import abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias, final

from typing_extensions import override

from kv_core.connector._effective import log_start
from kv_core.connector._memory import memory_limit_bytes, require_memory
from kv_core.connector._settings import OffloadingSettings
from kv_core.contract import NullMetrics, PrimaryView
from kv_core.cpu import (
    CPUOffloadingManager,
    CPUPrimaryTierOffloadingManager,
    FilterReusedOffloadingManager,
    PrimaryGeometry,
    SharedOffloadRegion,
)
from kv_core.device import CanonicalKVCaches, CpuGpuOffloadingHandlers
from kv_core.device.copy import HostCopyBackend, PinnedRows
from kv_core.engine import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingSpec,
    OffloadingSpecFactory,
)
from kv_core.errors import EngineStateError, RegionError
from kv_core.plugins import TierRegistry, check_tier, open_tier, require_space_limit
from kv_core.tiering import TieringOffloadingManager, TierMode, TierOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from kv_core.connector._role import RegionRole
    from kv_core.contract import Clock
    from kv_core.device.copy import CopyBackend, HostRegistrar
    from kv_core.engine import LoadStoreSpec, OffloadingConfig, OffloadingHandler, OffloadingManager
    from kv_core.keys import Namespace, OffloadKey
    from kv_core.plugins import OpenTier, TierSettings
    from kv_core.tiering import JobObserver

__all__ = ["SPEC_FACTORY", "CPUOffloadingSpec", "HostBackedSpec", "TieringOffloadingSpec"]

_LOGGER: Final = logging.getLogger(__name__)

CopyBackendFactory: TypeAlias = "Callable[[Sequence[npt.NDArray[np.int8]]], CopyBackend]"
"""Makes a copy back end, given the worker's part of the primary tier."""


def _host_backend(cpu_tensors: Sequence[npt.NDArray[np.int8]]) -> CopyBackend:  # noqa: ARG001
    return HostCopyBackend()


class HostBackedSpec(OffloadingSpec):
    """A spec whose primary tier is a shared region of this host.

    Scheduler and worker of one process use one object, and so one region. Where they are
    processes of their own, each has an object with its role: the manager is made in the
    scheduler's, and the handlers in the workers'.

    Attributes:
        settings: What the user wrote, with defaults, and the name of this class as its
            ``spec_name``.
        geometry: Shape of the primary tier.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        *,
        slot_freed: Callable[[int], None] | None = None,
        copy_backend: CopyBackendFactory | None = None,
        host_registrar: HostRegistrar | None = None,
        role: RegionRole | None = None,
    ) -> None:
        """Prepare; the region is created when the manager or the handlers are asked for.

        Args:
            config: The configuration.
            slot_freed: Called with the id of a slot whose content became meaningless.
            copy_backend: Makes the copy back end of the worker; by default one that copies
                between host memory and host memory.
            host_registrar: Pins the primary tier for the worker's device, if it has one.
            role: What this process is; by default the scheduler and its only worker.

        Raises:
            ConfigError: Settings are missing, unknown or invalid, or sizes do not fit.
        """
        settings = OffloadingSettings.from_extra_config(config.extra_config)
        self.settings = settings.model_copy(update={"spec_name": type(self).__name__})
        # A size may be written as text, and is a number from here on.
        extra_config = {**config.extra_config, "cpu_bytes_to_use": settings.cpu_bytes_to_use}
        super().__init__(replace(config, extra_config=extra_config))
        self.geometry = PrimaryGeometry.from_config(self.config)
        self._slot_freed = slot_freed
        self._copy_backend = copy_backend or _host_backend
        self._host_registrar = host_registrar
        self._role = role
        self._pinned_rows: PinnedRows | None = None
        self._region: SharedOffloadRegion | None = None
        self._primary_view: PrimaryView | None = None
        self._manager: OffloadingManager | None = None
        self._handlers: CpuGpuOffloadingHandlers | None = None

    @property
    def primary_view(self) -> PrimaryView:
        """The primary tier's memory, created or attached to on first use."""
        if self._primary_view is None:
            view = self._open_region().create_kv_memoryview()
            self._primary_view = PrimaryView(view, self.geometry.block_bytes)
        return self._primary_view

    def _open_region(self) -> SharedOffloadRegion:
        if self._region is None:
            self._region = self._create_or_attach()
        return self._region

    def _create_or_attach(self) -> SharedOffloadRegion:
        role, engine_id = self._role, self.config.engine_id
        fingerprint, shm_dir = self.config.namespace.fingerprint, self.settings.shm_dir
        if role is None or role.worker is None:
            return SharedOffloadRegion(
                engine_id,
                self.geometry,
                namespace_fingerprint=fingerprint,
                nonce=None if role is None else role.nonce,
                shm_dir=shm_dir,
                keep_name=role is not None,
            )
        return SharedOffloadRegion.attach(
            engine_id,
            self.geometry,
            namespace_fingerprint=fingerprint,
            nonce=role.nonce,
            worker=role.worker,
            shm_dir=shm_dir,
            deadline_s=role.deadline_s,
            stop=role.stop,
        )

    def wait_until_attached(self, deadline_s: float = 60.0) -> None:
        """Wait, in the scheduler's process, for all workers to attach to the primary tier.

        Returns at once when called again, and when there are no processes to wait for.

        Args:
            deadline_s: Seconds to wait; 0 looks once.

        Raises:
            RegionError: Workers are missing; their ranks are named.
        """
        if self._role is not None:
            self._open_region().wait_until_attached(deadline_s)

    def mark_failed(self, block_ids: Iterable[int]) -> None:
        """Note, in a worker's process, that copies into slots have failed.

        For engines that do not carry failures from their workers to their scheduler: mark first,
        then report the end of the copies.

        Args:
            block_ids: Slots.
        """
        self._open_region().mark_failed(block_ids)

    @abstractmethod
    def _create_manager(self) -> OffloadingManager:
        """Make the manager."""

    @override
    def get_manager(self) -> OffloadingManager:
        """Return the manager, making it on the first call.

        Raises:
            EngineStateError: This is the process of a worker.
            KVCoreError: It cannot be made. What was opened for it is closed again.
        """
        if self._role is not None and self._role.worker is not None:
            raise EngineStateError(
                f"worker {self._role.worker} has no manager: it is in the scheduler's process, "
                "and there is one for all workers"
            )
        if self._manager is None:
            try:
                manager = self._create_manager()
                if self._role is not None:
                    # Workers wait for it, whether or not the manager has to have it.
                    self._open_region()
            except BaseException as error:
                if self._handlers is None:
                    _forget_variables(error)
                    self._close_memory()
                raise
            if self.settings.reuse_filter is not None:
                manager = FilterReusedOffloadingManager(manager, *self.settings.reuse_filter)
            self._manager = manager
        return self._manager

    @override
    def get_handlers(
        self, kv_caches: object
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        if not isinstance(kv_caches, CanonicalKVCaches):
            raise TypeError(
                f"kv_caches must be CanonicalKVCaches, found {type(kv_caches).__name__}"
            )
        worker = 0 if self._role is None else self._role.worker
        if worker is None:
            raise EngineStateError(
                "the scheduler's process has no handlers: each worker makes its own, with "
                "role.of_worker(rank)"
            )
        if self._handlers is None:
            factor = self.config.block_size_factor
            region = self._open_region()
            cpu_tensors = [
                region.create_next_view(worker, tensor.page_size_bytes * factor)
                for tensor in kv_caches.tensors
            ]
            if self._host_registrar is not None:
                view = self.primary_view
                self._pinned_rows = PinnedRows(
                    self._host_registrar, view.address(0), view.num_blocks, view.row_stride
                )
            self._handlers = CpuGpuOffloadingHandlers(
                kv_caches, cpu_tensors, factor, self._copy_backend(cpu_tensors)
            )
        yield GPULoadStoreSpec, CPULoadStoreSpec, self._handlers.gpu_to_cpu
        yield CPULoadStoreSpec, GPULoadStoreSpec, self._handlers.cpu_to_gpu

    def shutdown(self) -> None:
        """Stop the handlers, then the manager, then unmap the region. Idempotent."""
        if self._handlers is not None:
            self._handlers.gpu_to_cpu.shutdown()
            self._handlers.cpu_to_gpu.shutdown()
            self._handlers = None
        if self._pinned_rows is not None:
            # No copy is under way any more, and the memory is still mapped.
            self._pinned_rows.release()
            self._pinned_rows = None
        if self._manager is not None:
            try:
                self._manager.shutdown()
            except RegionError:
                _LOGGER.exception("the primary tier is still in use")
            self._manager = None
        self._close_memory()

    def _close_memory(self) -> None:
        """Unmap the region, unless somebody still holds a part of it.

        Only a tier that does not let go, or I/O that could not be stopped, can be the reason:
        pages that are still touched must stay mapped until the process ends.
        """
        try:
            if self._primary_view is not None:
                self._primary_view.release()
                self._primary_view = None
            if self._region is not None:
                self._region.close()
                self._region = None
        except (BufferError, RegionError):
            _LOGGER.exception("the shared region stays mapped")


@final
class CPUOffloadingSpec(HostBackedSpec):
    """Two levels: GPU and CPU."""

    @override
    def _create_manager(self) -> OffloadingManager:
        self.settings.require_two_levels()
        log_start(self.settings, ())
        require_memory(self.geometry.region_bytes, (), memory_limit_bytes())
        return CPUOffloadingManager(
            self.geometry.num_blocks,
            self.settings.eviction_policy,
            enable_events=self.config.enable_events,
            slot_freed=self._slot_freed,
        )


@final
class TieringOffloadingSpec(HostBackedSpec):
    """Three levels: GPU, CPU, and secondary tiers in lookup order."""

    def __init__(
        self,
        config: OffloadingConfig,
        *,
        slot_freed: Callable[[int], None] | None = None,
        copy_backend: CopyBackendFactory | None = None,
        host_registrar: HostRegistrar | None = None,
        role: RegionRole | None = None,
        registry: TierRegistry | None = None,
        observer: JobObserver | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Prepare; tiers are opened when the manager is asked for.

        Args:
            config: The configuration.
            slot_freed: Called with the id of a slot whose content became meaningless.
            copy_backend: Makes the copy back end of the worker; by default one that copies
                between host memory and host memory.
            host_registrar: Pins the primary tier for the worker's device, if it has one.
            role: What this process is; by default the scheduler and its only worker.
            registry: Where tier types are looked up; by default what is installed.
            observer: Told of every finished job of a tier.
            clock: Monotonic seconds.

        Raises:
            ConfigError: Settings are missing, unknown or invalid, or sizes do not fit.
        """
        super().__init__(
            config,
            slot_freed=slot_freed,
            copy_backend=copy_backend,
            host_registrar=host_registrar,
            role=role,
        )
        self._registry = registry
        self._observer = observer
        self._clock = clock
        # Drawn at each start: another run's epoch of the same number had other weights.
        self._epoch_run = self.settings.epoch_run or uuid.uuid4().hex
        self._tiering: TieringOffloadingManager | None = None

    @property
    def num_jobs_in_flight(self) -> int:
        """Jobs between the primary tier and secondary tiers that have not been reported."""
        return 0 if self._tiering is None else self._tiering.num_jobs_in_flight

    @override
    def _create_manager(self) -> OffloadingManager:
        # Unknown types and impossible settings show before memory is taken.
        registry = self._registry or TierRegistry()
        entries = self.settings.secondary_tiers
        checked = [
            check_tier(entry.type, name=entry.name, settings=entry.settings, registry=registry)
            for entry in entries
        ]
        log_start(self.settings, checked)
        for entry, tier in zip(entries, checked, strict=True):
            require_space_limit(tier, read_only=entry.read_only)
        require_memory(self.geometry.region_bytes, checked, memory_limit_bytes())
        with ExitStack() as opened:
            view = opened.enter_context(self._open_region().create_kv_memoryview())
            primary = CPUPrimaryTierOffloadingManager(
                self.geometry.num_blocks,
                view,
                self.geometry.block_bytes,
                self.settings.eviction_policy,
                enable_events=self.config.enable_events,
                slot_freed=self._slot_freed,
            )
            tiers: list[OpenTier] = []
            for entry in entries:
                opened_tier = self._open(entry, registry, self.config.namespace)
                opened.callback(_abandon, opened_tier)
                tiers.append(opened_tier)
            opened.pop_all()
        self._tiering = TieringOffloadingManager(
            primary,
            tiers,
            options={
                entry.name: TierOptions(
                    TierMode.READ_ONLY if entry.read_only else TierMode.READ_WRITE,
                    entry.fill_on_promotion,
                )
                for entry in entries
            },
            config=self.settings,
            clock=self._clock,
            observer=self._observer,
            reopen=self._reopen,
        )
        return self._tiering

    def take_failed(self, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        """Return, in the scheduler's process, the blocks that a worker could not copy.

        To be asked once, when all workers have reported the end of a store and before
        ``complete_store``. See :meth:`mark_failed`.

        Args:
            keys: The blocks of the store.
        """
        region, tiering = self._region, self._tiering
        if region is None or tiering is None or not region.has_failures:
            return ()
        slots = {key: tiering.block_id_of(key) for key in keys}
        failed = set(region.take_failed(slot for slot in slots.values() if slot is not None))
        return [key for key, slot in slots.items() if slot in failed]

    @override
    def shutdown(self) -> None:
        self._tiering = None
        super().shutdown()

    def epoch_namespace(self, epoch: int) -> Namespace:
        """Return the namespace that tiers are re-opened under by a reset to an epoch."""
        return self.config.namespace.with_epoch(epoch, self._epoch_run)

    def _reopen(self, name: str, epoch: int) -> OpenTier:
        """Open a tier again, under the namespace of an epoch."""
        entry = next(entry for entry in self.settings.secondary_tiers if entry.name == name)
        namespace = self.epoch_namespace(epoch)
        return self._open(entry, self._registry or TierRegistry(), namespace)

    def _open(self, entry: TierSettings, registry: TierRegistry, namespace: Namespace) -> OpenTier:
        return open_tier(
            entry.type,
            name=entry.name,
            settings=entry.settings,
            namespace=namespace,
            primary=self.primary_view,
            clock=self._clock,
            metrics=NullMetrics(),
            registry=registry,
            read_only=entry.read_only,
        )


def _forget_variables(error: BaseException | None) -> None:
    """Clear the variables of the frames that an error went through.

    Views of the region may be among them, and the error lives longer than the region is to.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _abandon(tier: OpenTier) -> None:
    """Shut a tier down while another error is on its way, which must not be replaced."""
    try:
        tier.manager.shutdown()
    except Exception:
        _LOGGER.exception("tier %r raised in shutdown", tier.name)


SPEC_FACTORY: Final = OffloadingSpecFactory()
"""The specs that kv-core brings along."""
SPEC_FACTORY.register_spec("CPUOffloadingSpec", __name__, "CPUOffloadingSpec")
SPEC_FACTORY.register_spec("TieringOffloadingSpec", __name__, "TieringOffloadingSpec")
