"""open_tier: everything is checked before the tier is constructed, and failures are contained."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr, model_validator
from typing_extensions import override

from kv_core.contract import (
    Capability,
    ContractVersion,
    JobMetadata,
    JobResult,
    LookupAnswer,
    Namespace,
    NullMetrics,
    OffloadKey,
    PrimaryView,
    ReqContext,
    RequestOffloadingContext,
    SecondaryTierManager,
    TierConfig,
    TierContext,
    TierLimits,
    TierSpec,
)
from kv_core.errors import (
    BrokenPluginError,
    ConfigError,
    HashSeedError,
    IncompatibleTierError,
    NamespaceError,
    TierOpenError,
    UnknownTierError,
)
from kv_core.keys import GroupGeometry
from kv_core.plugins import OpenTier, TierRegistry, check_tier, open_tier

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.unit.plugins.conftest import FakeSite

BLOCK_BYTES = 4096


class _Config(TierConfig):
    depth: int = 1
    token: SecretStr = SecretStr("")


class _Tier(SecondaryTierManager):
    def __init__(self, context: TierContext) -> None:
        self.context = context

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        return False

    @override
    def submit_store(self, job: JobMetadata) -> None: ...

    @override
    def submit_load(self, job: JobMetadata) -> None: ...

    @override
    def get_finished_jobs(self) -> list[JobResult]:
        return []

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @override
    def drain_jobs(self) -> Collection[Any]:
        return ()


_SPEC = TierSpec(
    type="acme",
    summary="a tier of the tests",
    contract=ContractVersion(1, 0),
    factory=_Tier,
    config_model=_Config,
    limits=lambda config: TierLimits(
        job_deadline_s=config.depth, lookup_deadline_s=1.0, min_free_bytes=1
    ),
)

_NAMESPACE = Namespace(
    model="toy",
    model_fingerprint="0" * 64,
    revision="1",
    dtype="bfloat16",
    kv_layout="NHD",
    groups=(GroupGeometry(16, BLOCK_BYTES, 1),),
    block_bytes=BLOCK_BYTES,
    tokens_per_hash=16,
    hash_algorithm="sha256",
    hash_seed="0",
)


def _clock() -> float:
    return 12.5


def _open(
    tier: TierSpec | str = _SPEC,
    *,
    namespace: Namespace = _NAMESPACE,
    registry: TierRegistry | None = None,
    **settings: object,
) -> OpenTier:
    memory = memoryview(bytearray(2 * BLOCK_BYTES)).cast("B", (2, BLOCK_BYTES))
    return open_tier(
        tier,
        name="disk",
        settings=settings,
        namespace=namespace,
        primary=PrimaryView(memory, BLOCK_BYTES),
        clock=_clock,
        metrics=NullMetrics(),
        registry=registry,
    )


def test_an_open_tier_got_its_surroundings() -> None:
    """The context carries geometry, names, settings and services."""
    opened = _open(depth=7)
    assert isinstance(opened.manager, _Tier)
    context = opened.manager.context
    assert (context.tier_type, context.tier_name) == ("acme", "disk")
    assert (context.block_bytes, context.num_blocks) == (BLOCK_BYTES, 2)
    assert context.namespace is _NAMESPACE
    assert context.config == _Config(depth=7)
    assert context.clock() == 12.5
    assert (opened.name, opened.spec, opened.limits.job_deadline_s) == ("disk", _SPEC, 7.0)


def test_an_open_tier_is_frozen() -> None:
    """The value cannot be changed."""
    opened = _open()
    with pytest.raises(dataclasses.FrozenInstanceError):
        opened.name = "other"  # type: ignore[misc]  # the point of the test


def test_a_type_is_looked_up_in_the_registry(site: FakeSite) -> None:
    """A string names an installed type; its factory's nonsense names the package."""
    site.add("acme")
    with pytest.raises(BrokenPluginError, match="NoneType") as caught:
        _open("acme", registry=site.registry())
    assert caught.value.distribution == "kv-tier-acme 1.0"


def test_an_unknown_type_is_the_registrys_error() -> None:
    """Types that are not installed are refused before anything else."""
    with pytest.raises(UnknownTierError, match="pip install kv-tier-acme"):
        _open("acme", registry=TierRegistry(()))


def test_unknown_settings_are_named() -> None:
    """Settings are validated against the tier's own model."""
    with pytest.raises(ConfigError, match="'dpeth' is not a setting") as caught:
        _open(dpeth=3)
    assert caught.value.setting == "disk.dpeth"


