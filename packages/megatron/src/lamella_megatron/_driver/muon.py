"""megatron-core's config as options of Muon and AdamW over shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from lamella_engine import Rows, Whole
from lamella_layout import Keep
from lamella_optim import MuonAndAdam

# megatron-core's scales that torch's Muon has: (muon_scale_mode, muon_extra_scale_factor) to adjust_lr_fn.
_SCALES = {("shape_scaling", 1.0): "original", ("spectral", 0.2): "match_rms_adamw"}


def keep_matrices(parameter: torch.Tensor) -> Keep:
    """For `ShardingOptions(keep_together=...)`: each matrix whole on one rank, all other parameters by rows.

    Muon then steps each matrix on its rank without a collective; matrices of even shards are exchanged in each step. A
    matrix of a tensor-parallel rank is the rank's part.
    """
    return Whole() if parameter.ndim == 2 else Rows(1)


def is_matrix(parameter: torch.Tensor) -> bool:
    """Whether Muon steps a parameter."""
    return parameter.ndim == 2 and not getattr(parameter, "is_embedding_or_output_parameter", False)


def muon_maker(
    config: Any, parameters: Iterable[tuple[str, torch.Tensor]], tp_size: int, model_config: Any
) -> Callable[..., Optimizer]:
    """A function of parameter groups that makes Muon and AdamW, as megatron-core's config says.

    Raises:
        ValueError: The config asks for something that torch's Muon does not do; or a matrix of queries, keys and values
            has other rows than the model's config says.
    """
    parameters = list(parameters)
    scale = (config.muon_scale_mode, config.muon_extra_scale_factor)
    if scale not in _SCALES:
        raise ValueError(
            "Expected `config.muon_scale_mode` and `config.muon_extra_scale_factor` to be one of torch's scales, "
            f"{list(_SCALES)}, got {scale}. Set one of them, or pass `make`."
        )
    required = {"muon_coefficient_type": "quintic", "muon_scalar_optimizer": "adam"}
    if tp_size > 1:
        required["muon_tp_mode"] = "blockwise"
    for name, required_value in required.items():
        if (configured := getattr(config, name)) != required_value:
            raise ValueError(
                f"Expected `config.{name}` to be {required_value!r} for torch's Muon, got {configured!r}. Set it, or "
                "pass `make`."
            )
    common = {"lr": config.lr, "weight_decay": config.weight_decay}
    muon_options = {
        **common,
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "ns_steps": config.muon_num_ns_steps,
        "adjust_lr_fn": _SCALES[scale],
    }
    adam_options = {**common, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps, "fused": True}
    fused = _fused(parameters, model_config) if config.muon_split_qkv else None
    return lambda groups: MuonAndAdam(groups, is_matrix=is_matrix, muon=muon_options, adam=adam_options, fused=fused)


def _fused(parameters: Iterable[tuple[str, torch.Tensor]], model_config: Any) -> dict[torch.Tensor, tuple[int, ...]]:
    """Matrices of queries, keys and values, with the rows of each for one query group.

    Raises:
        ValueError: A matrix has no whole number of query groups.

    Source: `_get_qkv_split_shapes` of megatron-core 0.19.2.
    """
    matrices = {
        name: parameter for name, parameter in parameters if "linear_qkv.weight" in name and is_matrix(parameter)
    }
    if not matrices:
        return {}
    kv = model_config.kv_channels
    queries = model_config.num_attention_heads // model_config.num_query_groups * kv
    gates = (queries,) if getattr(model_config, "attention_output_gate", False) else ()
    rows = (queries, *gates, kv, kv)
    for name, matrix in matrices.items():
        if len(matrix) % sum(rows):
            raise ValueError(
                f"Expected {name!r} to have {sum(rows)} rows for each query group, got {len(matrix)} rows. Set "
                "config.muon_split_qkv=False."
            )
    return dict.fromkeys(matrices.values(), rows)
