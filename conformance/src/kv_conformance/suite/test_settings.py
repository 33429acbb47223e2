"""CONF: settings, secrets and the declaration."""

from __future__ import annotations

import secrets as random_words
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from kv_conformance.harness import SHORT_DEADLINES, Fault, HarnessError
from kv_conformance.rig import Broken, expect
from kv_conformance.rig._attempt import attempt_open
from kv_conformance.rig._secrets import Listener, plain_secrets, secret_fields, secrets_in
from kv_conformance.run._case import case
from kv_core.contract import CONTRACT_VERSION, Capability, parse_tier_config
from kv_core.errors import ConfigError, KVCoreError
from kv_core.plugins import RESERVED_KEYS, check_tier

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic.fields import FieldInfo

    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import TierLimits

_UNKNOWN: Final = "no_tier_has_this_setting"

# Odd enough that hardly any type takes all of them.
_ODD_VALUES: Final[tuple[Any, ...]] = ({"": [[]]}, [[{}]], "no such value", -1.5, "", object())

_LONGEST_SUMMARY: Final = 200


def _settings(rigs: Rigs) -> dict[str, Any]:
    return dict(rigs.harness.settings(rigs.opening()))


def _names(name: str, field: FieldInfo) -> set[str]:
    """Return the names under which a setting may be written."""
    aliases = (field.alias, field.validation_alias)
    return {name, *(alias for alias in aliases if isinstance(alias, str))}


# -- CONF-1 ---------------------------------------------------------------------------------------


def _refusal(rigs: Rigs, settings: Mapping[str, Any], names: set[str], what: str) -> str:
    """Open the tier with settings that are wrong; return what is wrong with its answer."""
    attempt = attempt_open(rigs.spec, settings)
    if attempt.error_type is None:
        return f"the tier opens {what}"
    if not issubclass(attempt.error_type, ConfigError):
        return f"{what}, opening raises no ConfigError but {attempt.error}"
    if not any(name in attempt.error or name in attempt.setting for name in names):
        return f"{what}, the error does not name the setting: {attempt.error}"
    return ""


@case("CONF-1")
def test_an_unknown_setting_is_refused(rigs: Rigs) -> None:
    """A misspelt limit must not be a limit that is ignored."""
    settings = {**_settings(rigs), _UNKNOWN: 1}
    problem = _refusal(rigs, settings, {_UNKNOWN}, f"with a setting {_UNKNOWN!r}")
    expect(not problem, problem)


@case("CONF-1")
def test_a_missing_setting_is_named(rigs: Rigs) -> None:
    """Each one that is required, instead of an error from deep inside."""
    for name, field in rigs.spec.config_model.model_fields.items():
        if field.is_required():
            names = _names(name, field)
            settings = {key: item for key, item in _settings(rigs).items() if key not in names}
            problem = _refusal(rigs, settings, names, f"without its required setting {name!r}")
            expect(not problem, problem)


def _refused_by_type(field: FieldInfo) -> Iterator[Any]:
    """Yield odd values that do not fit the declared type of a setting."""
    annotation: Any = field.annotation
    try:
        adapter = TypeAdapter[Any](annotation)
    except PydanticUserError:
        # A type of the tier's own, which only its model knows how to check.
        return
    for value in _ODD_VALUES:
        try:
            adapter.validate_python(value)
        except ValidationError:
            yield value


@case("CONF-1")
def test_an_invalid_setting_is_named(rigs: Rigs) -> None:
    """Each one with a type that not everything fits."""
    for name, field in rigs.spec.config_model.model_fields.items():
        names, good = _names(name, field), _settings(rigs)
        written = next((key for key in names if key in good), field.alias or name)
        values = list(_refused_by_type(field))
        problems = [
            _refusal(rigs, {**good, written: value}, names, f"with {name} = {value!r}")
            for value in values
        ]
        # A model may make sense of some of them. One that takes all of them checks nothing.
        if values and all(problem.startswith("the tier opens") for problem in problems):
            raise Broken(problems[0])
        for problem in problems:
            expect(not problem or problem.startswith("the tier opens"), problem)


# -- CONF-2 ---------------------------------------------------------------------------------------


def _canary() -> str:
    return f"canary/{random_words.token_hex(8)}"


