"""The overlap report on hand-written traces: exposed time, copies and waits of each unit."""

import gzip
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from traces import (
    ADAM,
    ALL_GATHER,
    CAST,
    COMPUTE,
    GATHER,
    MATMUL,
    REDUCE,
    REDUCE_SCATTER,
    TraceMaker,
    two_microbatches_of_two_layers,
    two_units_in_two_steps,
)

from lamella_trace import (
    OverlapReport,
    Role,
    StepReport,
    TraceError,
    UnitReport,
    as_html,
    as_json,
    as_text,
    losses,
    overlap_report,
    read_trace,
    verdict,
)
from lamella_trace._html import NUM_COLUMNS
from lamella_trace._intervals import gaps, intersect, length, union


def _unit(step: StepReport, name: str) -> UnitReport:
    return next(unit for unit in step.units if unit.unit == name)


def _times(unit: UnitReport, role: Role) -> tuple[int, float, float]:
    """Return the number of collectives, and their microseconds: all and exposed."""
    traffic = unit.traffic[role]
    assert traffic.exposed is not None
    return traffic.num, round(1000 * traffic.duration, 6), round(1000 * traffic.exposed, 6)


# -- known answers ---------------------------------------------------------------------------------------------------


def test_a_step_is_compute_exposed_communication_and_idleness() -> None:
    report = overlap_report(two_units_in_two_steps())
    assert (report.rank, report.num_ranks, report.on_gpu) == (1, 4, True)
    first, second = report.steps
    assert (first.name, second.name) == ("ProfilerStep#5", "ProfilerStep#6")
    for step, parts in ((first, [870, 510, 300, 60]), (second, [320.25, 100.25, 99.5, 120.5])):
        assert [1000 * ms for ms in (step.span, step.compute, step.exposed, step.idle)] == pytest.approx(parts)
    overlapping = (first.collectives, first.optimizer, first.lone_copies)
    assert [1000 * ms for ms in overlapping] == pytest.approx([400, 100, 10])


def test_the_overlap_report_has_gathers_reductions_copies_and_waits_by_unit() -> None:
    first, second = overlap_report(two_units_in_two_steps()).steps
    a, b = _unit(first, "a"), _unit(first, "b")
    assert _times(a, Role.FORWARD_GATHER) == (1, 100, 100)
    assert _times(b, Role.FORWARD_GATHER) == (1, 150, 60)  # one prefetched by a, one by b
    assert _times(a, Role.BACKWARD_GATHER) == (0, 0, 0)
    assert _times(b, Role.BACKWARD_GATHER) == (1, 40, 40)  # launched on autograd's thread
    assert _times(a, Role.REDUCE) == (1, 60, 50)
    assert _times(b, Role.REDUCE) == (1, 50, 50)
    assert (1000 * a.copies, b.copies) == pytest.approx((10, 0))
    assert (a.host_gaps, b.host_gaps) == pytest.approx((0.050, 0))  # latency of the GPU before b's gather is no wait
    assert _times(_unit(second, "a"), Role.FORWARD_GATHER) == (1, 99.5, 99.5)  # after the end of backward
    assert _unit(second, "a").host_gaps == pytest.approx(0.1205)


def test_rates_come_from_the_message_sizes_of_nccl() -> None:
    first, _ = overlap_report(two_units_in_two_steps()).steps
    traffic = _unit(first, "a").traffic
    assert traffic[Role.FORWARD_GATHER].sent_nbytes == 3 / 4 * 400_000 * 2
    assert traffic[Role.FORWARD_GATHER].gb_per_s == pytest.approx(600_000 / 100e-6 / 1e9)
    assert traffic[Role.REDUCE].sent_nbytes is None
    assert first.whole.traffic[Role.FORWARD_GATHER].sent_nbytes is None  # b's gather has no bytes in the trace


