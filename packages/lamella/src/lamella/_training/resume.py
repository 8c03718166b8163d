"""Resuming a run: the choice of a checkpoint, the check against the settings, and the removal of later checkpoints."""

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

from lamella._data.mixture import Mixture
from lamella._data.order import ORDER
from lamella._model.checks import CheckedModel
from lamella._model.lora import lora_alpha
from lamella._model.matrices import MUON
from lamella._model.spec import load_spec
from lamella._record.metrics import rewind
from lamella._record.output import one_line
from lamella._record.run_directory import RunDirectory
from lamella._settings.config import GROUPS, Config, resolve, to_values
from lamella._settings.files import read_file
from lamella._settings.mixture import weight_of_source
from lamella._settings.options import ConfigError, fields_of
from lamella._settings.sections import DataConfig, ModelConfig, OptimConfig, Packing, RunConfig
from lamella._streaming.reader import WINDOW_ORDER
from lamella._training.optimizer_class import ADAMW, OptimizerClass, check_muon_options
from lamella_checkpoint import CheckpointDamaged, CheckpointDirectory, CheckpointMismatch, check
from lamella_convert import open_checkpoint
from lamella_transformers import ModelSpec, fingerprint_of_weights

# These settings and the text determine the data stream. After a change, a resumed run would repeat or skip text.
_STREAM = (("data", "sequence_length"), ("data", "loss_on"), ("optim", "batch_size"), ("run", "seed"))
_ORDER: Final = "data.order"

# The optimizer's state in a checkpoint is of these settings. Checkpoints without the settings are of the defaults.
_STATE: Mapping[str, object] = {"optim.optimizer": OptimConfig.optimizer, "optim.train": OptimConfig.train}

# Other options are taken where the optimizer goes on from the state of the stored options.
_OPTIONS: Final = "optim.optimizer_options"

# The adapters in a checkpoint are of these settings; checkpoints without the settings have none.
_ADAPTERS: Mapping[str, object] = {
    "model.lora_rank": ModelConfig.lora_rank,
    "model.lora_alpha": ModelConfig.lora_alpha,
    "model.lora_targets": ModelConfig.lora_targets,
    "model.dora": ModelConfig.dora,
}

# The stream of a checkpoint is of this mixture; checkpoints without a mixture are of one stream of all sequences.
_MIXTURE: Final = "data.mixture"

# Streamed text is in another order than prepared text, by windows of this size.
_STREAMING: Mapping[str, object] = {
    "data.streaming": DataConfig.streaming,
    "data.shuffle_buffer": DataConfig.shuffle_buffer,
}

_KEPT = {**_STATE, **_ADAPTERS, _MIXTURE: DataConfig.mixture, **_STREAMING}

# Fields of a model's config set by the run, or not read in training.
_NOT_OF_THE_MODEL = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "use_cache")

_FLAGS = {f"{group}.{field.name}": field.flag for group, cls in GROUPS.items() for field in fields_of(cls)}

_NUM_NAMED: Final = 3
_STEP: Final = re.compile("step_([0-9]{8}|[1-9][0-9]{8,})")  # a checkpoint directory's names, and no others


def wanted_checkpoint(directory: RunDirectory, run: RunConfig) -> Path | None:
    """Return the checkpoint to go on from: the newest, or `--from-step`'s; None in a new run.

    Raises:
        ConfigError: The step has no checkpoint, the newest has lost the metadata, `--resume` and `--no-resume` say
            otherwise, or the run has a later checkpoint in the folder of its last start.
    """
    checkpoints = CheckpointDirectory(directory.checkpoints)
    checkpoint = _newest(checkpoints) if run.from_step is None else _checkpoint_at(checkpoints, run.from_step)
    if run.resume is True and checkpoint is None:
        raise ConfigError(f"Expected a checkpoint to resume in {str(directory.root)!r}, got none.")
    if run.resume is False and checkpoint is not None:
        raise ConfigError(
            f"Expected no checkpoint in {str(directory.root)!r}, got {checkpoint.name}. "
            "Pass another --run-dir, or leave out --no-resume."
        )
    if run.from_step is None:
        _check_later_checkpoints(directory, checkpoints)
    return checkpoint


def _check_later_checkpoints(directory: RunDirectory, checkpoints: CheckpointDirectory) -> None:
    """Refuse another `--checkpoints` than at the run's last start, which saved a later step there.

    The run would go back, or begin anew, and drop the records of the steps between.
    """
    former_run = _settings_of_last_start(directory)
    if former_run is None:
        return
    last_start = RunDirectory(directory.root, former_run.checkpoints)
    newest_step = max(checkpoints.steps(), default=0)
    former_step = max(CheckpointDirectory(last_start.checkpoints).steps(), default=0)
    if newest_step < former_step:
        raise ConfigError(
            f"Expected the checkpoints of the run in {str(directory.root)!r}, of step {former_step} in "
            f"{str(last_start.checkpoints)!r}, got {str(checkpoints.root)!r}, with {newest_step or 'none'}. "
            "Pass the former as --checkpoints, move its checkpoints there, or pass another --run-dir."
        )


