"""Fully sharded training in thin layers: the command line, the training recipe and the names most code needs."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("lamella")
except PackageNotFoundError:  # Sources on PYTHONPATH, as on a GPU host where nothing can be installed.
    __version__ = "0+source"

from lamella._config import Config as Config
from lamella._config import DataConfig as DataConfig
from lamella._config import ModelConfig as ModelConfig
from lamella._config import OptimConfig as OptimConfig
from lamella._config import ParallelConfig as ParallelConfig
from lamella._config import RunConfig as RunConfig
from lamella._endings import LossNotFiniteError as LossNotFiniteError
from lamella._endings import Stopped as Stopped
from lamella._endings import StorageError as StorageError
from lamella._launch import WorkerError as WorkerError
from lamella._options import ConfigError as ConfigError
from lamella._run import Result as Result
from lamella._run import train as train
from lamella_checkpoint import CheckpointDirectory as CheckpointDirectory
from lamella_checkpoint import load as load
from lamella_checkpoint import save as save
from lamella_engine import FSDPModule as FSDPModule
from lamella_engine import MixedPrecisionPolicy as MixedPrecisionPolicy
from lamella_engine import UnshardHandle as UnshardHandle
from lamella_engine import fully_shard as fully_shard
