"""Timelines: lanes work in order, events wait for dependencies, and exposed time is time without compute."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella_schedule import Event, Kind, Lane, Slot, Timeline, bars, exposures, order, run_order, simulate, svg, work

_DURATIONS = st.fixed_dictionaries({(slot, kind): st.integers(0, 9).map(float) for slot in Slot for kind in Kind})


def _times(communication: float, compute: float) -> dict[tuple[Slot, Kind], float]:
    return {
        (slot, kind): communication if slot in (Slot.DISPATCH, Slot.COMBINE) else compute
        for slot in Slot
        for kind in Kind
    }


@given(st.integers(1, 4), st.integers(0, 4), _DURATIONS, st.booleans(), st.integers(0, 2))
def test_a_timeline_keeps_the_lanes_and_the_chains_in_order(
    num_microbatches: int, num_layers: int, durations: dict[tuple[Slot, Kind], float], early: bool, host: int
) -> None:
    events = run_order(num_microbatches, num_layers, early_release=early)
    timeline = simulate(events, durations, host=host)
    assert [span.event for span in timeline.spans] == list(work(events))
    for lane in Lane:
        spans = [span for span in timeline.spans if span.lane is lane]
        assert all(one.stop <= other.start for one, other in itertools.pairwise(spans))
    for microbatch in range(num_microbatches):
        chain = [
            span
            for span in timeline.spans
            if isinstance(span.event, Event)
            and span.event.microbatch == microbatch
            and span.event.kind is not Kind.WEIGHT_GRADIENT
        ]
        assert all(one.stop <= other.start for one, other in itertools.pairwise(chain))
    busy = {lane: timeline.busy(lane) for lane in Lane}
    assert 0 <= timeline.exposed <= busy[Lane.COMMUNICATION]
    assert busy[Lane.COMPUTE] + timeline.exposed <= timeline.total + 1e-9
    if not host:
        assert timeline.total <= sum(busy.values()) + 1e-9


@pytest.mark.parametrize("num_layers", [1, 2, 8])
def test_a_pair_hides_communication_that_takes_no_longer_than_its_compute(num_layers: int) -> None:
    pair = simulate(order(num_layers, num_layers), _times(2.0, 3.0))
    assert pair.busy(Lane.COMMUNICATION) == 8.0 * num_layers
    assert pair.exposed == 0
    alone = [simulate(order(num_layers, None), _times(2.0, 3.0)), simulate(order(None, num_layers), _times(2.0, 3.0))]
    assert alone[0].exposed == 4.0 * num_layers  # nothing to hide behind
    assert alone[1].exposed < 4.0 * num_layers  # delayed weight gradients hide a little
    assert pair.total < sum(one.total for one in alone)


def test_delayed_weight_gradients_hide_the_dispatch_of_a_backward_alone() -> None:
    times = _times(2.0, 3.0)
    assert simulate(order(None, 1), times).exposed == 2.0
    assert simulate(order(None, 1, delayed=False), times).exposed == 4.0


def test_a_host_that_is_too_slow_shows() -> None:
    assert simulate(order(2, 2), _times(1.0, 1.0), host=10.0).total > 10 * (len(work(order(2, 2))) - 1)


def test_durations_may_be_a_function_of_the_event() -> None:
    timeline = simulate(order(2, 2), lambda event: float(event.layer or 0))
    assert timeline.busy(Lane.COMMUNICATION) == 4.0


def test_missing_negative_and_nan_durations_are_refused() -> None:
    with pytest.raises(ValueError, match="got none for preprocess forward"):
        simulate(order(1, None), {})
    with pytest.raises(ValueError, match=r"got -1.0 for microbatch 1 preprocess forward"):
        simulate(order(1, None), _times(0.0, -1.0))
    with pytest.raises(ValueError, match=r"got nan for microbatch 1 preprocess forward"):
        simulate(order(1, None), _times(0.0, math.nan))


def test_bars_have_a_column_for_each_share_of_the_time() -> None:
    lines = bars(simulate(order(1, None), _times(2.0, 1.0)), width=8).splitlines()
    assert lines == [
        "compute       |IP  E  O|",
        "communication |  DD CC |",
        "total 8, exposed communication 4",
    ]
    with pytest.raises(ValueError, match="got 0"):
        bars(Timeline(()), width=0)
    assert bars(Timeline(()), width=2).splitlines()[-1] == "total 0, exposed communication 0"


def test_a_picture_has_a_bar_for_each_span() -> None:
    timeline = simulate(run_order(2, 2), _times(2.0, 3.0))
    picture = ET.fromstring(svg(timeline))
    rectangles = picture.findall(".//{*}rect")
    assert len(rectangles) == len(timeline.spans)
    right = max(float(rectangle.attrib["x"]) + float(rectangle.attrib["width"]) for rectangle in rectangles)
    assert right == pytest.approx(1200 + min(float(rectangle.attrib["x"]) for rectangle in rectangles), abs=0.2)
    title = rectangles[0].find("{*}title")
    assert title is not None and title.text == "0 preprocess fwd: 0 to 3"


def test_an_event_names_its_place() -> None:
    assert str(Event(3, 1, Slot.PRE, Kind.WEIGHT_GRADIENT)) == "microbatch 3 layer 1 pre weight gradient"


def test_exposed_times_of_slots_sum_up_to_the_exposed_time_and_name_the_layer() -> None:
    events = run_order(3, 2)
    times = {(slot, kind): 4.0 if slot is Slot.COMBINE else 1.0 for slot in Slot for kind in Kind}
    timeline = simulate(events, times)
    exposed = timeline.exposed_by
    assert sum(exposed.values()) == pytest.approx(timeline.exposed)
    assert timeline.exposed > 0
    assert set(exposed) == {
        (layer, slot, kind)
        for layer in (0, 1)
        for slot in (Slot.DISPATCH, Slot.COMBINE)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    drawn = exposures(timeline, simulate(events, {**times, (Slot.COMBINE, Kind.FORWARD): 0.0})).splitlines()
    assert drawn[0].split() == ["exposed", "measured", "predicted"]
    assert drawn[2].split()[:4] == ["layer", "0", "dispatch", "bwd"]
    assert drawn[3].split() == ["layer", "0", "combine", "fwd", f"{exposed[0, Slot.COMBINE, Kind.FORWARD]:.2f}", "0.00"]
    assert drawn[-1].split()[:2] == ["all", f"{timeline.exposed:.2f}"]
