"""Checkpoints of sharded models that open on any number of ranks, and in plain PyTorch."""

from lamella_checkpoint._checkpoint_directory import CheckpointDirectory as CheckpointDirectory
from lamella_checkpoint._correspondence import Correspondence as Correspondence
from lamella_checkpoint._correspondence import Piece as Piece
from lamella_checkpoint._correspondence import Place as Place
from lamella_checkpoint._errors import CheckpointDamaged as CheckpointDamaged
from lamella_checkpoint._errors import CheckpointFailed as CheckpointFailed
from lamella_checkpoint._errors import CheckpointMismatch as CheckpointMismatch
from lamella_checkpoint._errors import Differences as Differences
from lamella_checkpoint._errors import NameDifference as NameDifference
from lamella_checkpoint._errors import OptionConflict as OptionConflict
from lamella_checkpoint._load import PartialLoad as PartialLoad
from lamella_checkpoint._load import check as check
from lamella_checkpoint._load import load as load
from lamella_checkpoint._rules import Grouped as Grouped
from lamella_checkpoint._rules import Join as Join
from lamella_checkpoint._rules import Rule as Rule
from lamella_checkpoint._rules import Rules as Rules
from lamella_checkpoint._rules import Stack as Stack
from lamella_checkpoint._save import save as save
from lamella_checkpoint._source import Source as Source
from lamella_checkpoint._source import TensorInfo as TensorInfo
from lamella_checkpoint._source import Wanted as Wanted
from lamella_checkpoint._translate import Translated as Translated
from lamella_checkpoint._translate import parameter_shapes as parameter_shapes
from lamella_checkpoint._translate import translate as translate
