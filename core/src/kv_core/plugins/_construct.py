"""Makes a tier on a thread of its own: no constructor holds the engine for ever.

**Who owns what.** The started thread runs the constructor; the caller waits for it. Whoever
acquires ``claim`` first decides: the thread, and the outcome is the caller's; or the caller, who
has waited long enough, and what is made afterwards is the thread's to close again. Nobody
releases it. So a tier has exactly one owner at any time, and none is forgotten.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kv_core.contract import SecondaryTierManager
from kv_core.errors import TierOpenError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_core.contract import TierContext

__all__ = ["construct_tier"]

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Outcome:
    made: object = None
    error: BaseException | None = None


def construct_tier(
    factory: Callable[[TierContext], object], context: TierContext, deadline_s: float
) -> object:
    """Return what a factory makes, or raise what it raises.

    A constructor cannot be stopped from outside. One that does not come back goes on in its
    thread, and for as long the memory of the primary tier stays mapped, whatever the caller
    releases. What it makes in the end is shut down at once.

    Args:
        factory: Makes the tier.
        context: What it is made from.
        deadline_s: Real seconds to wait, whatever the engine's clock does.

    Raises:
        TierOpenError: The deadline has passed.
        BaseException: Whatever the factory raises.
    """
    claim = threading.Lock()
    outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()

    def deliver(outcome: _Outcome) -> None:
        if claim.acquire(blocking=False):
            outcomes.put(outcome)
        else:
            _close_late(outcome, context.tier_name)

    def run() -> None:
        # An export of the thread's own is what keeps the memory mapped.
        with memoryview(context.primary.view):
            try:
                outcome = _Outcome(made=factory(context))
            except BaseException as error:  # noqa: BLE001 - handed over to the caller
                # Not in a variable: the error's traceback would hold this frame, and so itself.
                deliver(_Outcome(error=error))
            else:
                deliver(outcome)

    thread = threading.Thread(target=run, name=f"kv-open-{context.tier_name}", daemon=True)
    try:
        thread.start()
        outcome = outcomes.get(timeout=min(deadline_s, threading.TIMEOUT_MAX))
    except queue.Empty:
        if claim.acquire(blocking=False):
            raise _too_late(context, deadline_s) from None
        # It came in the last moment.
        outcome = outcomes.get()
    except BaseException:
        # An interrupt ends the wait, or even the start, and nobody is left to own the tier.
        if not claim.acquire(blocking=False):
            _close_late(outcomes.get(), context.tier_name)
        raise
    thread.join()
    if outcome.error is None:
        return outcome.made
    try:
        raise outcome.error
    finally:
        # As above.
        del outcome


def _too_late(context: TierContext, deadline_s: float) -> TierOpenError:
    return TierOpenError(
        f"tier {context.tier_name!r} of type {context.tier_type!r} was not open after "
        f"{deadline_s:g} s, the 'open_deadline_s' that it declares, and is given up. Check that "
        "its storage answers: a mount that hangs, or a server that cannot be reached, looks like "
        "this"
    )


def _close_late(outcome: _Outcome, tier_name: str) -> None:
    """Shut down a tier that nobody waits for any more."""
    if not isinstance(outcome.made, SecondaryTierManager):
        return
    _LOGGER.warning("tier %r has opened after its deadline; it is closed again", tier_name)
    try:
        outcome.made.shutdown()
    except Exception:
        _LOGGER.exception("tier %r raised in shutdown", tier_name)
