"""The page of the architecture agrees with the contracts on imports."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()


def _check(workspace: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(workspace / "tools" / "architecture.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_page_shows_the_layers_of_the_contracts() -> None:
    run = _check(ROOT)
    assert run.returncode == 0, run.stdout


def test_a_layer_that_moved_makes_the_page_old(copy_of_the_workspace: Path) -> None:
    pyproject = copy_of_the_workspace / "pyproject.toml"
    text = pyproject.read_text()
    pyproject.write_text(
        text.replace('"lamella_integration",\n    "lamella",', '"lamella",\n    "lamella_integration",')
    )
    assert pyproject.read_text() != text
    run = _check(copy_of_the_workspace)
    assert run.returncode == 1 and "tools/architecture.py" in run.stdout


def test_files_to_read_exist() -> None:
    files = re.findall(r"^\d+\. `([^`]+)`", PAGE, flags=re.MULTILINE)
    assert len(files) == 10
    assert [file for file in files if not (ROOT / file).is_file()] == []
