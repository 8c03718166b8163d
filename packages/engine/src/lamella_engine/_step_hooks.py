"""What hooks around an optimizer's step ask: which parameters it holds, and whether a compiler traces it."""

from __future__ import annotations

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer


def held_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_compiled() -> bool:
    """Whether a compiler traces what asks this, or what comes after it. Not to be asked where Dynamo is disabled."""
    # Dynamo answers the first question itself where it traces this. It leaves out a frame that has no operators, and is
    # then still there for the step's.
    return is_dynamo_compiling() or get_eval_frame_callback() is not None
