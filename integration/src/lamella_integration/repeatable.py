"""Kernels that give the same bits every time."""

import os

import torch


def use_repeatable_kernels() -> None:
    """Let what does the same arithmetic have the same results, bit for bit, from now on; call it before CUDA is used.

    Fused attention's backward adds up in the order in which blocks finish, and training from a random start makes a
    percent of that within ten steps.

    Effects: settings of this process; kernels get slower.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)  # A warning names what has no repeatable kernel.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
