"""Specs: each half made once, errors before memory is taken, everything closed again."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typing_extensions import override

import kv_core
from kv_core.connector import (
    SPEC_FACTORY,
    CPUOffloadingSpec,
    OffloadingConnectorWorker,
    TieringOffloadingSpec,
)
from kv_core.contract import (
    ContractVersion,
    JobId,
    JobResult,
    ReqContext,
    RequestOffloadingContext,
    SecondaryTierManager,
    TierConfig,
    TierLimits,
    TierSpec,
)
from kv_core.cpu import CPUOffloadingManager, FilterReusedOffloadingManager
from kv_core.device import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kv_core.engine import CPULoadStoreSpec, GPULoadStoreSpec
from kv_core.errors import ConfigError, TierOpenError, UnknownTierError
from kv_core.plugins import ENTRY_POINT_GROUP, TierRegistry
from kv_core.tiering import TieringOffloadingManager

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    import numpy.typing as npt

    from kv_core.contract import JobMetadata, LookupAnswer, OffloadKey, TierContext
    from kv_core.engine import OffloadingConfig

ROW_BYTES = 4096
NUM_BLOCKS = 4


class RecordedConfig(TierConfig):
    """What the recorded tier can be told.

    Attributes:
        fails: Whether it cannot be opened.
        leaks: Whether it holds on to the primary after its shutdown.
    """

    fails: bool = False
    leaks: bool = False


class RecordedTier(SecondaryTierManager):
    """A tier that notes its opening and its end."""

    log: list[str]
    leaked: list[npt.NDArray[np.uint8]]

    @override
    def __init__(self, context: TierContext) -> None:
        assert isinstance(context.config, RecordedConfig)
        self.name = context.tier_name
        block = context.primary.block(0)
        if context.config.fails:
            raise OSError("no such bucket")
        if context.config.leaks:
            self.leaked.append(np.asarray(block))
        self.log.append(f"open {self.name}")

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        return False

    @override
    def submit_store(self, job: JobMetadata) -> None:
        raise NotImplementedError

    @override
    def submit_load(self, job: JobMetadata) -> None:
        raise NotImplementedError

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return ()

    @override
    def drain_jobs(self) -> Collection[JobId]:
        return ()

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @override
    def shutdown(self) -> Collection[JobId]:
        self.log.append(f"close {self.name}")
        if self.name == "raises":
            raise RuntimeError("cannot close")
        return ()


@pytest.fixture
def log() -> list[str]:
    """Return what tiers note."""
    return []


@pytest.fixture
def leaked() -> list[npt.NDArray[np.uint8]]:
    """Return what a leaking tier holds on to."""
    return []


@pytest.fixture
def registry(
    log: list[str], leaked: list[npt.NDArray[np.uint8]], monkeypatch: pytest.MonkeyPatch
) -> TierRegistry:
    """Return a registry with one type, ``recorded``."""

    class Tier(RecordedTier):
        pass

    Tier.log = log
    Tier.leaked = leaked

    @kv_core.hookimpl
    def kv_core_register_tier() -> TierSpec:
        return TierSpec(
            type="recorded",
            summary="a tier of the tests",
            contract=ContractVersion(1, 0),
            factory=Tier,
            config_model=RecordedConfig,
            limits=lambda _: TierLimits(
                job_deadline_s=1.0, lookup_deadline_s=1.0, min_free_bytes=1
            ),
        )

    module = ModuleType("kv_tests_recorded_tier")
    module.kv_core_register_tier = kv_core_register_tier  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return TierRegistry([EntryPoint("recorded", module.__name__, ENTRY_POINT_GROUP)])


@pytest.fixture
def configure(
    config: Callable[..., OffloadingConfig], tmp_path: Path
) -> Callable[..., OffloadingConfig]:
    """Return the maker of configurations of four blocks, in a folder of the test."""

    def make(**extra_config: Any) -> OffloadingConfig:
        return config(
            cpu_bytes_to_use=NUM_BLOCKS * ROW_BYTES, shm_dir=str(tmp_path), **extra_config
        )

    return make


@pytest.fixture
def kv_caches() -> CanonicalKVCaches:
    """Return a GPU pool of eight blocks, in host memory."""
    tensor = CanonicalKVCacheTensor(np.zeros((8, ROW_BYTES), dtype=np.int8), ROW_BYTES)
    return CanonicalKVCaches((tensor,), ((CanonicalKVCacheRef(0, ROW_BYTES),),))


def open_files(folder: Path) -> list[str]:
    """Return what this process has open below a folder, removed files included."""
    gc.collect()
    found = []
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - no path, numbers
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - as above
        except FileNotFoundError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


# -- the two specs ------------------------------------------------------------------------------


def test_two_levels(configure: Callable[..., OffloadingConfig]) -> None:
    """A plain CPU manager of as many blocks as fit, made once."""
    spec = CPUOffloadingSpec(configure())
    manager = spec.get_manager()
    assert isinstance(manager, CPUOffloadingManager)
    assert manager.num_blocks == NUM_BLOCKS
    assert spec.get_manager() is manager
    spec.shutdown()


def test_three_levels(
    configure: Callable[..., OffloadingConfig], registry: TierRegistry, log: list[str]
) -> None:
    """Tiers are opened in order, once, and closed before the memory is unmapped."""
    tiers = [{"type": "recorded"}, {"type": "recorded", "name": "second"}]
    spec = TieringOffloadingSpec(configure(secondary_tiers=tiers), registry=registry)
    assert log == []
    manager = spec.get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    assert spec.get_manager() is manager
    assert log == ["open recorded", "open second"]
    assert spec.num_jobs_in_flight == 0
    spec.shutdown()
    assert log[2:] == ["close recorded", "close second"]


@pytest.mark.parametrize("tiers", [None, []])
def test_three_levels_without_tiers_are_two(
    configure: Callable[..., OffloadingConfig], registry: TierRegistry, tiers: object
) -> None:
    """An empty list is a plain CPU manager."""
    spec = TieringOffloadingSpec(configure(secondary_tiers=tiers), registry=registry)
    assert spec.num_jobs_in_flight == 0
    assert not spec.get_manager().has_pending_work()
    spec.shutdown()


def test_handlers_copy_between_the_caches_and_the_primary(
    configure: Callable[..., OffloadingConfig], kv_caches: CanonicalKVCaches
) -> None:
    """Made once; what is stored is what the tiers' view of the same memory shows."""
    spec = CPUOffloadingSpec(configure())
    routes = list(spec.get_handlers(kv_caches))
    assert [(source, destination) for source, destination, _ in routes] == [
        (GPULoadStoreSpec, CPULoadStoreSpec),
        (CPULoadStoreSpec, GPULoadStoreSpec),
    ]
    again = [handler for *_, handler in spec.get_handlers(kv_caches)]
    assert again == [handler for *_, handler in routes]
    tensor = kv_caches.tensors[0].tensor
    assert isinstance(tensor, np.ndarray)
    tensor[5] = 42
    stores = routes[0][2]
    assert stores.transfer_async(0, (GPULoadStoreSpec([5], [1], [0]), CPULoadStoreSpec([2])))
    stores.wait([0])
    with spec.primary_view.block(2) as block:
        assert bytes(block) == b"\x2a" * ROW_BYTES
    del routes, again, stores
    spec.shutdown()


