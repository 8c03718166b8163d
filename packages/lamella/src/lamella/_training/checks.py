"""The checks of a run before its text is read: the folder, the checkpoint to go on from, and the model."""

import os
from dataclasses import dataclass
from pathlib import Path

from lamella._model.checks import CheckedModel, check_model
from lamella._model.spec import NAMED
from lamella._model.trained_parameters import check_trained
from lamella._record.run_directory import RunDirectory
from lamella._record.trackers import check_trackers
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._training.narrow_states import check_states
from lamella._training.optimizer_class import check_optimizer
from lamella._training.resume import wanted_checkpoint
from lamella._training.samples import check_prompts


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """A run whose settings can be met, as far as can be told without its text.

    Attributes:
        directory: The run's files.
        checkpoint: The checkpoint to go on from; None for a new run.
        model: The model, checked.
    """

    directory: RunDirectory
    checkpoint: Path | None
    model: CheckedModel


def check(config: Config) -> CheckedRun:
    """Check settings, folder, model and machine.

    Raises:
        ConfigError: The settings cannot be met.

    Effects: reads the config of the model; writes nothing.
    """
    directory = run_directory(config)
    checkpoint = wanted_checkpoint(directory, config.run)
    if checkpoint is None:
        _check_utf8(directory.root)
        _check_writable(directory.root, "--run-dir")
        _check_writable(directory.checkpoints, "--run-dir" if config.run.checkpoints is None else "--checkpoints")
    model = check_model(config, has_checkpoint=checkpoint is not None)
    check_trackers(config.run.tracker_names)
    check_prompts(config.run.sample)
    check_optimizer(config.optim, config.parallel.device)
    check_states(config.optim)
    check_trained((name for name, _ in model.outline.named_parameters()), config.optim.train)
    return CheckedRun(directory=directory, checkpoint=checkpoint, model=model)


def run_root(config: Config) -> Path:
    """Return the directory of a run: `--run-dir`, or runs/<model>."""
    return Path(config.run.directory or Path("runs", _model_name(config.model.name)))


def run_directory(config: Config) -> RunDirectory:
    """Return the files of a run; see `run_root` and `--checkpoints`."""
    return RunDirectory(run_root(config), config.run.checkpoints)


def _model_name(name: str) -> str:
    """Return the name of a shipped model or a folder, dots included (Llama-3.1-8B), or of a file without its suffix."""
    path = Path(os.path.abspath(name))
    if name not in NAMED and path.is_file():
        return path.parent.name if path.name == "config.json" else path.stem
    return path.name


def _check_utf8(root: Path) -> None:
    """Refuse a run directory whose name is not UTF-8: the tokenizers library writes only to such paths."""
    try:
        str(root.absolute()).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"Expected a --run-dir whose name is UTF-8, got {str(root)!r}.") from None


def _check_writable(folder: Path, option: str) -> None:
    """Refuse an unwritable folder, before reading the text takes time."""
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        got = "cannot be written to" if parent.is_dir() else "is a file"
        raise ConfigError(
            f"Expected a folder for the run in {str(folder)!r}, got {str(parent)!r}, which {got}. "
            f"Pass another {option}."
        )
