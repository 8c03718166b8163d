"""The compiler's own imports, made before ranks are forked."""

import functools
import importlib
import warnings

import torch
from torch import nn


@functools.cache
def load_compiler() -> None:
    """Compile a small module on the CPU, so that ranks forked later inherit the compiler's modules: two seconds each.

    For tests without GPUs: the compiler's look at devices could initialise CUDA, and forked ranks could not use GPUs.

    Effects: once a process, imports two hundred modules of torch.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the compiler's imports
        # Without gradients: since torch 2.15 tracing a backward starts autograd's threads, which no fork has.
        torch.compile(nn.Linear(1, 1).requires_grad_(False), backend="aot_eager")(torch.ones(1, 1))
        importlib.import_module("torch._inductor.fx_passes.joint_graph")  # the backward's, a second
    torch.compiler.reset()
