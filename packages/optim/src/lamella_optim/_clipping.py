"""Clipping gradients by their global norm, on however many meshes they lie."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lamella_engine.extending import all_reduce_anywhere, finish_deferred, groups_that_share, local_of


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients down to a joint norm of at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, which serves as well where all parameters lie on one mesh; this function takes
    parameters on any meshes, sharded or replicated, and plain parameters beside them. For shards on the CPU torch's
    function needs a process group with a CPU backend ("cpu:gloo,cuda:nccl"), and this function does not.

    Args:
        parameters: Parameters with the gradients to clip; the same on every rank. Plain tensors count as equal on all
            ranks.
        max_norm: Largest norm after clipping.
        norm_type: p of the p-norm, above 0; may be infinity.
        error_if_nonfinite: Raise an error for a NaN or infinite norm, instead of scaling by it.
        foreach: False scales one by one; otherwise all at once.

    Returns:
        The norm before clipping, 0-D, equal on every rank; float32, or float64 if a gradient is wider.

    Raises:
        ValueError: A gradient is `Partial`, or `norm_type` is not above 0.
        RuntimeError: The norm is not finite, and `error_if_nonfinite` was given.

    Effects: collective: an all-reduce of one number (two for infinity) for each set of mesh axes that gradients are
        sharded along, an axis; on the current stream. No host sync except for `error_if_nonfinite`, and for gradients
        on the CPU in a group without a CPU backend: their norms are summed on the group's device.
    """
    parameter_list = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not norm_type > 0:
        raise ValueError(f"Expected `norm_type` above 0, got {norm_type}. 2.0 is the Euclidean norm.")
    finish_deferred()
    gradients = [parameter.grad for parameter in parameter_list if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    total = _total_norm(gradients, float(norm_type))
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"Expected a finite norm of the gradients, got {total.item()}. lamella_engine.find_nonfinite() "
            "says where; leave error_if_nonfinite at False to scale by it all the same."
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    locals_ = [local_of(gradient) for gradient in gradients]
    with torch.no_grad():
        if foreach is False:
            for local in locals_:
                local.mul_(scale.to(local.dtype))
        else:
            for device in dict.fromkeys(local.device for local in locals_):  # units may rest on the CPU, or not
                torch._foreach_mul_([local for local in locals_ if local.device == device], scale.to(device))
    return total


def _total_norm(gradients: list[torch.Tensor], p: float) -> torch.Tensor:
    """The norm over all gradients, from one norm for each set of process groups."""
    together: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups = tuple(groups_that_share(gradient)) if isinstance(gradient, DTensor) else ()
        together.setdefault(groups, []).append(local_of(gradient))
    norms = [_norm_over(groups, locals_, p) for groups, locals_ in together.items()]
    return _norm_of(norms, p)


def _norm_over(groups: tuple[dist.ProcessGroup, ...], locals_: list[torch.Tensor], p: float) -> torch.Tensor:
    owned: dict[torch.dtype, list[torch.Tensor]] = {}
    for local in locals_:
        owned.setdefault(torch.promote_types(local.dtype, torch.float32), []).append(local)
    # One for each dtype: all ranks must send the same dtype, and a rank may own no element.
    norms = [torch.zeros((), dtype=dtype.to_real(), device=locals_[0].device) for dtype in owned]
    for dtype, locals_of_dtype in owned.items():
        if owns := [local for local in locals_of_dtype if local.numel() > 0]:
            norms += torch._foreach_norm(owns, p, dtype=dtype)
    norm = _norm_of(norms, p)
    if math.isinf(p):
        return _largest_over(groups, norm)
    norm = norm.pow(p)
    for group in groups:
        all_reduce_anywhere(norm, group, dist.ReduceOp.SUM)
    return norm.pow(1 / p)


def _largest_over(groups: tuple[dist.ProcessGroup, ...], norm: torch.Tensor) -> torch.Tensor:
    # NaN travels beside: a collective's maximum may lose a NaN, and ranks would clip by different norms.
    norm_and_nan = torch.stack([norm, norm.isnan().to(norm.dtype)])
    for group in groups:
        all_reduce_anywhere(norm_and_nan, group, dist.ReduceOp.MAX)
    return torch.where(norm_and_nan[1] != 0, math.nan, norm_and_nan[0])


def _norm_of(norms: list[torch.Tensor], p: float) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), p)
    return norm
