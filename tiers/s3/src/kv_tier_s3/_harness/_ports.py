"""Ports on loopback that nothing listens on."""

from __future__ import annotations

import secrets
import socket
from typing import Final

from kv_conformance.harness import HarnessError

__all__ = ["free_ports"]

# Below those that the kernel gives to outgoing connections, one of which could take a port before
# its server does; and so are the ports 10,000 above.
_PORTS: Final = range(10_000, 22_000)


def free_ports(count: int, also_free_at: int = 0) -> list[int]:
    """Return ports that are free now. Nothing keeps them free.

    Args:
        count: How many.
        also_free_at: The ports at this offset from them are free as well.

    Raises:
        HarnessError: There are not so many.
    """
    found: list[int] = []
    # In any order: others look for ports at the same time.
    for port in secrets.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            return found
        if _is_free(port) and (also_free_at == 0 or _is_free(port + also_free_at)):
            found.append(port)
    raise HarnessError(f"no {count} ports between {_PORTS[0]} and {_PORTS[-1]} are free")


def _is_free(port: int) -> bool:
    with socket.socket() as attempt:
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
