"""Routes transfers to the handler of their two media. All state belongs to one thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, final

from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_core.engine import (
        LoadStoreSpec,
        OffloadingHandler,
        TransferResult,
        TransferSpec,
        TransferType,
    )

__all__ = ["OffloadingWorker"]

_LOGGER: Final = logging.getLogger(__name__)


@final
class OffloadingWorker:
    """All handlers of one worker."""

    def __init__(self) -> None:
        self._handlers: dict[TransferType, OffloadingHandler] = {}

    def register_handler(
        self,
        source_type: type[LoadStoreSpec],
        destination_type: type[LoadStoreSpec],
        handler: OffloadingHandler,
    ) -> None:
        """Add the handler of one route.

        Raises:
            EngineStateError: The route has a handler.
        """
        route = (source_type.medium(), destination_type.medium())
        if route in self._handlers:
            raise EngineStateError(f"the route {route[0]} to {route[1]} has a handler already")
        self._handlers[route] = handler

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Begin a transfer and return at once.

        Returns:
            ``False`` when it could not be begun (logged); no result follows then.

        Raises:
            EngineStateError: No handler has this route.
        """
        source, destination = spec
        route = (source.medium(), destination.medium())
        handler = self._handlers.get(route)
        if handler is None:
            known = ", ".join(f"{a} to {b}" for a, b in self._handlers) or "none"
            raise EngineStateError(
                f"no handler copies {route[0]} to {route[1]} (registered: {known})"
            )
        try:
            return handler.transfer_async(job_id, spec)
        except Exception:
            # A failed copy costs a recompute; the worker's step must go on.
            _LOGGER.exception("transfer %d (%s to %s) could not be begun", job_id, *route)
            return False

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers of all routes that ended since the last call."""
        return [result for handler in self._handlers.values() for result in handler.get_finished()]

    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until these transfers have ended."""
        ids = tuple(job_ids)
        for handler in self._handlers.values():
            handler.wait(ids)

    def shutdown(self) -> None:
        """Finish what is in flight and release everything. Idempotent."""
        for route, handler in self._handlers.items():
            try:
                handler.shutdown()
            except Exception:
                # The others hold memory, too, that must be let go of.
                _LOGGER.exception("the handler %s to %s could not be shut down", *route)
