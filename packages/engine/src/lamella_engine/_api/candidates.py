"""A unit's parameters: the search, the checks, and the first move to a device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lamella_engine._modules.state import find_state
from lamella_engine._options.options import KeepFn, checked_keep
from lamella_engine._parameters.extended_form import is_extended
from lamella_engine._parameters.flat_packing import nums_per_element
from lamella_engine._parameters.group import dtypes_of
from lamella_engine._parameters.sharded_parameter import Candidate, Owner, is_sharded, name_of_sharded_original
from lamella_engine._parameters.sharding import DataAxes, PlacementFn, Sharding, local_of, sharding_of
from lamella_layout import Keep, Rows, mesh_region
from lamella_precision import DivisibleRecipe, MixedPrecisionPolicy, PlainRecipe, Recipe, refuse_quantized


def own_modules(modules: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules, and all modules below outside inner units, with dotted prefixes; each once.

    Names begin in the module; of several modules, names begin with the module's place in the list.
    """
    seen: set[int] = set()

    def walk(inner: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        if id(inner) in seen or find_state(inner) is not None:
            return
        # By id: a module that is held under several names has its parameters once.
        seen.add(id(inner))
        yield prefix, inner
        for name, child in inner.named_children():
            yield from walk(child, f"{prefix}{name}.")

    for i, module in enumerate(modules):
        yield from walk(module, f"{i}." if len(modules) > 1 else "")


def ignored_parameters(parameters: object) -> set[nn.Parameter]:
    """The parameters of `ignored_params`.

    Raises:
        TypeError: No set or other iterable of parameters: anything else would leave no parameter alone.
    """
    if parameters is None:
        return set()
    if isinstance(parameters, torch.Tensor | str) or not isinstance(parameters, Iterable):
        raise TypeError(
            f"Expected `ignored_params` to be a set of parameters, got {_kind(parameters)}. Pass {{parameter}}."
        )
    chosen = list(parameters)
    for parameter in chosen:
        if not isinstance(parameter, nn.Parameter):
            way_out = " Look names up: module.get_parameter(name)." if isinstance(parameter, str) else ""
            raise TypeError(f"Expected `ignored_params` to hold parameters alone, got {_kind(parameter)}.{way_out}")
    return set(chosen)


def _kind(value: object) -> str:
    """A value in a message: a tensor by its shape."""
    return f"a {type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def candidates_of(
    modules: list[nn.Module],
    ignored: set[nn.Parameter],
    axes: DataAxes,
    placement_fn: PlacementFn | None,
    keep_fn: KeepFn,
    policy: MixedPrecisionPolicy,
) -> list[Candidate]:
    """The unit's parameters, each once with all modules that hold the parameter."""
    candidates: dict[int, Candidate] = {}
    ignored_ids = {id(parameter) for parameter in ignored}
    for prefix, inner in own_modules(modules):
        for name, parameter in inner._parameters.items():
            if parameter is None or id(parameter) in ignored_ids:
                continue
            if isinstance(inner, torch.jit.ScriptModule):
                raise ValueError(
                    f"Expected {prefix + name!r} to be in a module of Python, got {type(inner).__name__}, whose "
                    "compiled code takes no shards. Use torch.compile in place of scripting, or leave the module's "
                    "parameters out by `ignored_params`."
                )
            if getattr(inner, "sparse", False):
                raise ValueError(
                    f"Expected {prefix + name!r} to have dense gradients, got {type(inner).__name__}(sparse=True). "
                    "Make it with sparse=False."
                )
            if id(parameter) not in candidates:
                _check_parameter(prefix + name, parameter)
                keep = checked_keep(prefix + name, keep_fn(parameter))
                resolved_policy = policy.resolved_for(parameter)
                sharding = sharding_of(prefix + name, parameter, axes, placement_fn, keep)
                if isinstance(resolved_policy.recipe, Recipe):
                    _check_recipe(prefix + name, parameter, resolved_policy.recipe)
                    if _cuts_blocks(prefix + name, parameter, sharding, resolved_policy.recipe):
                        keep = Rows(resolved_policy.recipe.block_rows)
                    if keep is not None:
                        _check_packs(prefix + name, parameter, resolved_policy.recipe, keep)
                        sharding = sharding_of(prefix + name, parameter, axes, placement_fn, keep)
                candidates[id(parameter)] = Candidate(prefix + name, parameter, [], sharding, resolved_policy)
            # Every place, also of a tied parameter: each must change forms with the unit, or it would compute with a
            # stale weight.
            candidates[id(parameter)].owners.append(Owner(inner._parameters, name, weakref.ref(inner)))
    return list(candidates.values())


