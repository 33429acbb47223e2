"""The conformance suite of the kv-core tier contract: ``pytest --conformance``.

Authors of tiers need :mod:`kv_conformance.harness`; the clauses are in
:mod:`kv_conformance.clauses`.
"""

from __future__ import annotations

from typing import Final

__all__ = ["__version__"]

__version__: Final = "0.1.0"
