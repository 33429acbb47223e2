"""What this machine has to say about a configuration: memory, shared memory, environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kv_core.connector import Advice, memory_limit_bytes, staging_bytes
from kv_core.contract import Capability
from kv_core.units import format_bytes

if TYPE_CHECKING:
    from kv_core.connector import OffloadingSettings
    from kv_core.plugins import CheckedTier

__all__ = ["HostFacts", "host_advice"]

_SEED_VARIABLE: Final = "PYTHONHASHSEED"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What matters of the machine and the environment.

    Attributes:
        memory_bytes: Memory that a process can have at most, or ``None`` when not known.
        shm_problem: Why the folder of the shared memory cannot be used, or ``None``.
        shm_free_bytes: What is free there; 0 with a problem.
        hash_seed: ``PYTHONHASHSEED``, or ``None`` when unset.
    """

    memory_bytes: int | None
    shm_problem: str | None
    shm_free_bytes: int
    hash_seed: str | None

    @classmethod
    def read(cls, shm_dir: Path, environment: Mapping[str, str] = os.environ) -> HostFacts:
        """Ask the machine."""
        problem, free_bytes = None, 0
        try:
            found = os.statvfs(shm_dir)
            free_bytes = found.f_bavail * found.f_frsize
        except OSError as error:
            problem = error.strerror or str(error)
        return cls(memory_limit_bytes(), problem, free_bytes, environment.get(_SEED_VARIABLE))


def host_advice(
    settings: OffloadingSettings,
    tiers: Sequence[CheckedTier],
    needed_bytes: int,
    facts: HostFacts,
) -> Iterator[Advice]:
    """Yield what would go wrong if an engine were started here.

    Args:
        settings: The configuration.
        tiers: Those of its tiers that could be checked.
        needed_bytes: Shared memory that the primary tier takes.
        facts: The machine.
    """
    if facts.shm_problem is not None:
        yield Advice(
            "shm_dir",
            f"'shm_dir' {settings.shm_dir} cannot be used here: {facts.shm_problem}; create it, "
            "or check on the machine that runs the engine",
        )
    elif needed_bytes > facts.shm_free_bytes:
        yield Advice(
            "shm_dir",
            f"the primary tier needs {_exact(needed_bytes)} in {settings.shm_dir}, but "
            f"{_exact(facts.shm_free_bytes)} are free: the engine would refuse to start. Enlarge "
            "the mount (Docker: --shm-size; Kubernetes: sizeLimit of an emptyDir with medium "
            "Memory), remove leftovers, or lower 'cpu_bytes_to_use'",
        )
    staged_bytes = staging_bytes(tiers)
    if facts.memory_bytes is not None and needed_bytes + staged_bytes > facts.memory_bytes:
        staged = f", and its tiers stage up to {_exact(staged_bytes)}" if staged_bytes else ""
        yield Advice(
            "cpu_bytes_to_use",
            f"the primary tier needs {_exact(needed_bytes)}{staged}: more than the "
            f"{_exact(facts.memory_bytes)} of memory that a process can have here, and the engine "
            "would refuse to start. Lower 'cpu_bytes_to_use', and leave room for the inference "
            "engine",
        )
    if facts.hash_seed in (None, "", "random"):
        for tier in tiers:
            if Capability.PERSISTENT in tier.spec.capabilities:
                state = f"is {facts.hash_seed!r}" if facts.hash_seed else "is not set"
                yield Advice(
                    _SEED_VARIABLE,
                    f"tier {tier.name!r} keeps blocks beyond the process, but {_SEED_VARIABLE} "
                    f"{state} here: block hashes would differ in every process, and the engine "
                    "refuses the tier. Set it to a fixed number, the same in every process that "
                    "shares the storage",
                )


def _exact(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({format_bytes(size_bytes)})"
