"""The life of a tier whose blocking calls run on a pool of threads.

**Who owns what.** The calling thread owns every attribute here. ``close`` runs on a thread of its
own, which the calling thread starts when all others have ended, and waits for.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final, final

from typing_extensions import override

from kv_core.tierkit._base import KitTier
from kv_core.tierkit._pool import LoadFirstPool
from kv_core.tierkit._threads import join_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_core.tierkit._base import Lookups
    from kv_core.tierkit._jobs import Chunk, Executor

__all__ = ["PooledTier"]

logger = logging.getLogger(__name__)

# The base waits for I/O until a tenth of the job deadline is left.
_CLOSING_SHARE: Final = 0.1


@final
class _PoolExecutor:
    """Runs chunks on a pool. What is inside a blocking call cannot be broken off."""

    def __init__(self, pool: LoadFirstPool) -> None:
        self._pool = pool

    def submit(self, chunks: Iterable[Chunk], *, loads: bool) -> None:
        self._pool.submit(chunks, loads=loads)

    def withdraw(self, chunk: Chunk) -> bool:
        return self._pool.withdraw(chunk)

    def interrupt(self, chunk: Chunk) -> None:
        pass


class PooledTier(KitTier):
    """What :class:`ThreadedTier` and :class:`BatchTier` have in common. Not for subclassing."""

    _hooks: ClassVar[tuple[str, ...]] = ()

    def open(self) -> None:
        """Open the storage, on the constructing thread; before any other hook.

        When it raises, :meth:`close` is called, too: it must cope with a half-open storage.
        """

    def close(self) -> None:
        """Close the storage, after the last call of any other hook; on a thread of its own."""

    @abstractmethod
    def _start_lookups(self) -> Lookups:
        """Return what answers lookups, and start its threads if it has any."""

    def _max_stores(self) -> int | None:
        """Return the most stores that run at the same time; ``None`` leaves one thread free."""
        return None

    def _max_stores_beside_loads(self) -> int | None:
        """Return the same for while there are loads; ``None`` for no other number."""
        return None

    def _stop_lookups(self, timeout_s: float | None) -> bool:  # noqa: ARG002 - for overrides
        """Join the threads of the lookups; also when they were never started."""
        return True

    @override
    def _open(self) -> tuple[Executor, Lookups]:
        self._refuse_coroutines()
        self._closer: threading.Thread | None = None
        self._pool = LoadFirstPool(
            self.config.io_threads,
            name=f"kv-{self.context.tier_name}-io",
            max_stores=self._max_stores(),
            max_stores_beside_loads=self._max_stores_beside_loads(),
        )
        try:
            self.open()
            lookups = self._start_lookups()
            self._pool.start()
        except BaseException:
            self._stop_lookups(None)
            self._close()
            raise
        return _PoolExecutor(self._pool), lookups

    def _refuse_coroutines(self) -> None:
        # Unawaited, one would count as "present", and as a load that has filled its buffer.
        for hook in self._hooks:
            if inspect.iscoroutinefunction(getattr(self, hook)):
                raise TypeError(
                    f"{type(self).__name__}.{hook} is a coroutine, which this kind of tier does "
                    "not await: write 'def' instead of 'async def', or derive from AsyncioTier"
                )

    @override
    def _stop(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        if not self._ledger.wait_until_idle(timeout_s):
            timeout_s = 0.0
        stopped = self._pool.stop(min(timeout_s, end - time.monotonic()))
        if not (self._stop_lookups(max(0.0, min(timeout_s, end - time.monotonic()))) and stopped):
            return False
        if self._closer is None:
            # A storage that hangs would keep the engine from ending.
            name = f"kv-{self.context.tier_name}-close"
            self._closer = threading.Thread(target=self._close, name=name, daemon=True)
            self._closer.start()
        slack_s = self.config.job_deadline_s * _CLOSING_SHARE
        return join_all([self._closer], max(slack_s, end - time.monotonic()))

    def _close(self) -> None:
        try:
            self.close()
        except Exception as error:  # noqa: BLE001 - must not hide why the storage is given up
            logger.error(  # noqa: TRY400 - a traceback would repeat secrets
                "tier %r: close() raised: %s", self.context.tier_name, self._describe(error)
            )
