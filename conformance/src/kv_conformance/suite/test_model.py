"""DATA-1 and all others at once: any sequence of calls, drawn by Hypothesis.

What is drawn depends on the calls before it, never on what has completed: an honest tier with
threads would look flaky otherwise. So the model knows three states of a key. It is *sure* after a
store was reported and nothing has happened to the object; it is *gone* when it was never stored,
or when a load has found it missing or damaged; else it is *maybe* there, and any answer is right.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from typing_extensions import override

from kv_conformance.harness import Corruption
from kv_conformance.rig import Broken, Findings, Violation
from kv_conformance.run._case import case
from kv_core.contract import Capability, JobErrorKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Never

    from kv_conformance.rig import Rig, Rigs
    from kv_core.contract import JobId, JobResult, OffloadKey, ReqContext

_KEYS: Final = 3
_REQUESTS: Final = 2
_SETTINGS: Final = settings(
    max_examples=20,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    database=None,
    # An example that is made smaller is run again and again; the calls are few enough to read.
    phases=[Phase.explicit, Phase.generate],
    verbosity=Verbosity.quiet,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)

_NUMBERS: Final = st.lists(st.integers(0, _KEYS - 1), min_size=1, max_size=2, unique=True)

_RETIRING: Final = (JobErrorKind.MISSING, JobErrorKind.DAMAGED)


@dataclass(slots=True)
class _Job:
    """A job in flight.

    Attributes:
        numbers: Its keys.
        is_load: Whether it is a load.
        due: Keys whose load must succeed.
        crossed: Keys of which a store was in flight at some time of this load.
    """

    numbers: list[int]
    is_load: bool
    due: set[int] = field(default_factory=set)
    crossed: set[int] = field(default_factory=set)


class _State(enum.Enum):
    GONE = enum.auto()
    MAYBE = enum.auto()
    SURE = enum.auto()


class _Call(enum.Enum):
    STORE = enum.auto()
    LOAD = enum.auto()
    ASK = enum.auto()
    RESOLVE = enum.auto()
    STEP = enum.auto()
    SETTLE = enum.auto()
    DRAIN = enum.auto()
    REPLACE = enum.auto()
    DAMAGE = enum.auto()
    REOPEN = enum.auto()


# What comes more often is there more often.
_CALLS: Final = (
    *[_Call.STORE] * 4,
    *[_Call.LOAD] * 4,
    *[_Call.DAMAGE] * 3,
    *[_Call.RESOLVE] * 2,
    *[_Call.STEP] * 2,
    _Call.ASK,
    _Call.SETTLE,
    _Call.DRAIN,
    _Call.REPLACE,
    _Call.REOPEN,
)


class _Machine(RuleBasedStateMachine):
    """One storage, three keys, two requests.

    Attributes:
        rigs: Opens the tier; set before the first example.
        broken: What was found first.
    """

    rigs: Rigs
    broken: Broken | None

    def __init__(self) -> None:
        super().__init__()
        self._keys: list[OffloadKey] = self.rigs.keys(_KEYS)
        self._storage = self.rigs.storage()
        self._states = dict.fromkeys(range(_KEYS), _State.GONE)
        self._ever_stored: set[int] = set()
        self._calls: list[str] = []
        self._seen: list[Violation] = []
        self._jobs: dict[JobId, _Job] = {}
        self._open()

    def _open(self) -> None:
        self._rig: Rig = self.rigs.open(storage=self._storage, num_blocks=96, block_bytes=512)
        # Of this example alone: what one has found does not end the others.
        self._rig.findings = Findings(self._seen.append)
        self._requests: list[ReqContext] = [self._rig.new_request() for _ in range(_REQUESTS)]

    # -- what is drawn --------------------------------------------------------------------------

    @rule(
        call=st.sampled_from(_CALLS),
        numbers=_NUMBERS,
        request=st.integers(0, _REQUESTS - 1),
        how=st.sampled_from([None, Corruption.TRUNCATED, Corruption.EMPTY]),
    )
    def call(self, call: _Call, numbers: list[int], request: int, how: Corruption | None) -> None:
        """Make one call.

        One rule for all: Hypothesis leaves rules out at random, and what is left of most examples
        would say nothing.
        """
        if call is _Call.STORE:
            self._store(numbers, request)
        elif call is _Call.LOAD:
            self._load(numbers, request)
        elif call in {_Call.ASK, _Call.RESOLVE}:
            self._ask(numbers[0], request, patient=call is _Call.RESOLVE)
        elif call is _Call.DAMAGE:
            self._damage(numbers[0], how)
        elif call is _Call.REPLACE:
            self._replace(request)
        elif call is not _Call.REOPEN:
            self._pause(call)
        elif Capability.PERSISTENT in self.rigs.spec.capabilities:
            self._reopen()

    def _store(self, numbers: list[int], request: int) -> None:
        """Submit stores."""
        self._calls.append(f"store {numbers} for request {request}")
        for part in self._parts(numbers):
            for number in part:
                self._ever_stored.add(number)
                if self._states[number] is _State.GONE:
                    self._states[number] = _State.MAYBE
            for job in self._jobs.values():
                job.crossed.update(part)
            keys = [self._keys[number] for number in part]
            job_id = self._rig.submit_store(keys, request=self._requests[request])
            self._jobs[job_id] = _Job(part, is_load=False)
        self._look()

    def _load(self, numbers: list[int], request: int) -> None:
        """Submit loads."""
        self._calls.append(f"load {numbers} for request {request}")
        for part in self._parts(numbers):
            keys = [self._keys[number] for number in part]
            job_id = self._rig.submit_load(keys, request=self._requests[request])
            self._jobs[job_id] = _Job(
                part,
                is_load=True,
                due={number for number in part if self._states[number] is _State.SURE},
                crossed={number for number in part if self._is_being_stored(number)},
            )
        self._look()

    def _is_being_stored(self, number: int) -> bool:
        return any(number in job.numbers and not job.is_load for job in self._jobs.values())

    def _parts(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        size = self._rig.job_keys
        for start in range(0, len(numbers), size):
            yield list(numbers[start : start + size])

    def _ask(self, number: int, request: int, *, patient: bool) -> None:
        """Look a key up, once (then None is always right) or until the answer is known."""
        self._calls.append(f"look {number} up for request {request}")
        before = self._states[number]
        if not patient:
            answer = self._rig.ask(self._keys[number], self._requests[request])
        else:
            answer = self._rig.finds(self._keys[number], self._requests[request])
            self._collect()
        # A job that was reported meanwhile may have changed what is right.
        if self._states[number] is before:
            self._judge(number, answer)

    def _pause(self, call: _Call) -> None:
        """Let the tier work, one way or the other."""
        self._calls.append(call.name.lower())
        if call is _Call.SETTLE:
            self._settle()
        elif call is _Call.STEP:
            self._rig.step()
        else:
            self._rig.drain()
            # What a drain cancels need not succeed.
            for job in self._jobs.values():
                job.due.clear()
            self._rig.poll()
        self._collect()

    def _replace(self, request: int) -> None:
        """End a request, whatever it has in flight, and begin another."""
        self._calls.append(f"replace request {request}")
        self._rig.finish_request(self._requests[request])
        self._requests[request] = self._rig.new_request()
        self._look()

    def _damage(self, number: int, how: Corruption | None) -> None:
        """Remove or damage an object behind the tier's back."""
        self._calls.append(f"damage {number}: {'lost' if how is None else how.value}")
        self._settle()
        if how is not None and self._states[number] is not _State.SURE:
            # There is nothing that could be damaged, or it is damaged already.
            return
        try:
            if how is None:
                self._rig.lose(self._keys[number])
            else:
                self._rig.corrupt(self._keys[number], how)
        except KeyError:
            return
        self._states[number] = _State.MAYBE

    def _reopen(self) -> None:
        """Shut down and open again."""
        self._calls.append("reopen")
        self._settle()
        self._rig.close()
        self._look()
        self._open()

    @override
    def teardown(self) -> None:
        """End the example."""
        self._rig.close()
        self._look()

    # -- what is right --------------------------------------------------------------------------

    def _judge(self, number: int, answer: bool | None) -> None:
        state = self._states[number]
        if answer is True and state is _State.GONE:
            clause = "LOOK-4" if number in self._ever_stored else "LOOK-1"
            self._fail(clause, f"key {number} is found, and no store has put it there")
        if answer is False and state is _State.SURE:
            self._fail("LOOK-3", f"key {number} is not found, though nothing has happened to it")
        self._look()

    def _settle(self) -> None:
        self._rig.wait_all(self._jobs)
        self._collect()

    def _collect(self) -> None:
        """Learn from the results that have come, in the order in which they came."""
        for job_id in [job_id for job_id in self._rig.results if job_id in self._jobs]:
            job = self._jobs.pop(job_id)
            result = self._rig.results[job_id]
            for number in job.numbers:
                good = result.success or self._keys[number] in result.successful_keys
                if job.is_load:
                    self._learn_load(job, number, result, good=good)
                else:
                    self._learn_store(number, good=good)
        self._look()

    def _learn_store(self, number: int, *, good: bool) -> None:
        # Another job of the key may end it differently.
        alone = not any(number in job.numbers for job in self._jobs.values())
        self._states[number] = _State.SURE if good and alone else _State.MAYBE

    def _learn_load(self, job: _Job, number: int, result: JobResult, *, good: bool) -> None:
        if good:
            return
        # A tier without partial results fails the whole job for one bad key.
        judged = bool(result.successful_keys) or job.due.issuperset(job.numbers)
        if number in job.due and judged:
            self._fail("DATA-1", f"key {number} could not be loaded: {result.error}")
        alone = bool(result.successful_keys) or len(job.numbers) == 1
        known = alone and result.error is not None and result.error.kind in _RETIRING
        # With a store in flight the failure says nothing of what is there now.
        gone = known and number not in job.crossed
        self._states[number] = _State.GONE if gone else _State.MAYBE

    def _look(self) -> None:
        """End the example when the rig has seen something."""
        if self._seen:
            self._fail(self._seen[0].clause, self._seen[0].message)

    def _fail(self, clause: str, message: str) -> Never:
        error = Broken(f"{message}. The calls were: {'; '.join(self._calls)}", clause)
        type(self).broken = type(self).broken or error
        raise error


@case("DATA-1", limit_s=180)
def test_any_sequence_of_calls_keeps_every_promise(rigs: Rigs) -> None:
    """Stores, loads, lookups, losses, damage, drains and reopenings, in any order."""
    machine: Any = type("Machine", (_Machine,), {"rigs": rigs, "broken": None})
    try:
        run_state_machine_as_test(machine, settings=_SETTINGS)
    except Exception:
        # Hypothesis runs what has failed once more, and wraps what does not fail again.
        if machine.broken is not None:
            raise machine.broken from None
        raise
