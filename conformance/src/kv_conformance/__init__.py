"""The place of the conformance suite for kv-core tiers.

This version holds the package's version and nothing else: no test, no pytest plugin, no command
line option. Passing it says nothing about a tier yet.
"""

from __future__ import annotations

from typing import Final

__all__ = ["__version__"]

__version__: Final = "0.1.0"
