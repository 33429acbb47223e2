"""Everything that a user may write, and what is made of it."""

from __future__ import annotations

import json
import logging
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from pydantic import SecretStr

from kv_core.connector import (
    CPUOffloadingSpec,
    OffloadingSettings,
    TieringOffloadingSpec,
    config_advice,
    effective_config,
)
from kv_core.connector._effective import log_start
from kv_core.contract import Capability, ContractVersion, TierConfig, TierLimits, TierSpec
from kv_core.errors import ConfigError, TierOpenError
from kv_core.plugins import TierRegistry, check_tier
from kv_core.tiering import EngineReset, TieringConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.engine import OffloadingConfig
    from kv_core.plugins import CheckedTier

DOCS: Final = Path(__file__).parents[3] / "docs" / "configuration.md"
SECRET: Final = "hunter2"


class AcmeConfig(TierConfig):
    """Settings of a made-up tier."""

    address: str = ""
    token: SecretStr = SecretStr("")
    min_free_bytes: int = 0
    limit_s: float = 1.0


def acme_spec(*capabilities: Capability) -> TierSpec:
    """Declare a made-up tier with these capabilities."""
    return TierSpec(
        type="acme",
        summary="",
        contract=ContractVersion(1, 0),
        factory=lambda _: pytest.fail("the tier was opened"),
        config_model=AcmeConfig,
        limits=lambda config: TierLimits(
            job_deadline_s=config.limit_s,
            lookup_deadline_s=config.limit_s,
            min_free_bytes=config.min_free_bytes,
        ),
        capabilities=frozenset(capabilities),
    )


def read(**extra_config: Any) -> OffloadingSettings:
    """Read settings, with a size of the primary tier unless they have one."""
    return OffloadingSettings.from_extra_config({"cpu_bytes_to_use": "1MiB", **extra_config})


def checked(*capabilities: Capability, name: str = "acme", **settings: Any) -> CheckedTier:
    """Check the settings of a made-up tier."""
    return check_tier(acme_spec(*capabilities), name=name, settings=settings)


def problems(**extra_config: Any) -> dict[str, str]:
    """Return what is wrong with settings: message by setting."""
    with pytest.raises(ConfigError) as caught:
        read(**extra_config)
    return {problem.setting: problem.message for problem in caught.value.problems}


# -- reading ------------------------------------------------------------------------------------


def test_only_the_size_is_required() -> None:
    """Everything else has a default."""
    settings = read()
    assert settings.cpu_bytes_to_use == 2**20
    assert settings.engine_reset is EngineReset.CACHE
    assert settings.secondary_tiers == ()
    assert settings.reuse_filter is None
    assert problems(cpu_bytes_to_use=None)["cpu_bytes_to_use"].endswith("for example '64MiB'")


def test_a_missing_size_is_explained() -> None:
    """The message says what to set it to."""
    with pytest.raises(ConfigError, match=r"'cpu_bytes_to_use' is missing: .*'64GiB'"):
        OffloadingSettings.from_extra_config({})


def test_the_settings_are_those_of_the_tiering_engine_too() -> None:
    """One object configures connector and engine."""
    settings = read(lease_share=0.25)
    assert isinstance(settings, TieringConfig)
    assert settings.lease_blocks(100) == 25


@pytest.mark.parametrize(
    ("written", "read_as"), [("64GiB", 64 * 2**30), (4096, 4096), ("1.5 kB", 1500)]
)
def test_sizes_may_be_text(written: object, read_as: int) -> None:
    """Both settings that are sizes read numbers and text."""
    settings = read(cpu_bytes_to_use=written, max_inflight_store_bytes=written)
    assert (settings.cpu_bytes_to_use, settings.max_inflight_store_bytes) == (read_as, read_as)


