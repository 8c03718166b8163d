"""A live state dict is filled with a Megatron checkpoint's main weights."""

import torch

from lamella_checkpoint._state.fill import fill
from lamella_checkpoint.testing import MemorySource
from lamella_convert._translation.megatron import read_fsdp_dtensor


def test_main_weights_arrive_at_full_precision_and_compute_sees_their_rounding():
    exact = 1.0009765625 + 2**-20
    whole = torch.full((8, 2), exact)
    halves = {
        f"model.module.mlp.linear_fc1.weight_{half}": part for half, part in zip("wv", whole.chunk(2), strict=True)
    }
    source = read_fsdp_dtensor(MemorySource(halves))
    main = torch.zeros(8, 2)
    computing = torch.zeros(8, 2, dtype=torch.bfloat16)
    fill({"model": {"mlp.linear_fc1.weight": main}}, source)
    fill({"model": {"mlp.linear_fc1.weight": computing}}, source)
    assert (main == exact).all()
    assert exact != torch.tensor(exact).bfloat16().item() == 1.0
    assert (main.bfloat16() == 1.0).all()
    assert (computing == 1.0).all()
