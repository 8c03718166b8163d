"""Deprecated names work as their replacements do, and warn of their removal."""

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import lamella_trace

# Names of `lamella.overlap` before its code became a package.
OVERLAP_NAMES = [
    *("Breakdown", "HostGap", "Kernel", "Kind", "NodeReport", "OverlapReport", "Role", "StepReport", "Timeline"),
    *("TraceError", "Traffic", "UnitReport", "as_html", "as_json", "as_text", "breakdown", "classify", "kernels_of"),
    *("losses", "operators_of", "overlap_report", "read_trace", "streams_of", "verdict"),
]


EXPERTS_NAMES = ("chunk", "shard_with_experts", "spread_experts")


@pytest.mark.parametrize("name", EXPERTS_NAMES)
def test_a_name_of_experts_is_that_of_lamella_transformers_and_warns(name: str) -> None:
    experts, replacements = import_module("lamella.experts"), import_module("lamella_transformers.experts")
    replacement = rf"will be removed in lamella 0\.2: import {name} from lamella_transformers\.experts\.$"
    with pytest.warns(FutureWarning, match=replacement) as warned:
        assert getattr(experts, name) is getattr(replacements, name)
    assert [warning.filename for warning in warned] == [__file__]


def test_star_imports_and_misspelt_names_of_experts() -> None:
    names: dict[str, object] = {}
    with pytest.warns(FutureWarning):
        exec("from lamella.experts import *", names)
    assert names.keys() >= set(EXPERTS_NAMES)
    with pytest.raises(AttributeError, match="'lamella.experts' has no attribute 'spraed_experts'"):
        _ = import_module("lamella.experts").spraed_experts


@pytest.mark.parametrize("name", OVERLAP_NAMES)
def test_a_name_of_overlap_is_that_of_lamella_trace_and_warns(name: str) -> None:
    overlap = import_module("lamella.overlap")
    replacement = rf"will be removed in lamella 0\.2: import {name} from lamella_trace\.$"
    with pytest.warns(FutureWarning, match=replacement) as warned:
        assert getattr(overlap, name) is getattr(lamella_trace, name)
    assert [warning.filename for warning in warned] == [__file__]  # the line to change, not a line of lamella


def test_overlap_writes_the_replacements_report(tmp_path: Path) -> None:
    event = {"ph": "X", "ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": {}}
    unit, operator = ("user_annotation", "FSDP::all_gather (a)"), ("cpu_op", "aten::mm")
    events = [event | {"cat": category, "name": name} for category, name in (unit, operator)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    with pytest.warns(FutureWarning, match=re.escape("lamella.overlap is deprecated")):
        from lamella.overlap import as_json, overlap_report, read_trace
    expected = lamella_trace.as_json(lamella_trace.overlap_report(lamella_trace.read_trace(path)))
    assert as_json(overlap_report(read_trace(path))) == expected


def test_star_imports_and_misspelt_names_of_overlap() -> None:
    names: dict[str, object] = {}
    with pytest.warns(FutureWarning):
        exec("from lamella.overlap import *", names)
    assert names.keys() >= set(OVERLAP_NAMES)
    with pytest.raises(AttributeError, match="'lamella.overlap' has no attribute 'overlap_reprot'"):
        _ = import_module("lamella.overlap").overlap_reprot


def test_lamella_and_its_commands_import_without_a_warning() -> None:
    program = "import sys, lamella.cli, lamella.overlap; assert 'lamella_trace' in sys.modules"
    subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", program], check=True, timeout=60)
    program = "import sys, lamella; assert not {'lamella.overlap', 'lamella_trace'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
