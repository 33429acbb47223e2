"""The harness of vLLM's tier ``example``: a storage is a dictionary inside an open tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from kv_conformance.harness import BaseHarness, HarnessError
from kv_core.contract import ContractVersion, TierSpec
from kv_core.vllm.conformance._adapter import VllmTier, prepare_process
from kv_core.vllm.conformance._settings import UncheckedConfig, limits_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kv_conformance.harness import Corruption, Fault, Opening, Subject
    from kv_core.contract import OffloadKey, TierContext

__all__ = ["SPEC", "ExampleHarness"]


class ExampleConfig(UncheckedConfig):
    """The settings of vLLM's tier ``example``, as its constructor names them."""

    custom_param: int = 0


def _make(context: TierContext) -> VllmTier:
    return VllmTier(context, "example")


SPEC: Final = TierSpec(
    type="vllm-example",
    summary="vLLM's own example tier, unmodified, behind an adapter.",
    contract=ContractVersion(1, 0),
    factory=_make,
    config_model=ExampleConfig,
    limits=limits_of,
)


@final
class ExampleHarness(BaseHarness):
    """The harness of vLLM's ``example``.

    The tier keeps keys in a dictionary of its own process. Nothing about that can stall, fail or be
    damaged, so the clauses on that cannot be judged.
    """

    spec = SPEC
    faults: frozenset[Fault] = frozenset()

    @override
    def start(self) -> None:
        prepare_process("example")

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings of a storage.

        Raises:
            HarnessError: Faults are asked for.
        """
        if opening.faults:
            raise HarnessError(
                "vLLM's example tier keeps its keys in a dictionary of its own process: there is "
                "no storage that could stall or fail"
            )
        return {
            "job_deadline_s": opening.deadlines.job_s,
            "lookup_deadline_s": opening.deadlines.lookup_s,
            "error_backoff_s": opening.deadlines.error_backoff_s,
        }

    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Remove a key.

        Raises:
            KeyError: It is not there.
        """
        del _chunks(subject)[key]

    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        """Refuse: there are no bytes that could be damaged.

        Raises:
            KeyError: There is no such key.
            HarnessError: There is.
        """
        if key not in _chunks(subject):
            raise KeyError(key)
        raise HarnessError(
            f"an object of vLLM's example tier cannot be {how.value}: it has no bytes"
        )

    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys."""
        return list(_chunks(subject))

    def inject(self, subject: Subject, fault: Fault) -> None:  # noqa: ARG002
        """Refuse: see the class.

        Raises:
            HarnessError: Always.
        """
        raise HarnessError(f"vLLM's example tier has no storage that could {fault.value}")

    def heal(self, subject: Subject) -> None:
        """Do nothing."""


def _chunks(subject: Subject) -> dict[OffloadKey, bool]:
    if not isinstance(subject.tier, VllmTier):
        raise HarnessError(f"a VllmTier expected, found a {type(subject.tier).__name__}")
    chunks: dict[OffloadKey, bool] = subject.tier.inner.chunks
    return chunks
