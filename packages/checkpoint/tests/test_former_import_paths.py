"""Names of lamella-files from this package's former modules keep the former import paths."""

import pickle

import pytest

import lamella_checkpoint
import lamella_files
from lamella_checkpoint import CheckpointDamaged


@pytest.mark.parametrize(
    "name", ["CheckpointDamaged", "CheckpointMismatch", "Correspondence", "Source", "Verification"]
)
def test_former_import_paths_give_the_names_of_lamella_files(name: str) -> None:
    assert getattr(lamella_checkpoint, name) is getattr(lamella_files, name)


def test_failures_pickled_by_an_earlier_version_are_read() -> None:
    old = b"clamella_checkpoint._base.errors\nCheckpointDamaged\n(S'file'\nS'absent'\ntR."
    error = pickle.loads(old)
    assert type(error) is CheckpointDamaged and error.file == "file"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is CheckpointDamaged and str(again) == str(error)