def test_larger_blocks_than_the_tier_takes_are_refused() -> None:
    """The limit is enforced at start, not at the first store."""
    limits = TierLimits(
        job_deadline_s=1.0,
        lookup_deadline_s=1.0,
        max_block_bytes=BLOCK_BYTES - 1,
        min_free_bytes=1,
    )
    with pytest.raises(ConfigError, match="at most 4095 bytes, but a block has 4096"):
        _open(dataclasses.replace(_SPEC, limits=lambda _: limits))
    fits = dataclasses.replace(limits, max_block_bytes=BLOCK_BYTES)
    assert _open(dataclasses.replace(_SPEC, limits=lambda _: fits)).limits is fits


def test_a_persistent_tier_needs_reproducible_keys() -> None:
    """A random hash seed is refused for tiers that outlive the process, and only for those."""
    random = dataclasses.replace(_NAMESPACE, hash_seed=None)
    persistent = dataclasses.replace(_SPEC, capabilities=frozenset({Capability.PERSISTENT}))
    with pytest.raises(HashSeedError, match="PYTHONHASHSEED"):
        _open(persistent, namespace=random)
    assert _open(persistent).name == "disk"
    assert _open(namespace=random).name == "disk"


def test_the_namespace_must_know_the_block_size() -> None:
    """A namespace of other blocks would let wrong bytes be found."""
    with pytest.raises(NamespaceError) as caught:
        _open(namespace=dataclasses.replace(_NAMESPACE, block_bytes=512))
    assert caught.value.field == "block_bytes"


def test_the_contract_version_of_a_bare_spec_is_checked() -> None:
    """Specs that come from no plugin are held to the same rule."""
    with pytest.raises(IncompatibleTierError, match=r"2\.0"):
        _open(dataclasses.replace(_SPEC, contract=ContractVersion(2, 0)))


def test_errors_of_kv_core_pass_through_a_factory() -> None:
    """A tier that explains itself is not wrapped."""
    original = ConfigError("'a' and 'b' contradict each other", setting="a")

    def factory(context: TierContext) -> SecondaryTierManager:
        raise original

    with pytest.raises(ConfigError) as caught:
        _open(dataclasses.replace(_SPEC, factory=factory))
    assert caught.value is original


def test_other_errors_of_a_factory_become_open_errors() -> None:
    """The tier is named and the original chained."""

    def factory(context: TierContext) -> SecondaryTierManager:
        raise PermissionError(13, "Permission denied", "/cache")

    with pytest.raises(TierOpenError, match=r"tier 'disk' of type 'acme'.*Permission denied") as e:
        _open(dataclasses.replace(_SPEC, factory=factory))
    assert isinstance(e.value.__cause__, PermissionError)


@pytest.mark.parametrize("wrapper", [None, RuntimeError, TierOpenError])
def test_secrets_are_kept_out_of_open_errors(wrapper: type[Exception] | None) -> None:
    """Credentials that a client library repeats are in no message and no traceback (CONF-2)."""
    secret = "hunter" + "2"

    def factory(context: TierContext) -> SecondaryTierManager:
        error = RuntimeError(f"cannot log in with {secret}")
        if wrapper is None:
            raise error
        raise wrapper("no access") from error

    with pytest.raises(TierOpenError) as caught:
        _open(dataclasses.replace(_SPEC, factory=factory), token=secret)
    assert secret not in "".join(traceback.format_exception(caught.value))
    expected = "cannot log in with **********" if wrapper is None else "no access"
    assert expected in str(caught.value)


def test_an_error_without_a_text_is_still_an_open_error() -> None:
    """An exception whose text cannot be made does not break the message about it."""

    class MuteError(Exception):
        @override
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def factory(context: TierContext) -> SecondaryTierManager:
        raise MuteError

    with pytest.raises(TierOpenError, match=r"MuteError: \(an error without a readable text\)"):
        _open(dataclasses.replace(_SPEC, factory=factory))


def test_an_exit_of_a_factory_is_an_open_error() -> None:
    """A client library that gives up on the whole process does not get it."""
    with pytest.raises(TierOpenError, match="SystemExit: 3"):
        _open(dataclasses.replace(_SPEC, factory=lambda _: sys.exit(3)))


def test_a_validator_that_breaks_is_told_without_its_words() -> None:
    """Before the settings are valid nobody knows which of them are secret (CONF-2)."""

    class BreakingConfig(_Config):
        @model_validator(mode="before")
        @classmethod
        def _break(cls, values: dict[str, object]) -> dict[str, object]:
            raise RuntimeError(str(values))

    with pytest.raises(BrokenPluginError, match=r"its settings \(RuntimeError\)") as caught:
        _open(dataclasses.replace(_SPEC, config_model=BreakingConfig), token="hunter" + "2")
    assert "hunter" + "2" not in "".join(traceback.format_exception(caught.value))


def test_a_factory_that_makes_no_tier_is_broken() -> None:
    """What comes out of a factory must be a SecondaryTierManager."""
    with pytest.raises(BrokenPluginError, match="makes a dict, which is no SecondaryTierManager"):
        _open(dataclasses.replace(_SPEC, factory=lambda _: {}))  # type: ignore[arg-type,return-value]


