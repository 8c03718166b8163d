"""Lines that say how to install something work from a clone: nothing is on a package index yet."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_lines", ROOT / "tools" / "install_lines.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["install_lines"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _project(name: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    return project


def _siblings(name: str, extras: list[str]) -> set[str]:
    """The packages of this repository that a package needs, itself included."""
    project = _project(name)
    declared = [text for extra in extras for text in project["optional-dependencies"][extra]]
    siblings = {name}
    for requirement in map(Requirement, [*project["dependencies"], *declared]):
        if requirement.name.startswith("lamella-"):
            siblings |= _siblings(requirement.name.removeprefix("lamella-"), [*requirement.extras])
    return siblings


def _forgotten(line: Any) -> set[str]:
    """Siblings that pip would look for on an index."""
    needed = {sibling for name, extras in line.packages for sibling in _siblings(name, extras)}
    return set() if line.is_uv else needed - {name for name, _ in line.packages}


def test_a_line_names_packages_of_this_repository_and_tells_pip_of_siblings(tool: ModuleType) -> None:
    lines = [*tool.install_lines()]
    assert len(lines) >= 20
    for line in lines:
        assert not _forgotten(line), f"{line}: pip finds no {sorted(_forgotten(line))} on an index"


def test_the_readme_of_each_package_has_a_line_for_pip(tool: ModuleType) -> None:
    lines = [line for line in tool.install_lines() if not line.is_uv]
    for folder in sorted((ROOT / "packages").iterdir()):
        readme = folder.relative_to(ROOT) / "README.md"
        named = [name for line in lines if line.file == readme for name, _ in line.packages]
        assert folder.name in named, f"{readme}: expected a line `pip install` of {sorted(_siblings(folder.name, []))}"


def test_the_table_of_lines_is_read(tool: ModuleType) -> None:
    cells = [line for line in tool.install_lines() if line.file == Path("docs/how-to/install.md")]
    assert ("./packages/engine", "./packages/checkpoint") in [line.arguments for line in cells if line.is_uv]
    assert ("./packages/{layout,buffers,precision,engine,optim}",) in [c.arguments for c in cells if not c.is_uv]


def test_a_forgotten_sibling_and_a_strange_argument_are_noticed(tool: ModuleType) -> None:
    assert _forgotten(tool.InstallLine(Path("page.md"), ("./packages/buffers",), is_uv=False)) == {"layout"}
    assert not _forgotten(tool.InstallLine(Path("page.md"), ("./packages/buffers",), is_uv=True))
    with pytest.raises(ValueError, match=r"expected ./packages/NAME, got 'lamella'"):
        _ = tool.InstallLine(Path("page.md"), ("lamella",), is_uv=False).packages
