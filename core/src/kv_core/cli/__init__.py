"""The command ``kv-core``.

Importing this package loads typer and rich; nothing else of kv-core imports it.
"""

from kv_core.cli._app import main

__all__ = ["main"]
