"""Every package is complete, describes itself truly, and imports public names of other packages only."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

Packages = dict[Path, dict[str, Any]]
ROOT = Path(__file__).parents[2]


def _name(folder: Path) -> str:
    return "lamella" if folder.name == "lamella" else f"lamella-{folder.name}"


def _requirements(pyproject: dict[str, Any]) -> Iterator[Requirement]:
    yield from map(Requirement, pyproject["project"]["dependencies"])
    for extra in pyproject["project"].get("optional-dependencies", {}).values():
        yield from map(Requirement, extra)


def test_the_workspace_has_exactly_the_known_packages_by_name(packages: Packages) -> None:
    assert {folder.name for folder in packages} == {
        "layout", "schedule", "trace", "buffers", "precision", "engine", "optim", "files", "checkpoint", "convert",
        "transformers", "mamba", "qwen", "megatron", "lamella",
    }  # fmt: skip
    assert {pyproject["project"]["name"] for pyproject in packages.values()} == set(map(_name, packages))


def test_every_package_has_readme_changelog_license_and_py_typed(packages: Packages) -> None:
    for folder in packages:
        source = folder / "src" / _name(folder).replace("-", "_")
        needed = [*(folder / name for name in ("README.md", "CHANGELOG.md", "LICENSE")), source / "py.typed"]
        assert [path for path in needed if not path.is_file()] == []
        assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_a_package_has_tests(packages: Packages) -> None:
    assert [folder.name for folder in packages if not list(folder.glob("tests/**/test_*.py"))] == []


def test_the_changelog_speaks_of_the_present_version(packages: Packages) -> None:
    for folder, pyproject in packages.items():
        assert f"## {pyproject['project']['version']}" in (folder / "CHANGELOG.md").read_text(), folder.name


def test_siblings_are_required_at_the_present_minor_version(packages: Packages) -> None:
    versions = {pyproject["project"]["name"]: pyproject["project"]["version"] for pyproject in packages.values()}
    for folder, pyproject in packages.items():
        for requirement in _requirements(pyproject):
            if requirement.name in versions and folder.name != "lamella":
                major, minor, _ = map(int, versions[requirement.name].split("."))
                expected = SpecifierSet(f">={major}.{minor},<{major}.{minor + 1}")
                assert requirement.specifier == expected, f"{folder.name}: {requirement}"


def test_the_umbrella_pins_every_package_at_its_present_version(packages: Packages) -> None:
    versions = {pyproject["project"]["name"]: pyproject["project"]["version"] for pyproject in packages.values()}
    [umbrella] = [pyproject for folder, pyproject in packages.items() if folder.name == "lamella"]
    pinned = {
        requirement.name: str(requirement.specifier)
        for requirement in _requirements(umbrella)
        if requirement.name in versions
    }
    assert pinned == {name: f"=={version}" for name, version in versions.items() if name != "lamella"}


def test_the_classifiers_agree_with_the_python_that_is_required(packages: Packages) -> None:
    for pyproject in packages.values():
        project = pyproject["project"]
        classifiers = project["classifiers"]
        minors = [int(m[1]) for text in classifiers if (m := re.fullmatch(r".*:: 3\.(\d+)", text))]
        assert all(SpecifierSet(project["requires-python"]).contains(f"3.{minor}") for minor in minors)
        assert f">=3.{min(minors)}" == project["requires-python"]
        # With a license expression, a license classifier is a second opinion, and indexes refuse the package.
        assert project["license"] == "Apache-2.0"
        assert not [text for text in classifiers if text.startswith("License ::")]


def test_every_package_lets_torch_be_as_old_as_is_promised(packages: Packages) -> None:
    floors = {str(item) for pyproject in packages.values() for item in _requirements(pyproject) if item.name == "torch"}
    assert floors == {"torch>=2.11"}


def test_every_member_is_resolved_from_the_workspace(packages: Packages) -> None:
    sources = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["sources"]
    assert set(sources) == {*map(_name, packages), "lamella-testing", "lamella-integration"}


def test_no_package_imports_private_names_of_another(packages: Packages) -> None:
    trespasses = [
        f"{file.relative_to(ROOT)}:{line}: {module}"
        for folder in [*packages, ROOT / "testing", ROOT / "integration"]
        for file in folder.glob("src/**/*.py")
        for line, module in _imported(file)
        if (top := module.partition(".")[0]).startswith("lamella")
        and top != file.relative_to(folder / "src").parts[0]
        and "._" in module
    ]
    assert trespasses == []


def _imported(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_lazily_imported_names_are_the_names_that_type_checkers_see() -> None:
    tables = [file for file in ROOT.glob("packages/*/src/*/__init__.py") if "_LATER" in file.read_text()]
    assert len(tables) >= 3
    for file in tables:
        body = ast.parse(file.read_text()).body
        [seen] = [
            node for node in body if isinstance(node, ast.If) and any(isinstance(n, ast.ImportFrom) for n in node.body)
        ]
        imported = [
            (node.module, alias.name) for node in seen.body if isinstance(node, ast.ImportFrom) for alias in node.names
        ]
        [table] = [
            node.value for node in body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_LATER"
        ]
        assert table is not None
        later = [(module, name) for module, names in ast.literal_eval(table).items() for name in names]
        assert sorted(later) == sorted((str(module), name) for module, name in imported), file


def test_the_readme_names_the_siblings_that_a_package_may_import(packages: Packages) -> None:
    names = set(map(_name, packages))
    for folder, pyproject in packages.items():
        if folder.name == "lamella":  # all packages
            continue
        [_, text] = re.split(r"May import", (folder / "README.md").read_text())
        listed = set(re.findall(r"lamella-[a-z]+", text.partition("Stability")[0]))
        assert listed & names == {requirement.name for requirement in _requirements(pyproject)} & names, folder.name


def test_a_release_names_every_package_in_their_order_and_every_session_for_gpus() -> None:
    text = " ".join((ROOT / "RELEASING.md").read_text().split())
    noxfile = (ROOT / "noxfile.py").read_text()
    listed = re.search(r"the lowest first: ([a-z, ]+)\.", text)
    names = re.search(r"^PACKAGES = \[(.*?)\]$", noxfile, flags=re.MULTILINE | re.DOTALL)
    assert listed is not None and names is not None
    assert listed[1].split(", ") == re.findall(r'"(\w+)"', names[1])
    sessions = {
        *(f"gpu({n})" for n in (1, 2, 4)),
        "te",
        "ssm(gpu-1)",
        "hybrid(gpu-2)",
        *(f"megatron(gpu-{n})" for n in (1, 2, 4)),
    }
    assert not [session for session in sessions if not re.search(rf'`\./dev "?{re.escape(session)}"?`', text)]
