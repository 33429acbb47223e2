"""A spec makes the two halves of an offloading set-up that belong together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_core.engine._config import OffloadingConfig
    from kv_core.engine._load_store_specs import LoadStoreSpec
    from kv_core.engine._manager import OffloadingManager
    from kv_core.engine._transfers import OffloadingHandler

__all__ = ["OffloadingSpec"]


class OffloadingSpec(ABC):
    """Builds the scheduler-side manager and the worker-side handlers of one configuration.

    Each is made once and then returned again; the scheduler's process asks for the manager, a
    worker's process for the handlers.

    Attributes:
        config: The configuration.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        self.config = config

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the manager, making it on the first call."""

    @abstractmethod
    def get_handlers(
        self, kv_caches: object
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield (source type, destination type, handler), making the handlers on first call.

        Args:
            kv_caches: The worker's ``kv_core.device.CanonicalKVCaches``.
        """
