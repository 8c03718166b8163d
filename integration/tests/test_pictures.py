"""The pictures in docs/explanation are those that the packages draw."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "pictures.py"


def test_pictures_of_layouts_and_of_an_overlap_schedule_are_up_to_date() -> None:
    process = subprocess.run([sys.executable, TOOL, "--check"], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stdout
