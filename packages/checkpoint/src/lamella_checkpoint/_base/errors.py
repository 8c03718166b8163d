"""The former home of lamella-files' errors, by which failures pickled by an earlier version name the classes."""

from lamella_files import CheckpointDamaged as CheckpointDamaged
from lamella_files import CheckpointFailed as CheckpointFailed
from lamella_files import CheckpointMismatch as CheckpointMismatch
from lamella_files import CheckpointUntrusted as CheckpointUntrusted
from lamella_files import Differences as Differences
from lamella_files import FormatUnknown as FormatUnknown
from lamella_files import NameDifference as NameDifference
from lamella_files import OptionConflict as OptionConflict
