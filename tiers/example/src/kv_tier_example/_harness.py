"""How the conformance suite drives the tiers of this package, and reaches what lies below them.

The storage is a client object inside the tier, so a storage is an open tier, and a fault is a
gate that is put in front of that client. Needs ``kv-conformance``; the tiers never import this.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

from kv_conformance.faults import FaultGate
from kv_conformance.harness import BaseHarness, Corruption, Fault, HarnessError
from kv_core.contract import OffloadKey
from kv_tier_example import hostile as hostile_module
from kv_tier_example import kv_core_register_tier
from kv_tier_example._hostile_tier import HostileTier
from kv_tier_example._tier import ExampleTier

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from kv_conformance.harness import Opening, Subject
    from kv_core.contract import TierSpec

__all__ = ["ExampleHarness", "async_mode", "at_once", "hostile"]


@final
class ExampleHarness(BaseHarness):
    """The harness of the tiers ``example`` and ``hostile``.

    Args:
        workdir: Folder of the run; nothing is put there.
        spec: Which of the two.
        simulate_async: The mode in which it is tested.
    """

    faults = frozenset({Fault.STALL, Fault.ERROR, Fault.FULL})

    def __init__(
        self, workdir: Path, spec: TierSpec | None = None, *, simulate_async: bool = False
    ) -> None:
        super().__init__(workdir)
        self.spec = spec or kv_core_register_tier()
        self._simulate_async = simulate_async
        self._gates: weakref.WeakKeyDictionary[ExampleTier, FaultGate] = weakref.WeakKeyDictionary()

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings of a storage."""
        settings: dict[str, Any] = {
            "simulate_async": self._simulate_async,
            "job_deadline_s": opening.deadlines.job_s,
            "lookup_deadline_s": opening.deadlines.lookup_s,
            "error_backoff_s": opening.deadlines.error_backoff_s,
        }
        if opening.capacity_blocks is not None:
            settings["max_blocks"] = opening.capacity_blocks
        return settings

    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Remove a block from the store.

        Raises:
            KeyError: There is none.
        """
        if not _tier(subject).store.remove(key):
            raise KeyError(key.hex())

    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        """Replace a block in the store by a damaged one.

        Raises:
            KeyError: There is none.
        """
        store = _tier(subject).store
        block = store.get(key)
        if block is None:
            raise KeyError(key.hex())
        store.put(key, how.damage(block))

    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the names in the store."""
        return [OffloadKey(name) for name in _tier(subject).store.names()]

    def inject(self, subject: Subject, fault: Fault) -> None:
        """Put a gate between the tier and its store, and set it."""
        tier = _tier(subject)
        gate = self._gates.get(tier)
        if gate is None:
            gate = self._gates[tier] = FaultGate()
            tier.store = gate.guard(tier.store, reads=("contains", "get"), writes=("put", "remove"))
        gate.inject(fault)

    def heal(self, subject: Subject) -> None:
        """Open the gate again. Idempotent."""
        gate = self._gates.get(_tier(subject))
        if gate is not None:
            gate.heal()


def _tier(subject: Subject) -> ExampleTier:
    tier: object = subject.tier
    if isinstance(tier, HostileTier):
        tier = tier.inner
    if not isinstance(tier, ExampleTier):
        raise HarnessError(
            f"this is the harness of ExampleTier, found a {type(tier).__name__}: a subclass or "
            "wrapper needs a harness of its own"
        )
    return tier


def at_once(workdir: Path) -> ExampleHarness:
    """Make the harness of ``example`` in the mode that answers lookups at once."""
    return ExampleHarness(workdir)


def async_mode(workdir: Path) -> ExampleHarness:
    """Make the harness of ``example`` in the mode that asks its store."""
    return ExampleHarness(workdir, simulate_async=True)


def hostile(workdir: Path) -> ExampleHarness:
    """Make the harness of ``hostile`` with every fault off: then it owes what all tiers owe."""
    return ExampleHarness(workdir, hostile_module.kv_core_register_tier())
