"""One run of the suite: cases, journal, supervisor, verdict and report."""

from kv_conformance.run._case import CASES, Case, case

__all__ = ["CASES", "Case", "case"]