def test_every_faulty_key_is_named_at_once() -> None:
    """Nobody has to correct one mistake to see the next."""
    found = problems(
        cpu_bytes_to_use="64Gb",
        block_size=32,
        blocks_per_chunk=2,
        lease_share=1.5,
        engine_reset="weights",
        store_threshold="2",
        offload_prompt_only="false",
        eviction_policy="arcc",
        secondary_tiers=[{"type": "a"}, {"type": "a"}, {}],
        no_such_thing=1,
    )
    assert set(found) == {
        "cpu_bytes_to_use",
        "block_size",
        "lease_share",
        "engine_reset",
        "store_threshold",
        "offload_prompt_only",
        "eviction_policy",
        "secondary_tiers[1].name",
        "secondary_tiers[2].type",
        "no_such_thing",
    }
    assert (
        found["lease_share"] == "'lease_share': input should be less than or equal to 1, found 1.5"
    )
    assert "did you mean 'arc'?" in found["eviction_policy"]
    assert "did you mean 'GB'?" in found["cpu_bytes_to_use"]
    assert "'cache' or 'epoch', found 'weights'" in found["engine_reset"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("lease_shar", "lease_share"),
        ("cpu_bytes", "cpu_bytes_to_use"),
        ("secondary_tier", "secondary_tiers"),
        ("engine-reset", "engine_reset"),
    ],
)
def test_an_unknown_key_is_met_with_the_closest(written: str, meant: str) -> None:
    """Settings that nobody knows are refused, not ignored."""
    assert problems(**{written: 1})[written] == (
        f"{written!r} is not a setting (did you mean {meant!r}?)"
    )


def test_an_unknown_key_that_is_close_to_none_may_be_a_tiers() -> None:
    """The message lists the settings and says where those of a tier stand; no value (CONF-2)."""
    message = problems(token=SECRET)["token"]
    assert "eviction_policy" in message
    assert "'secondary_tiers'" in message
    assert SECRET not in message


@pytest.mark.parametrize(
    "entries",
    [
        [{"token": SECRET}],
        {"token": SECRET},
        SECRET,
        [[SECRET]],
        [{"type": {"token": SECRET}, "mode": [SECRET], "fill_on_promotion": {"a": SECRET}}],
    ],
)
def test_values_of_tiers_are_not_repeated(entries: object) -> None:
    """A malformed list of tiers may hold secrets (CONF-2)."""
    with pytest.raises(ConfigError) as caught:
        read(secondary_tiers=entries)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_settings_of_tiers_are_in_no_dump_and_no_repr() -> None:
    """The model does not know which of them are secrets (CONF-2)."""
    settings = read(secondary_tiers=[{"type": "acme", "token": SECRET}])
    assert SECRET not in repr(settings)
    assert SECRET not in settings.model_dump_json()
    assert settings.secondary_tiers[0].settings["token"] == SECRET


def test_the_reuse_filter_needs_two_requests() -> None:
    """A threshold of 1 is no filter."""
    assert read(store_threshold=1).reuse_filter is None
    assert read(store_threshold=2, max_tracker_size=9).reuse_filter == (2, 9)


# -- the specs ----------------------------------------------------------------------------------


def test_the_engine_sees_a_number_of_bytes(config: Callable[..., OffloadingConfig]) -> None:
    """Text is read once, at the door."""
    spec = CPUOffloadingSpec(config(cpu_bytes_to_use="64KiB"))
    assert spec.config.extra_config["cpu_bytes_to_use"] == 65536
    assert spec.geometry.num_blocks == 16


def test_a_spec_refuses_what_the_model_refuses(config: Callable[..., OffloadingConfig]) -> None:
    """Unknown settings show at construction."""
    with pytest.raises(ConfigError, match="did you mean 'lease_share'"):
        TieringOffloadingSpec(config(cpu_bytes_to_use="64KiB", leas_share=1))


def test_two_levels_have_no_tiers(config: Callable[..., OffloadingConfig]) -> None:
    """The message has the spec that has them."""
    spec = CPUOffloadingSpec(config(cpu_bytes_to_use="64KiB", secondary_tiers=[{"type": "fs"}]))
    with pytest.raises(ConfigError, match='"spec_name": "TieringOffloadingSpec"'):
        spec.get_manager()


def test_the_configuration_is_one_line_of_the_log(
    config: Callable[..., OffloadingConfig], caplog: pytest.LogCaptureFixture
) -> None:
    """At the making of the manager, as JSON, with the class in use as the name of the spec."""
    spec = CPUOffloadingSpec(config(cpu_bytes_to_use="64KiB", store_threshold=3))
    with caplog.at_level(logging.INFO, "kv_core.connector"):
        spec.get_manager()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("kv_core.connector", "INFO")
    shown = json.loads(record.getMessage().partition(": ")[2])
    assert next(iter(shown)) == "spec_name"
    assert shown["spec_name"] == "CPUOffloadingSpec"
    assert (shown["cpu_bytes_to_use"], shown["store_threshold"]) == (65536, 3)
    assert shown.keys() == OffloadingSettings.model_fields.keys()