def _settings_of_last_start(directory: RunDirectory) -> RunConfig | None:
    """Return the settings of the run's last start; None in a new run, and after another version of lamella."""
    try:
        return resolve(read_file(str(directory.config))).run
    except ConfigError:
        return None


def validation_lines(directory: RunDirectory, run: RunConfig) -> list[str]:
    """Return a line to print if the run to go on is validated on another number of sequences from now on."""
    former = _settings_of_last_start(directory)
    if former is None or former.validation_sequences == run.validation_sequences:
        return []
    numbers = f"{run.validation_sequences} sequences from now on, {former.validation_sequences} before"
    return [f"validation: on {numbers}: losses before and after are of other texts"]


def _newest(checkpoints: CheckpointDirectory) -> Path | None:
    newest = max(_steps(checkpoints.root), default=None)
    if newest is not None and newest not in checkpoints.steps():
        raise damaged(checkpoints, checkpoints.path(newest), "Expected a whole checkpoint, got one without .metadata")
    return checkpoints.latest()


def _checkpoint_at(checkpoints: CheckpointDirectory, step: int) -> Path:
    if step not in checkpoints.steps():
        got = ", ".join(map(str, checkpoints.steps())) or "none"
        raise ConfigError(
            f"Expected a checkpoint of step {step} in {str(checkpoints.root)!r} for --from-step, got {got}."
        )
    return checkpoints.path(step)


def check_resumable(
    checkpoint: Path, model: CheckedModel, stream: Mapping[str, object], text: str, directory: RunDirectory
) -> int:
    """Return the checkpoint's step; refuse checkpoints of another model or data stream, and other weights.

    Args:
        checkpoint: The checkpoint to go on from.
        model: The model of the settings.
        stream: The settings of the data stream, by dotted name.
        text: The fingerprint of text, tokenizer and form of the sequences.
        directory: The run's files.

    Raises:
        ConfigError: The checkpoint is damaged, or was written under other settings; names the difference.
    """
    try:
        extra = check(checkpoint, model=model.checkpointed)
    except CheckpointDamaged as error:
        raise damaged(CheckpointDirectory(checkpoint.parent), checkpoint, error) from error
    except CheckpointMismatch as error:
        # Different adapters change the names of tensors: unequal settings of adapters are the reason.
        _check_settings(open_checkpoint(checkpoint).extra, {name: stream[name] for name in _ADAPTERS})
        first = "; ".join(map(str, error.differences.names[:_NUM_NAMED]))
        more = len(error.differences.names) - _NUM_NAMED
        raise ConfigError(
            f"Expected a checkpoint of this model in {str(checkpoint)!r}, got a checkpoint of another model: {first}"
            f"{f'; and {more} more' if more > 0 else ''}. Pass the checkpoint's --model, or another --run-dir."
        ) from error
    _check_stream(extra, stream, text)
    _check_same_model(model.spec, directory)
    if model.pretrained is not None:
        _check_same_weights(model.pretrained, directory)
    return int(extra["step"])


def _check_same_model(spec: ModelSpec, directory: RunDirectory) -> None:
    """Refuse to resume with a config of equal shapes and another computation (an activation, an epsilon)."""
    if not directory.model_config.is_file():
        return
    before, now = load_spec(str(directory.model)).to_dict(), spec.to_dict()
    for name in sorted(before.keys() | now.keys()):
        if name not in _NOT_OF_THE_MODEL:
            _check_kept(f"the model's {name}", before.get(name), now.get(name), "--model")


def _check_same_weights(pretrained: Path, directory: RunDirectory) -> None:
    """Refuse to resume with other weights of an equal config than the first weights of the run.

    Weights damaged or deleted since the run began pass: a checkpoint needs no weights.
    """
    before = directory.weights.read_text(encoding="ascii").strip() if directory.weights.is_file() else None
    now = fingerprint_of_weights(pretrained)
    if before and now and before != now:
        raise ConfigError(
            f"Expected the weights that the run in {str(directory.root)!r} started from ({before[:12]}) in --model, "
            f"got others in {str(pretrained)!r} ({now[:12]}). Pass the former --model, or another --run-dir."
        )


