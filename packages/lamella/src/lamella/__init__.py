"""Fully sharded training in thin layers: the command line, the training recipe and the names most code needs.

Names are imported at first use: `lamella --help` needs no torch, and checkpoints need no transformers.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

try:
    __version__ = version("lamella")
except PackageNotFoundError:  # Sources on PYTHONPATH, as on a GPU host where nothing can be installed.
    __version__ = "0+source"

if TYPE_CHECKING:
    from lamella._command.train import Result as Result
    from lamella._command.train import train as train
    from lamella._estimate.api import estimate as estimate
    from lamella._estimate.choice import FittingOptions as FittingOptions
    from lamella._estimate.choice import fit_options as fit_options
    from lamella._estimate.estimated_bytes import Estimate as Estimate
    from lamella._processes.endings import LossNotFiniteError as LossNotFiniteError
    from lamella._processes.endings import Stopped as Stopped
    from lamella._processes.endings import StorageError as StorageError
    from lamella._processes.launch import WorkerError as WorkerError
    from lamella._processes.launch import WorkerTimeoutError as WorkerTimeoutError
    from lamella._settings.config import Config as Config
    from lamella._settings.options import ConfigError as ConfigError
    from lamella._settings.sections import DataConfig as DataConfig
    from lamella._settings.sections import ModelConfig as ModelConfig
    from lamella._settings.sections import OptimConfig as OptimConfig
    from lamella._settings.sections import ParallelConfig as ParallelConfig
    from lamella._settings.sections import RunConfig as RunConfig
    from lamella_checkpoint import CheckpointDirectory as CheckpointDirectory
    from lamella_checkpoint import load as load
    from lamella_checkpoint import save as save
    from lamella_engine import FSDPModule as FSDPModule
    from lamella_engine import MixedPrecisionPolicy as MixedPrecisionPolicy
    from lamella_engine import UnshardHandle as UnshardHandle
    from lamella_engine import fully_shard as fully_shard

_NAMES: Final = {
    "lamella._settings.config": ("Config",),
    "lamella._settings.sections": ("DataConfig", "ModelConfig", "OptimConfig", "ParallelConfig", "RunConfig"),
    "lamella._processes.endings": ("LossNotFiniteError", "Stopped", "StorageError"),
    "lamella._processes.launch": ("WorkerError", "WorkerTimeoutError"),
    "lamella._settings.options": ("ConfigError",),
    "lamella._command.train": ("Result", "train"),
    "lamella._estimate.api": ("estimate",),
    "lamella._estimate.choice": ("FittingOptions", "fit_options"),
    "lamella._estimate.estimated_bytes": ("Estimate",),
    "lamella_checkpoint": ("CheckpointDirectory", "load", "save"),
    "lamella_engine": ("FSDPModule", "MixedPrecisionPolicy", "UnshardHandle", "fully_shard"),
}
_HOMES: Final = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_HOMES]

if not TYPE_CHECKING:  # Hidden from type checkers: a module `__getattr__` makes every misspelt name type-check.

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        attribute = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return attribute


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
