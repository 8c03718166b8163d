"""The picture and the table of packages are drawn from the pyproject files, and the README stays short."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
PICTURE = "docs/explanation/stack.svg"
MAX_README_WORDS = 600
BOX = "{http://www.w3.org/2000/svg}rect"
NAME = "{http://www.w3.org/2000/svg}text[@class='name']"


def _run(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(workspace / "tools" / "stack.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _tops(picture: Path) -> dict[str, int]:
    """Return the height of each package's name in the picture, in pixels from the top."""
    svg = ET.fromstring(picture.read_text())
    return {str(text.text): int(text.attrib["y"]) for text in svg.iterfind(NAME)}


def test_picture_and_table_show_the_pyproject_files() -> None:
    run = _run(ROOT, "--check")
    assert run.returncode == 0, run.stdout


def test_each_package_has_a_box_below_every_package_that_needs_it(packages: dict[Path, dict[str, Any]]) -> None:
    tops = _tops(ROOT / PICTURE)
    projects = {pyproject["project"]["name"]: pyproject["project"] for pyproject in packages.values()}
    assert tops.keys() == projects.keys()
    assert len(ET.fromstring((ROOT / PICTURE).read_text()).findall(BOX)) == len(projects)
    needs = [
        (name, sibling)
        for name, project in projects.items()
        for requirement in project["dependencies"]
        if (sibling := re.split(r"[^\w-]", requirement)[0]) in projects
    ]
    assert len(needs) > 20
    assert [(user, used) for user, used in needs if tops[user] >= tops[used]] == []


def test_boxes_do_not_overlap() -> None:
    boxes = [
        tuple(int(box.attrib[side]) for side in ("x", "y", "width", "height"))
        for box in ET.fromstring((ROOT / PICTURE).read_text()).iterfind(BOX)
    ]
    overlaps = [
        (first, second)
        for index, first in enumerate(boxes)
        for second in boxes[:index]
        if abs(first[0] - second[0]) < first[2] and abs(first[1] - second[1]) < first[3]
    ]
    assert overlaps == []


@pytest.mark.parametrize(
    ("written", "changed"),
    [('"lamella-layout>=0.2,<0.3"', '"packaging"'), ('description = "', 'description = "Many ')],
    ids=["dependency", "description"],
)
def test_a_changed_pyproject_file_makes_the_package_picture_and_table_outdated(
    copy_of_the_workspace: Path, written: str, changed: str
) -> None:
    pyproject = copy_of_the_workspace / "packages" / "buffers" / "pyproject.toml"
    text = pyproject.read_text()
    assert written in text
    pyproject.write_text(text.replace(written, changed))
    run = _run(copy_of_the_workspace, "--check")
    assert run.returncode == 1 and "tools/stack.py" in run.stdout
    assert _run(copy_of_the_workspace).returncode == 0
    assert _run(copy_of_the_workspace, "--check").returncode == 0


def test_the_readme_has_600_words_without_code_pictures_and_tables() -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)|<!--.*?-->", "", text)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    words = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines)).split()
    assert 200 < len(words) <= MAX_README_WORDS


def test_an_unknown_argument_is_refused() -> None:
    run = _run(ROOT, "--chek")
    assert run.returncode == 1 and "--check" in run.stderr
