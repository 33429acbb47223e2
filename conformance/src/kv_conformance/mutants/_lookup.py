"""Mutants of the LOOK clauses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import FolderHarness, FolderTier, folder_spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import LookupAnswer, OffloadKey, ReqContext


class _AlwaysThere(FolderTier):
    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupAnswer:
        return True

    @override
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupAnswer]:
        return [True] * len(keys)


@mutant(
    "LOOK-1",
    breaks="Answers True for every key.",
    source="sglang#31881: the hit that was promised was never fetched",
    also=frozenset({"LOOK-4", "LOOK-6", "LOOK-8", "DEL-1", "CAP-2", "NS-1", "MET-1"}),
)
def always_there(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_AlwaysThere))
