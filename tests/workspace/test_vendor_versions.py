"""The extras of vendors' libraries, the checks at first use and the GPU environment name the same versions."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

Packages = dict[Path, dict[str, Any]]
ROOT = Path(__file__).parents[2]
GPU_PINS = (ROOT / "constraints-gpu.txt").read_text().splitlines()


@functools.cache
def _checks() -> list[dict[str, str]]:
    """The arguments of each `VendorVersions` in the packages."""
    return [
        {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
        for file in ROOT.glob("packages/*/src/**/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "VendorVersions"
    ]


def _extras(packages: Packages) -> dict[tuple[str, str], SpecifierSet]:
    """The specifiers of each extra's requirements, by extra and name."""
    return {
        (f"{pyproject['project']['name']}[{extra}]", requirement.name): requirement.specifier
        for pyproject in packages.values()
        for extra, requirements in pyproject["project"].get("optional-dependencies", {}).items()
        for requirement in map(Requirement, requirements)
    }


def test_a_check_at_first_use_has_the_versions_of_its_extra(packages: Packages) -> None:
    checks = _checks()
    assert {check["distribution"] for check in checks} == {
        "transformer-engine",
        "mamba-ssm",
        "causal-conv1d",
        "megatron-core",
    }
    extras = _extras(packages)
    for check in checks:
        expected = SpecifierSet(f">={check['floor']},<{check['ceiling']}")
        assert extras[check["extra"], check["distribution"]] == expected, check


def test_the_gpu_environment_has_a_tested_version_of_each(packages: Packages) -> None:
    pins = dict(pin.split("==") for pin in GPU_PINS)
    for check in _checks():
        assert SpecifierSet(f">={check['floor']},<{check['ceiling']}").contains(pins[check["distribution"]]), check
    floors = [item for item in map(Requirement, _torch_requirements(packages)) if item.name == "torch"]
    assert all(floor.specifier.contains(pins["torch"]) for floor in floors)
    noxfile = (ROOT / "noxfile.py").read_text()
    assert f'MEGATRON_CORE = "megatron-core=={pins["megatron-core"]}"' in noxfile


def _torch_requirements(packages: Packages) -> Iterator[str]:
    for pyproject in packages.values():
        yield from pyproject["project"]["dependencies"]


def test_pins_of_the_gpu_environment_are_bare_and_sorted() -> None:
    assert [pin for pin in GPU_PINS if not re.fullmatch(r"[a-z0-9-]+==[0-9]+(\.[0-9a-z]+)*", pin)] == []
    names = [pin.partition("==")[0] for pin in GPU_PINS]
    assert sorted(names) == names


def test_the_session_of_the_gpu_environment_installs_every_such_extra(packages: Packages) -> None:
    [assigned] = [
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "GPU_EXTRAS"
    ]
    names = {folder.name: pyproject["project"]["name"] for folder, pyproject in packages.items()}
    installed = {f"{names[package]}[{extra}]" for package, extra in assigned.items()}
    assert installed == {check["extra"] for check in _checks()}