def _check_stream(stored: Mapping[str, object], stream: Mapping[str, object], text: str) -> None:
    """Refuse to resume with other text or settings of the data stream, or another order under the same seed."""
    _check_settings(stored, {name: stream[name] for name in _STREAMING})
    if stored.get(_ORDER) != stream[_ORDER]:
        order = stored.get(_ORDER, "an older one")
        raise ConfigError(
            f"Expected a checkpoint of a run in the data order {stream[_ORDER]!r}, got {order!r}. "
            "Resume the run with the version of lamella that began it, or pass another --run-dir."
        )
    _check_settings(stored, {name: setting for name, setting in stream.items() if name not in (_ORDER, _OPTIONS)})
    _check_optimizer_options(stored, stream)
    if stored.get("fingerprint") != text:
        raise ConfigError(
            "Expected the text that the run to be resumed was started on, got another. Pass the same --data, "
            "--validation-data and --validation-fraction, and the same tokenizer and chat template in --model, to the "
            "version of lamella that began the run; or another --run-dir."
        )


def _check_optimizer_options(stored: Mapping[str, object], stream: Mapping[str, object]) -> None:
    """Refuse options that leave out one of the stored options, or need other state of an optimizer by import path."""
    name, options = str(stream["optim.optimizer"]), cast("tuple[str, ...]", stream[_OPTIONS])
    former = tuple(cast("tuple[str, ...]", stored.get(_OPTIONS, options)))
    if former == options or name == ADAMW:
        return
    before, now = (OptimConfig(optimizer=name, optimizer_options=arguments) for arguments in (former, options))
    if name == MUON:
        check_muon_options(before, now)
    else:
        OptimizerClass.of(now).check_state(OptimizerClass.of(before))


def _check_settings(stored: Mapping[str, object], settings: Mapping[str, object]) -> None:
    """Refuse settings, by dotted name, unlike the stored settings."""
    former = {name: stored.get(name, _KEPT.get(name)) for name in settings}
    former = {name: tuple(setting) if isinstance(setting, list) else setting for name, setting in former.items()}
    for name, setting in settings.items():
        if _effect(name, former) != _effect(name, settings):
            _check_kept(name, former[name], setting, f"value of {_FLAGS[name]}")


def _effect(name: str, settings: Mapping[str, object]) -> object:
    """Return a value that settings with the same effect have in common: other spellings of a mixture, a default."""
    setting = settings[name]
    if name == _MIXTURE and setting:
        weights = dict(sorted(map(weight_of_source, cast("tuple[str, ...]", setting))))
        return (*weights, *Mixture.of([*weights.values()]).shares)
    if name == "model.lora_alpha" and (rank := settings["model.lora_rank"]) is not None:
        return lora_alpha(cast(int, rank), cast("float | None", setting))
    return setting


def _check_kept(name: str, before: object, now: object, option: str) -> None:
    if before != now:
        raise ConfigError(
            f"Expected {name} to stay {before!r} as in the run to be resumed, got {now!r}. "
            f"Pass the former {option}, or another --run-dir."
        )


def stream_settings(config: Config, packing: Packing) -> dict[str, object]:
    """Return the settings to hold over a run, by dotted name.

    Args:
        config: The run's settings.
        packing: How the run's documents become sequences; "auto" leaves the choice to the documents.
    """
    values = to_values(config)
    names = (*_STREAM, *(name.split(".") for name in (*_KEPT, _OPTIONS)))
    settings = {f"{group}.{name}": values[group][name] for group, name in names}
    return settings | {"data.packing": packing, _ORDER: WINDOW_ORDER if config.data.streaming else ORDER}


def go_back(directory: RunDirectory, step: int) -> list[str]:
    """Set aside checkpoints and drop records after `step`; return lines on both, to print."""
    checkpoints = CheckpointDirectory(directory.checkpoints)
    later = [checkpoints.path(number) for number in _steps(checkpoints.root) if number > step]
    lines = [f"set aside: {_set_aside(path)}" for path in later]  # No run may go on from a later checkpoint.
    if num_damaged := rewind(directory.metrics, step):
        lines.append(
            f"dropped from {directory.metrics.name}: {num_damaged} damaged lines, as a run leaves that is killed"
        )
    return lines


def damaged(checkpoints: CheckpointDirectory, checkpoint: Path, problem: object) -> ConfigError:
    """Return the refusal of a damaged checkpoint, with the option to avoid the checkpoint.

    A silent fallback to an earlier checkpoint would repeat steps unseen.
    """
    before = [step for step in checkpoints.steps() if step < int(checkpoint.name.removeprefix("step_"))]
    way_out = (
        f"Run the same command with --from-step {before[-1]} to go on from the checkpoint before it"
        if before
        else "There is none before it: pass another --run-dir to start anew"
    )
    return ConfigError(
        f"{one_line(str(problem)).rstrip('.')}: the checkpoint {str(checkpoint)!r} is damaged. {way_out}, "
        "or put back what it lacks."
    )


def _set_aside(path: Path) -> Path:
    return path.rename(path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}"))


def _steps(root: Path) -> list[int]:
    """Return the steps of all folders with a checkpoint's name, complete or damaged."""
    matches = (_STEP.fullmatch(path.name) for path in root.glob("step_*") if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)
