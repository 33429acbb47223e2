"""The watcher of calls: what counts as waiting, and what does not."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, cast

from kv_conformance.rig import Budget, CallWatch, watch_calls

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_conformance.rig import Rig


class _Tier:
    """Has the methods that a test gives it."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.__dict__.update(methods)


class _Rig:
    """What the watcher needs of a rig."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.tier: Any = _Tier(**methods)
        self.budget = Budget()
        self.healed = threading.Event()

    def heal(self) -> None:
        self.healed.set()


def _as_rig(rig: _Rig) -> Rig:
    return cast("Rig", rig)


def _open(path: Path) -> None:
    os.close(os.open(path, os.O_RDONLY))


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_calls_in_memory_are_no_finding() -> None:
    """A method that computes, however often it is called, does not wait."""
    rig = _Rig(lookup=lambda key: key == b"there")
    with CallWatch(_as_rig(rig)) as watch:
        answers = [rig.tier.lookup(b"there") for _ in range(5)]
    assert answers == [True] * 5
    assert watch.findings() == []


def test_a_file_opened_in_each_call_is_certain(tmp_path: Path) -> None:
    """The finding names the method, the event and the number of calls."""
    rig = _Rig(submit_store=lambda: _open(tmp_path))
    with CallWatch(_as_rig(rig)) as watch:
        for _ in range(3):
            rig.tier.submit_store()
    (finding,) = watch.findings()
    assert finding.method == "submit_store"
    assert finding.is_certain
    assert "open(" in finding.message
    assert "3 of 3 calls" in finding.message


def test_a_file_opened_once_is_no_finding(tmp_path: Path) -> None:
    """An import, say, at the first call."""
    paths = iter([tmp_path])

    def submit() -> None:
        for path in paths:
            _open(path)

    rig = _Rig(submit_store=submit)
    with CallWatch(_as_rig(rig)) as watch:
        for _ in range(3):
            rig.tier.submit_store()
    assert watch.findings() == []


def test_other_threads_may_open_files(tmp_path: Path) -> None:
    """Only the calling thread is the engine's."""

    def submit() -> None:
        thread = threading.Thread(target=_open, args=(tmp_path,))
        thread.start()
        thread.join()

    rig = _Rig(submit_store=submit)
    with CallWatch(_as_rig(rig)) as watch:
        for _ in range(3):
            rig.tier.submit_store()
    assert not [finding for finding in watch.findings() if finding.is_certain]


def test_files_that_are_opened_between_calls_are_not_the_tiers(tmp_path: Path) -> None:
    """The suite itself reads and writes as it likes."""
    rig = _Rig(get_stats=dict)
    with CallWatch(_as_rig(rig)) as watch:
        for _ in range(3):
            rig.tier.get_stats()
            _open(tmp_path)
    assert watch.findings() == []


def test_waiting_is_a_suspicion() -> None:
    """Most calls wait for longer than scheduling takes: to be measured again."""
    rig = _Rig(get_finished_jobs=lambda: _wait(0.02))
    with CallWatch(_as_rig(rig)) as watch:
        for _ in range(3):
            rig.tier.get_finished_jobs()
    (finding,) = watch.findings()
    assert finding.method == "get_finished_jobs"
    assert not finding.is_certain


def test_a_few_calls_that_wait_are_no_finding() -> None:
    """On a busy machine any call may have to wait for a processor."""
    waits = iter([0.05, 0.0, 0.0, 0.05, 0.0])
    rig = _Rig(get_finished_jobs=lambda: _wait(next(waits)))
    with CallWatch(_as_rig(rig)) as watch:
        for _ in range(5):
            rig.tier.get_finished_jobs()
    assert watch.findings() == []


def test_a_suspicion_that_is_not_confirmed_is_dropped() -> None:
    """The first measurement falls into a bad moment, the second does not."""
    waits = iter([0.02, 0.02, 0.0, 0.0])
    rig = _Rig(lookup=lambda: _wait(next(waits)))

    def exercise() -> None:
        for _ in range(2):
            rig.tier.lookup()

    assert watch_calls(_as_rig(rig), exercise) == []
    assert next(waits, None) is None


def test_a_suspicion_that_is_confirmed_three_times_is_kept() -> None:
    """Then it is no bad moment."""
    calls: list[float] = []

    def lookup() -> None:
        calls.append(0.02)
        _wait(calls[-1])

    rig = _Rig(lookup=lookup)

    def exercise() -> None:
        rig.tier.lookup()

    (finding,) = watch_calls(_as_rig(rig), exercise)
    assert finding.method == "lookup"
    assert len(calls) == 3


def test_a_call_that_hangs_is_freed_and_named() -> None:
    """The end of the stall lets it go on; the finding stays."""
    rig = _Rig(lookup=lambda: rig.healed.wait(20.0))
    with CallWatch(_as_rig(rig), hanging_s=0.05) as watch:
        assert rig.tier.lookup()
    assert watch.hung == ("lookup",)
    (finding,) = watch.findings()
    assert finding.is_certain
    assert "0.05 s" in finding.message


def test_the_tier_is_put_back() -> None:
    """After the watch the rig has the tier itself, also when a call raised."""
    rig = _Rig(lookup=lambda: 1 / 0)
    tier = rig.tier
    try:
        with CallWatch(_as_rig(rig)):
            rig.tier.lookup()
    except ZeroDivisionError:
        assert rig.tier is tier
    else:
        raise AssertionError("the error was swallowed")
