"""Two streams, on stand-ins that record their order: a missing wait shows on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from lamella_schedule import (
    Event,
    Flight,
    Kind,
    Lane,
    Lanes,
    LayerSlots,
    ModelChunk,
    ResidenceEvent,
    Slot,
    _lanes,
    run,
    run_pair,
)

Seen = dict[str, int]


class Stream:
    """Counts the work of the stream; `seen` is how much work of each stream comes before the stream's next work."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: Seen = {name: 0}

    def wait_event(self, event: Seen) -> None:
        for name, count in event.items():
            self.seen[name] = max(self.seen.get(name, 0), count)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.seen)

    def record_event(self) -> Seen:
        return dict(self.seen)


@dataclass
class Work:
    """A piece of work on a stream, and the work of each stream before the piece."""

    stream: str
    count: int
    seen: Seen

    def is_behind(self, other: Work) -> bool:
        return self.seen.get(other.stream, 0) >= other.count


class Device:
    """Stands in for torch's module of a device."""

    def __init__(self) -> None:
        self.caller = self.current = Stream("caller")

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def work(self) -> Work:
        """Put something on the current stream."""
        stream = self.current
        seen = dict(stream.seen)
        stream.seen[stream.name] += 1
        return Work(stream.name, stream.seen[stream.name], seen)

    # The last method: below it this name is the method's in the class.
    def Stream(self, device: torch.device, priority: int) -> Stream:  # noqa: N802  torch's name
        return Stream("communication")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    _lanes._communication_stream.cache_clear()
    monkeypatch.setattr(_lanes, "_module", lambda _: device)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    yield device
    _lanes._communication_stream.cache_clear()


def _chunks(num: int) -> list[ModelChunk]:
    weight = torch.ones(3, requires_grad=True)

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    layer = LayerSlots(
        pre=double,
        dispatch=double,
        experts=double,
        combine=double,
        delayed={Slot.PRE: lambda: None, Slot.EXPERTS: lambda: None},
    )
    return [ModelChunk(lambda: weight * 2, [layer] * 2, lambda x: x.sum()) for _ in range(num)]


