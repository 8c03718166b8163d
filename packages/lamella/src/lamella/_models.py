"""Models by name or by a transformers config: how each is built and cut into sharding units."""

import importlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, cast

import torch
from torch import nn

from lamella._config import Values
from lamella._json import parse_json, read_settings
from lamella._options import LARGEST, ConfigError, in_short, nearest, shown


class ModelSpec(Protocol):
    """The attributes and methods used of a transformers config."""

    model_type: str
    vocab_size: int

    def to_dict(self) -> dict[str, object]: ...
    def to_json_file(self, json_file_path: Path, use_diff: bool) -> None: ...


class Adapter(Protocol):
    """The functions used of an adapter package."""

    NAMED_CONFIGS: Mapping[str, Mapping[str, object]]

    def sharding_units(self, model: nn.Module) -> list[nn.Module]: ...


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model that ships with lamella: its config's values, and the settings that train it sensibly.

    Attributes:
        adapter: The extra whose package holds the values under the same name; then `config` is empty.
    """

    config: Mapping[str, object] = field(default_factory=dict)
    settings: Values = field(default_factory=dict)
    adapter: str | None = None


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
    "qwen3.5-tiny": NamedModel(adapter="qwen", settings={"optim": {"lr": 1e-2}}),
}

SMALLEST_VOCABULARY = 257

_COUNT: Final = re.compile(r"layer|expert|block|depth")
_RATE: Final = re.compile(r"dropout|pdrop")
_LARGEST_COUNT: Final = 10_000
"""The largest number of layers or experts: forty times those of any published model."""

ADAPTERS: Mapping[str, str] = {"qwen3_5_text": "qwen", "qwen3_5_moe_text": "qwen", "mamba2": "mamba"}
"""Model type -> the extra whose package knows its sharding units. Other models name theirs themselves."""


def named_settings(name: str) -> Values:
    """The settings that come with a named model; none for a path."""
    return NAMED[name].settings if name in NAMED else {}


def load_spec(name: str, vocab_size: int | None = None) -> ModelSpec:
    """The transformers config of a named model or of a path, with the vocabulary size replaced if one is given.

    Of a model that has other parts too (vision), it is the text model's.

    Raises:
        ConfigError: No such model, its adapter is not installed, or the config lacks a field or is refused by
            transformers.
    """
    values = dict(_text_part(name, _values(name)))
    if vocab_size is not None:
        values["vocab_size"] = vocab_size
    # Main weights are fp32 whatever the config of a published checkpoint says; precision is the run's choice.
    # The training loop reads outputs by name, which `return_dict` would turn into tuples.
    for key in ("dtype", "torch_dtype", "transformers_version", "return_dict"):
        values.pop(key, None)
    return _to_spec(name, values)


def _values(name: str) -> Mapping[str, object]:
    if name not in NAMED:
        return _read_values(name)
    named = NAMED[name]
    return named.config if named.adapter is None else _adapter(named.adapter, name).NAMED_CONFIGS[name]


def _read_values(name: str) -> Mapping[str, object]:
    from transformers import PreTrainedConfig

    path = Path(name)
    if not os.path.exists(path):  # Path.exists() raises where a name is too long.
        known = ", ".join(map(repr, NAMED))
        raise ConfigError(
            f"Expected a path or one of {known} as --model, got {name!r}.{nearest(name, NAMED) or _from_a_hub(name)}"
        )
    if path.is_dir():
        path /= "config.json"
    try:
        values = parse_json(read_settings(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Expected a transformers config in {str(path)!r}, got {in_short(error)}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(f"Expected a field 'model_type' in {str(path)!r}, got none.")
    _check_numbers(str(path), values)
    try:
        # Read once more by transformers, which has its own way to write what JSON has no numbers for: infinity.
        return PreTrainedConfig.get_config_dict(path, local_files_only=True)[0]
    except Exception as error:  # It raises what its parts raise.
        raise ConfigError(f"Expected a transformers config in {str(path)!r}, got {in_short(error)}") from error


def _check_numbers(name: str, values: Mapping[str, object]) -> None:
    """Refuse numbers that transformers accepts: counts of modules that take hours to build, and dropout rates."""
    for key, value in values.items():
        if isinstance(value, dict):
            _check_numbers(name, value)
        elif _RATE.search(key) and isinstance(value, int | float) and not 0 <= value <= 1:
            raise ConfigError(f"Expected {key!r} from 0 to 1 in {name!r}, got {shown(value)}.")
        elif isinstance(value, int) and abs(value) > (_LARGEST_COUNT if _COUNT.search(key) else LARGEST):
            bound = _LARGEST_COUNT if _COUNT.search(key) else LARGEST
            raise ConfigError(f"Expected {key!r} of at most {bound} in {name!r}, got {shown(value)}.")


def _from_a_hub(name: str) -> str:
    """A way out for `owner/model`, which is how models are called where they are published."""
    owner, _, model = name.partition("/")
    if not owner or not model or "/" in model or owner.startswith("."):
        return ""
    return f" Nothing is downloaded here: hf download {name} --local-dir {model}, then --model {model}"


def _text_part(name: str, values: Mapping[str, object]) -> Mapping[str, object]:
    part = values.get("text_config")
    if part is None:
        return values
    if not isinstance(part, dict) or not isinstance(part.get("model_type"), str):
        raise ConfigError(f"Expected a text_config with a model_type in {name!r}, got {shown(part)}.")
    # The outer config decides on this one: the inner value may be a library's default.
    return part | {key: values[key] for key in ("tie_word_embeddings",) if key in values}


def _to_spec(name: str, values: dict[str, object]) -> ModelSpec:
    from transformers import AutoConfig

    model_type = str(values.pop("model_type"))
    try:
        spec = AutoConfig.for_model(model_type, **values)
        _check_sizes(name, spec, values)
        _check_vocabulary(spec.vocab_size)
        return cast(ModelSpec, spec)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"Expected a config that transformers accepts in {name!r}, got {in_short(error)}") from error


def _check_sizes(name: str, spec: object, values: Mapping[str, object]) -> None:
    """Refuse a config that leaves its size to transformers, whose defaults are those of a published model."""
    aliases: Mapping[str, str] = getattr(spec, "attribute_map", {})
    for size in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if size not in values and aliases.get(size, size) not in values:
            default = getattr(spec, size, None)
            raise ConfigError(
                f"Expected a field {aliases.get(size, size)!r} in the model config {name!r}, got none "
                f"(transformers would take {default})."
            )


def _check_vocabulary(vocab_size: int) -> None:
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"Expected a vocabulary of at least {SMALLEST_VOCABULARY} tokens (each byte, and the end of a text), "
            f"got {vocab_size}. Pass --vocab-size."
        )


def _adapter(extra: str, wanted_by: str) -> Adapter:
    try:
        return cast(Adapter, importlib.import_module(f"lamella_{extra}"))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Expected lamella-{extra} to be installed for {wanted_by!r}, got none. "
            f"Install it from a clone: uv pip install './packages/lamella[{extra}]'"
        ) from error


def build_model(spec: ModelSpec, device: torch.device, seed: int) -> nn.Module:
    """The causal language model of a config, fp32, with weights that follow from `seed` alone.

    Every rank builds the whole model and keeps its shards, so the weights do not depend on the number of ranks.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(spec)  # type: ignore[no-untyped-call]
        return cast(nn.Module, model).train()


