"""Pictures of the packages agree with the contracts on imports."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()


def _height_of_packages() -> dict[str, int]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [each["layers"] for each in contracts if each["type"] == "layers" and "containers" not in each]
    return {name: -depth for depth, layer in enumerate(layers) for name in re.findall(r"\w+", layer)}


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


def test_the_picture_in_the_readme_has_each_package_above_those_it_may_import() -> None:
    [picture] = re.findall(r"## Packages\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    lines = picture.splitlines()
    heights = {name: height for name, height in _height_of_packages().items() if name != "lamella_integration"}
    places = {name: re.compile(rf"(?<![\w-]){name.replace('_', '-')}(?![\w-])") for name in heights}
    found = {name: [n for n, line in enumerate(lines) if place.search(line)] for name, place in places.items()}
    assert [name for name, numbers in found.items() if len(numbers) != 1] == []
    lower = [(a, b) for a in heights for b in heights if heights[a] > heights[b] and found[a] > found[b]]
    assert lower == []
