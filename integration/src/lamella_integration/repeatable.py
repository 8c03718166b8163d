"""Kernels with bitwise reproducible results."""

import os

import torch


def use_repeatable_kernels() -> None:
    """Make equal arithmetic give equal bits from now on. Must precede any use of CUDA.

    Fused attention's backward sums in the order in which blocks finish, and training from a random start amplifies
    the rounding differences to a percent of the loss within ten steps.

    Effects: changes settings of this process; kernels get slower.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)  # A warning names operators without a repeatable kernel.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