def _with_canaries(rigs: Rigs, settings: Mapping[str, Any], *, instead: bool) -> dict[str, Any]:
    """Put made-up secrets into the secret settings.

    Args:
        rigs: Of the test.
        settings: To begin with.
        instead: Also where a secret is set already.
    """
    changed = dict(settings)
    for name, field in secret_fields(rigs.spec.config_model).items():
        written = next((key for key in _names(name, field) if key in changed), None)
        if written is None or instead or not changed[written]:
            changed[written or field.alias or name] = _canary()
    return changed


def _secret_settings(rigs: Rigs, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with a secret in every place that takes one, if the tier opens then."""
    changed = _with_canaries(rigs, settings, instead=False)
    if changed != settings and attempt_open(rigs.spec, changed).error:
        return dict(settings)
    return changed


def _expect_silence(listener: Listener, secrets: frozenset[str]) -> None:
    seen = listener.find(secrets)
    expect(not seen, f"a secret of the settings is in {', '.join(seen[:4])}")


def _show(listener: Listener, rigs: Rigs, settings: Mapping[str, Any]) -> frozenset[str]:
    """Let the listener see every form in which settings are shown; return the secrets."""
    checked = check_tier(rigs.spec, name=rigs.spec.type, settings=settings)
    config = checked.config
    for form in (repr, str, format):
        listener.hear(f"{form.__name__}() of the config", form(config))
    listener.hear("the config as JSON", config.model_dump_json(fallback=str))
    listener.hear("repr() of the config's fields", config.model_dump())
    listener.hear("the settings that an engine logs", checked.shown_settings())
    listener.hear("repr() of a checked tier", repr(checked))
    return secrets_in(config)


@case("CONF-2")
def test_a_working_tier_shows_no_secret(rigs: Rigs) -> None:
    """In no form of its settings, of itself, its log, its statistics or its child processes."""
    settings = _secret_settings(rigs, _settings(rigs))
    with Listener() as listener:
        secrets = _show(listener, rigs, settings)
        rig = rigs.open(settings=settings)
        keys = rigs.keys(2)
        rig.stored(keys)
        rig.resolve([*keys, rigs.key()])
        rig.load(rigs.keys(1))
        listener.look_at_processes()
        _show_tier(listener, rig)
        rig.shutdown()
    _expect_silence(listener, secrets)


@case("CONF-2")
def test_a_failing_tier_shows_no_secret(rigs: Rigs) -> None:
    """Client libraries like to repeat the credentials that were refused."""
    opening = rigs.opening(faults=True, deadlines=SHORT_DEADLINES)
    settings = _secret_settings(rigs, rigs.harness.settings(opening))
    with Listener() as listener:
        secrets = _show(listener, rigs, settings)
        rig = rigs.open(
            storage=opening.storage, faults=True, deadlines=SHORT_DEADLINES, settings=settings
        )
        keys = rigs.keys(2)[: rig.job_keys]
        rig.stored(keys)
        rig.inject(Fault.ERROR)
        for result in (rig.store(rigs.keys(len(keys))), rig.load(keys).result):
            listener.hear("the error of a job", result)
        rig.resolve(keys, rig.new_request())
        _show_tier(listener, rig)
        rig.heal()
        rig.shutdown()
    _expect_silence(listener, secrets)


def _show_tier(listener: Listener, rig: Rig) -> None:
    listener.hear("repr() of the tier", repr(rig.tier))
    listener.hear("str() of the tier", str(rig.tier))
    context = getattr(rig.tier, "context", None)
    listener.hear("repr() of the tier's context", repr(context))
    listener.hear("the statistics", rig.stats())
    listener.hear("the names of metrics", rig.metrics.names)
    listener.hear("the definitions of metrics", rig.tier.build_metric_definitions())
    listener.hear("the events", list(rig.tier.take_events()))


@case("CONF-2")
def test_a_tier_that_cannot_be_opened_shows_no_secret(rigs: Rigs) -> None:
    """Neither of a storage that is not there, nor of one that refuses what it is given."""
    opening = rigs.opening()
    unusable = rigs.harness.unusable_settings(opening)
    settings = [_with_canaries(rigs, rigs.harness.settings(opening), instead=True)]
    if unusable is not None:
        settings.append(_with_canaries(rigs, unusable, instead=True))
    # An invalid value beside a secret: the error must not repeat all of its input.
    settings.append({**settings[0], _UNKNOWN: _canary()})
    for tried in settings:
        with Listener() as listener:
            attempt = attempt_open(rigs.spec, tried)
            listener.hear("the error of the constructor", attempt.traceback)
        canaries = {
            value for value in tried.values() if isinstance(value, str) and "canary/" in value
        }
        _expect_silence(listener, frozenset(canaries))


@case("CONF-2")
def test_settings_that_are_secrets_are_declared_so(rigs: Rigs) -> None:
    """Only then does everybody who shows settings know what to hide."""
    found = plain_secrets(rigs.spec.config_model)
    expect(
        not found,
        f"by their names, {', '.join(found)} hold secrets, but their type is plain text: declare "
        "them as pydantic.SecretStr (a setting that only says where a secret is ends in _file, "
        "_path, _env, _id or _name)",
    )


# -- CONF-3 ---------------------------------------------------------------------------------------


@case("CONF-3")
def test_capabilities_are_those_of_the_contract(rigs: Rigs) -> None:
    """An engine that does not know a word cannot act on it."""
    capabilities: object = rigs.spec.capabilities
    expect(
        isinstance(capabilities, (frozenset, set)),
        f"capabilities is a {type(capabilities).__name__}, expected a frozenset of Capability",
    )
    unknown = [item for item in rigs.spec.capabilities if not isinstance(item, Capability)]  # type: ignore[redundant-expr]
    expect(not unknown, f"{unknown!r} among the capabilities are no members of Capability")


@case("CONF-3")
def test_the_contract_version_is_known(rigs: Rigs) -> None:
    """Of the same major version, and no later minor one than this suite tests."""
    declared: Any = rigs.spec.contract
    expect(
        isinstance(declared, tuple)
        and len(declared) == 2
        and all(type(part) is int for part in declared),
        f"the contract version is {declared!r}, expected for example ContractVersion(1, 0)",
    )
    expect(
        declared[0] == CONTRACT_VERSION.major and 0 <= declared[1] <= CONTRACT_VERSION.minor,
        f"the tier is written for contract {declared[0]}.{declared[1]}, this suite tests "
        f"{CONTRACT_VERSION}",
    )


@case("CONF-3")
def test_type_and_summary_can_be_shown(rigs: Rigs) -> None:
    """The type is the name it is installed under; the summary is one line."""
    spec = rigs.spec
    expect(
        spec.type == rigs.subject_type.name,
        f"the type is {spec.type!r}, but it is installed as {rigs.subject_type.name!r}",
    )
    summary: object = spec.summary
    expect(
        isinstance(summary, str)
        and summary.strip()
        and len(summary.splitlines()) == 1
        and len(summary) <= _LONGEST_SUMMARY,
        f"the summary is {summary!r}, expected one line of at most {_LONGEST_SUMMARY} characters",
    )


@case("CONF-3")
def test_no_setting_has_a_name_of_the_engine(rigs: Rigs) -> None:
    """The engine keeps those for itself, so no user could ever set it."""
    fields = rigs.spec.config_model.model_fields
    written = set().union(*(_names(name, field) for name, field in fields.items()))
    taken = sorted(written & RESERVED_KEYS)
    expect(not taken, f"{', '.join(taken)} of the settings are names that belong to the engine")


def _limits(rigs: Rigs, settings: Mapping[str, Any]) -> TierLimits:
    try:
        return check_tier(rigs.spec, name=rigs.spec.type, settings=settings).limits
    except ConfigError as error:
        raise HarnessError(f"the settings of the harness are refused: {error}") from error
    except KVCoreError as error:
        raise Broken(f"the limits cannot be computed: {error}") from error


@case("CONF-3")
def test_limits_follow_the_settings(rigs: Rigs) -> None:
    """The engine acts on what is declared: a deadline that is set must be the one declared."""
    opening = rigs.opening()
    long = rigs.harness.settings(opening)
    short = rigs.harness.settings(replace(opening, deadlines=SHORT_DEADLINES))
    limits = {
        name: _limits(rigs, settings) for name, settings in (("long", long), ("short", short))
    }
    expect(
        limits["long"] == _limits(rigs, long),
        "the limits differ from one time to the next, for the same settings",
    )
    expect(
        long == short or limits["long"] != limits["short"],
        "other deadlines in the settings change nothing in the limits",
    )
    config = parse_tier_config(rigs.spec.type, rigs.spec.config_model, short)
    for name in ("job_deadline_s", "lookup_deadline_s", "error_backoff_s", "open_deadline_s"):
        setting, declared = getattr(config, name, None), getattr(limits["short"], name)
        expect(
            setting is None or setting == declared,
            f"the setting {name} is {setting!r}, but the limit of that name is {declared!r}",
        )