def test_handlers_need_canonical_caches(configure: Callable[..., OffloadingConfig]) -> None:
    """Anything else is refused by its type."""
    spec = CPUOffloadingSpec(configure())
    with pytest.raises(TypeError, match="found dict"):
        next(spec.get_handlers({}))


def test_the_reuse_filter_comes_on_top(configure: Callable[..., OffloadingConfig]) -> None:
    """From a threshold of two on; below it there is nothing to filter."""
    spec = CPUOffloadingSpec(configure(store_threshold=2, max_tracker_size=10))
    assert isinstance(spec.get_manager(), FilterReusedOffloadingManager)
    assert isinstance(
        CPUOffloadingSpec(configure(store_threshold=1)).get_manager(), CPUOffloadingManager
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, CPUOffloadingSpec),
        ("CPUOffloadingSpec", CPUOffloadingSpec),
        ("TieringOffloadingSpec", TieringOffloadingSpec),
    ],
)
def test_the_factory_knows_both(
    configure: Callable[..., OffloadingConfig], name: str | None, expected: type
) -> None:
    """By name; two levels are the default."""
    extra = {} if name is None else {"spec_name": name}
    spec = SPEC_FACTORY.create_spec(configure(**extra))
    assert type(spec) is expected


# -- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "setting"),
    [
        ({"store_threshold": -1}, "store_threshold"),
        ({"store_threshold": "2"}, "store_threshold"),
        ({"store_threshold": True}, "store_threshold"),
        ({"store_threshold": 2, "max_tracker_size": 0}, "max_tracker_size"),
        ({"lease_share": 0}, "lease_share"),
        ({"lease_share": 1.5}, "lease_share"),
        ({"request_lookup_deadline_s": 0}, "request_lookup_deadline_s"),
        ({"secondary_tiers": {"type": "recorded"}}, "secondary_tiers"),
        ({"secondary_tiers": [{}]}, "secondary_tiers[0].type"),
    ],
)
def test_impossible_settings_are_refused_at_construction(
    configure: Callable[..., OffloadingConfig],
    registry: TierRegistry,
    extra: dict[str, Any],
    setting: str,
) -> None:
    """Each is named; nothing was opened."""
    with pytest.raises(ConfigError, match=setting.split("[")[0]) as raised:
        TieringOffloadingSpec(configure(**extra), registry=registry)
    assert raised.value.setting == setting


