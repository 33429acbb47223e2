"""Rules for the tests that run where vLLM is installed."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture(scope="session", autouse=True)
def _import_vllm() -> None:
    """Import vLLM before anything else: what it and its libraries warn of is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.kv_offload.tiering.spec  # noqa: F401
