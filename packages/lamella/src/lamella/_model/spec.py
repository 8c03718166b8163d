"""The config of a run's model, by the name of a shipped model or by a path, checked for mistakes."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from torch import nn

import lamella_transformers
from lamella._settings.config import Values
from lamella._settings.options import LARGEST, ConfigError, in_short, nearest, shown
from lamella._settings.parsing import parse_json, read_settings
from lamella_transformers import Adapter, ModelError, ModelSpec, find_adapter, num_positions

if TYPE_CHECKING:
    from transformers import GenerationConfig


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model of lamella's: the values of its config, and sensible settings.

    Attributes:
        adapted_type: The model type whose adapter holds the values under the same name; then `config` is empty.
    """

    config: Mapping[str, object] = field(default_factory=dict)
    settings: Values = field(default_factory=dict)
    adapted_type: str | None = None


NAMED: Mapping[str, NamedModel] = {
    "llama-small": NamedModel(
        config={
            "model_type": "llama",
            "vocab_size": 1024,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            # One over the root of the width: at transformers' 0.02 a model this narrow takes twice as long.
            "initializer_range": 0.06,
        },
    ),
    "llama-1b": NamedModel(
        config={
            "model_type": "llama",
            "vocab_size": 32768,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
        settings={
            "data": {"sequence_length": 2048},
            "optim": {"steps": 1000, "batch_size": 32, "lr": 6e-4, "warmup_steps": 100},
            "run": {"validation_interval": 100},
        },
    ),
    "llama-8b": NamedModel(
        config={
            "model_type": "llama",
            "vocab_size": 32768,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
        settings={
            "data": {"sequence_length": 4096},
            "optim": {"steps": 1000, "batch_size": 64, "lr": 3e-4, "warmup_steps": 100},
            "run": {"validation_interval": 100},
        },
    ),
    "qwen3.5-tiny": NamedModel(adapted_type="qwen3_5_text", settings={"optim": {"lr": 1e-2}}),
}

SMALLEST_VOCABULARY = 257

GENERATION_CONFIG: Final = "generation_config.json"

_COUNT: Final = re.compile(r"layer|expert|block|depth")
_RATE: Final = re.compile(r"dropout|pdrop")
_LARGEST_COUNT: Final = 10_000
"""The largest number of layers or experts: forty times those of any published model."""

_EXTRAS: Final[Mapping[str, str]] = {"qwen3_5_text": "qwen", "qwen3_5_moe_text": "qwen", "mamba2": "mamba"}
"""Model type -> the extra that has its adapter, without which no such model is trained."""


def named_settings(name: str) -> Values:
    """Return the settings of a shipped model; none for a path."""
    return NAMED[name].settings if name in NAMED else {}


def generation_config(folder: Path, spec: ModelSpec) -> "GenerationConfig":
    """Return the settings of generation in a model's folder; those of the model's config without any.

    Raises:
        ConfigError: transformers refuses the file.
    """
    from transformers import GenerationConfig

    make = cast(Any, GenerationConfig)
    try:
        has_file = (folder / GENERATION_CONFIG).is_file()
        settings = make.from_pretrained(folder, local_files_only=True) if has_file else make.from_model_config(spec)
    except Exception as error:  # transformers raises errors of all its parts.
        raise ConfigError(
            f"Expected a {GENERATION_CONFIG} that transformers reads in {str(folder)!r}, got: {in_short(error)}"
        ) from error
    return cast("GenerationConfig", settings)


def load_spec(name: str, vocab_size: int | None = None) -> ModelSpec:
    """Return the transformers config of a shipped model or of a path, with another vocabulary size if passed.

    A config with other parts (vision) yields the config of the text model.

    Raises:
        ConfigError: No model of the name, its adapter is not installed, or the config lacks a field or is refused by
            transformers.
    """
    config = dict(_text_part(name, _config_of(name)))
    if vocab_size is not None:
        config["vocab_size"] = vocab_size
    # Main weights are fp32 whatever dtype a published config names; precision is the run's choice.
    # The training loop reads outputs by name; `return_dict` would turn outputs into tuples.
    for key in ("dtype", "torch_dtype", "transformers_version", "return_dict"):
        config.pop(key, None)
    return _to_spec(name, config)


def _config_of(name: str) -> Mapping[str, object]:
    if name not in NAMED:
        return _read_config(name)
    named = NAMED[name]
    return named.config if named.adapted_type is None else _adapter(named.adapted_type, name).named_configs[name]


def _read_config(name: str) -> Mapping[str, object]:
    from transformers import PreTrainedConfig

    path = Path(name)
    if not os.path.exists(name):  # Path.exists() raises for names that are too long; Path("") is the current folder.
        names = ", ".join(map(repr, NAMED))
        raise ConfigError(
            f"Expected a path or one of {names} as --model, got {name!r}.{nearest(name, NAMED) or _from_a_hub(name)}"
        )
    if path.is_dir():
        _refuse_checkpoint(path)
        path /= "config.json"
    try:
        config = parse_json(read_settings(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Expected a transformers config in {str(path)!r}, got {in_short(error)}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        way_out = ""
        if isinstance(config, dict) and {"model", "optim", "run"} <= config.keys():
            way_out = (
                f" It holds the settings of a run of lamella train: `lamella export {path.parent}` writes the run's "
                f"model, and --config {path} takes the settings."
            )
        raise ConfigError(f"Expected a field 'model_type' in {str(path)!r}, got none.{way_out}")
    _check_numbers(str(path), config)
    try:
        # Read once more by transformers, which has a spelling for infinity: JSON has no such number.
        return PreTrainedConfig.get_config_dict(path, local_files_only=True)[0]
    except Exception as error:  # Any part of transformers may raise.
        raise ConfigError(f"Expected a transformers config in {str(path)!r}, got {in_short(error)}") from error


def _refuse_checkpoint(folder: Path) -> None:
    if (folder / ".metadata").is_file() and not (folder / "config.json").exists():
        raise ConfigError(
            f"Expected a folder of a model as --model, got the checkpoint {str(folder)!r}. Write the model of a run by "
            "`lamella export RUN --step N`, or of any checkpoint by `lamella ckpt convert`."
        )


def _check_numbers(name: str, config: Mapping[str, object]) -> None:
    """Refuse numbers accepted by transformers: counts of modules that take hours to build, and dropout rates."""
    for key, value in config.items():
        if isinstance(value, dict):
            _check_numbers(name, value)
        elif _RATE.search(key) and isinstance(value, int | float) and not 0 <= value <= 1:
            raise ConfigError(f"Expected {key!r} from 0 to 1 in {name!r}, got {shown(value)}.")
        elif isinstance(value, int) and abs(value) > (_LARGEST_COUNT if _COUNT.search(key) else LARGEST):
            bound = _LARGEST_COUNT if _COUNT.search(key) else LARGEST
            raise ConfigError(f"Expected {key!r} of at most {bound} in {name!r}, got {shown(value)}.")


def _from_a_hub(name: str) -> str:
    """Return a way out for `owner/model`, the name of a model on a hub."""
    owner, _, model = name.partition("/")
    if not owner or not model or "/" in model or owner.startswith("."):
        return ""
    return f" Nothing is downloaded here: hf download {name} --local-dir {model}, then --model {model}"


def _text_part(name: str, config: Mapping[str, object]) -> Mapping[str, object]:
    part = config.get("text_config")
    if part is None:
        return config
    if not isinstance(part, dict) or not isinstance(part.get("model_type"), str):
        raise ConfigError(f"Expected a text_config with a model_type in {name!r}, got {shown(part)}.")
    # The outer config decides on the field: the inner value may be a library's default.
    return part | {key: config[key] for key in ("tie_word_embeddings",) if key in config}


def _to_spec(name: str, config: dict[str, object]) -> ModelSpec:
    from transformers import AutoConfig

    model_type = str(config.pop("model_type"))
    try:
        spec = AutoConfig.for_model(model_type, **config)
        _check_sizes(name, spec, config)
        _check_vocabulary(spec.vocab_size)
        return cast(ModelSpec, spec)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"Expected a config that transformers accepts in {name!r}, got {in_short(error)}") from error


def _check_sizes(name: str, spec: object, config: Mapping[str, object]) -> None:
    """Refuse a config without its sizes: transformers would take the sizes of a published model."""
    for size in ("vocab_size", "hidden_size", "num_hidden_layers"):
        fields = _fields_of_size(spec, size)
        if size not in config and fields.isdisjoint(config):
            raise ConfigError(
                f"Expected a field {min(fields)!r} in the model config {name!r}, got none "
                f"(transformers would take {getattr(spec, size, None)})."
            )


def _fields_of_size(spec: object, size: str) -> set[str]:
    """Return the fields behind a size: the field of another name, or the fields that transformers computes from."""
    computed = getattr(type(spec), size, None)
    if isinstance(computed, property) and computed.fget is not None:
        fields = _RecordedFields(spec)
        computed.fget(fields)
        return fields.names
    aliases: Mapping[str, str] = getattr(spec, "attribute_map", {})
    return {aliases.get(size, size)}


class _RecordedFields:
    """A config that notes each attribute as it is read."""

    def __init__(self, spec: object) -> None:
        self.names: set[str] = set()
        self._spec = spec

    def __getattr__(self, name: str) -> object:
        self.names.add(name)
        return getattr(self._spec, name)


def _check_vocabulary(vocab_size: int) -> None:
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"Expected a vocabulary of at least {SMALLEST_VOCABULARY} tokens (each byte, and the end of a text), "
            f"got {vocab_size}. Pass --vocab-size."
        )


def _adapter(model_type: str, wanted_by: str) -> Adapter:
    adapter = find_adapter(model_type)
    if adapter is None:
        extra = _EXTRAS[model_type]
        raise ConfigError(
            f"Expected lamella-{extra} to be installed for {wanted_by!r}, got none. "
            f"Install it from a clone: uv pip install './packages/lamella[{extra}]'"
        )
    return adapter


@contextmanager
def refused_models() -> Iterator[None]:
    """Turn the refusal of a model into one of the settings.

    Raises:
        ConfigError: With the message of a `ModelError` in the block.
    """
    try:
        yield
    except ModelError as error:
        raise ConfigError(f"{error}") from error


def outline(spec: ModelSpec) -> nn.Module:
    """Return the model of a config without memory for its weights, if a run can train the model.

    Raises:
        ConfigError: The model's adapter is not installed, or as `lamella_transformers.outline`.
    """
    if spec.model_type in _EXTRAS:
        _adapter(spec.model_type, spec.model_type)
    with refused_models():
        return lamella_transformers.outline(spec)


def check_context(spec: ModelSpec, sequence_length: int) -> None:
    """Refuse sequences with more positions than the model has.

    Raises:
        ConfigError: Names both numbers.
    """
    bound = num_positions(spec)
    if bound is not None and sequence_length > bound:
        raise ConfigError(
            f"Expected a --sequence-length of at most {bound}, the positions that the {spec.model_type!r} "
            f"model has (max_position_embeddings), got {sequence_length}. Pass --sequence-length {bound}."
        )
