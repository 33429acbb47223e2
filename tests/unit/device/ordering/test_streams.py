"""One ordered stream: events, errors, and a device that is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kv_core.device import OrderedStream
from kv_core.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.device.ordering.conftest import FakeDevice


@pytest.fixture
def stream(device: FakeDevice) -> OrderedStream:
    """Return an ordered stream on the device."""
    return OrderedStream(device, "fake:0")


def _noting(notes: list[str], note: str) -> Callable[[Any], None]:
    return lambda stream: stream.enqueue(lambda: notes.append(note))


def _nothing(stream: Any) -> None:
    """Queue no copy at all."""


def test_work_begins_after_what_the_compute_stream_had(
    device: FakeDevice, stream: OrderedStream
) -> None:
    """And not after what the compute stream is given later."""
    notes: list[str] = []
    device.compute.enqueue(lambda: notes.append("before"))
    stream.run(_noting(notes, "copy"))
    device.compute.enqueue(lambda: notes.append("after"))
    device.run()
    assert notes == ["before", "copy", "after"]


def test_the_current_stream_is_what_is_waited_for(
    device: FakeDevice, stream: OrderedStream
) -> None:
    """Whichever stream the calling thread works on; others do not hold the copies up."""
    notes: list[str] = []
    engine = device.Stream("fake:0")
    engine.enqueue(lambda: notes.append("before"))
    device.compute.enqueue(lambda: notes.append("unrelated"))
    device.frozen = [device.compute]
    with device.stream(engine):
        stream.run(_noting(notes, "copy"))
    device.run()
    assert notes == ["before", "copy"]


def test_copies_are_queued_on_the_current_stream(device: FakeDevice, stream: OrderedStream) -> None:
    """Kernels and tensor copies go where the thread's current stream is: that is the copy's own."""
    seen = []
    stream.run(lambda own: seen.append(device.current_stream("fake:0") is own))
    assert seen == [True]
    assert device.current_stream("fake:0") is device.compute


def test_time_is_measured_on_the_device(device: FakeDevice, stream: OrderedStream) -> None:
    """From the start of the copies to their end, without the time that they waited."""
    for _ in range(5):
        device.compute.enqueue(lambda: None)

    def queue_three(own: Any) -> None:
        for _ in range(3):
            own.enqueue(lambda: None)

    ticket = stream.run(queue_three)
    ticket.wait()
    assert ticket.done()
    assert ticket.elapsed_seconds == pytest.approx(0.004)


def test_events_are_used_again(device: FakeDevice, stream: OrderedStream) -> None:
    """A hundred batches, one after the other, take one pair; each batch in flight takes its own."""
    for _ in range(100):
        stream.run(_nothing).wait()
    one_at_a_time = device.events_made
    tickets = [stream.run(_nothing) for _ in range(10)]
    device.run()
    assert all(ticket.done() for ticket in tickets)
    assert (one_at_a_time, device.events_made) == (3, 21)


def test_events_in_flight_are_not_used_again(device: FakeDevice, stream: OrderedStream) -> None:
    """A ticket does not end with a later batch's event, nor later because of it."""
    notes: list[str] = []
    first = stream.run(_noting(notes, "first"))
    first.wait()
    second = stream.run(_noting(notes, "second"))
    assert first.done()
    assert not second.done()
    third = stream.run(_noting(notes, "third"))
    second.wait()
    assert notes[:2] == ["first", "second"]
    assert not third.done()
    device.run()


def test_copies_that_fail_midway_are_failed_when_the_rest_has_ended(
    device: FakeDevice, stream: OrderedStream
) -> None:
    """What was queued before the failure still touches the memory until the end event."""
    notes: list[str] = []

    def fail_midway(own: Any) -> None:
        _noting(notes, "half")(own)
        raise OSError("no room in the command queue")

    ticket = stream.run(fail_midway)
    assert (ticket.done(), ticket.error) == (False, None)
    device.run()
    assert ticket.done()
    assert notes == ["half"]
    assert isinstance(ticket.error, OSError)
    later = stream.run(_noting(notes, "later"))
    later.wait()
    assert later.error is None


def test_a_batch_whose_end_cannot_be_marked_has_ended_when_it_is_refused(
    device: FakeDevice, stream: OrderedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could say later when its copies end, so they are waited for now."""
    notes: list[str] = []
    make = device.Event
    stream.run(_nothing)

    def refuse(own: object) -> None:
        raise RuntimeError("no event")

    def make_some(*, enable_timing: bool) -> Any:
        event = make(enable_timing=enable_timing)
        if device.events_made % 2:  # The second of a pair: the end.
            monkeypatch.setattr(event, "record", refuse)
        return event

    monkeypatch.setattr(device, "Event", make_some)
    with pytest.raises(RuntimeError, match="no event"):
        stream.run(_noting(notes, "copied"))
    assert notes == ["copied"]


def test_a_lost_device_fails_what_is_in_flight(device: FakeDevice, stream: OrderedStream) -> None:
    """Asking and waiting both end, with the device's error."""
    asked, waited = (stream.run(_nothing) for _ in range(2))
    device.is_lost = True
    assert asked.done()
    waited.wait()
    assert waited.done()
    assert str(asked.error) == str(waited.error) == "the device is lost"
    with pytest.raises(RuntimeError, match="the device is lost"):
        stream.run(_nothing)


def test_close_finishes_what_is_queued(device: FakeDevice, stream: OrderedStream) -> None:
    """Nothing is dropped, and nothing more is taken."""
    notes: list[str] = []
    ticket = stream.run(_noting(notes, "copied"))
    stream.close()
    stream.close()
    assert notes == ["copied"]
    assert ticket.done()
    with pytest.raises(EngineStateError, match="closed"):
        stream.run(_nothing)
