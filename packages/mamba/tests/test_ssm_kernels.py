"""The scan that tests compute with on a CPU is mamba-ssm's: the same values, and the same gradients of all inputs."""

import importlib

import pytest
import torch

from lamella_testing import run_ranks
from lamella_testing.megatron import scan_in_steps
from lamella_testing.triton_kernels import limit_autotuning

BATCH, LENGTH, HEADS, HEADDIM, GROUPS, STATE, WIDTH = 2, 32, 4, 64, 2, 64, 4
INNER = HEADS * HEADDIM
CHANNELS = INNER + 2 * GROUPS * STATE


def _inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "zxbcdt": (BATCH, LENGTH, INNER + CHANNELS + HEADS),
        "weight": (CHANNELS, WIDTH),
        "bias": (CHANNELS,),
        "dt_bias": (HEADS,),
        "A": (HEADS,),
        "D": (HEADS,),
    }
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    inputs["A"] = -inputs["A"].exp()
    return {name: tensor.cuda().requires_grad_() for name, tensor in inputs.items()}


@pytest.mark.ssm
@pytest.mark.filterwarnings("ignore::Warning")  # what mamba-ssm and Triton say of themselves
def test_the_scan_in_steps_is_the_fused_kernels() -> None:
    def on_one_gpu() -> None:
        limit_autotuning()  # before mamba-ssm imports the kernels
        kernels = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
        results = []
        for scan in (kernels.mamba_split_conv1d_scan_combined, scan_in_steps):
            inputs = _inputs()
            *scan_inputs, d = inputs.values()
            out = scan(*scan_inputs, D=d, chunk_size=16, activation="silu", headdim=HEADDIM, ngroups=GROUPS)
            gradients = torch.autograd.grad(out.square().mean(), list(inputs.values()))
            results.append({"out": out, **dict(zip(inputs, gradients, strict=True))})
        for name, expected in results[1].items():
            # The kernels multiply in TF32, with a 10-bit mantissa.
            scale = expected.abs().max().item()
            torch.testing.assert_close(results[0][name], expected, rtol=0, atol=1e-2 * scale, msg=name)

    run_ranks(on_one_gpu, 1, device="cuda", timeout_s=480.0)  # Triton compiles
