"""Families of models are found by what installed packages declare, and by nothing else."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamella_convert import Family, Rules, find_family, known_model_types
from lamella_testing import write_entry_points

MODULE = """
from lamella_convert import Family, Rules
FAMILY = Family(
    megatron=lambda config: Rules(()), megatron_sizes=lambda config, **_: {}, modules=lambda config: Rules(())
)
NOT_ONE = 7
"""


Install = Callable[[str, dict[str, str]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package of one module with entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(package: str, entries: dict[str, str]) -> None:
        (tmp_path / f"{package}.py").write_text(MODULE)
        entry_points = {name: f"{package}:{value}" for name, value in entries.items()}
        write_entry_points(tmp_path, package, "lamella.families", entry_points)

    yield install
    for name in ("some_family", "another_family"):
        sys.modules.pop(name, None)


def test_a_family_is_found_by_its_model_type_and_only_its_package_is_imported(install: Install) -> None:
    install("some_family", {"falcon": "FAMILY"})
    install("another_family", {"condor": "FAMILY"})
    assert {"condor", "falcon"} <= set(known_model_types())
    assert "some_family" not in sys.modules
    family = find_family("falcon")
    assert isinstance(family, Family) and family.modules({}) == Rules(())
    assert "some_family" in sys.modules and "another_family" not in sys.modules


def test_an_undeclared_model_type_has_no_family(install: Install) -> None:
    install("some_family", {"falcon": "FAMILY"})
    assert find_family("falco") is None


def test_two_packages_with_one_model_type_are_refused(install: Install) -> None:
    install("some_family", {"falcon": "FAMILY"})
    install("another_family", {"falcon": "FAMILY"})
    with pytest.raises(ValueError, match="one package with rules for 'falcon', got .*another_family.*some_family"):
        find_family("falcon")


def test_an_entry_point_that_is_no_family_is_refused(install: Install) -> None:
    install("some_family", {"falcon": "NOT_ONE"})
    with pytest.raises(TypeError, match="Expected 'some_family:NOT_ONE' to be a Family, got int"):
        find_family("falcon")
