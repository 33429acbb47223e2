"""The offloading specs: two levels (CPU) and three (CPU and secondary tiers)."""

from __future__ import annotations

import logging
import time
import traceback
from abc import abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from pydantic import ValidationError
from typing_extensions import override

from kv_core.contract import NullMetrics, PrimaryView, parse_tier_config
from kv_core.cpu import (
    CPUOffloadingManager,
    CPUPrimaryTierOffloadingManager,
    FilterReusedOffloadingManager,
    PrimaryGeometry,
    SharedOffloadRegion,
)
from kv_core.device import CanonicalKVCaches, CpuGpuOffloadingHandlers
from kv_core.device.copy import HostCopyBackend
from kv_core.engine import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingSpec,
    OffloadingSpecFactory,
)
from kv_core.errors import ConfigError, RegionError
from kv_core.plugins import TierRegistry, open_tier, parse_secondary_tiers
from kv_core.tiering import TieringConfig, TieringOffloadingManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from kv_core.contract import Clock
    from kv_core.device.copy import CopyBackend
    from kv_core.engine import LoadStoreSpec, OffloadingConfig, OffloadingHandler, OffloadingManager
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

    Scheduler and worker of one process use one object, and so one region.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        *,
        slot_freed: Callable[[int], None] | None = None,
        copy_backend: CopyBackendFactory = _host_backend,
    ) -> None:
        """Prepare; the region is created when the manager or the handlers are asked for.

        Args:
            config: The configuration.
            slot_freed: Called with the id of a slot whose content became meaningless.
            copy_backend: Makes the copy back end of the worker.

        Raises:
            ConfigError: Sizes do not fit.
        """
        super().__init__(config)
        self.geometry = PrimaryGeometry.from_config(config)
        self._reuse_filter = _reuse_filter(config.extra_config)
        self._slot_freed = slot_freed
        self._copy_backend = copy_backend
        self._region: SharedOffloadRegion | None = None
        self._primary_view: PrimaryView | None = None
        self._manager: OffloadingManager | None = None
        self._handlers: CpuGpuOffloadingHandlers | None = None

    @property
    def primary_view(self) -> PrimaryView:
        """The primary tier's memory, created on first use."""
        if self._primary_view is None:
            view = self._open_region().create_kv_memoryview()
            self._primary_view = PrimaryView(view, self.geometry.block_bytes)
        return self._primary_view

    def _open_region(self) -> SharedOffloadRegion:
        if self._region is None:
            self._region = SharedOffloadRegion(
                self.config.engine_id,
                self.geometry,
                namespace_fingerprint=self.config.namespace.fingerprint,
                shm_dir=Path(self.config.extra_config.get("shm_dir", "/dev/shm")),  # noqa: S108
            )
        return self._region

    @abstractmethod
    def _create_manager(self) -> OffloadingManager:
        """Make the manager."""

    @override
    def get_manager(self) -> OffloadingManager:
        """Return the manager, making it on the first call.

        Raises:
            KVCoreError: It cannot be made. What was opened for it is closed again.
        """
        if self._manager is None:
            try:
                manager = self._create_manager()
            except BaseException as error:
                if self._handlers is None:
                    _forget_variables(error)
                    self._close_memory()
                raise
            if self._reuse_filter is not None:
                manager = FilterReusedOffloadingManager(manager, *self._reuse_filter)
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
        if self._handlers is None:
            factor = self.config.block_size_factor
            region = self._open_region()
            cpu_tensors = [
                region.create_next_view(0, tensor.page_size_bytes * factor)
                for tensor in kv_caches.tensors
            ]
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
        extra = self.config.extra_config
        if extra.get("secondary_tiers"):
            raise ConfigError(
                '\'secondary_tiers\' needs "spec_name": "TieringOffloadingSpec"; '
                "CPUOffloadingSpec has two levels only",
                setting="secondary_tiers",
            )
        return CPUOffloadingManager(
            self.geometry.num_blocks,
            extra.get("eviction_policy", "lru"),
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
        copy_backend: CopyBackendFactory = _host_backend,
        registry: TierRegistry | None = None,
        observer: JobObserver | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Prepare; tiers are opened when the manager is asked for.

        Args:
            config: The configuration.
            slot_freed: Called with the id of a slot whose content became meaningless.
            copy_backend: Makes the copy back end of the worker.
            registry: Where tier types are looked up; by default what is installed.
            observer: Told of every finished job of a tier.
            clock: Monotonic seconds.

        Raises:
            ConfigError: Sizes or settings do not fit.
        """
        super().__init__(config, slot_freed=slot_freed, copy_backend=copy_backend)
        self._tier_settings = parse_secondary_tiers(config.extra_config.get("secondary_tiers"))
        self._tiering_config = _tiering_config(config.extra_config)
        self._registry = registry
        self._observer = observer
        self._clock = clock
        self._tiering: TieringOffloadingManager | None = None

    @property
    def num_jobs_in_flight(self) -> int:
        """Jobs between the primary tier and secondary tiers that have not been reported."""
        return 0 if self._tiering is None else self._tiering.num_jobs_in_flight

    @override
    def _create_manager(self) -> OffloadingManager:
        # Unknown types and impossible settings show before memory is taken.
        registry = self._registry or TierRegistry()
        for settings in self._tier_settings:
            model = registry.spec(settings.type).config_model
            parse_tier_config(settings.name, model, settings.settings)
        with ExitStack() as opened:
            view = opened.enter_context(self._open_region().create_kv_memoryview())
            primary = CPUPrimaryTierOffloadingManager(
                self.geometry.num_blocks,
                view,
                self.geometry.block_bytes,
                self.config.extra_config.get("eviction_policy", "lru"),
                enable_events=self.config.enable_events,
                slot_freed=self._slot_freed,
            )
            tiers: list[OpenTier] = []
            for settings in self._tier_settings:
                tier = self._open(settings, registry)
                opened.callback(_abandon, tier)
                tiers.append(tier)
            opened.pop_all()
        self._tiering = TieringOffloadingManager(
            primary,
            tiers,
            config=self._tiering_config,
            clock=self._clock,
            observer=self._observer,
        )
        return self._tiering

    @override
    def shutdown(self) -> None:
        self._tiering = None
        super().shutdown()

    def _open(self, settings: TierSettings, registry: TierRegistry) -> OpenTier:
        return open_tier(
            settings.type,
            name=settings.name,
            settings=settings.settings,
            namespace=self.config.namespace,
            primary=self.primary_view,
            clock=self._clock,
            metrics=NullMetrics(),
            registry=registry,
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


def _reuse_filter(extra_config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return threshold and size of the reuse filter, or ``None`` without one."""
    threshold = extra_config.get("store_threshold", 0)
    size = extra_config.get("max_tracker_size", 64_000)
    for setting, value, least in (("store_threshold", threshold, 0), ("max_tracker_size", size, 1)):
        if type(value) is not int or value < least:
            raise ConfigError(
                f"{setting!r} must be an integer >= {least}, found {value!r}", setting=setting
            )
    return (threshold, size) if threshold >= 2 else None


def _tiering_config(extra_config: Mapping[str, Any]) -> TieringConfig:
    settings = {
        name: extra_config[name] for name in TieringConfig.model_fields if name in extra_config
    }
    try:
        return TieringConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        setting = str(first["loc"][0])
        raise ConfigError(f"{setting!r}: {first['msg']}", setting=setting) from None


SPEC_FACTORY: Final = OffloadingSpecFactory()
"""The specs that kv-core brings along."""
SPEC_FACTORY.register_spec("CPUOffloadingSpec", __name__, "CPUOffloadingSpec")
SPEC_FACTORY.register_spec("TieringOffloadingSpec", __name__, "TieringOffloadingSpec")
