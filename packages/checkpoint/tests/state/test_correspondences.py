"""A fused tensor is stored by part, from shards, and read back into shards."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lamella_checkpoint import Correspondence, LiveCut, LiveShard, Piece, Place, load, save, written_pieces
from lamella_checkpoint._formats.dcp_read import StoredCheckpoint
from lamella_checkpoint.testing import read_all
from lamella_layout import Chunk, Range
from lamella_testing import run_ranks

UP, DOWN = Chunk((0, 0), (3, 2)), Chunk((3, 0), (2, 2))
FUSED = Correspondence(
    left={"up": (3, 2), "down": (2, 2)},
    right={"weight": (5, 2)},
    pieces=(
        Piece(Place("up", UP), Place("weight", UP)),
        Piece(Place("down", Chunk((0, 0), (2, 2))), Place("weight", DOWN)),
    ),
)


def test_shards_are_saved_by_part(tmp_path: Path) -> None:
    def save_mine() -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(2, 5, bias=False)
        weight = model.weight.detach().clone()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        model.weight.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        save(tmp_path / "a", model=model, optimizer=optimizer, correspondences=[FUSED])
        return weight - 1

    weight = run_ranks(save_mine, 3)[0]
    tensors = read_all(StoredCheckpoint(tmp_path / "a"))
    assert torch.equal(tensors["model.up"], weight[:3]) and torch.equal(tensors["model.down"], weight[3:])
    assert torch.equal(tensors["optimizer.state.up.momentum_buffer"], torch.ones(3, 2))
    assert "model.weight" not in tensors

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.zeros(rows, 2)) for rows in (3, 2))

    parts = Parts()
    load(tmp_path / "a", model=parts)
    assert torch.equal(torch.cat([parts.up, parts.down]), weight)


def test_a_live_shard_is_written_by_part_in_views() -> None:
    rows = torch.arange(4.0).reshape(2, 2)  # Rows 2 and 3: the last of one part, the first of the other.
    cut = LiveCut([FUSED], to="left")
    pieces = written_pieces(cut, {"weight": (LiveShard.of_rows((5, 2), Range(4, 8)), rows)})
    chunks = {name: [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.__create_chunk_list__()]
             for name, value in pieces.items()}  # fmt: skip
    assert chunks == {"up": [((2, 0), (1, 2))], "down": [((0, 0), (1, 2))]}
