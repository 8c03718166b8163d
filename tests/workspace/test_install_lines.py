"""Lines of installation work from a clone: nothing is on a package index yet."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"\b(?P<uv>uv )?pip install (?P<arguments>[^`#|\n]*)")
PATH = re.compile(r"^\./packages/(?P<names>\{[\w,]+\}|\w+)(?:\[(?P<extras>[\w,{}]+)\])?$")


def _places() -> Iterator[tuple[Path, str]]:
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md", "packages/*/src/**/*.py"):
        for file in sorted(ROOT.glob(pattern)):
            yield file, file.read_text(encoding="utf-8")


def _lines() -> Iterator[tuple[str, bool, list[str]]]:
    """Each line's place, whether the line is uv's, and the installed packages."""
    for file, text in _places():
        for match in LINE.finditer(text):
            arguments = match["arguments"].replace("'", " ").replace('"', " ").split()
            yield (
                f"{file.relative_to(ROOT)}: {match[0]}",
                bool(match["uv"]),
                [argument.rstrip(".,") for argument in arguments],
            )


def _project(name: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    return project


def _siblings(name: str, extras: list[str]) -> set[str]:
    """The packages of this repository that a package needs, the package itself included."""
    project = _project(name)
    needed = [
        *project["dependencies"],
        *(extra_requirement for extra in extras for extra_requirement in project["optional-dependencies"][extra]),
    ]
    names = {name}
    for requirement in map(Requirement, needed):
        if requirement.name.startswith("lamella-"):
            names |= _siblings(requirement.name.removeprefix("lamella-"), [*requirement.extras])
    return names


def test_installed_packages_are_in_this_repository_and_pip_gets_the_siblings() -> None:
    lines = [*_lines()]
    assert len(lines) >= 5
    for place, is_uv, arguments in lines:
        named: set[str] = set()
        needed: set[str] = set()
        for argument in arguments:
            if argument in ("-c", "constraints.txt"):
                continue
            path = PATH.match(argument)
            assert path is not None, f"{place}: expected ./packages/NAME, got {argument!r}"
            extras = [extra for extra in (path["extras"] or "").split(",") if extra and "{" not in extra]
            for name in path["names"].strip("{}").split(","):
                named.add(name)
                needed |= _siblings(name, extras)
        assert is_uv or needed <= named, f"{place}: pip finds no {sorted(needed - named)} on an index"
