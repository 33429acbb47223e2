"""Serve one vLLM engine to the process that started this one."""

from __future__ import annotations

import sys

from ._server import serve

if __name__ == "__main__":
    sys.exit(serve(commands=int(sys.argv[1]), replies=int(sys.argv[2])))