def test_limits_that_fail_or_are_none_are_broken() -> None:
    """Computing the limits is the plugin's duty."""
    with pytest.raises(BrokenPluginError, match="ZeroDivisionError"):
        _open(dataclasses.replace(_SPEC, limits=lambda _: 1 / 0))  # type: ignore[arg-type,return-value]
    with pytest.raises(BrokenPluginError, match="SystemExit"):
        _open(dataclasses.replace(_SPEC, limits=lambda _: sys.exit(3)))
    with pytest.raises(BrokenPluginError, match="limit 'job_deadline_s' must be a number > 0"):
        _open(depth=0)
    with pytest.raises(BrokenPluginError, match="expected a TierLimits"):
        _open(dataclasses.replace(_SPEC, limits=lambda _: None))  # type: ignore[arg-type,return-value]


# -- a declaration that follows the settings ------------------------------------------------------

_DEEP = frozenset({Capability.BOUNDED, Capability.USAGE})


def _deep_is_bounded(config: _Config) -> TierSpec:
    return _FLEXIBLE if config.depth == 1 else dataclasses.replace(_FLEXIBLE, capabilities=_DEEP)


_FLEXIBLE = dataclasses.replace(
    _SPEC, capabilities=frozenset({Capability.USAGE}), refine=_deep_is_bounded
)


@pytest.mark.parametrize(("depth", "declared"), [(1, {Capability.USAGE}), (2, _DEEP)])
def test_settings_decide_what_a_tier_declares(depth: int, declared: set[Capability]) -> None:
    """Whoever checks and whoever opens a tier gets the declaration that holds, and only that."""
    checked = check_tier(_FLEXIBLE, name="disk", settings={"depth": depth})
    opened = _open(_FLEXIBLE, depth=depth)
    assert checked.spec.capabilities == opened.spec.capabilities == declared
    assert checked.spec.refine is None


def test_refined_limits_hold() -> None:
    """The limits are those of the declaration that holds for the settings."""
    limits = TierLimits(job_deadline_s=9.0, lookup_deadline_s=1.0, min_free_bytes=1)
    refined = dataclasses.replace(_SPEC, limits=lambda _: limits)
    assert _open(dataclasses.replace(_SPEC, refine=lambda _: refined)).limits is limits


def test_demands_are_made_of_the_refined_declaration() -> None:
    """A tier without a floor is opened with the settings that bound it, and no others."""
    limits = TierLimits(job_deadline_s=1.0, lookup_deadline_s=1.0)
    spec = dataclasses.replace(_FLEXIBLE, limits=lambda _: limits)
    spec = dataclasses.replace(
        spec,
        refine=lambda config: dataclasses.replace(
            spec, capabilities=_deep_is_bounded(config).capabilities
        ),
    )
    assert _open(spec, depth=2).spec.capabilities == _DEEP
    with pytest.raises(ConfigError, match="no limit of capacity"):
        _open(spec, depth=1)


@pytest.mark.parametrize(
    "change",
    [
        {"type": "other"},
        {"contract": ContractVersion(1, 1)},
        {"factory": lambda _: None},
        {"config_model": TierConfig},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_refinement_keeps_what_settings_cannot_decide(change: dict[str, Any]) -> None:
    """Another type, contract, factory or config model is refused by name."""
    refined = dataclasses.replace(_SPEC, **change)
    with pytest.raises(BrokenPluginError, match=f"changes {next(iter(change))} when it refines"):
        _open(dataclasses.replace(_SPEC, refine=lambda _: refined))


def test_a_refinement_that_fails_or_is_none_is_broken() -> None:
    """Refining the declaration is the plugin's duty; secrets stay out of what is said of it."""

    def fail(config: _Config) -> TierSpec:
        raise RuntimeError(f"refused: {config.token.get_secret_value()}")

    secret = "hunter2"[::-1]
    with pytest.raises(BrokenPluginError, match="cannot say what holds for its settings") as caught:
        _open(dataclasses.replace(_SPEC, refine=fail), token=secret)
    assert secret not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(BrokenPluginError, match="SystemExit"):
        _open(dataclasses.replace(_SPEC, refine=lambda _: sys.exit(3)))
    with pytest.raises(BrokenPluginError, match="expected a TierSpec"):
        _open(dataclasses.replace(_SPEC, refine=lambda _: None))  # type: ignore[arg-type,return-value]
    strange: Any = frozenset({"bounded"})
    refined = dataclasses.replace(_SPEC, capabilities=strange)
    with pytest.raises(BrokenPluginError, match=r"unknown capabilities.*for these settings"):
        _open(dataclasses.replace(_SPEC, refine=lambda _: refined))
