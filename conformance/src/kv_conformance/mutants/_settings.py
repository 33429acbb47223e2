"""Mutants of the CONF clauses."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import FolderConfig, FolderHarness, FolderTier, folder_spec
from kv_core.contract import JobError, TierLimits

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import JobResult

_LOGGER: Final = logging.getLogger(__name__)


# -- CONF-1: what is wrong is named -------------------------------------------------------------


class _Lenient(FolderConfig):
    model_config = ConfigDict(extra="ignore")


@mutant(
    "CONF-1",
    breaks="Ignores settings that it does not know.",
    source="LMCache#4725: a limit that was set, ignored and never enforced",
)
def ignores_unknown_settings(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(config_model=_Lenient))


def _or_default(value: Any) -> Any:
    return value if isinstance(value, int) and value > 0 else 1_000_000


class _Corrected(FolderConfig):
    capacity_blocks: Annotated[int, BeforeValidator(_or_default)] = Field(default=1_000_000)


@mutant(
    "CONF-1",
    breaks="Takes the default for a capacity that it cannot read.",
    source="LMCache#4725: 14 TB used of the 4 TB that were configured",
)
def corrects_invalid_settings(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(config_model=_Corrected))


class _Nameless(FolderConfig):
    @model_validator(mode="before")
    @classmethod
    def _check(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if not settings.get("root_dir"):
            raise ValueError("the configuration is incomplete")
        return settings


@mutant(
    "CONF-1",
    breaks="Does not say which setting is missing.",
    source="llm-d-kv-cache#499: what is missing shows itself deep inside, as something else",
)
def names_no_setting(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(config_model=_Nameless))


# -- CONF-2: secrets ------------------------------------------------------------------------------


class _Candid(FolderTier):
    config: FolderConfig

    @property
    def _password(self) -> str:
        return self.config.password.get_secret_value()


class _CandidRepr(_Candid):
    @override
    def __repr__(self) -> str:
        return f"FolderTier(root_dir={self.config.root_dir}, password={self._password!r})"


@mutant(
    "CONF-2",
    breaks="Shows its password in its repr.",
    source="llm-d-kv-cache#499: settings in dumps; a repr is in every traceback with locals",
)
def shows_the_password_in_its_repr(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_CandidRepr))


class _CandidLog(_Candid):
    @override
    def open(self) -> None:
        settings = self.config.model_dump() | {"password": self._password}
        _LOGGER.debug("opening with %s", settings)
        super().open()


@mutant(
    "CONF-2",
    breaks="Logs its settings, the password included, at level DEBUG.",
    source="llm-d-kv-cache#499: the effective configuration, as one log line",
)
def logs_the_password(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_CandidLog))


class _CandidError(_Candid):
    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [
            replace(
                result,
                error=JobError(result.error.kind, f"{self._password} was refused"),
            )
            if result.error is not None
            else result
            for result in super().get_finished_jobs()
        ]


@mutant(
    "CONF-2",
    breaks="Repeats the password in the error of a job.",
    source="LMCache#3376: whole answers of a server in the log, request included",
)
def repeats_the_password_in_errors(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_CandidError))


class _CandidFailure(_Candid):
    @override
    def open(self) -> None:
        try:
            super().open()
        except OSError:
            warnings.warn(f"cannot log in with {self._password}", stacklevel=1)
            raise


@mutant(
    "CONF-2",
    breaks="Warns of a storage that cannot be opened, with the password that was tried.",
    source="client libraries repeat what was refused",
)
def warns_with_the_password(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_CandidFailure))


class _PlainConfig(FolderConfig):
    password: str = ""  # type: ignore[assignment]


@mutant(
    "CONF-2",
    breaks="Declares its password as plain text.",
    source="llm-d-kv-cache#499: nobody who shows settings can know what to hide",
)
def declares_plain_text(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(config_model=_PlainConfig))


class _CandidConfig(FolderConfig):
    password: SecretStr = SecretStr("")

    @override
    def __repr__(self) -> str:
        settings = {name: getattr(self, name) for name in type(self).model_fields}
        return str(settings | {"password": self.password.get_secret_value()})


@mutant(
    "CONF-2",
    breaks="Shows its password in the repr of its configuration.",
    source="a repr written by hand, for a debugger, ends up in a log",
)
def shows_the_password_in_its_config(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(config_model=_CandidConfig))


# -- CONF-3: the declaration ----------------------------------------------------------------------


def _fixed(config: FolderConfig) -> TierLimits:
    return TierLimits(
        job_deadline_s=30.0,
        lookup_deadline_s=15.0,
        error_backoff_s=0.2,
        min_retained_blocks=config.capacity_blocks,
    )


@mutant(
    "CONF-3",
    breaks="Declares the same limits whatever its settings say.",
    source="vllm#53128: a timer that no setting reaches",
)
def declares_fixed_limits(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(limits=_fixed))


class _Reserved(FolderConfig):
    mode: str = "fast"


@mutant(
    "CONF-3",
    breaks="Has a setting that the engine never hands on.",
    source="vllm#58088: a tier and an engine that disagree on keywords",
)
def has_a_reserved_setting(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(config_model=_Reserved))


@mutant(
    "CONF-3",
    breaks="Describes itself in several lines.",
    source="a docstring in the place of a summary",
)
def has_a_summary_of_two_lines(workdir: Path) -> Harness:
    """Make the harness."""
    spec = replace(folder_spec(), summary="Blocks in a folder.\n\nTo test the suite with.")
    return FolderHarness(workdir, spec)
