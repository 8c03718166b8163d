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
def test_every_name_that_is_listed_is_there(package: ModuleType) -> None:
    assert all(getattr(package, name) is not None for name in dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        package.absent  # noqa: B018


@pytest.mark.parametrize("name", OF_FILES)
def test_readers_of_files_need_no_live_tensors(name: str) -> None:
    package, _, attribute = name.rpartition(".")
    program = f"import sys\nfrom {package} import {attribute}\nprint(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in modules and not {*HEAVY} & {*modules}
