"""Mutants of the NS clauses: folder tiers whose folders have other names."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import FolderHarness, FolderTier, folder_spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_conformance.harness import Harness, Subject
    from kv_conformance.reference._folder_harness import _Files
    from kv_core.contract import Namespace, SecondaryTierManager, TierContext

    NameFunction = Callable[[Namespace], str]


@dataclass(frozen=True, slots=True)
class _Named:
    """Stands in for a namespace: all that the folder tier asks of one is its fingerprint."""

    fingerprint: str


def _named(namespace: Namespace, name: NameFunction) -> Namespace:
    return cast("Namespace", _Named(hashlib.sha256(name(namespace).encode()).hexdigest()))


@final
class _NamingHarness(FolderHarness):
    """Knows by what name its tier calls the folder of a namespace."""

    def __init__(self, workdir: Path, name: NameFunction) -> None:
        def make(context: TierContext) -> SecondaryTierManager:
            namespace = _named(context.namespace, name)
            return FolderTier(dataclasses.replace(context, namespace=namespace))

        super().__init__(workdir, folder_spec(make))
        self._name = name

    @override
    def _store(self, subject: Subject) -> _Files:
        namespace = _named(subject.namespace, self._name)
        return super()._store(dataclasses.replace(subject, namespace=namespace))


# -- NS-1 ---------------------------------------------------------------------------------------


@mutant(
    "NS-1",
    breaks="Names its folder after everything but the epoch of the weights.",
    source="vllm#9744: answers from weights that were updated 17 times since",
)
def epoch_blind(workdir: Path) -> Harness:
    """Make the harness."""
    return _NamingHarness(workdir, lambda namespace: namespace.with_epoch(0, "").fingerprint)


@mutant(
    "NS-1",
    breaks="Tells models apart by name and size of the block.",
    source="vllm#49440: files of equal size and different layout, vllm#55904, vllm#49261",
)
def same_size_same_block(workdir: Path) -> Harness:
    """Make the harness."""
    return _NamingHarness(
        workdir, lambda namespace: f"{namespace.model}-{namespace.dtype}-{namespace.block_bytes}"
    )


@mutant(
    "NS-1",
    breaks="Writes the fields of the namespace one after the other, with nothing between them.",
    source="vllm#55191: two configurations that lead to one folder",
)
def joined_fields(workdir: Path) -> Harness:
    """Make the harness."""
    return _NamingHarness(
        workdir, lambda namespace: "".join(str(value) for value in namespace.describe().values())
    )


@mutant(
    "NS-1",
    breaks="Writes the namespace in lower case, with what is neither letter nor digit left out.",
    source="names made safe for a file system",
)
def tidy_names(workdir: Path) -> Harness:
    """Make the harness."""
    return _NamingHarness(
        workdir,
        lambda namespace: "_".join(
            "".join(filter(str.isalnum, str(value))).lower()
            for value in namespace.describe().values()
        ),
    )


# -- NS-2 ---------------------------------------------------------------------------------------


@mutant(
    "NS-2",
    breaks="Names its folder with Python's hash(), which every process salts anew.",
    source="LMCache#1139, vllm#42625: no process finds what another one has stored",
    also=frozenset({"PERS-3", "SHARE-1", "SHARE-2"}),
)
def salted_names(workdir: Path) -> Harness:
    """Make the harness."""
    return _NamingHarness(workdir, lambda namespace: str(hash(namespace.fingerprint)))