_PLUGIN: Final = """
import kv_core
from kv_core.contract import ContractVersion, TierConfig, TierLimits, TierSpec
from kv_core.errors import TierOpenError
from pydantic import SecretStr

class Config(TierConfig):
    token: SecretStr

def open_it(context):
    raise TierOpenError("the storage is not there")

@kv_core.hookimpl
def kv_core_register_tier():
    return TierSpec(type="acme", summary="", contract=ContractVersion(1, 0), factory=open_it,
        config_model=Config,
        limits=lambda config: TierLimits(
            job_deadline_s=1.0, lookup_deadline_s=1.0, min_free_bytes=1))
"""


def test_the_line_is_written_before_tiers_are_opened(
    config: Callable[..., OffloadingConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever looks for the reason of a failed start finds the configuration (CONF-2)."""
    (tmp_path / "kv_settings_test_tier.py").write_text(_PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kv_settings_test_tier", raising=False)
    entry_point = metadata.EntryPoint("acme", "kv_settings_test_tier", "kv_core.tiers")
    spec = TieringOffloadingSpec(
        config(
            cpu_bytes_to_use="64KiB",
            shm_dir=str(tmp_path),
            secondary_tiers=[{"type": "acme", "token": SECRET}],
        ),
        registry=TierRegistry([entry_point]),
    )
    with caplog.at_level(logging.INFO, "kv_core.connector"), pytest.raises(TierOpenError):
        spec.get_manager()
    levels = [(r.name, r.levelname) for r in caplog.records]
    assert levels == [("kv_core.connector", "INFO")]
    assert '"settings": {"token": "**********"}' in caplog.text
    assert '"spec_name": "TieringOffloadingSpec"' in caplog.text
    assert SECRET not in caplog.text
    spec.shutdown()


def test_a_tier_that_could_fill_its_storage_is_refused_before_anything_is_taken(
    config: Callable[..., OffloadingConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No region, no constructor; a tier that is only read gets as far as its constructor."""
    module = tmp_path / "kv_settings_endless_tier.py"
    module.write_text(_PLUGIN.replace("min_free_bytes=1", "min_free_bytes=0"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, module.stem, raising=False)
    registry = TierRegistry([metadata.EntryPoint("acme", module.stem, "kv_core.tiers")])
    for mode, error in (("read_write", ConfigError), ("read_only", TierOpenError)):
        shm_dir = tmp_path / mode
        entry = {"type": "acme", "token": SECRET, "mode": mode}
        spec = TieringOffloadingSpec(
            config(cpu_bytes_to_use="64KiB", shm_dir=str(shm_dir), secondary_tiers=[entry]),
            registry=registry,
        )
        if mode == "read_only":
            shm_dir.mkdir()
        with pytest.raises(error, match=r"no limit of capacity|the storage is not there"):
            spec.get_manager()
        spec.shutdown()


def test_the_line_shows_tiers_without_their_secrets(caplog: pytest.LogCaptureFixture) -> None:
    """Secret settings are masked, also where a plain setting repeats them (CONF-2)."""
    entry = {
        "type": "acme",
        "mode": "read_only",
        "token": SECRET,
        "address": f"https://user:pass@example.org/?key={SECRET}",
    }
    settings = read(secondary_tiers=[entry])
    written = dict(settings.secondary_tiers[0].settings)
    with caplog.at_level(logging.INFO, "kv_core.connector"):
        log_start(settings, [checked(Capability.BOUNDED, **written)])
    (record,) = caplog.records
    shown = json.loads(record.getMessage().partition(": ")[2])
    assert shown["secondary_tiers"] == [
        {
            "type": "acme",
            "name": "acme",
            "mode": "read_only",
            "fill_on_promotion": False,
            "settings": {
                "address": "https://user:**********@example.org/?key=**********",
                "token": "**********",
                "min_free_bytes": 0,
                "limit_s": 1.0,
            },
        }
    ]


def test_of_an_unknown_tier_only_names_are_shown() -> None:
    """Nobody knows which of its settings are secrets (CONF-2)."""
    settings = read(secondary_tiers=[{"type": "acme", "token": SECRET, "address": "x"}])
    shown = effective_config(settings, ())["secondary_tiers"][0]
    assert shown["settings"] == ["address", "token"]


# -- advice -------------------------------------------------------------------------------------


def advice(settings: OffloadingSettings, *tiers: CheckedTier) -> dict[str, str]:
    """Return advice by setting."""
    return {found.setting: found.message for found in config_advice(settings, tiers)}


TIERS: Final = [{"type": "acme", "name": "a"}, {"type": "acme", "name": "b"}]


@pytest.mark.parametrize(
    ("extra_config", "setting", "part"),
    [
        (
            {"promotion_deadline_s": 31},
            "promotion_deadline_s",
            "(31) is longer than 'request_lookup_deadline_s' (30)",
        ),
        ({"lease_deadline_s": 29}, "lease_deadline_s", "(29) is shorter than"),
        ({"degraded_backoff_s": 61}, "degraded_backoff_max_s", "(61) is longer than"),
        (
            {"promotion_deadline_s": 0.5, "request_lookup_deadline_s": 0.9},
            "a.job_deadline_s",
            "may take 1 s for a job, but loads",
        ),
        ({"store_deadline_s": 0.5}, "a.job_deadline_s", "may take 1 s for a job, but stores"),
        (
            {"request_lookup_deadline_s": 0.5},
            "a.lookup_deadline_s",
            "may take 1 s for a lookup",
        ),
        (
            {"secondary_tiers": [{**TIERS[0], "mode": "read_only", "fill_on_promotion": True}]},
            "a.fill_on_promotion",
            "is 'read_only', so its 'fill_on_promotion' has no effect",
        ),
        (
            {"secondary_tiers": [{**TIERS[0], "fill_on_promotion": True}]},
            "a.fill_on_promotion",
            "is the last one",
        ),
        (
            {"secondary_tiers": [{**TIERS[0], "mode": "read_only"}]},
            "secondary_tiers",
            "every secondary tier is 'read_only'",
        ),
        ({"store_threshold": 1}, "store_threshold", "is the same as 0"),
        ({"max_tracker_size": 1}, "max_tracker_size", "has no effect without"),
        ({"secondary_tiers": []}, "secondary_tiers", "is a plain CPU cache"),
        (
            {"spec_name": "CPUOffloadingSpec", "lease_share": 0.5},
            "lease_share",
            "has no effect with CPUOffloadingSpec",
        ),
    ],
)
def test_what_is_probably_not_meant_is_said(
    extra_config: dict[str, Any], setting: str, part: str
) -> None:
    """Each piece of advice names the setting and the numbers it is about."""
    defaults = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": TIERS[:1]}
    settings = read(**{**defaults, **extra_config})
    tier = checked(Capability.BOUNDED, Capability.PERSISTENT, name="a")
    assert part in advice(settings, tier)[setting]


def test_two_tiers_over_one_storage_are_noticed() -> None:
    """The same type and the same settings, whatever the names."""
    settings = read(spec_name="TieringOffloadingSpec", secondary_tiers=TIERS)
    a = checked(Capability.BOUNDED, name="a", address="x")
    b = checked(Capability.BOUNDED, name="b", address="x")
    c = checked(Capability.BOUNDED, name="b", address="y")
    assert "tiers 'a' and 'b' have the same type and settings" in advice(settings, a, b)["b"]
    assert advice(settings, a, c) == {}


# -- documentation ------------------------------------------------------------------------------


def documented() -> dict[str, str]:
    """Return the default of each setting in the tables of the documentation."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", DOCS.read_text(), flags=re.MULTILINE)
    return {name: default.strip().strip("`") for name, default in rows}


@pytest.mark.parametrize("name", OffloadingSettings.model_fields)
def test_every_setting_is_documented_with_its_default(name: str) -> None:
    """docs/configuration.md has a row for it."""
    shown = documented()[name]
    field = OffloadingSettings.model_fields[name]
    if field.is_required():
        assert shown == "required"
    elif field.default in (None, ()):
        assert shown in ("none", "1", "the GPU block size")
    elif isinstance(field.default, bool):
        assert shown == str(field.default).lower()
    elif isinstance(field.default, EngineReset):
        assert shown == field.default.value
    elif isinstance(field.default, (int, float)):
        size = {"GiB": 2**30}.get(shown.rpartition(" ")[2], 1)
        assert float(shown.split()[0]) * size == field.default
    else:
        assert shown == str(field.default)


def test_every_setting_says_what_it_is() -> None:
    """The descriptions of the model are complete: tools list them."""
    assert [n for n, f in OffloadingSettings.model_fields.items() if not f.description] == []
