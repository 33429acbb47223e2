"""Sends what kv-core logs to where vLLM's own lines go."""

from __future__ import annotations

import logging

__all__ = ["log_where_vllm_does"]


def log_where_vllm_does() -> None:
    """Give kv-core's loggers the handlers and the level of vLLM's, unless the program has its own.

    To be called where a door of ours is constructed, for vLLM sets its logging up late, and anew in
    each process. May be called again.
    """
    ours, theirs = logging.getLogger("kv_core"), logging.getLogger("vllm")
    if not theirs.handlers or ours.handlers or logging.getLogger().handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False
