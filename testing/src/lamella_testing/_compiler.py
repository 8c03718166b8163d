"""The compiler's own imports, made before ranks are forked."""

import functools
import warnings

import torch
from torch import nn

from lamella_testing._ranks import start_autograd


@functools.cache
def load_compiler() -> None:
    """Compile a small module on the CPU, so that ranks forked later inherit the compiler's modules: two seconds each.

    For tests without GPUs: the compiler's look at devices could initialise CUDA, and forked ranks could not use GPUs.

    Effects: once a process, imports two hundred modules of torch.
    """
    start_autograd()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the compiler's imports
        torch.compile(nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1))
    torch.compiler.reset()
