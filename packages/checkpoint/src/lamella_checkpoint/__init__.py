"""Checkpoints of sharded models that open on any number of ranks, and in plain PyTorch."""

from lamella_checkpoint._checkpoint_directory import CheckpointDirectory as CheckpointDirectory
from lamella_checkpoint._errors import CheckpointDamaged as CheckpointDamaged
from lamella_checkpoint._errors import CheckpointFailed as CheckpointFailed
from lamella_checkpoint._errors import CheckpointMismatch as CheckpointMismatch
from lamella_checkpoint._errors import CheckpointUntrusted as CheckpointUntrusted
from lamella_checkpoint._errors import Differences as Differences
from lamella_checkpoint._errors import NameDifference as NameDifference
from lamella_checkpoint._errors import OptionConflict as OptionConflict
from lamella_checkpoint._load import PartialLoad as PartialLoad
from lamella_checkpoint._load import check as check
from lamella_checkpoint._load import load as load
from lamella_checkpoint._safetensors_save import save_safetensors as save_safetensors
from lamella_checkpoint._save import save as save
