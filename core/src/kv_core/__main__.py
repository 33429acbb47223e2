"""Lets ``python -m kv_core`` stand for ``kv-core``."""

from __future__ import annotations

import sys

from kv_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
