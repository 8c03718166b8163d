"""The compiler's own imports, made before ranks are forked."""

import functools
import warnings

import torch
from torch import nn

from lamella_testing._ranks import num_visible_gpus, start_autograd


@functools.cache
def load_compiler() -> None:
    """Compile a small module on the CPU, so that ranks forked later inherit the compiler's modules: two seconds each.

    With visible GPUs nothing is compiled, and every rank loads the compiler: a backward here would start autograd's
    threads for the GPUs, after which no rank could be forked.

    Effects: once a process, imports two hundred modules of torch.
    """
    if num_visible_gpus():
        return
    start_autograd()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the compiler's imports
        torch.compile(nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1))
    torch.compiler.reset()
