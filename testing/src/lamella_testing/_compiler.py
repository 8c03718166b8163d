"""The compiler's own imports, made before ranks are forked."""

import functools
import warnings

import torch
from torch import nn


@functools.cache
def load_compiler() -> None:
    """Compile something small on the CPU: ranks forked later have what the compiler imports, two seconds of it each.

    For tests without GPUs: what the compiler looks up could initialise CUDA, and forked ranks could not use GPUs.

    Effects: once a process, imports two hundred modules of torch.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what the compiler imports
        torch.compile(nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1))
    torch.compiler.reset()
