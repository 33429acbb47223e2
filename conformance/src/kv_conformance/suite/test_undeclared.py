"""UNDECLARED: what a tier does not declare must not be there by halves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_conformance.harness import Corruption
from kv_conformance.rig import Broken, expect
from kv_conformance.run._case import case
from kv_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_conformance.rig import Rigs


@case("UNDECLARED-PERSISTENT")
def test_a_reopened_tier_finds_nothing(rigs: Rigs) -> None:
    """Neither by lookup nor by a load without one."""
    rig = rigs.open()
    keys = rigs.keys(4)
    rig.stored(keys)
    rig.close()
    rig = rigs.open(storage=rig.opening.storage)
    found = rig.resolve(keys).count(True)
    expect(not found, f"{found} of {len(keys)} blocks were found by a tier that was reopened")
    for key in keys:
        expect(not rig.load([key]).keys, "a block was loaded by a tier that was reopened")


@case("UNDECLARED-EVENTS")
def test_no_events_are_told(rigs: Rigs) -> None:
    """Whatever happens to blocks."""
    rig = rigs.open()
    keys = rigs.keys(4)
    rig.stored(keys)
    rig.lose(keys[0])
    rig.corrupt(keys[1], Corruption.TRUNCATED)
    rig.load(keys[:1])
    rig.load(keys[1:2])
    rig.stored(rigs.keys(4))
    rig.step()
    events = list(rig.call("take_events"))
    expect(not events, f"take_events returned {len(events)} event(s)")


def _expect_unsupported(call: Callable[[], object], what: str) -> None:
    try:
        answer = call()
    except UnsupportedError:
        return
    except Exception as error:
        raise Broken(
            f"{what} raised {type(error).__name__}: {error}; expected UnsupportedError"
        ) from error
    else:
        raise Broken(f"{what} returned {answer!r}; expected UnsupportedError")


@case("UNDECLARED-DELETE")
def test_delete_is_refused_and_removes_nothing(rigs: Rigs) -> None:
    """The refusal comes before anything is done."""
    rig = rigs.open()
    keys = rigs.keys(3)
    rig.stored(keys)
    _expect_unsupported(lambda: rig.tier.delete(keys[:2]), "delete")
    rig.step()
    expect(all(rig.resolve(keys, rig.new_request())), "a refused delete has removed a block")
    rig.expect_loads(keys)


@case("UNDECLARED-USAGE")
def test_usage_is_refused(rigs: Rigs) -> None:
    """With blocks and without."""
    rig = rigs.open()
    _expect_unsupported(rig.tier.usage, "usage")
    rig.stored(rigs.keys(2))
    _expect_unsupported(rig.tier.usage, "usage")


@case("UNDECLARED-TOUCH")
def test_touch_does_nothing(rigs: Rigs) -> None:
    """It does not raise, makes no block appear and none go."""
    rig = rigs.open()
    stored, unknown = rigs.keys(3), rigs.keys(3)
    rig.stored(stored)
    try:
        rig.tier.touch([*stored, *unknown], rig.request)
        rig.tier.touch([], rig.request)
    except Exception as error:
        raise Broken(f"touch raised {type(error).__name__}: {error}") from error
    rig.step()
    expect(all(rig.resolve(stored)), "a block was not found after it was touched")
    expect(not any(rig.resolve(unknown)), "a block that was only touched was found")
    rig.expect_loads(stored)
