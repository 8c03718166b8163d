"""The comparison of public names with the last release lists breaks, and asks for a version that shows the breaks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPORT = "from lamella_layout._cut import cut as cut\n"
FUNCTION = "def cut(size: int, parts: int = 1) -> int:\n    return size // parts\n"


def _write(root: Path, version: str, init: str, module: str) -> None:
    package = root / "packages" / "layout"
    source = package / "src" / "lamella_layout"
    source.mkdir(parents=True, exist_ok=True)
    (package / "pyproject.toml").write_text(f'[project]\nname = "lamella-layout"\nversion = "{version}"\n')
    (source / "__init__.py").write_text(init)
    (source / "_cut.py").write_text(module)


def _git(root: Path, *args: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *who, *args], check=True, capture_output=True)


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A repository whose layout was released as 0.1.0, after 0.0.9."""
    _write(tmp_path, "0.1.0", EXPORT, FUNCTION)
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "add", "--all")
    _git(tmp_path, "commit", "--quiet", "-m", "Release")
    _git(tmp_path, "tag", "layout-v0.0.9")
    _git(tmp_path, "tag", "layout-v0.1.0")
    return tmp_path


def _diff(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "api_diff.py"), "layout"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_a_package_without_a_tag_has_nothing_to_compare_with(tmp_path: Path) -> None:
    _write(tmp_path, "0.1.0", EXPORT, FUNCTION)
    _git(tmp_path, "init", "--quiet")
    run = _diff(tmp_path)
    assert (run.returncode, run.stdout) == (0, "layout 0.1.0: nothing released to compare with\n"), run.stderr


def test_a_new_name_breaks_nothing(released: Path) -> None:
    _write(released, "0.1.1", EXPORT + "from lamella_layout._cut import join as join\n", FUNCTION + "def join(): ...\n")
    run = _diff(released)
    assert run.returncode == 0 and "since layout-v0.1.0: 1 names added, 0 breaking" in run.stdout, run.stderr
    assert "added join" in run.stdout


@pytest.mark.parametrize(("version", "expected"), [("0.1.1", 1), ("0.2.0", 0)])
def test_an_argument_that_is_gone_needs_another_minor_version(released: Path, version: str, expected: int) -> None:
    _write(released, version, EXPORT, "def cut(size: int) -> int:\n    return size\n")
    run = _diff(released)
    assert run.returncode == expected and "parts" in run.stdout, run.stdout + run.stderr
    assert ("Raise it." in run.stdout) == bool(expected)


def test_private_names_may_go(released: Path) -> None:
    _write(released, "0.1.1", EXPORT, FUNCTION.replace("cut", "_other") + "cut = _other\n" + FUNCTION)
    assert _diff(released).returncode == 0
