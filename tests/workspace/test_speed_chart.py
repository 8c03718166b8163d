"""The chart of speed against memory shows the figures of its record."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def chart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("speed_chart", ROOT / "tools" / "speed_chart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["speed_chart"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_picture_in_the_documentation_is_the_records() -> None:
    subprocess.run([sys.executable, "tools/speed_chart.py", "--check"], cwd=ROOT, check=True)


def test_another_figure_in_the_record_draws_another_picture(chart: ModuleType) -> None:
    record = (ROOT / chart.RECORD).read_text()
    drawn = chart.picture(record)
    assert "lamella 91.0 %, 50.8 GiB" in drawn
    assert chart.picture(record.replace("| 91.0% |", "| 90.9% |")) != drawn


def test_a_record_without_the_table_is_refused(chart: ModuleType) -> None:
    with pytest.raises(ValueError, match="Expected a table with `of ideal`"):
        chart.figures("\n## Another\n\n| backend |\n|---|\n", "8 billion parameters, 4,096 tokens")
