"""Every public name is there, and none needs live tensors."""

import subprocess
import sys

import pytest

import lamella_files

HEAVY = {"torch.distributed.tensor", "torch.distributed.checkpoint", "sympy"}


def test_every_public_name_of_lamella_files_can_be_imported() -> None:
    assert all(getattr(lamella_files, name) is not None for name in dir(lamella_files) if name != "__builtins__")


@pytest.mark.parametrize("module", ["lamella_files", "lamella_files.testing"])
def test_no_module_imports_live_tensors_or_torchs_checkpoints(module: str) -> None:
    program = f"import sys, {module}\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = set(run.stdout.split())
    assert "torch" in modules and not HEAVY & modules
