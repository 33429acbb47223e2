"""Tiering engine and storage-backend contract for LLM KV caches.

The package is a set of rooms; import from the room you need:

* :mod:`kv_core.contract` -- all that the author of a tier imports.
* :mod:`kv_core.tierkit` -- base classes that make a conforming tier of three short methods.
* :mod:`kv_core.plugins` -- discovery of installed tiers.
* :mod:`kv_core.engine`, :mod:`kv_core.cpu`, :mod:`kv_core.tiering` -- the scheduler-side ledger.
* :mod:`kv_core.device`, :mod:`kv_core.connector` -- the worker side and the step protocol.
* :mod:`kv_core.workload` -- request traces and the replay engine.

``kv_core.hookimpl`` marks the hooks of a tier's entry-point module. Importing this package is
cheap: nothing heavier than pluggy is loaded, and never torch.
"""

from __future__ import annotations

from typing import Final

import pluggy

__all__ = ["__version__", "hookimpl"]

__version__: Final = "0.1.0"

hookimpl: Final = pluggy.HookimplMarker("kv_core")
"""Marks the hook implementations in the entry-point module of a tier package."""