def test_exchanges_of_tokens_belong_to_their_layer_and_node() -> None:
    report = overlap_report(two_microbatches_of_two_layers())
    exchanges = {(node.layer, node.node): node.traffic for node in report.total.nodes}
    assert list(exchanges) == [("layer 0", "dispatch forward"), ("layer 1", "combine backward")]
    for key, (num, duration, exposed) in zip(exchanges, [(2, 90, 70), (1, 40, 30)], strict=True):
        traffic = exchanges[key]
        assert traffic.exposed is not None
        assert (traffic.num, 1000 * traffic.duration, 1000 * traffic.exposed) == pytest.approx((num, duration, exposed))
    assert _times(report.total.whole, Role.EXCHANGE) == (3, 130, 100)
    # A unit's gather inside a node's range stays the unit's.
    assert _times(_unit(report.total, "b"), Role.FORWARD_GATHER) == (1, 10, 10)
    assert not any(unit.traffic[Role.EXCHANGE].num for unit in report.total.units)
    lines = as_text(report).splitlines()
    rows = {line.split("  ")[0]: line.split() for line in lines if line.startswith(("layer", "node"))}
    assert " ".join(rows["node"]) == "node dispatch forward exposed combine backward exposed"
    assert rows["layer 0"][2:] == ["0.09", "0.07"]
    assert "layer 1" in as_html(report)
    assert [node["node"] for node in json.loads(as_json(report))["total"]["nodes"]] == [name for _, name in exchanges]


def test_the_total_is_that_of_all_steps() -> None:
    report = overlap_report(two_units_in_two_steps())
    assert report.total.span == pytest.approx(sum(step.span for step in report.steps))
    assert _times(_unit(report.total, "a"), Role.FORWARD_GATHER) == (2, 199.5, 199.5)
    assert _times(report.total.whole, Role.REDUCE) == (2, 110, 100)


def test_a_trace_without_step_marks_is_one_step() -> None:
    trace = two_units_in_two_steps()
    trace["traceEvents"] = [event for event in trace["traceEvents"] if "ProfilerStep" not in event["name"]]
    [step] = overlap_report(trace).steps
    assert step.name == "whole trace" and step.span == pytest.approx(1.19025)


def test_a_gather_past_the_end_of_its_step_is_cut_at_the_end_and_counts_once() -> None:
    maker = TraceMaker()
    maker.host("ProfilerStep#0", 0, 50)
    maker.host("FSDP::pre_forward", 0, 5)
    maker.kernel(MATMUL, 10, 110, COMPUTE, 6)
    maker.host("ProfilerStep#1", 50, 100)
    maker.host("FSDP::all_gather", 52, 56)
    maker.kernel(ALL_GATHER, 60, 160, GATHER, 54)
    first, second = overlap_report(maker.trace()).steps
    assert _times(_unit(first, "(outermost)"), Role.FORWARD_GATHER) == (1, 50, 0)
    assert _times(second.whole, Role.FORWARD_GATHER) == (0, 50, 50)


def test_several_kernels_of_one_collective_count_once() -> None:
    maker = TraceMaker()
    maker.host("FSDP::all_gather (a)", 0, 10)
    message: dict[str, Any] = {
        "dtype": "Float",
        "Group size": 2,
        "In msg nelems": 5,
        "Out msg nelems": 10,
        "External id": 4,
    }
    maker.kernel("ncclDevKernel_AllGather", 20, 30, GATHER, 1, **message)
    maker.kernel("ncclDevKernel_AllGather", 30, 40, GATHER, 2, **message)
    maker.host("FSDP::post_backward_reduce (a)", 50, 60)
    maker.kernel("ncclDevKernel_AllReduce", 70, 80, REDUCE, 51, **message | {"External id": 5})
    unit = _unit(overlap_report(maker.trace()).total, "a")
    assert _times(unit, Role.FORWARD_GATHER) == (1, 20, 20) and unit.traffic[Role.FORWARD_GATHER].sent_nbytes == 20
    assert _times(unit, Role.REDUCE) == (1, 10, 10) and unit.traffic[Role.REDUCE].sent_nbytes == 40


