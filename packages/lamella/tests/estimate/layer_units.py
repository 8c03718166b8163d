"""The function of a caller that estimates a module: each layer is a unit."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lamella_engine import fully_shard


def shard_layers(module: nn.Module, mesh: DeviceMesh) -> None:
    for layer in module.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
