"""The base of reference models: named units, and initial weights independent of sharding.

Each parameter is drawn from a generator seeded by the seed and the parameter's name. A model built on the meta device
and sharded before initialisation therefore starts with exactly the weights of an unsharded model, on any number of
ranks, and no rank ever holds more than one unsharded parameter.
"""

import zlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


class ReferenceModel(nn.Module):
    """A model with named units."""

    def units(self) -> list[nn.Module]:
        """Return the modules to shard before the root, in execution order."""
        raise NotImplementedError(f"Expected {type(self).__name__} to name its units, got none.")


def init_weights(model: nn.Module, seed: int, *, round_to: torch.dtype | None = None) -> None:
    """Fill the parameters of `model`, sharded or not, from `seed` and their names.

    Biases become 0, norm weights (one dim) 1, and matrices normal with a deviation of 1 / sqrt(last dim).

    Args:
        model: Model off the meta device, with the unsharded model's parameter names: initialise before any wrapper
            adds a prefix.
        seed: Seed, the same on every rank.
        round_to: Dtype to round each value to, for equal starts with backends that store only `round_to`.

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
    # Every rank has drawn the same tensor. Without a source rank, each rank cuts out its own shard, with no broadcast.
    return distribute_tensor(weight, parameter.device_mesh, parameter.placements, src_data_rank=None)
