"""Fixtures of the workspace's tests: the root folder, the packages, and copies of the workspace for damage."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def packages() -> dict[Path, dict[str, Any]]:
    """Each published package's folder, and its pyproject.toml."""
    files = sorted(ROOT.glob("packages/*/pyproject.toml"))
    return {file.parent: tomllib.loads(file.read_text()) for file in files}


@pytest.fixture
def copy_of_the_workspace(tmp_path: Path) -> Path:
    """The files that git would commit, copied to a separate folder."""
    return _copy_workspace(tmp_path)


@pytest.fixture(scope="module")
def shared_copy_of_the_workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One copy for all tests of a module: a test takes its damage back."""
    return _copy_workspace(tmp_path_factory.mktemp("workspace"))


def _copy_workspace(folder: Path) -> Path:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        source, target = ROOT / name, folder / name
        if os.path.lexists(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return folder