def test_kernels_of_generic_names_take_their_role_from_the_range_of_the_launch() -> None:
    maker = TraceMaker()
    maker.host("FSDP::pre_backward (a)", 0, 30)
    maker.host("FSDP::backward_prefetch for (a).b", 2, 20)
    maker.host("FSDP::all_gather ((a).b)", 3, 10)
    maker.kernel("Memcpy PtoP (Device -> Device)", 40, 50, GATHER, 4)
    maker.kernel("Memcpy DtoD (Device -> Device)", 50, 51, COMPUTE, 15)  # after the gather, in the prefetch
    maker.host("FSDP::post_backward_rs_wait ()", 31, 34)
    maker.host("FSDP::post_backward_reduce", 35, 39)
    maker.kernel("ncclDevKernel_Generic_4", 60, 70, REDUCE, 36)
    total = overlap_report(maker.trace()).total
    assert _times(_unit(total, "(a).b"), Role.BACKWARD_GATHER) == (1, 10, 10)
    assert _unit(total, "(a).b").copies == pytest.approx(0.001)
    assert _times(_unit(total, "(outermost)"), Role.REDUCE) == (1, 10, 10)


def test_a_gather_by_copy_engines_is_one_from_its_first_copy_to_its_last() -> None:
    maker = TraceMaker()
    for name, begin in (("FSDP::all_gather (a)", 0), ("FSDP::all_gather (b)", 110)):
        number = maker.host(name, begin, begin + 10)
        maker.device(number, name, begin + 20, begin + 81, GATHER)
        maker.push(begin + 20, begin + 21, 4)
        maker.push(begin + 50, begin + 80, 1000)  # peers became ready at 50
        maker.push(begin + 80, begin + 81, 4)
    maker.kernel(MATMUL, 60, 100, COMPUTE, 1)
    total = overlap_report(maker.trace()).total
    a, b = _unit(total, "a"), _unit(total, "b")
    assert _times(a, Role.FORWARD_GATHER) == (1, 61, 40) and _times(b, Role.FORWARD_GATHER) == (1, 61, 61)
    assert a.traffic[Role.FORWARD_GATHER].sent_nbytes == 1008
    assert (a.host_gaps, b.host_gaps) == pytest.approx((0, 0.030))  # b's gather was launched after a's compute


def test_a_step_of_the_optimizer_inside_backward_counts_for_the_optimizer() -> None:
    maker = TraceMaker()
    maker.host("FSDP::post_backward_reduce (a)", 0, 20)
    maker.host("Optimizer.step#AdamW.step", 5, 15)
    maker.kernel("void multi_tensor_apply_kernel<BinaryOpScalarFunctor>", 30, 40, COMPUTE, 6)
    maker.kernel(CAST, 40, 45, COMPUTE, 7)
    maker.kernel(MATMUL, 45, 55, COMPUTE, 16)
    total = overlap_report(maker.trace()).total
    assert (total.optimizer, total.whole.copies) == pytest.approx((0.015, 0))


def test_collectives_outside_of_all_units_have_a_line() -> None:
    maker = TraceMaker()
    maker.host("FSDP::post_backward_reduce (a)", 0, 10)
    maker.kernel(REDUCE_SCATTER, 10, 20, REDUCE, 1)
    maker.kernel("ncclDevKernel_AllReduce", 20, 30, COMPUTE, 12)
    assert _times(_unit(overlap_report(maker.trace()).total, "(no unit)"), Role.OTHER) == (1, 10, 10)


# -- properties ------------------------------------------------------------------------------------------------------

NAMES = [MATMUL, CAST, ALL_GATHER, REDUCE_SCATTER, ADAM]
KERNELS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(20, 90), st.integers(0, 12), st.integers(0, 19)), min_size=1
)


