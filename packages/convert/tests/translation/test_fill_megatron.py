"""A live state dict is filled with a Megatron checkpoint's main weights."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lamella_checkpoint._state.fill import fill
from lamella_checkpoint._state.shards import LiveCut, LiveShard, written_pieces
from lamella_checkpoint.testing import MemorySource
from lamella_convert._translation.megatron import read_fsdp_dtensor
from lamella_convert._translation.megatron_model import from_megatron_model
from lamella_layout import Range
from lamella_testing import run_ranks


def test_main_weights_arrive_at_full_precision_and_compute_sees_their_rounding() -> None:
    exact = 1.0009765625 + 2**-20
    weight = torch.full((8, 2), exact)
    halves = {
        f"model.module.mlp.linear_fc1.weight_{half}": part for half, part in zip("wv", weight.chunk(2), strict=True)
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


def test_ranks_fill_even_and_uneven_shards_with_their_rows() -> None:
    values = torch.arange(12.0).reshape(6, 2)

    def fill_mine() -> tuple[torch.Tensor, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        even = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])
        rows = Range(0, 2) if dist.get_rank() == 0 else Range(2, 12)
        part = torch.zeros(rows.numel // 2, 2)
        cut = LiveCut(from_megatron_model({}, sizes={}), to="left")
        uneven = written_pieces(cut, {"uneven": (LiveShard.of_rows((6, 2), rows), part)})["uneven"]
        fill({"model": {"even": even, "uneven": uneven}}, MemorySource({"model.even": values, "model.uneven": values}))
        assert isinstance(even, DTensor)
        return even.to_local(), part

    (even0, part0), (even1, part1) = run_ranks(fill_mine, 2)
    assert torch.equal(torch.cat([even0, even1]), values)
    assert torch.equal(torch.cat([part0, part1]), values)
