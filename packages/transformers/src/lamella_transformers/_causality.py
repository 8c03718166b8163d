"""The refusal of models whose positions see the tokens to predict, by a trial where a model does not say."""

import copy
from typing import Any, Final, cast

import torch
from torch import nn

from lamella_transformers._building import build_model
from lamella_transformers._construction import ModelSpec, constructed
from lamella_transformers._errors import ModelError

_TRIAL_LENGTH: Final = 16
_LARGEST_TRIAL_NUMEL: Final = 2**28  # 1 GiB in fp32
_CHANGE: Final = 1e-4  # of the later logits' change: a model that sees ahead has 3e-3 or more, rounding 2e-5 or less


def check_causal(model: nn.Module, spec: ModelSpec) -> None:
    """Refuse a model whose positions see later tokens: in training the model would read the token to predict.

    A model whose attention modules all say `is_causal` is believed. Any other model is tried with fresh weights on the
    CPU: tokens in the second half of a sequence must not change logits in the first half. Of a large model one layer is
    tried; of a larger model, or of a model that fails here, the modules' own word counts.

    Args:
        model: The model of the config, on any device.
        spec: The config.

    Raises:
        ModelError: The model is not causal. Names the model type, and the field for a causal model if known.

    Effects: may allocate up to 1 GiB in passing. The random state stays.
    """
    is_causal = [bool(module.is_causal) for module in model.modules() if hasattr(module, "is_causal")]
    if is_causal and all(is_causal):
        return
    change = _change_before_later_tokens(model, spec)
    if (bool(is_causal) and not any(is_causal)) if change is None else change > _CHANGE:
        raise ModelError(
            f"Expected a causal language model, got {spec.model_type!r}, whose positions see the tokens that they "
            f"predict. {_way_out(spec)}"
        )


def _way_out(spec: ModelSpec) -> str:
    for field in ("is_decoder", "causal"):
        if getattr(spec, field, None) is False:
            return f'Set "{field}": true in its config.'
    return "Train a model of another type."


def _change_before_later_tokens(model: nn.Module, spec: ModelSpec) -> float | None:
    """Return the largest change of logits before changed tokens, by the change behind them; None without a trial."""
    trial_spec = _small_enough(model, spec)
    if trial_spec is None:
        return None
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(spec.vocab_size, (1, _TRIAL_LENGTH), generator=generator)
    half = _TRIAL_LENGTH // 2
    second = torch.cat([first[:, :half], (first[:, half:] + 1) % spec.vocab_size], dim=1)
    try:
        trial = build_model(trial_spec, torch.device("cpu"), seed=0).eval()
        with torch.no_grad():
            logits, changed = (cast(Any, trial(input_ids=x, use_cache=False)).logits for x in (first, second))
    except Exception:  # noqa: BLE001  Some models run on GPUs alone, or on longer sequences.
        return None
    change = (logits - changed).abs()
    return float(change[:, :half].max() / change[:, half:].max())


def _small_enough(model: nn.Module, spec: ModelSpec) -> ModelSpec | None:
    """Return the config, or else a copy with one layer, if the weights are few enough for a trial."""
    if _numel(model) <= _LARGEST_TRIAL_NUMEL:
        return spec
    try:
        shallow = copy.deepcopy(spec)
        cast(Any, shallow).num_hidden_layers = 1
        outline, _ = constructed(shallow, torch.device("meta"))
    except Exception:  # noqa: BLE001  A config computes its number of layers, or has lists of as many values.
        return None
    return shallow if _numel(outline) <= _LARGEST_TRIAL_NUMEL else None


def _numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
