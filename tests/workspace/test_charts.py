"""The charts of the documentation show the figures of their records."""

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


FIGURES = {"speed_chart": ("| 91.0% |", "| 90.9% |"), "loss_chart": ("| 6.169 |", "| 6.269 |")}


def test_another_figure_in_the_record_draws_another_picture(chart: ModuleType) -> None:
    record = (ROOT / chart.RECORD).read_text()
    assert chart.picture(record.replace(*FIGURES[chart.__name__])) != chart.picture(record)


def test_a_record_without_the_table_is_refused(chart: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"Expected a table with columns \[.*\] below '.*', got none"):
        chart.picture("\n## Another\n\n| backend |\n|---|\n")
