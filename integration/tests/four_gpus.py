"""Set-ups of tests on four GPUs: meshes, and ways to shard over meshes."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lamella_engine import DDP, HFSDP, HSDP, ZERO1, ZERO2, ZERO3, ShardingOptions

Options = Callable[[], dict[str, Any]]


@cache
def mesh(*shape: int) -> DeviceMesh:
    """All ranks as a single axis, or as outer by inner."""
    return init_device_mesh("cuda", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


# Options of `fully_shard`, made on the ranks.
WAYS: dict[str, Options] = {
    "DDP": lambda: {"mesh": mesh(4), "options": ShardingOptions(placements=DDP)},
    "ZERO1": lambda: {"mesh": mesh(4), "options": ShardingOptions(placements=ZERO1)},
    "ZERO2": lambda: {"mesh": mesh(4), "options": ShardingOptions(placements=ZERO2)},
    "ZERO3": lambda: {"mesh": mesh(4), "options": ShardingOptions(placements=ZERO3)},
    "HSDP as FSDP2": lambda: {"mesh": mesh(2, 2)},
    "HSDP, ZERO1": lambda: {"mesh": mesh(2, 2), "options": ShardingOptions(placements=(HSDP, ZERO1))},
    "HSDP, ZERO2": lambda: {"mesh": mesh(2, 2), "options": ShardingOptions(placements=(HSDP, ZERO2))},
    "HSDP, ZERO3": lambda: {"mesh": mesh(2, 2), "options": ShardingOptions(placements=(HSDP, ZERO3))},
    "HFSDP, ZERO3": lambda: {"mesh": mesh(2, 2), "options": ShardingOptions(placements=(HFSDP, ZERO3))},
    "pairs hold the whole after forward": lambda: {"mesh": mesh(4), "reshard_after_forward": 2},
}
