"""The load-first queue and its threads."""

from __future__ import annotations

import functools
import threading

import pytest

from kv_core.tierkit import LoadFirstPool
from kv_core.tierkit._pool import Lane, LoadFirstQueue

WAIT_S = 20.0


class Task:
    """A task that says when it runs and ends when it is told to."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.thread = ""

    def __call__(self) -> None:
        """Run."""
        self.thread = threading.current_thread().name
        self.entered.set()
        assert self.leave.wait(WAIT_S)


@pytest.fixture
def pool() -> LoadFirstPool:
    """Return a pool of three threads that have not been started."""
    return LoadFirstPool(3, name="pool")


def test_a_load_is_taken_before_stores() -> None:
    """Who prefers loads takes a load, however many stores came before it."""
    queue: LoadFirstQueue[str] = LoadFirstQueue(2)
    queue.put(["store 1", "store 2"], loads=False)
    queue.put(["load"], loads=True)
    assert queue.take(stores_first=False) == ("load", Lane.LOAD)
    assert queue.take(stores_first=False) == ("store 1", Lane.STORE)


def test_a_store_is_taken_before_loads_by_who_prefers_it() -> None:
    """Loads do not starve stores."""
    queue: LoadFirstQueue[str] = LoadFirstQueue(2)
    queue.put(["load"], loads=True)
    queue.put(["store"], loads=False)
    assert queue.take(stores_first=True) == ("store", Lane.STORE)


def test_no_more_stores_than_the_limit_are_out() -> None:
    """Beyond the limit stores wait, whoever asks; one that ends lets the next go."""
    queue: LoadFirstQueue[str] = LoadFirstQueue(1)
    queue.put(["store 1", "store 2"], loads=False)
    assert queue.take(stores_first=True) == ("store 1", Lane.STORE)
    assert queue.take(stores_first=True) is None
    queue.done(Lane.STORE)
    assert queue.take(stores_first=True) == ("store 2", Lane.STORE)


def test_fewer_stores_are_out_beside_loads() -> None:
    """While a load is out or waits, a smaller limit holds; then the other one again."""
    queue: LoadFirstQueue[str] = LoadFirstQueue(3, 1)
    queue.put(["load"], loads=True)
    queue.put(["store 1", "store 2", "store 3"], loads=False)
    assert queue.take(stores_first=True) == ("store 1", Lane.STORE)
    assert queue.take(stores_first=True) == ("load", Lane.LOAD)
    assert queue.take(stores_first=True) is None
    queue.done(Lane.LOAD)
    assert queue.take(stores_first=True) == ("store 2", Lane.STORE)
    assert queue.take(stores_first=True) == ("store 3", Lane.STORE)


def test_a_chore_goes_before_loads_and_is_none() -> None:
    """It takes no place of a store, and while it runs as many stores run as without it."""
    queue: LoadFirstQueue[str] = LoadFirstQueue(2, 1)
    queue.put(["load"], loads=True)
    queue.put(["store 1", "store 2"], loads=False)
    queue.put_chore("chore")
    assert len(queue) == 4
    assert queue.take(stores_first=True) == ("chore", Lane.CHORE)
    assert queue.take(stores_first=False) == ("load", Lane.LOAD)
    queue.done(Lane.LOAD)
    assert queue.take(stores_first=False) == ("store 1", Lane.STORE)
    assert queue.take(stores_first=False) == ("store 2", Lane.STORE)


def test_stores_go_on_when_the_loads_are_over() -> None:
    """Threads that waited because of a load are woken when it ends."""
    pool = LoadFirstPool(4, name="pool", max_stores=3, max_stores_beside_loads=1)
    pool.start()
    load, stores = Task(), [Task() for _ in range(3)]
    pool.submit([load], loads=True)
    assert load.entered.wait(WAIT_S)
    pool.submit(stores, loads=False)
    assert stores[0].entered.wait(WAIT_S)
    assert not any(store.entered.is_set() for store in stores[1:])
    load.leave.set()
    assert all(store.entered.wait(WAIT_S) for store in stores)
    for store in stores:
        store.leave.set()
    assert pool.stop(WAIT_S)


def test_a_queued_task_is_withdrawn_once() -> None:
    """What was taken back is not handed out, and what was handed out is not taken back."""
    queue: LoadFirstQueue[str] = LoadFirstQueue(1)
    queue.put(["a", "b"], loads=True)
    assert queue.withdraw("a")
    assert not queue.withdraw("a")
    assert queue.take(stores_first=False) == ("b", Lane.LOAD)
    assert not queue.withdraw("b")
    assert len(queue) == 0


def test_one_thread_is_always_free_of_stores(pool: LoadFirstPool) -> None:
    """A load runs at once although more stores than threads are stuck (JOB-8, vllm#49225)."""
    pool.start()
    stores = [Task() for _ in range(5)]
    load = Task()
    pool.submit(stores, loads=False)
    assert all(store.entered.wait(WAIT_S) for store in stores[:2])
    pool.submit([load], loads=True)
    assert load.entered.wait(WAIT_S)
    assert not any(store.entered.is_set() for store in stores[2:])
    for task in (*stores, load):
        task.leave.set()
    assert all(store.entered.wait(WAIT_S) for store in stores)
    assert pool.stop(WAIT_S)


def test_all_threads_serve_loads(pool: LoadFirstPool) -> None:
    """With loads only, every thread loads."""
    pool.start()
    loads = [Task() for _ in range(3)]
    pool.submit(loads, loads=True)
    assert all(load.entered.wait(WAIT_S) for load in loads)
    for load in loads:
        load.leave.set()
    assert pool.stop(WAIT_S)
    assert len({load.thread for load in loads}) == 3


def test_a_task_that_raises_costs_no_thread(
    pool: LoadFirstPool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a task raises is logged, and all threads go on (sglang#38428)."""
    pool.start()

    def fail() -> None:
        raise SystemExit(3)

    pool.submit([functools.partial(fail) for _ in range(3)], loads=True)
    loads = [Task() for _ in range(3)]
    pool.submit(loads, loads=True)
    assert all(load.entered.wait(WAIT_S) for load in loads)
    for load in loads:
        load.leave.set()
    assert pool.stop(WAIT_S)
    assert "a task of the pool raised" in caplog.text


def test_stop_drops_what_is_queued(pool: LoadFirstPool) -> None:
    """After a stop no further task begins; the running one ends by itself."""
    pool.start()
    running = [Task() for _ in range(3)]
    queued = Task()
    pool.submit(running, loads=True)
    assert all(task.entered.wait(WAIT_S) for task in running)
    pool.submit([queued], loads=True)
    assert not pool.stop(0.0)
    for task in running:
        task.leave.set()
    assert pool.stop(WAIT_S)
    assert not queued.entered.is_set()


def test_stop_is_idempotent_and_needs_no_start(pool: LoadFirstPool) -> None:
    """A pool that never ran can be stopped, as often as one likes."""
    assert pool.stop(0.0)
    assert pool.stop(0.0)


def test_a_thread_that_cannot_start_stops_the_others(
    pool: LoadFirstPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-started pool leaves no thread behind (LIFE-4)."""
    before = threading.active_count()
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start"):
        pool.start()
    assert threading.active_count() == before
    assert not any(thread.is_alive() for thread in started)


def test_one_thread_is_too_few() -> None:
    """A single thread cannot be free of stores."""
    with pytest.raises(ValueError, match=r"at least 2 threads, .* found 1"):
        LoadFirstPool(1, name="pool")