def outline(spec: ModelSpec) -> nn.Module:
    """The model of a config without memory for its weights, to learn before a run whether it can be built and sharded.

    Raises:
        ConfigError: It cannot, or its positions see those that they are to predict; names the model type and the
            reason.
    """
    try:
        model = build_model(spec, torch.device("meta"), seed=0)
    except Exception as error:
        raise ConfigError(
            f"Expected a causal language model that transformers can build, got {spec.model_type!r}: {in_short(error)}"
        ) from error
    _check_causal(model, spec)
    sharding_units(model, spec.model_type)
    return model


def _check_causal(model: nn.Module, spec: ModelSpec) -> None:
    """Refuse a model that was built to fill in words: trained on the next token, it would read that token."""
    is_causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    if is_causal and not any(is_causal):
        way_out = ' Set "is_decoder": true in its config.' if hasattr(spec, "is_decoder") else ""
        raise ConfigError(
            f"Expected a causal language model, got {spec.model_type!r}, each of whose positions sees all others."
            f"{way_out}"
        )


def check_context(spec: ModelSpec, sequence_length: int) -> None:
    """Refuse sequences with more positions than the model has.

    Raises:
        ConfigError: Names both numbers.
    """
    num_positions = _num_positions(spec)
    if num_positions is not None and sequence_length > num_positions:
        raise ConfigError(
            f"Expected a --sequence-length of at most {num_positions}, the positions that the {spec.model_type!r} "
            f"model has (max_position_embeddings), got {sequence_length}. Pass --sequence-length {num_positions}."
        )


