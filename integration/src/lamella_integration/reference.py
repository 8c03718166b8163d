"""What reference models have in common: named units, and initial weights that are the same however they are stored.

Each parameter is drawn from a generator seeded by the seed and the parameter's name. So a model built on
the meta device and sharded before it has weights starts with exactly the weights of one built whole, on any
number of ranks, and no rank ever holds more than one unsharded parameter.
"""

import zlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


class ReferenceModel(nn.Module):
    """A model that says where its units are."""

    def units(self) -> list[nn.Module]:
        """Modules to shard before the root, in execution order."""
        raise NotImplementedError(f"Expected {type(self).__name__} to name its units, got none.")


def init_weights(model: nn.Module, seed: int, *, round_to: torch.dtype | None = None) -> None:
    """Fill the parameters of `model`, sharded or not, from `seed` and their names.

    Biases become 0, norm weights (one dim) 1, and matrices normal with a deviation of 1 / sqrt(last dim).

    Args:
        model: Not on meta. Names must be the unsharded model's: call before a wrapper adds a prefix.
        seed: The same on every rank.
        round_to: Round each value to this dtype, so that a backend which stores nothing wider starts equal.

    Effects: no communication; holds one unsharded fp32 parameter at a time.
    """
    for name, parameter in model.named_parameters():
        weight = _draw(name, parameter.shape, parameter.device, seed)
        if round_to is not None:
            weight = weight.to(round_to)
        with torch.no_grad():
            parameter.copy_(_as_sharded(weight.to(parameter.dtype), parameter))


def _draw(name: str, shape: torch.Size, device: torch.device, seed: int) -> torch.Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape, device=device)
    if len(shape) < 2:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(seed * 2**32 + zlib.crc32(name.encode()))
    weight = torch.empty(shape, device=device)
    return weight.normal_(std=shape[-1] ** -0.5, generator=generator)


def _as_sharded(weight: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return weight
    # Every rank has drawn the same tensor: without a source rank each one cuts out its own shard.
    return distribute_tensor(weight, parameter.device_mesh, parameter.placements, src_data_rank=None)