def _instants(kernels: list[tuple[str, int, int, int]], *names: str) -> set[int]:
    return {time for name, start, duration, _ in kernels if name in names for time in range(start, start + duration)}


@given(KERNELS, st.integers(20, 60))
def test_compute_exposed_and_idle_time_add_up_to_the_span(kernels: list[tuple[str, int, int, int]], cut: int) -> None:
    maker = TraceMaker()
    for name, start, end in (("ProfilerStep#0", 0, cut), ("ProfilerStep#1", cut, 100)):
        maker.host(name, start, end)
    for begin in range(0, 90, 10):
        maker.host(f"FSDP::all_gather (layers.{begin % 30})", begin, begin + 6)
        maker.host(f"FSDP::post_backward_reduce (layers.{begin % 20})", begin + 6, begin + 9)
    for name, start, duration, lead in kernels:
        maker.kernel(name, start, start + duration, COMPUTE, start - lead)
    assume(any(duration for _, _, duration, _ in kernels))
    report = overlap_report(maker.trace())
    computed, communicated = _instants(kernels, MATMUL, CAST, ADAM), _instants(kernels, ALL_GATHER, REDUCE_SCATTER)
    assert 1000 * report.total.compute == pytest.approx(len(computed))
    assert 1000 * report.total.exposed == pytest.approx(len(communicated - computed))
    assert sum(step.span for step in report.steps) == pytest.approx(report.total.span)
    for step in (*report.steps, report.total):
        assert step.compute + step.exposed + step.idle == pytest.approx(step.span)
        assert 0 <= (step.whole.host_gaps or 0) <= step.idle + 1e-9
        for unit in (*step.units, step.whole):
            for traffic in unit.traffic.values():
                assert traffic.exposed is not None and traffic.hidden is not None
                assert -1e-9 <= traffic.exposed <= traffic.duration + 1e-9
                assert traffic.exposed + traffic.hidden == pytest.approx(traffic.duration)


PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair))))


