"""Muon for the matrices of layers and AdamW for all other parameters, as one optimizer over shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer
from torch.optim._muon import muon

from lamella_engine import Rows, Whole
from lamella_engine.extending import local_of
from lamella_layout import Keep

_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")

# megatron-core's scales that torch's Muon has: (muon_scale_mode, muon_extra_scale_factor) to adjust_lr_fn.
_SCALES = {("shape_scaling", 1.0): "original", ("spectral", 0.2): "match_rms_adamw"}


def keep_matrices(parameter: torch.Tensor) -> Keep:
    """For `ShardingOptions(keep_together=...)`: each matrix whole on one rank, all other parameters by rows.

    Muon orthogonalises whole matrices. A matrix of a tensor-parallel rank is the rank's part.
    """
    return Whole() if parameter.ndim == 2 else Rows(1)


class SplitMuon(Muon):
    """torch's Muon for matrices that hold several, their rows in turns, such as queries, keys and values.

    Each of the several is a matrix of its own for orthogonalisation and scale; the momentum lies as the whole matrix.
    The option `rows` of a group is the number of rows of each in a turn.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # of `MuonAndAdam`, which has the closure
        """Step all matrices of which this rank has the rows."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                    _step_in_turns(group, *map(local_of, (parameter, parameter.grad, state["momentum_buffer"])))


def _step_in_turns(
    group: Mapping[str, Any], weight: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor
) -> None:
    """Step the several matrices of one, on copies: torch's Muon takes matrices, and a matrix's rows lie apart."""
    if not len(weight):
        return
    rows, width = group["rows"], weight.shape[1]
    options = {name: group[name] for name in _OPTIONS}
    turns = [torch.split(tensor.view(-1, sum(rows), width), list(rows), 1) for tensor in (weight, gradient, momentum)]
    for parts in zip(*turns, strict=True):
        own_weight, own_gradient, own_momentum = (
            part.clone(memory_format=torch.contiguous_format).view(-1, width) for part in parts
        )
        muon([own_weight], [own_gradient], [own_momentum], **options, has_complex=False)
        parts[0].copy_(own_weight.view_as(parts[0]))
        parts[2].copy_(own_momentum.view_as(parts[2]))


class MuonAndAdam(Optimizer):
    """torch's Muon for matrices, torch's AdamW for the rest; embeddings and the output layer are of the rest.

    Args:
        groups: Parameter groups; each is divided into a group for either optimizer.
        muon: Options of `torch.optim.Muon`.
        adam: Options of `torch.optim.AdamW`.
        fused: Matrices that hold several, as for `SplitMuon`, and the rows of each of the several in a turn.

    Attributes:
        parts: The optimizers, each over groups of its own, with the state of all.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        muon: dict[str, Any],
        adam: dict[str, Any],
        fused: Mapping[torch.Tensor, tuple[int, ...]] | None = None,
    ) -> None:
        groups, fused = list(groups), fused or {}
        chooses_by_class: dict[type[Optimizer], Callable[[torch.Tensor], bool]] = {
            Muon: lambda parameter: is_matrix(parameter) and parameter not in fused,
            SplitMuon: lambda parameter: is_matrix(parameter) and parameter in fused,
            AdamW: lambda parameter: not is_matrix(parameter),
        }
        self.parts: list[Optimizer] = []
        for kind, chooses in chooses_by_class.items():
            chosen = [{**group, "params": list(filter(chooses, group["params"]))} for group in groups]
            if chosen := [group for group in chosen if group["params"]]:
                if kind is SplitMuon:
                    chosen = [{**group, "rows": fused[group["params"][0]]} for group in chosen]
                self.parts.append(kind(chosen, **(adam if kind is AdamW else muon)))
        # A checkpoint tells optimizers apart by the names of their defaults.
        groups = [{"params": group["params"]} for part in self.parts for group in part.param_groups]
        super().__init__(groups, {"muon": muon, "adam": adam})
        # One dict a group and one state for all: learning rates are set here, and a state dict covers both.
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self._share()

    def _share(self) -> None:
        """Let the parts step on this optimizer's groups and state."""
        begin = 0
        for part in self.parts:
            end = begin + len(part.param_groups)
            part.__setstate__({"state": self.state, "param_groups": self.param_groups[begin:end]})
            begin = end

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step by all parts.

        Args:
            closure: Makes the gradients anew.

        Returns:
            The closure's result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # Every load brings new groups and a new state.
        self._share()


def is_matrix(parameter: torch.Tensor) -> bool:
    """Whether Muon steps a parameter."""
    return parameter.ndim == 2 and not getattr(parameter, "is_embedding_or_output_parameter", False)


def muon_maker(
    config: Any, parameters: Iterable[tuple[str, torch.Tensor]], tp_size: int, model_config: Any
) -> Callable[..., Optimizer]:
    """A function of parameter groups that makes Muon and AdamW, as megatron-core's config says.

    Raises:
        ValueError: The config asks for something that torch's Muon does not do; a matrix is cut between ranks; or a
            matrix of queries, keys and values has other rows than the model's config says.
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
    for name, parameter in parameters:
        if is_matrix(parameter) and len(local := local_of(parameter)) not in (0, len(parameter)):
            raise ValueError(
                f"Expected whole matrices for Muon, got {len(local)} rows of {len(parameter)} for {name!r}. Shard with "
                "options=ShardingOptions(placements=..., keep_together=lamella_megatron.training.keep_matrices)."
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
    return lambda groups: MuonAndAdam(groups, muon=muon_options, adam=adam_options, fused=fused)


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
