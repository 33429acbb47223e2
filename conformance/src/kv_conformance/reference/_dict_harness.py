"""The harness of the dict tier: its storage lives inside of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_conformance.harness import BaseHarness, Corruption, Fault, HarnessError
from kv_conformance.reference._dict_tier import DictConfig, DictTier
from kv_core.contract import Capability, ContractVersion, TierSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from kv_conformance.harness import Opening, Subject
    from kv_conformance.reference._dict_store import DictStore
    from kv_core.contract import OffloadKey, SecondaryTierManager, TierContext

__all__ = ["DictHarness", "dict_spec"]


def dict_spec(
    factory: Callable[[TierContext], SecondaryTierManager] = DictTier,
    *,
    name: str = "dict",
    capabilities: frozenset[Capability] = frozenset({Capability.WITHDRAWS_IO}),
) -> TierSpec:
    """Return the declaration of the dict tier, or of a variant of it."""
    return TierSpec(
        type=name,
        summary="Blocks in a dictionary, without the kit.",
        contract=ContractVersion(1, 0),
        factory=factory,
        config_model=DictConfig,
        limits=DictConfig.limits,
        capabilities=capabilities,
    )


class DictHarness(BaseHarness):
    """Acts on the store inside the tier.

    Args:
        workdir: Not used.
        spec: The tier or a variant of it.
    """

    stall_can_be_interrupted = True
    faults = frozenset({Fault.STALL, Fault.ERROR, Fault.FULL})

    def __init__(self, workdir: Path, spec: TierSpec | None = None) -> None:
        super().__init__(workdir)
        self.spec = spec or dict_spec()

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the deadlines."""
        return {
            "job_deadline_s": opening.deadlines.job_s,
            "lookup_deadline_s": opening.deadlines.lookup_s,
            "error_backoff_s": opening.deadlines.error_backoff_s,
        }

    def _store(self, subject: Subject) -> DictStore:
        if not isinstance(subject.tier, DictTier):
            raise HarnessError(f"expected a DictTier, found {type(subject.tier).__name__}")
        return subject.tier.store

    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Remove the object."""
        del self._store(subject).objects[key]

    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        """Change the object."""
        objects = self._store(subject).objects
        data = bytearray(objects[key])
        if how is Corruption.TRUNCATED:
            del data[-100:]
        elif how is Corruption.EMPTY:
            data.clear()
        elif how is Corruption.OVERLONG:
            data += b"more"
        elif data:  # it may be empty, by an earlier corruption
            data[len(data) // 2] ^= 0x10
        objects[key] = bytes(data)

    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys of the dictionary."""
        return tuple(self._store(subject).objects)

    def inject(self, subject: Subject, fault: Fault) -> None:
        """Set the fault of the store."""
        self._store(subject).fault = fault

    def heal(self, subject: Subject) -> None:
        """Clear the fault."""
        self._store(subject).fault = None
