"""The configuration of a training run, merged from files and the command line."""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lamella._settings.attention import check_attention
from lamella._settings.capture import check_capture
from lamella._settings.context_parallel import check_context_parallel
from lamella._settings.determinism import check_deterministic
from lamella._settings.fit import check_fit
from lamella._settings.lora import check_lora
from lamella._settings.mixture import check_texts
from lamella._settings.options import ConfigError, check_fields, shown
from lamella._settings.sections import DataConfig, ModelConfig, OptimConfig, ParallelConfig, RunConfig
from lamella._settings.streaming import check_streaming
from lamella._settings.tensor_parallel import check_tensor_parallel

_LARGEST_STEP: Final = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. Only the machine and the text itself are outside."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for group in GROUPS:
            check_fields(getattr(self, group))
        check_fit(self.parallel)
        check_texts(self.data)
        check_streaming(self.data, self.optim)
        check_lora(self.model, self.optim, self.parallel)
        check_context_parallel(self.data, self.parallel, self.run)
        check_tensor_parallel(self.model, self.optim, self.parallel)
        check_capture(self.data, self.optim, self.parallel)
        check_attention(self.model, self.data, self.parallel)
        check_deterministic(self.run, self.model, self.parallel)
        _check_warmup(self.optim)
        _check_tokens(self.optim.batch_size, self.data.sequence_length)


def _check_warmup(optim: OptimConfig) -> None:
    """Refuse a warm-up that would not end: the learning rate would never reach `--lr`."""
    if optim.epochs is not None:  # The text decides on the steps.
        return
    if optim.num_warmup_steps > optim.steps:
        raise ConfigError(
            f"Expected --warmup-steps of at most --steps, {optim.steps}, got {optim.num_warmup_steps}. "
            f"Pass --warmup-steps {optim.steps} or fewer, or more --steps."
        )


def _check_tokens(batch_size: int, sequence_length: int) -> None:
    """Refuse steps that no memory holds, before any is set aside."""
    if batch_size * sequence_length > _LARGEST_STEP:
        raise ConfigError(
            f"Expected --batch-size times --sequence-length of at most {_LARGEST_STEP:,} tokens in a step, got "
            f"{batch_size} * {sequence_length}. Pass a smaller one."
        )


Group = ModelConfig | DataConfig | OptimConfig | ParallelConfig | RunConfig
GROUPS: Mapping[str, type[Group]] = typing.get_type_hints(Config)


Values = Mapping[str, Mapping[str, object]]
"""Group -> field -> value: one source of settings."""


def resolve(*layers: Values) -> Config:
    """Merge settings, later layers over earlier layers, into a checked configuration.

    Raises:
        ConfigError: A value has the wrong type or is out of bounds, or no layer names a model.
    """
    settings = merged(*layers)
    if "name" not in settings["model"]:
        raise ConfigError("Expected a model in the configuration (model.name, or --model), got none.")
    groups = {group: cls(**typing.cast(typing.Any, settings[group])) for group, cls in GROUPS.items()}
    return Config(**typing.cast(typing.Any, groups))


def merged(*layers: Values) -> dict[str, dict[str, object]]:
    """Return all groups of settings, later layers over earlier layers; steps replace epochs, and epochs steps.

    Raises:
        ConfigError: A layer has both steps and epochs.
    """
    settings: dict[str, dict[str, object]] = {group: {} for group in GROUPS}
    for layer in layers:
        if (replaced := _replaced_length(layer.get("optim", {}))) is not None:
            settings["optim"].pop(replaced, None)
        for group, values in layer.items():
            settings[group].update(values)
    return settings


def _replaced_length(optim: Mapping[str, object]) -> str | None:
    """Return the field of earlier layers that the steps, or epochs, of a layer replace."""
    steps, epochs = optim.get("steps"), optim.get("epochs")
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"Expected --steps or --epochs, got both, {shown(steps)} and {shown(epochs)}. Pass one of them."
        )
    return "epochs" if steps is not None else "steps" if epochs is not None else None


def to_values(config: Config) -> dict[str, dict[str, object]]:
    """Return the settings as plain values for JSON and `resolve`; without steps where epochs are in their place."""
    values = dataclasses.asdict(config)
    if config.optim.epochs is not None:
        del values["optim"]["steps"]
    return values


def to_toml(config: Config) -> str:
    """Return the settings as a TOML document for `lamella._settings.files.read_file`; settings of None are omitted."""
    return "\n".join(_table(group, values) for group, values in to_values(config).items())


def _table(group: str, values: Mapping[str, object]) -> str:
    lines = [f"{name} = {_literal(value)}" for name, value in values.items() if value is not None]
    return "\n".join([f"[{group}]", *lines])


def _literal(value: object) -> str:
    # JSON strings, numbers, booleans and lists of strings are valid TOML too, but JSON's surrogate pairs, DEL and inf.
    if value == math.inf:
        return "inf"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")
