"""Checkpoints of sharded models that open on any number of ranks, and in plain PyTorch.

Saves and loads of live models are imported on first use: `torch.distributed.tensor` takes seconds, and
readers of files do not need the import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from lamella_files import CheckpointDamaged as CheckpointDamaged
from lamella_files import CheckpointFailed as CheckpointFailed
from lamella_files import CheckpointMismatch as CheckpointMismatch
from lamella_files import CheckpointUntrusted as CheckpointUntrusted
from lamella_files import Correspondence as Correspondence
from lamella_files import Differences as Differences
from lamella_files import FormatUnknown as FormatUnknown
from lamella_files import NameDifference as NameDifference
from lamella_files import OptionConflict as OptionConflict
from lamella_files import Piece as Piece
from lamella_files import Place as Place
from lamella_files import Problem as Problem
from lamella_files import Source as Source
from lamella_files import TensorInfo as TensorInfo
from lamella_files import Translate as Translate
from lamella_files import Verification as Verification
from lamella_files import Wanted as Wanted

if TYPE_CHECKING:
    from lamella_checkpoint._formats.dcp_verify import verify as verify
    from lamella_checkpoint._state.fill import Filled as Filled
    from lamella_checkpoint._state.fill import fill as fill
    from lamella_checkpoint._state.shards import LiveCut as LiveCut
    from lamella_checkpoint._state.shards import LivePiece as LivePiece
    from lamella_checkpoint._state.shards import LiveShard as LiveShard
    from lamella_checkpoint._state.shards import PiecesOfTensor as PiecesOfTensor
    from lamella_checkpoint._state.shards import written_pieces as written_pieces
    from lamella_checkpoint._training.async_save import AsyncSaver as AsyncSaver
    from lamella_checkpoint._training.checkpoint_directory import CheckpointDirectory as CheckpointDirectory
    from lamella_checkpoint._training.handle import SaveHandle as SaveHandle
    from lamella_checkpoint._training.load import PartialLoad as PartialLoad
    from lamella_checkpoint._training.load import check as check
    from lamella_checkpoint._training.load import load as load
    from lamella_checkpoint._training.random_states import random_states as random_states
    from lamella_checkpoint._training.random_states import restore_random_states as restore_random_states
    from lamella_checkpoint._training.save import save as save

_LATER: Final = {
    "lamella_checkpoint._formats.dcp_verify": ("verify",),
    "lamella_checkpoint._state.fill": ("Filled", "fill"),
    "lamella_checkpoint._state.shards": ("LiveCut", "LivePiece", "LiveShard", "PiecesOfTensor", "written_pieces"),
    "lamella_checkpoint._training.async_save": ("AsyncSaver",),
    "lamella_checkpoint._training.checkpoint_directory": ("CheckpointDirectory",),
    "lamella_checkpoint._training.handle": ("SaveHandle",),
    "lamella_checkpoint._training.load": ("PartialLoad", "check", "load"),
    "lamella_checkpoint._training.random_states": ("random_states", "restore_random_states"),
    "lamella_checkpoint._training.save": ("save",),
}
_HOMES: Final = {name: module for module, names in _LATER.items() for name in names}

if not TYPE_CHECKING:  # A type checker that saw `__getattr__` would accept any name of the module.

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        exported = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return exported


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