@given(PAIRS, PAIRS)
def test_arithmetic_on_intervals_is_that_of_sets(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    def instants(intervals: list[Any]) -> set[int]:
        return {time for start, end in intervals for time in range(start, end)}

    merged = union(first)
    assert instants(merged) == instants(first) and length(merged) == len(instants(first))
    assert instants(gaps(merged, 5, 45)) == set(range(5, 45)) - instants(first)
    assert instants(intersect(merged, union(second))) == instants(first) & instants(second)


# -- texts and page -------------------------------------------------------------------------------------------------


def test_the_text_has_a_line_a_step_and_a_line_a_unit() -> None:
    lines = as_text(overlap_report(two_units_in_two_steps())).splitlines()
    assert lines[0] == "rank 1 of 4, 2 steps, GPU kernels; milliseconds"
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert rows["ProfilerStep#5"] == ["0.87", "0.51", "0.30", "0.06", "0.40", "0.01", "0.10", "0.05"]
    assert rows["unit"][:4] == ["forward", "ms", "exposed", "GB/s"] and "other" not in rows["unit"]
    assert rows["a"] == ["1", "0.10", "0.10", "6", "0.5", "0.03", "0.03", "0.01", "0.09"]
    assert max(map(len, lines)) <= 120


def _report(
    *,
    exposed: Role | None = None,
    host_gaps: float = 0.0,
    latencies: float = 0.0,
    lone_copies: float = 0.0,
    collectives: float = 10.0,
) -> OverlapReport:
    """Return the report of a 100 ms step with one loss of 20 ms."""
    report = overlap_report(two_units_in_two_steps())
    unit = report.total.whole
    traffic = {
        role: replace(role_traffic, exposed=20.0 if role is exposed else 0.0)
        for role, role_traffic in unit.traffic.items()
    }
    totals = replace(unit, traffic=traffic, host_gaps=host_gaps)
    total = replace(
        report.total,
        span=100.0,
        compute=70.0,
        collectives=collectives,
        idle=host_gaps + latencies,
        lone_copies=lone_copies,
        whole=totals,
        units=(totals,),
    )
    return replace(report, steps=report.steps[:1], total=total)


@pytest.mark.parametrize(
    ("report", "loss", "knob"),
    [
        (_report(exposed=Role.FORWARD_GATHER), "exposed gathers in forward", "prefetch_budget"),
        (_report(exposed=Role.BACKWARD_GATHER), "exposed gathers in backward", "keep_budget"),
        (_report(exposed=Role.REDUCE), "exposed reductions", "set_reduce_scatter_max_input_buffers"),
        (_report(exposed=Role.REDUCE, collectives=90.0), "exposed reductions", "bfloat16"),
        (_report(exposed=Role.EXCHANGE), "exposed exchanges of tokens", "more microbatches"),
        (_report(host_gaps=20.0), "waits for the host", "CUDA graph"),
        (_report(latencies=20.0), "idleness that is not the host's", "had been launched"),
        (_report(lone_copies=20.0), "copies of units that nothing else runs beside", "divides by the number of ranks"),
    ],
)
def test_the_verdict_names_the_largest_loss_and_a_setting(report: OverlapReport, loss: str, knob: str) -> None:
    assert losses(report)[0].name == loss
    assert verdict(report).startswith(f"The largest loss is 20.00 ms a step (20.0%) of {loss}.")
    assert knob in verdict(report)


def test_the_verdict_on_a_step_without_losses() -> None:
    assert verdict(_report()).startswith("Nothing stands out")


def test_the_verdict_names_a_unit_with_most_of_the_exposed_time() -> None:
    assert "Most of it is of 'a'." in verdict(overlap_report(two_units_in_two_steps()))


def test_json_has_the_values_of_the_report() -> None:
    report = overlap_report(two_units_in_two_steps())
    values = json.loads(as_json(report))
    assert [step["name"] for step in values["steps"]] == ["ProfilerStep#5", "ProfilerStep#6"]
    first = {unit["unit"]: unit for unit in values["steps"][0]["units"]}
    assert first["b"]["traffic"]["forward_gathers"]["exposed"] == pytest.approx(0.06)
    assert values["total"]["by_kind"]["matmul"] == pytest.approx(0.50025)
    assert values["verdict"] == verdict(report)


class _Page(HTMLParser):
    """The open tags of a page, and the content read so far."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rects: list[dict[str, str | None]] = []
        self.titles: list[str] = []
        self.marks: dict[str, str | None] = {}
        self.text = ""
        self._style: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "input"):
            self.open.append(tag)
        if tag == "rect":
            self.rects.append(dict(attrs))
        self._style = dict(attrs).get("style")
        assert not {name for name, _ in attrs} & {"src", "href"}  # the page loads no other file

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag == "line"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] == "title":
            self.titles.append(data)
        if self.open and self.open[-1] == "span" and self._style:
            self.marks[data] = self._style


def test_the_page_is_well_formed_and_names_units_and_exposed_kernels() -> None:
    names = ("blocks.0<script>&", 'blocks."1"')
    text = as_html(overlap_report(two_units_in_two_steps(*names)))
    page = _Page(text)
    assert page.open == [] and "<script>" not in text
    for name in names:
        assert name in page.text and any(title.startswith(f"{name}: ncclDevKernel_AllGather") for title in page.titles)
    assert f"{names[1]}: exposed, 60.0 us" in page.titles
    kinds = {rect["class"] for rect in page.rects}
    assert kinds == {"all_gather", "reduce_scatter", "matmul", "copy", "optimizer", "exposed", "host_gap", "range"}


def test_bars_lie_where_their_kernels_ran() -> None:
    page = _Page(as_html(overlap_report(two_units_in_two_steps())))
    [adam] = [rect for rect in page.rects if rect["class"] == "optimizer"]
    scale = 2 * NUM_COLUMNS / 1190.25
    assert float(adam["x"] or 0) == pytest.approx(770 * scale, abs=1)
    assert float(adam["width"] or 0) == pytest.approx(100 * scale, abs=2)


def test_the_overlap_reports_axis_marks_the_starts_of_steps_and_milliseconds() -> None:
    page = _Page(as_html(overlap_report(two_units_in_two_steps())))
    assert page.titles[0] == "Overlap report: rank 1 of 4, 2 steps, GPU kernels; milliseconds"
    assert page.marks["ProfilerStep#5"] == "left:0.000%;width:73.094%"
    assert page.marks["ProfilerStep#6"] == "left:73.094%;width:26.906%"
    assert [mark for mark in page.marks if not mark.startswith("Profiler")] == [f"{n / 10:g}" for n in range(12)]
    assert page.marks["0.7"] == f"left:{70_000 / 1190.25:.3f}%;width:{10_000 / 1190.25:.3f}%"


def test_a_page_of_very_many_kernels_stays_small() -> None:
    maker = TraceMaker()
    maker.host("FSDP::all_gather (a)", 0, 1)
    for i in range(100_000):
        maker.kernel(MATMUL, 10 + 2 * i, 11 + 2 * i, COMPUTE, 5)
    page = _Page(as_html(overlap_report(maker.trace())))
    assert len(page.rects) <= 2 * NUM_COLUMNS
    assert sum(int(title.split(" and ")[1].split()[0]) + 1 for title in page.titles if " more" in title) > 90_000


# -- reading ---------------------------------------------------------------------------------------------------------


def test_a_trace_is_read_from_json_gzipped_or_not(tmp_path: Path) -> None:
    text = json.dumps(two_units_in_two_steps())
    (tmp_path / "trace.json").write_text(text)
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(text.encode()))
    plain, zipped = (overlap_report(read_trace(tmp_path / name)) for name in ("trace.json", "trace.json.gz"))
    assert as_json(plain) == as_json(zipped)
    assert math.isclose(plain.total.span, 1.19025)


COMPLETE = {"ph": "X", "cat": "kernel", "name": MATMUL, "ts": 1, "dur": 2, "pid": 0, "tid": 7}
MALFORMED: list[dict[str, Any]] = [
    *({"name": None}, {"ts": None}, {"dur": "1"}, {"dur": -5}, {"ts": math.nan}, {"ts": 10**400}, {"tid": []}),
    *({"args": None}, {"args": {"External id": [1]}}, {"args": {"dtype": []}}, {"args": {"Group size": "4"}}),
    *({"args": {"Out msg nelems": count}} for count in (None, math.inf)),
    *({"args": {"Input Dims": dims}} for dims in (3, [3], [[[1], 2]])),
]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[]", "JSON without a list of traceEvents"),
        (b'{"traceEvents": 3}', "JSON without a list of traceEvents"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "ended before the end-of-stream marker"),
        (b"\x1f\x8b" + b"\x08" * 30, ""),
        (b"[" * 100_000, "recursion"),
        (b'{"traceEvents": [3]}', "got a malformed event: 3."),
        *(
            (json.dumps({"traceEvents": [COMPLETE | changed]}).encode(), "got a malformed event: {")
            for changed in MALFORMED
        ),
        (b'{"traceEvents": [], "distributedInfo": null}', "got a malformed distributedInfo: None."),
    ],
)
def test_a_file_without_a_trace_is_refused_by_its_path(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="Expected what export_chrome_trace") as refused:
        read_trace(path)
    assert str(path) in str(refused.value) and problem in str(refused.value)


def test_an_event_of_an_odd_category_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps({"traceEvents": [COMPLETE | {"cat": ["kernel"], "dur": None}]}))
    assert len(read_trace(path)["traceEvents"]) == 1


def test_an_absent_file_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="got No such file or directory"):
        read_trace(tmp_path / "absent.json")


def _trace(*events: tuple[str, str]) -> dict[str, Any]:
    fields = {"ph": "X", "ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": {}}
    return {"traceEvents": [fields | {"cat": category, "name": name} for category, name in events]}


UNITS = ("user_annotation", "FSDP::all_gather (a)")
OTHER_THREAD = [event | {"tid": 2} for event in _trace(("cpu_op", "aten::mm"), UNITS)["traceEvents"]]
TIMELESS = [event | {"dur": 0} for event in _trace(("kernel", MATMUL), UNITS)["traceEvents"]]


@pytest.mark.parametrize(
    ("trace", "problem"),
    [
        (_trace(), "Expected kernels, or operators of the main thread, in 'some.json', got none"),
        ({"traceEvents": OTHER_THREAD}, "got none. Profile steps of training, on a CPU in the program's main thread"),
        ({"traceEvents": TIMELESS}, "Expected kernels that took some time in 'some.json', got none"),
        (_trace(UNITS, ("cpu_op", "aten::mm")) | {"distributedInfo": {"backend": "nccl"}}, "Expected GPU kernels in "),
        (
            _trace(("kernel", MATMUL)),
            "Expected ranges of sharded units .* in 'some.json', got none. Record with Profiler",
        ),
        (
            _trace(("kernel", MATMUL), ("user_annotation", "Optimizer.step#SGD.step")),
            "Expected ranges of sharded units",
        ),
        (
            _trace(UNITS, ("cpu_op", "aten::mm"), ("user_annotation", "nccl:_all_gather_base")),
            "Expected GPU kernels in ",
        ),
    ],
)
def test_a_trace_without_kernels_or_units_is_refused(trace: dict[str, Any], problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        overlap_report(trace, "some.json")


@pytest.mark.parametrize(
    ("processes", "named"),
    [((1, 100001), "2 processes: 1, 100001. Read"), (range(9), "9 processes: 0, 1, 2, 3 and more. Read")],
)
@pytest.mark.parametrize("work", [("kernel", MATMUL), ("cpu_op", "aten::mm")])
def test_a_trace_merged_from_several_ranks_is_refused(
    processes: Iterable[int], named: str, work: tuple[str, str]
) -> None:
    events = _trace(UNITS, work, ("cpu_op", "aten::add"))["traceEvents"]
    merged = [event | {"pid": process, "tid": process} for process in processes for event in events]
    with pytest.raises(TraceError) as refused:
        overlap_report({"traceEvents": merged}, "some.json")
    assert f"Expected the trace of one rank in 'some.json', got operators of {named}" in str(refused.value)


def test_the_processes_of_gpus_and_tools_and_the_threads_of_autograd_are_no_further_ranks() -> None:
    events = _trace(UNITS, ("cpu_op", "aten::mm"), ("cpu_op", "aten::mm"), ("kernel", MATMUL), ("Trace", "Profiler"))
    pids_and_tids = ((1, 1), (1, 1), (1, 2), (0, 7), ("Spans", "Profiler"))
    for event, (pid, tid) in zip(events["traceEvents"], pids_and_tids, strict=True):
        event |= {"pid": pid, "tid": tid}
    assert overlap_report(events).on_gpu


def test_without_a_gpu_exposure_is_unknown() -> None:
    trace = _trace(UNITS, ("user_annotation", "gloo::all_gather"), ("cpu_op", "aten::mm"))
    trace["traceEvents"][2] |= {"ts": 5}
    report = overlap_report(trace)
    assert not report.on_gpu and losses(report) == [] and "No GPU kernels" in verdict(report)
    traffic = _unit(report.total, "a").traffic[Role.FORWARD_GATHER]
    assert (traffic.num, traffic.exposed, traffic.hidden) == (1, None, None)
    assert report.total.whole.host_gaps is None and "exposed" not in as_text(report).split("No GPU")[0]
