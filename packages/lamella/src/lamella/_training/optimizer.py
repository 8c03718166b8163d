"""The optimizer of a run, and the learning rate of each step."""

import math

import torch
from torch import nn

from lamella._settings.config import OptimConfig


def learning_rate(step: int, optim: OptimConfig) -> float:
    """Return the learning rate of step `step`, from 0 on: linear warm-up, then a cosine down to the final fraction."""
    warmup = optim.num_warmup_steps
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, optim.steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return optim.lr * (optim.final_lr_fraction + (1 - optim.final_lr_fraction) * cosine)


def make_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """Make an AdamW with weight decay on matrices and none on vectors (norms, biases)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    nonempty_groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(nonempty_groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)