class Log:
    """The work of each event, and a residence whose gathers run on a stream of their own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._gather = Stream("gather")
        self.work: dict[Event, Work] = {}
        self.gathered: dict[tuple[int, int | None, str], Work] = {}
        self.finished: dict[tuple[int, int | None, str], Seen] = {}

    @contextmanager
    def around(self, event: Event) -> Iterator[None]:
        self.work[event] = self._device.work()
        yield

    def acquire(self, event: ResidenceEvent) -> None:
        with self._device.stream(self._gather):
            self.gathered[event.microbatch, event.layer, event.phase] = self._device.work()

    def used(self, event: ResidenceEvent) -> None:
        self._device.current.wait_stream(self._gather)

    def finished_event(self, event: ResidenceEvent) -> None:
        self.finished[event.microbatch, event.layer, event.phase] = self._device.current.record_event()


class Gathers:
    """`Log` as a residence."""

    def __init__(self, log: Log) -> None:
        self.acquire, self.used, self.finished = log.acquire, log.used, log.finished_event

    def begin_step(self, num_microbatches: int) -> None:
        assert num_microbatches > 0

    def drop(self) -> None:
        raise AssertionError("nothing has failed")


def _logged(device: Device, num_microbatches: int = 3) -> Log:
    log = Log(device)
    run(_chunks(num_microbatches), residence=Gathers(log), around=log.around, device="cpu")
    return log


def test_work_runs_on_the_stream_of_its_lane(device: Device) -> None:
    for event, work in _logged(device).work.items():
        assert work.stream == {Lane.COMPUTE: "caller", Lane.COMMUNICATION: "communication"}[event.lane]


def test_every_node_is_ordered_behind_the_previous_node_of_its_chunk(device: Device) -> None:
    log = _logged(device)
    for microbatch in range(3):
        events = [event for event in log.work if event.microbatch == microbatch]
        chain = [log.work[event] for event in events if event.kind is not Kind.WEIGHT_GRADIENT]
        assert all(later.is_behind(earlier) for i, earlier in enumerate(chain) for later in chain[i + 1 :])
        for event in events:
            if event.kind is Kind.WEIGHT_GRADIENT:
                backward = Event(microbatch, event.layer, event.slot, Kind.BACKWARD)
                assert log.work[event].is_behind(log.work[backward])


def test_nodes_of_two_chunks_that_should_overlap_are_not_ordered(device: Device) -> None:
    work = _logged(device).work
    for one, other in (
        (Event(1, 0, Slot.PRE, Kind.FORWARD), Event(0, 1, Slot.COMBINE, Kind.BACKWARD)),
        (Event(1, 0, Slot.DISPATCH, Kind.FORWARD), Event(0, 1, Slot.EXPERTS, Kind.BACKWARD)),
        (Event(0, 1, Slot.DISPATCH, Kind.BACKWARD), Event(0, 1, Slot.EXPERTS, Kind.WEIGHT_GRADIENT)),
        (Event(0, 1, Slot.PRE, Kind.BACKWARD), Event(1, 0, Slot.COMBINE, Kind.FORWARD)),
    ):
        assert not work[one].is_behind(work[other]), f"{one} waits for {other}"
        assert not work[other].is_behind(work[one]), f"{other} waits for {one}"


def test_the_communication_stream_and_the_callers_stream_wait_for_each_other(device: Device) -> None:
    before = device.work()
    log = _logged(device)
    first = next(work for work in log.work.values() if work.stream == "communication")
    assert first.is_behind(before)
    after = device.work()
    assert all(after.is_behind(work) for work in log.work.values())


def test_a_pair_may_run_under_another_stream_than_its_lanes(device: Device) -> None:
    [chunk] = _chunks(1)
    flight = Flight(chunk, Lanes(torch.device("cpu")))
    with device.stream(Stream("other")):
        before = device.work()
        log = Log(device)
        run_pair(flight, None, around=log.around)
        assert all(work.is_behind(before) for work in log.work.values())
        after = device.work()
        assert all(after.is_behind(work) for work in log.work.values())
        flight.begin_backward((torch.ones(()),))
        log = Log(device)
        run_pair(None, flight, around=log.around)
        assert all(work.is_behind(after) for work in log.work.values())
        assert all(device.work().is_behind(work) for work in log.work.values())


def test_every_reader_is_behind_the_gather_and_the_end_of_use_behind_every_reader(device: Device) -> None:
    log = _logged(device)
    assert len(log.finished) == len(log.gathered) == 3 * 2 * 3
    for event, work in log.work.items():
        for layer in {event.layer, None}:
            stay = event.microbatch, layer, event.phase.value
            assert work.is_behind(log.gathered[stay])
            assert log.finished[stay].get(work.stream, 0) >= work.count


def test_every_tensor_that_a_node_reads_is_marked_for_its_stream(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked: list[tuple[int, str]] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: marked.append((tensor.data_ptr(), stream.name))
    )
    seen: list[tuple[int, str]] = []

    def reads(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.data_ptr(), device.current.name))
        return _Twice.apply(x, seen, device)  # type: ignore[no-any-return, no-untyped-call]

    weight = torch.ones(3, requires_grad=True)
    layer = LayerSlots(pre=reads, dispatch=reads, experts=reads, combine=reads)
    run([ModelChunk(lambda: weight * 2, [layer, layer], lambda x: x.sum()) for _ in range(2)], device="cpu")
    assert len(seen) == 2 * 2 * 4 * 2
    assert set(seen) <= set(marked)


class _Twice(torch.autograd.Function):
    """Notes what backward reads."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, seen: list[tuple[int, str]], device: Device) -> torch.Tensor:
        ctx.noted = seen, device  # type: ignore[attr-defined]
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        seen, device = ctx.noted  # type: ignore[attr-defined]
        seen.append((gradient.data_ptr(), device.current.name))
        return gradient * 2, None, None


def test_after_an_exception_each_stream_is_behind_the_other(device: Device) -> None:
    works: list[Work] = []

    @contextmanager
    def around(event: Event) -> Iterator[None]:
        works.append(device.work())
        if event == Event(0, 1, Slot.DISPATCH, Kind.BACKWARD):
            raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        run(_chunks(2), around=around, device="cpu")
    assert device.current is device.caller
    assert all(device.work().is_behind(work) for work in works)
    with device.stream(_lanes._communication_stream(torch.device("cpu"))):
        assert all(device.work().is_behind(work) for work in works)


def test_after_an_exception_the_callers_stream_is_behind_both_lanes(device: Device) -> None:
    works: list[Work] = []

    @contextmanager
    def around(event: Event) -> Iterator[None]:
        works.append(device.work())
        if event == Event(0, 0, Slot.EXPERTS, Kind.FORWARD):
            raise KeyboardInterrupt
        yield

    [chunk] = _chunks(1)
    flight = Flight(chunk, Lanes(torch.device("cpu")))
    with device.stream(Stream("other")):
        with pytest.raises(KeyboardInterrupt):
            run_pair(flight, None, around=around)
        assert {work.stream for work in works} == {"caller", "communication"}
        assert all(device.work().is_behind(work) for work in works)


def test_a_tensor_on_another_device_than_the_lanes_is_refused(device: Device) -> None:
    lanes = Lanes(torch.device("cpu"))
    lanes.mark_read((torch.empty(1), torch.empty(1, device="meta"), None))
    lanes.device = torch.device("cpu", 1)
    with pytest.raises(ValueError, match=r"device of the lanes, cpu:1, got a tensor on cpu\. Give device="):
        lanes.mark_read((torch.empty(1),))
