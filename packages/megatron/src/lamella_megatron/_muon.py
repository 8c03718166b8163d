"""Muon for the matrices of layers and AdamW for all other parameters, as one optimizer over shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer

from lamella_engine import Rows, Whole
from lamella_layout import Keep
from lamella_megatron._wrapper import local_of

# megatron-core's scales that torch's Muon has: (muon_scale_mode, muon_extra_scale_factor) to adjust_lr_fn.
_SCALES = {("shape_scaling", 1.0): "original", ("spectral", 0.2): "match_rms_adamw"}


def keep_matrices(parameter: torch.Tensor) -> Keep:
    """For `ShardingOptions(keep_together=...)`: each matrix whole on one rank, all other parameters by rows.

    Muon orthogonalises whole matrices. A matrix of a tensor-parallel rank is the rank's part.
    """
    return Whole() if parameter.ndim == 2 else Rows(1)


class MuonAndAdam(Optimizer):
    """torch's Muon for matrices, torch's AdamW for the rest; embeddings and the output layer are of the rest.

    Args:
        groups: Parameter groups; each is divided into a group for either optimizer.
        muon: Options of `torch.optim.Muon`.
        adam: Options of `torch.optim.AdamW`.

    Attributes:
        parts: The optimizers, each over groups of its own, with the state of all.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, muon: dict[str, Any], adam: dict[str, Any]) -> None:
        groups = list(groups)
        self.parts: list[Optimizer] = []
        for make, options, is_muons in ((Muon, muon, True), (AdamW, adam, False)):
            chosen = [{**group, "params": [p for p in group["params"] if is_matrix(p) == is_muons]} for group in groups]
            if chosen := [group for group in chosen if group["params"]]:
                self.parts.append(make(chosen, **options))
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
        """Step by both.

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


def muon_maker(config: Any, parameters: Iterable[tuple[str, torch.Tensor]], tp_size: int) -> Callable[..., Optimizer]:
    """A function of parameter groups that makes Muon and AdamW, as megatron-core's config says.

    Raises:
        ValueError: The config asks for something that torch's Muon does not do; or a matrix is cut between ranks.
    """
    scale = (config.muon_scale_mode, config.muon_extra_scale_factor)
    if scale not in _SCALES:
        raise ValueError(
            "Expected `config.muon_scale_mode` and `config.muon_extra_scale_factor` to be one of torch's scales, "
            f"{list(_SCALES)}, got {scale}. Set one of them, or pass `make`."
        )
    wanted = {"muon_split_qkv": False, "muon_coefficient_type": "quintic", "muon_scalar_optimizer": "adam"}
    if tp_size > 1:
        wanted["muon_tp_mode"] = "blockwise"
    for name, value in wanted.items():
        if (found := getattr(config, name)) != value:
            raise ValueError(
                f"Expected `config.{name}` to be {value!r} for torch's Muon, got {found!r}. Set it, or pass `make`."
            )
    for name, parameter in parameters:
        if is_matrix(parameter) and len(local := local_of(parameter)) not in (0, len(parameter)):
            raise ValueError(
                f"Expected whole matrices for Muon, got {len(local)} rows of {len(parameter)} for {name!r}. Shard with "
                "options=ShardingOptions(placements=..., keep_together=lamella_megatron.training.keep_matrices)."
            )
    common = {"lr": config.lr, "weight_decay": config.weight_decay}
    muon = {
        **common,
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "ns_steps": config.muon_num_ns_steps,
        "adjust_lr_fn": _SCALES[scale],
    }
    adam = {**common, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps, "foreach": True}
    return lambda groups: MuonAndAdam(groups, muon=muon, adam=adam)
