"""Mutants of the REQ clauses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kv_conformance.mutants._mutant import mutant
from kv_conformance.reference import (
    DictHarness,
    DictTier,
    FolderHarness,
    FolderTier,
    dict_spec,
    folder_spec,
)
from kv_core.contract import RequestOffloadingContext

if TYPE_CHECKING:
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_core.contract import ReqContext, TierContext


# -- REQ-1 --------------------------------------------------------------------------------------


class _NoPolicy(DictTier):
    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        super().on_new_request(req_context)
        return None  # type: ignore[return-value]


@mutant(
    "REQ-1",
    breaks="Notes the request and returns nothing.",
    source="llm-d-kv-cache#588: a method that has got more to do since the tier was written",
)
def no_policy(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_NoPolicy))


class _PolicyByName(DictTier):
    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        super().on_new_request(req_context)
        return RequestOffloadingContext("block_level")  # type: ignore[arg-type]


@mutant(
    "REQ-1",
    breaks="Names the policy instead of returning it.",
    source="the text of a setting is handed on as it is",
)
def policy_by_name(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_PolicyByName))


class _OwnParamsOnly(DictTier):
    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._use(**req_context.kv_transfer_params)
        return super().on_new_request(req_context)

    def _use(self, *, priority: Any = None) -> None:
        pass


@mutant(
    "REQ-1",
    breaks="Raises for every parameter of a client that it does not know.",
    source="vllm#58088: keywords that one side knows and the other does not",
)
def own_params_only(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_OwnParamsOnly))


# -- REQ-2 --------------------------------------------------------------------------------------


class _KeepsAHistory(DictTier):
    @override
    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._history: dict[str, float] = {}

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._history[req_context.req_id] = self._clock()
        super().on_request_finished(req_context)


@mutant(
    "REQ-2",
    breaks="Notes when each request ended, and keeps the note.",
    source="LMCache#1495: memory that grows with every request",
)
def keeps_a_history(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_KeepsAHistory))


class _IgnoresTheEnd(DictTier):
    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        pass


@mutant(
    "REQ-2",
    breaks="Does nothing when a request ends.",
    source="the method has a default, so nothing reminds the author of it",
)
def ignores_the_end(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_IgnoresTheEnd))


class _KeepsOpenQuestions(FolderTier):
    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._lookups._requests.get(req_context.req_id)
        if request is None or not request.waiting:
            super().on_request_finished(req_context)


@mutant(
    "REQ-2",
    breaks="Frees a request only if it has had all its answers.",
    source="vllm#35931: what was looked up and never retrieved is never freed",
)
def keeps_open_questions(workdir: Path) -> Harness:
    """Make the harness."""
    return FolderHarness(workdir, folder_spec(_KeepsOpenQuestions))


class _EndsOnce(DictTier):
    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        del self._lookups._requests[req_context.req_id]


@mutant(
    "REQ-2",
    breaks="Raises for a request that has ended already, or never began.",
    source="LMCache#3376: an assertion at the end of a request takes the server down",
)
def ends_once(workdir: Path) -> Harness:
    """Make the harness."""
    return DictHarness(workdir, dict_spec(_EndsOnce))
