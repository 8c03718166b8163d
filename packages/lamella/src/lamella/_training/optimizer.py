"""The optimizer of a run, and the learning rate of each step."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from lamella._model.matrices import MUON
from lamella._settings.sections import OptimConfig
from lamella._training.narrow_states import narrow_adamw
from lamella._training.optimizer_class import ADAMW, OptimizerClass, muon_options
from lamella_optim import MuonAndAdam, step_on_local_shards


def learning_rate(step: int, optim: OptimConfig) -> float:
    """Return the learning rate of step `step`, from 0 on: linear warm-up, then the schedule, to the final fraction."""
    warmup = optim.num_warmup_steps
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    num_after = max(1, optim.steps - warmup)
    share = _share(min(1.0, (step - warmup) / num_after), num_after, optim)
    return optim.lr * (optim.final_lr_fraction + (1 - optim.final_lr_fraction) * share)


def _share(done: float, num_after: int, optim: OptimConfig) -> float:
    """Return the share of the way from the final learning rate up to `--lr`.

    Args:
        done: The share of the steps after the warm-up that have been made.
        num_after: The number of the steps after the warm-up.
        optim: The schedule, and the number of all steps.
    """
    if optim.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if optim.schedule == "linear":
        return 1 - done
    if optim.schedule == "wsd":
        num_falling = min(optim.decay_fraction * optim.steps, num_after)
        return min(1.0, (1 - done) * num_after / num_falling)
    return 1.0


def make_optimizer(
    model: nn.Module, optim: OptimConfig, matrices: Collection[str] = (), *, is_captured: bool = False
) -> torch.optim.Optimizer:
    """Make the optimizer of the trained parameters, with weight decay on matrices and none on vectors (norms, biases).

    Args:
        model: The model, sharded.
        optim: The settings of the optimizer.
        matrices: The names of the matrices that Muon steps.
        is_captured: AdamW's steps go into a CUDA graph, which reads the learning rate from a tensor.

    Raises:
        ConfigError: The optimizer of an import path is not elementwise on this device.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    nonempty_groups: list[dict[str, Any]] = [group for group in groups if group["params"]]
    if optim.states != "fp32":
        return narrow_adamw(nonempty_groups, optim)
    adam: dict[str, Any] = {"lr": optim.lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps, "fused": True}
    if is_captured:
        device = parameters[0].device
        adam |= {"lr": torch.tensor(optim.lr, device=device), "capturable": device.type == "cuda"}
    if optim.optimizer == ADAMW:
        return torch.optim.AdamW(nonempty_groups, **adam)
    if optim.optimizer == MUON:
        muon_parameters = {parameter for name, parameter in model.named_parameters() if name in matrices}
        muon = {"lr": optim.lr, **muon_options(optim)}
        return MuonAndAdam(nonempty_groups, is_matrix=muon_parameters.__contains__, muon=muon, adam=adam)
    return _imported_optimizer(nonempty_groups, optim, parameters[0].device)


def _imported_optimizer(
    groups: list[dict[str, Any]], optim: OptimConfig, device: torch.device
) -> torch.optim.Optimizer:
    optimizer_class = OptimizerClass.of(optim)
    if device.type != "cpu":  # The trial on the CPU was before the run.
        optimizer_class.check_elementwise(device)
    optimizer = optimizer_class.make(groups)
    # torch's own classes step on plain shards already. Other classes' kernels may know no DTensors.
    return optimizer if type(optimizer).__module__.startswith("torch.optim") else step_on_local_shards(optimizer)


def constant_settings(optimizer: torch.optim.Optimizer, optim: OptimConfig) -> list[dict[str, object]]:
    """Return the settings of each group that count in a resumed run in place of the checkpoint's.

    A class by import path may count in its groups (steps, estimates): of its settings only those of the run are taken.
    """
    names = None if optim.optimizer in (ADAMW, MUON) else {"lr", "weight_decay", *OptimizerClass.of(optim).options}
    return [
        {name: setting for name, setting in group.items() if name != "params" and (names is None or name in names)}
        for group in optimizer.param_groups
    ]
