"""Every public name exists, and readers of files import no module for live models."""

import subprocess
import sys
from types import ModuleType

import pytest

import lamella_checkpoint
import lamella_checkpoint.extending
import lamella_convert
import lamella_files

HEAVY = ("torch.distributed.tensor", "torch.distributed.checkpoint", "sympy")
OF_FILES = [
    "lamella_convert.inspect",
    "lamella_convert.verify",
    "lamella_convert.open_checkpoint",
    "lamella_convert.diff",
    "lamella_convert.open_both",
    "lamella_checkpoint.verify",
    "lamella_checkpoint.Correspondence",
    "lamella_checkpoint.extending.StoredCheckpoint",
    "lamella_checkpoint.extending.Manifest",
    "lamella_files.read_tensors",
    "lamella_files.StoredMetadata",
]


@pytest.mark.parametrize(
    "package",
    [lamella_files, lamella_checkpoint, lamella_checkpoint.extending, lamella_convert],
    ids=lambda package: package.__name__,
)
def test_every_public_name_of_the_checkpoint_packages_exists(package: ModuleType) -> None:
    assert all(getattr(package, name) is not None for name in dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        package.absent  # noqa: B018


@pytest.fixture(scope="module")
def modules_after_import() -> dict[str, set[str]]:
    """By name, the modules of a process that imported torch and the name: forks, since torch takes two seconds."""
    program = """
import os, sys, torch
for name in sys.argv[1:]:
    if os.fork() == 0:
        package, _, attribute = name.rpartition(".")
        exec(f"from {package} import {attribute}")
        print(name, *sys.modules, flush=True)
        os._exit(0)  # An exit in order takes half a second, for all that torch has made.
    os.wait()
"""
    run = subprocess.run([sys.executable, "-c", program, *OF_FILES], stdout=subprocess.PIPE, text=True, check=True)
    lines = [line.split() for line in run.stdout.splitlines()]
    return {name: set(modules) for name, *modules in lines}


@pytest.mark.parametrize("name", OF_FILES)
def test_readers_of_files_need_no_live_tensors(name: str, modules_after_import: dict[str, set[str]]) -> None:
    assert "torch" in modules_after_import[name] and not {*HEAVY} & modules_after_import[name]