def _num_positions(spec: ModelSpec) -> int | None:
    """Positions that a model is made for; None where its config names no bound.

    Where rotary positions are stretched, some configs name the bound before the stretch, and others after.
    """
    positions = getattr(spec, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    rope = getattr(spec, "rope_parameters", None)
    if not isinstance(rope, dict):
        return positions
    before, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if isinstance(before, int) and isinstance(factor, int | float):
        return max(positions, int(before * factor))
    return positions


def sharding_units(model: nn.Module, model_type: str) -> list[nn.Module]:
    """The modules to shard one by one, before the model: by its adapter's rule, or the layers transformers names.

    Raises:
        ConfigError: The adapter is not installed, or the model names no layers.
    """
    if model_type in ADAPTERS:
        return _adapter(ADAPTERS[model_type], model_type).sharding_units(model)
    names = set(getattr(model, "_no_split_modules", None) or ())
    units = [module for module in model.modules() if type(module).__name__ in names]
    if not units:
        raise ConfigError(f"Expected decoder layers named by transformers, got none for {model_type!r}.")
    return units


def fp32_parameters(model: nn.Module, model_type: str) -> Callable[[nn.Parameter], torch.dtype | None] | None:
    """The adapter's rule for parameters that compute in fp32 beside bf16 weights, as `param_dtype_override_fn`.

    None for models without such a rule.
    """
    if model_type not in ADAPTERS:
        return None
    keep = getattr(_adapter(ADAPTERS[model_type], model_type), "keep_fp32", None)
    return None if keep is None else cast(Callable[[nn.Parameter], torch.dtype | None], keep(model))


def flops_per_token(model: nn.Module, spec: ModelSpec, sequence_length: int) -> float:
    """Floating-point operations of one token's forward and backward, as they are counted for MFU.

    Six for each parameter but the input embedding, and twelve for each pair of positions in an attention layer.
    Causal masking and recomputation are not counted.
    """
    values = spec.to_dict()
    embeddings = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    tied = bool(values.get("tie_word_embeddings"))
    weights = sum(parameter.numel() for parameter in model.parameters()) - (0 if tied else embeddings)
    return 6.0 * weights + 12.0 * _attention_width(values) * sequence_length


def _attention_width(values: Mapping[str, object]) -> int:
    """Heads times head dim, summed over the layers that attend to all positions."""
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return 0
    kinds, head_dim = values.get("layer_types"), values.get("head_dim")
    num_layers = kinds.count("full_attention") if isinstance(kinds, list) else values.get("num_hidden_layers", 0)
    width = heads * head_dim if isinstance(head_dim, int) else hidden
    return width * cast(int, num_layers)