def _check_recipe(name: str, parameter: nn.Parameter, recipe: Recipe) -> None:
    """Refuse a parameter that a recipe cannot serve.

    Raises:
        ValueError: The recipe has no payloads for the shape of the parameter, or of a DTensor's local part.
        NotImplementedError: The parameter comes as a DTensor, and its parts are no weights by themselves to the recipe.
    """
    if isinstance(parameter, DTensor) and not isinstance(recipe, PlainRecipe) and not _divides(parameter, recipe):
        raise NotImplementedError(
            f"Expected {name!r} to be a plain parameter, or a DTensor cut along dim 0 between matrices or blocks that "
            f"have scales of their own, got {recipe!r} for a DTensor of shape {tuple(parameter.shape)}, "
            f"{parameter.placements} over {tuple(parameter.device_mesh.shape)} ranks. Let `recipe` return None for it."
        )
    try:
        recipe.payloads(local_of(parameter).shape, parameter.dtype)
    except ValueError as error:
        raise ValueError(f"Expected a recipe that serves {name!r}, got {recipe!r}: {error}") from error


def _divides(parameter: DTensor, recipe: Recipe) -> bool:
    """Whether each part of a DTensor is encoded alone as in the whole; equal on all ranks, without communication."""
    if not isinstance(recipe, DivisibleRecipe) or parameter.ndim < 2:
        return False
    shape, sizes, placements = parameter.shape, parameter.device_mesh.shape, parameter.placements
    ranks = [range(1 if placement.is_replicate() else size) for placement, size in zip(placements, sizes, strict=True)]
    parts = [mesh_region(shape, sizes, placements, coordinate) for coordinate in product(*ranks)]
    if any(part.shape[1:] != shape[1:] for part in parts if prod(part.shape)):
        return False
    return all(recipe.divides_at(shape, run.start) for part in parts for run in part.runs[0])


def _check_packs(name: str, parameter: nn.Parameter, recipe: Recipe, keep: Keep) -> None:
    """Refuse a parameter for the flat layout whose payloads cannot be cut between the rows that `keep` names.

    Raises:
        ValueError: A payload's elements do not stand for equally many of the weight, or the weight's last block is cut
            short and may come to lie on another rank than the first.
    """
    num_rows = parameter.shape[0]
    num_kept_rows = min(keep.num_rows, num_rows) if isinstance(keep, Rows) else num_rows
    for payload in recipe.payloads(parameter.shape, parameter.dtype):
        if not prod(payload.shape):
            continue
        if parameter.numel() % prod(payload.shape) or num_kept_rows * payload.shape[0] % num_rows:
            raise ValueError(
                f"Expected {name!r} to divide into blocks of {recipe.block_rows} rows on every rank, or to be made of "
                f"whole blocks alone, as {recipe!r} needs, got shape {tuple(parameter.shape)}. Let `recipe` return "
                "None for it."
            )


