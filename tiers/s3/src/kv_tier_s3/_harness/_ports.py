"""Ports on loopback that nothing listens on."""

from __future__ import annotations

import socket
from typing import Final

__all__ = ["free_ports"]

_HIGHEST: Final = 2**16 - 1


def free_ports(count: int, also_free_at: int = 0) -> list[int]:
    """Return ports that are free now. Nothing keeps them free.

    Args:
        count: How many.
        also_free_at: The ports at this offset from them are free as well.
    """
    asked: list[socket.socket] = []
    found: list[int] = []
    try:
        while len(found) < count:
            # Kept open until the end, or it would be offered again.
            asked.append(socket.socket())
            asked[-1].bind(("127.0.0.1", 0))
            port = asked[-1].getsockname()[1]
            if also_free_at == 0 or _is_free(port + also_free_at):
                found.append(port)
    finally:
        for opened in asked:
            opened.close()
    return found


def _is_free(port: int) -> bool:
    if port > _HIGHEST:
        return False
    with socket.socket() as attempt:
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