def test_tiers_need_the_spec_with_tiers(configure: Callable[..., OffloadingConfig]) -> None:
    """Two levels would leave them out silently."""
    spec = CPUOffloadingSpec(configure(secondary_tiers=[{"type": "recorded"}]))
    with pytest.raises(ConfigError, match="TieringOffloadingSpec"):
        spec.get_manager()


@pytest.mark.parametrize(
    ("tier", "error"),
    [({"type": "acme"}, UnknownTierError), ({"type": "recorded", "colour": 1}, ConfigError)],
)
def test_an_impossible_tier_is_refused_before_memory_is_taken(
    configure: Callable[..., OffloadingConfig],
    registry: TierRegistry,
    tmp_path: Path,
    log: list[str],
    tier: dict[str, Any],
    error: type[Exception],
) -> None:
    """Unknown types and settings show before the region exists, or another tier is opened."""
    tmp_path.chmod(0o500)
    tiers = [{"type": "recorded", "name": "good"}, tier]
    spec = TieringOffloadingSpec(configure(secondary_tiers=tiers), registry=registry)
    with pytest.raises(error):
        spec.get_manager()
    assert log == []
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("first", ["good", "raises"])
def test_everything_is_closed_when_a_tier_cannot_be_opened(
    configure: Callable[..., OffloadingConfig],
    registry: TierRegistry,
    tmp_path: Path,
    log: list[str],
    first: str,
) -> None:
    """LIFE-4 for the engine: tiers that were open, the mapping, its file and its name.

    The error is the tier's own, also when another one cannot even be closed.
    """
    tiers = [
        {"type": "recorded", "name": first},
        {"type": "recorded", "name": "bad", "fails": True},
    ]
    spec = TieringOffloadingSpec(configure(secondary_tiers=tiers), registry=registry)
    with pytest.raises(TierOpenError, match=r"'bad'.*no such bucket"):
        spec.get_manager()
    assert log == [f"open {first}", f"close {first}"]
    spec.shutdown()
    assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path) == []


def test_an_unknown_policy_leaves_nothing_open(
    configure: Callable[..., OffloadingConfig],
    registry: TierRegistry,
    tmp_path: Path,
    log: list[str],
) -> None:
    """No tier is opened for a primary that cannot be made."""
    extra = {"eviction_policy": "newest", "secondary_tiers": [{"type": "recorded"}]}
    with pytest.raises(ConfigError, match="newest"):
        TieringOffloadingSpec(configure(**extra), registry=registry)
    assert log == []
    assert open_files(tmp_path) == []


# -- the end ------------------------------------------------------------------------------------