def _cuts_blocks(name: str, parameter: nn.Parameter, sharding: Sharding, recipe: Recipe) -> bool:
    """Whether torch's chunks would split a recipe's block of rows between ranks.

    Raises:
        ValueError: `keep_together` lets a block be cut.
        NotImplementedError: The parameter is not sharded along dim 0.
    """
    num, keep = recipe.block_rows, sharding.keep
    if isinstance(keep, Rows) and keep.num_rows % num:
        raise ValueError(
            f"Expected `keep_together` to keep blocks of a multiple of {num} rows of {name!r} together, as {recipe!r} "
            f"does, got {keep}. Return Rows({num}), or None for it."
        )
    if sharding.dim != 0:
        raise NotImplementedError(
            f"Expected `shard_placement_fn` to leave {name!r} at dim 0, as `recipe` gives {recipe!r} for it, got dim "
            f"{sharding.dim}. Return None for it from one of the two."
        )
    axes, num_rows = sharding.axes, local_of(parameter).shape[0]
    # Both cuts count: an outer axis cuts the shards of the shard axis once more.
    cuts = {axes.num_shards, axes.num_shards * axes.num_outer_shards} - {1}
    return keep is None and any(-(-num_rows // num_ranks) % num for num_ranks in cuts)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if nn.parameter.is_lazy(parameter):
        raise ValueError(
            f"Expected {name!r} to have a shape, got a {type(parameter).__name__}, as lazy modules have until their "
            "first forward. Call the model once on a small input before fully_shard, on each rank alike."
        )
    before = "" if (original := name_of_sharded_original(parameter)) is None else f" as {original!r}"
    if is_sharded(parameter) or before:
        raise ValueError(
            f"Expected {name!r} to be in one unit only, got a parameter that is shared with a parameter already "
            f"managed by another FSDP group{before}. Tied parameters must share a unit: leave both modules to the unit "
            "around them, or use fully_shard([module_a, module_b]) to place them in the same FSDP group. Shard inner "
            "modules before outer ones."
        )
    if parameter.ndim == 0:
        raise ValueError(
            f"Expected {name!r} to have at least one dim, got a 0-D parameter: fully_shard doesn't support scalar "
            f"parameters. Change {name} to a 1D tensor with numel equal to 1."
        )
    if not is_extended(local_of(parameter)):  # an extended class says itself what its shards are, and what travels
        refuse_quantized(name, local_of(parameter))
    # FSDP2 of torch 2.15 installs gradients in `grad_dtype`; earlier versions overlook the attribute.
    if getattr(parameter, "_has_grad_dtype_override", False) and parameter.grad_dtype != parameter.dtype:
        raise NotImplementedError(
            f"Expected the gradient of {name!r} to have its dtype, {parameter.dtype}, got "
            f"grad_dtype={parameter.grad_dtype}. Leave it unset, and say `main_grads_dtype` in `mp_policy`, or "
            "`main_dtype` for main weights and gradients."
        )
    if num_hooks := len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ()):
        raise ValueError(
            f"Expected no hooks on the gradient of {name!r} before fully_shard, got {num_hooks}, which nothing would "
            "call again. Register them on the sharded parameter, by register_post_accumulate_grad_hook."
        )
    if not local_of(parameter).is_contiguous():
        raise NotImplementedError(
            f"Expected {name!r} to be contiguous, got strides {parameter.stride()} of shape {tuple(parameter.shape)}. "
            "FSDP does not support non-contiguous parameters: assign parameter.contiguous() first."
        )


def by_kind(candidates: list[Candidate]) -> list[list[Candidate]]:
    """Group parameters that can share buffers: equal axes and dtypes, and trained apart from frozen.

    In the flat layout one element of a payload stands for as many of every parameter of a group: blocks that a
    parameter's columns do not fill hold fewer.
    """
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in candidates:
        parameter, policy = candidate.parameter, candidate.policy
        kind = (parameter.requires_grad, parameter.device.type == "meta", is_extended(local_of(parameter)))
        packing = None if candidate.sharding.keep is None else nums_per_element(candidate)
        lies = (packing, candidate.sharding.axes)
        groups.setdefault((*lies, policy, *dtypes_of(parameter, policy), *kind), []).append(candidate)
    return list(groups.values())


def move_to(
    modules: list[nn.Module], device: torch.device, resting_device: torch.device, ignored: set[nn.Parameter]
) -> None:
    """Move the unit's own buffers to the device, and its parameters to their place of rest, but tensors on meta.

    Raises:
        ValueError: A DTensor that would move lies on a mesh of another kind of device.
    """
    ignored_ids = {id(parameter) for parameter in ignored}
    for _, inner in own_modules(modules):
        parameters = [(parameter, resting_device) for parameter in inner._parameters.values()]
        buffers = [(buffer, device) for buffer in inner._buffers.values()]
        for tensor, to in parameters + buffers:
            if tensor is None or id(tensor) in ignored_ids or tensor.device == to or tensor.is_meta:
                continue
            if isinstance(tensor, DTensor):
                if (kind := tensor.device_mesh.device_type) != device.type:
                    raise ValueError(
                        f"Expected DTensors of {type(inner).__name__} on a mesh of {device.type} devices, as `mesh`. "
                        f"Requires DTensor to have mesh of the same type as the FSDP mesh but got {kind} for "
                        f"DTensor and {device.type} for FSDP. Distribute it over an axis of the mesh that `mesh` is of."
                    )
                # Inside the same object in all three cases: ties, optimizers and other modules hold the Parameter
                # itself.
                tensor._local_tensor = local_of(tensor).to(to)
            elif _is_wrapper(tensor):
                # Inner tensors hold the bytes: only a swap moves them under the same object.
                moved = tensor.detach().to(to)
                moved = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
                torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]
            else:
                tensor.data = tensor.data.to(to)


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are in inner tensors, which an assignment to `data` leaves alone."""
    return is_traceable_wrapper_subclass(tensor)
