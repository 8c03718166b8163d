"""The charts of the documentation show the figures of their records."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = str(ROOT / "tools")


@pytest.fixture(params=["speed_chart", "loss_chart"])
def chart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(TOOLS)
    yield import_module(request.param)
    for name in (request.param, "chart"):
        sys.modules.pop(name)


def test_the_picture_in_the_documentation_is_the_records(chart: ModuleType) -> None:
    subprocess.run([sys.executable, f"tools/{chart.__name__}.py", "--check"], cwd=ROOT, check=True)


# A row of the record, the row changed, and where the figures are drawn: on axes from 45 to 70 GiB and from 80 to 95 %,
# and from step 0 to 60 and 4 to 8 nats.
FIGURES = {
    "speed_chart": ("| 91.0% |", "| 90.9% |", ">lamella 91.0 %, 50.8 GiB<"),
    "loss_chart": ("| 6.169 |", "| 6.269 |", '<polyline points="49.7,77.2 57.0,93.5 68.0,118.7 '),
}


def test_the_figures_of_the_record_are_drawn(chart: ModuleType) -> None:
    record = (ROOT / chart.RECORD).read_text(encoding="utf-8")
    figure, another, drawn = FIGURES[chart.__name__]
    assert drawn in chart.picture(record)
    assert drawn not in chart.picture(record.replace(figure, another))


MISSING = {
    "speed_chart": "['backend', 'of ideal', 'peak GiB'] below '8 billion parameters, 4,096 tokens', got none.",
    "loss_chart": "['laptop', 'step'] below 'Loss curves of the ready configurations', got none.",
}


def test_a_record_without_the_table_is_refused(chart: ModuleType) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Expected a table with columns {MISSING[chart.__name__]}")):
        chart.picture("\n## Another\n\n| backend |\n|---|\n")


def test_a_table_of_the_next_section_is_not_taken(chart: ModuleType) -> None:
    record = "## First\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n## Second\n\n| a | c |\n|---|---|\n| 3 | 4 |\n"
    tools = sys.modules["chart"]
    assert tools.table_of(record, "Second", {"a", "c"}) == [{"a": "3", "c": "4"}]
    with pytest.raises(ValueError, match="below 'First', got none"):
        tools.table_of(record, "First", {"a", "c"})