def test_shutdown_releases_everything_and_is_idempotent(
    configure: Callable[..., OffloadingConfig],
    registry: TierRegistry,
    tmp_path: Path,
    kv_caches: CanonicalKVCaches,
    log: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vllm#57303: with worker, manager and tiers in use, no mapping or file is left."""
    spec = TieringOffloadingSpec(
        configure(secondary_tiers=[{"type": "recorded"}]), registry=registry
    )
    worker = OffloadingConnectorWorker(spec)
    worker.register_kv_caches(kv_caches)
    spec.get_manager()
    assert len(open_files(tmp_path)) >= 1
    assert list(tmp_path.iterdir()) == []
    worker.shutdown()
    spec.shutdown()
    spec.shutdown()
    assert open_files(tmp_path) == []
    assert log == ["open recorded", "close recorded"]
    assert caplog.records == []


def test_each_start_counts_its_epochs_in_a_run_of_its_own(
    configure: Callable[..., OffloadingConfig], registry: TierRegistry
) -> None:
    """A restarted engine's epoch 1 is not that of the run before: other weights."""

    def namespace(**extra: Any) -> str:
        config = configure(secondary_tiers=[{"type": "recorded"}], **extra)
        return TieringOffloadingSpec(config, registry=registry).epoch_namespace(1).fingerprint

    assert namespace() != namespace()
    assert namespace(epoch_run="updates-7") == namespace(epoch_run="updates-7")


def test_shutdown_without_use_is_fine(configure: Callable[..., OffloadingConfig]) -> None:
    """Nothing was made, nothing is released."""
    CPUOffloadingSpec(configure()).shutdown()


def test_memory_that_a_tier_holds_on_to_stays_mapped(
    configure: Callable[..., OffloadingConfig],
    registry: TierRegistry,
    leaked: list[npt.NDArray[np.uint8]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """ZC-3: a tier's fault is logged and raises nothing; a later shutdown makes up for it."""
    tiers = [{"type": "recorded", "leaks": True}]
    spec = TieringOffloadingSpec(configure(secondary_tiers=tiers), registry=registry)
    spec.get_manager()
    spec.shutdown()
    assert "the shared region stays mapped" in caplog.text
    assert leaked[0].sum() == 0
    caplog.clear()
    leaked.clear()
    spec.shutdown()
    assert caplog.records == []


def test_shutdown_of_a_spec_whose_tier_raises_goes_on(
    configure: Callable[..., OffloadingConfig],
    registry: TierRegistry,
    tmp_path: Path,
    log: list[str],
) -> None:
    """The tier's exception is contained; the region is unmapped."""
    tiers = [{"type": "recorded", "name": "raises"}, {"type": "recorded", "name": "last"}]
    spec = TieringOffloadingSpec(configure(secondary_tiers=tiers), registry=registry)
    spec.get_manager()
    spec.shutdown()
    assert log[2:] == ["close raises", "close last"]
    assert open_files(tmp_path) == []


class PinLog:
    """A registrar that notes what it is asked for; ``refuses`` makes it say no."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.pinned: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> str | None:
        """Pin a range."""
        if self.refuses:
            return "no"
        self.pinned[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        """Unpin a range; the memory must still be there."""
        assert ctypes.string_at(address, 1) is not None
        del self.pinned[address]


def test_the_primary_is_pinned_while_handlers_live(
    configure: Callable[..., OffloadingConfig], kv_caches: CanonicalKVCaches
) -> None:
    """All rows from the first on, and given back before the memory is unmapped."""
    pins = PinLog()
    spec = CPUOffloadingSpec(configure(), host_registrar=pins)
    list(spec.get_handlers(kv_caches))
    view = spec.primary_view
    assert pins.pinned == {view.address(0): view.num_blocks * view.row_stride}
    spec.shutdown()
    assert pins.pinned == {}


def test_a_device_that_cannot_pin_costs_speed_only(
    configure: Callable[..., OffloadingConfig],
    kv_caches: CanonicalKVCaches,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vllm#51080: the handlers are there all the same, and one warning says so."""
    spec = CPUOffloadingSpec(configure(), host_registrar=PinLog(refuses=True))
    assert len(list(spec.get_handlers(kv_caches))) == 2
    assert ["not pinned" in message for message in caplog.messages] == [True]
    spec.shutdown()
    assert open_files(tmp_path) == []
