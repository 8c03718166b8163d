"""Checkpoints of torch's DCP, written and changed by one process without a group."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata


def dcp_save(entries: dict[str, Any], path: Path) -> Path:
    """Save entries as torch does; returns the path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that there is no group.
        dcp.save(entries, checkpoint_id=path)  # type: ignore[attr-defined]
    return path


def change_metadata(path: Path, change: Callable[[Metadata], object]) -> None:
    """Rewrite the metadata of a checkpoint, as if the writer had made the mistake."""
    metadata: Metadata = dcp.FileSystemReader(path).read_metadata()  # type: ignore[attr-defined]
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
