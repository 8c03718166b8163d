"""Damage to checkpoints of `save`, and lamella-files' sources in memory: for tests of rules and formats."""

import json
from collections.abc import Callable
from pathlib import Path

from lamella_checkpoint._base.manifest import MANIFEST_FILE
from lamella_checkpoint._formats.checksums import CHECKSUMS_FILE
from lamella_files import CheckpointDamaged
from lamella_files.testing import MemorySource as MemorySource
from lamella_files.testing import dtypes_of as dtypes_of
from lamella_files.testing import read_all as read_all
from lamella_files.testing import read_in_chunks as read_in_chunks
from lamella_files.testing import read_tensor as read_tensor


def forget_checksums(path: Path) -> None:
    """Rewrite a checkpoint of `save` as an early release without checksums would."""
    (path / CHECKSUMS_FILE).unlink(missing_ok=True)
    change_manifest(path, checksums=None)


def change_manifest(path: Path, **changes: object) -> None:
    """Rewrite the manifest of a checkpoint of `save` with other entries."""
    file = path / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_damaged(file: Path, act: Callable[[], object], *words: str) -> None:
    """Assert that a call refuses a file as damaged, in an error with these words."""
    refusal: CheckpointDamaged | None = None
    try:
        act()
    except CheckpointDamaged as error:
        refusal = error
    assert refusal is not None and refusal.file == str(file), refusal
    for word in words:
        assert word in str(refusal)
