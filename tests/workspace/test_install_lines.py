"""Lines that say how to install something work from a clone: nothing is on a package index yet."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"\b(?P<uv>uv )?pip install (?P<what>[^`#|\n]*)")
PATH = re.compile(r"^\./packages/(?P<names>\{[\w,]+\}|\w+)(?:\[(?P<extras>[\w,{}]+)\])?$")


def _places() -> Iterator[tuple[Path, str]]:
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md", "packages/*/src/**/*.py"):
        for file in sorted(ROOT.glob(pattern)):
            yield file, file.read_text(encoding="utf-8")


def _lines() -> Iterator[tuple[str, bool, list[str]]]:
    """Each line's place, whether it is uv's, and what it installs."""
    for file, text in _places():
        for found in LINE.finditer(text):
            what = found["what"].replace("'", " ").replace('"', " ").split()
            yield f"{file.relative_to(ROOT)}: {found[0]}", bool(found["uv"]), [each.rstrip(".,") for each in what]


def _project(name: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    return project


def _siblings(name: str, extras: list[str]) -> set[str]:
    """The packages of this repository that a package needs, itself included."""
    project = _project(name)
    needed = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    found = {name}
    for requirement in map(Requirement, needed):
        if requirement.name.startswith("lamella-"):
            found |= _siblings(requirement.name.removeprefix("lamella-"), [*requirement.extras])
    return found


def test_what_is_installed_is_in_this_repository_and_pip_is_told_of_siblings() -> None:
    lines = [*_lines()]
    assert len(lines) >= 5
    for place, is_uv, what in lines:
        named: set[str] = set()
        needed: set[str] = set()
        for each in what:
            if each in ("-c", "constraints.txt"):
                continue
            path = PATH.match(each)
            assert path is not None, f"{place}: expected ./packages/NAME, got {each!r}"
            extras = [extra for extra in (path["extras"] or "").split(",") if extra and "{" not in extra]
            for name in path["names"].strip("{}").split(","):
                named.add(name)
                needed |= _siblings(name, extras)
        assert is_uv or needed <= named, f"{place}: pip finds no {sorted(needed - named)} on an index"
