"""Prints how long importing takes: a tier author and every ``kv-core --help`` pay for it.

Each figure is the median over fresh interpreters of the import statement alone, files cached.
Budget: 0.3 s for ``kv_core`` and for ``kv_core.contract``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from typing import Final

MODULES: Final = ("kv_core", "kv_core.contract", "kv_core.plugins", "kv_core.cli")


def seconds(module: str) -> float:
    """Import a module in a fresh interpreter and return the seconds of the import."""
    code = (
        "import time; start = time.perf_counter(); "
        f"import {module}; print(time.perf_counter() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=11, help="fresh interpreters for each module")
    parser.add_argument("--quick", action="store_true", help="two interpreters, for a smoke test")
    options = parser.parse_args()
    runs = 2 if options.quick else options.runs
    sys.stdout.write(f"{'module':<20}{'median s':>10}{'least s':>10}\n")
    for module in MODULES:
        seconds(module)  # compiles and warms the file cache
        figures = [seconds(module) for _ in range(runs)]
        sys.stdout.write(f"{module:<20}{statistics.median(figures):>10.3f}{min(figures):>10.3f}\n")


if __name__ == "__main__":
    main()
