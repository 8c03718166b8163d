"""The entry: checks what was asked, shards a module's parameters, and makes it a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lamella_buffers import CachingAllocator
from lamella_engine._context import Context
from lamella_engine._hooks import register_hooks
from lamella_engine._module import FSDPModule, attach_state, find_state
from lamella_engine._parameter_group import (
    Candidate,
    Owner,
    ParameterGroup,
    dtypes_of,
    name_of_sharded_original,
)
from lamella_engine._policies import CPUOffloadPolicy, DataParallelMeshDims, OffloadPolicy
from lamella_engine._state import FSDPState
from lamella_precision import MixedPrecisionPolicy

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | fsdp2.MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """Shard a module's parameters, gradients and optimizer state over a mesh axis, and gather them when they are used.

    The module is changed in place: its parameters become DTensors (chunks along dim 0), its class becomes
    `FSDP<Class>`, a subclass of `FSDPModule` and of its own class. Apply it to inner modules first: each call makes one
    unit of all parameters that no inner unit owns, and a unit is gathered, used and freed as one. One unit a
    transformer block and one for the rest is the usual choice.

        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())     # after sharding

    In forward a unit's parameters are gathered before it runs and freed after; in backward again, and then its
    gradients are averaged over the ranks into the shards. From the second step on, each unit is gathered while the one
    before it computes.

    Args:
        module: What to shard. Containers without a forward are refused: their hooks would never fire. Several modules
            in a list or tuple make one unit: it is gathered before the first of them runs, and freed after the last. Of
            modules nested in one another the outer one counts. Where a forward runs only some of them (`[norm, head]`,
            with the head called on chunks later), the unit is freed at the end of the outermost unit's forward.
        mesh: 1-D. None makes one over all ranks.
        reshard_after_forward: True frees the parameters between forward and backward; False keeps them, for memory
            against a second gather. None means True but for the outermost unit, whose backward comes next.
        shard_placement_fn: Dim to shard each parameter along. Only dim 0 is supported.
        mp_policy: Number formats; torch's own policy is taken too. None keeps the parameters' own.
        offload_policy: Where shards rest.
        ignored_params: Parameters that are left alone: not sharded, moved or reduced.
        dp_mesh_dims: Not supported yet.

    Returns:
        `module`, changed; every module of a list is a unit's module then, and they share one state.

    Raises:
        ValueError: No modules, or one twice; a module has no forward, was sharded before, is inside a unit already, or
            shares a parameter with another unit; a parameter is 0-D, or its gradient would be sparse.
        NotImplementedError: An argument that FSDP2 has and lamella does not support yet; the message says what is.
        RuntimeError: A unit below is in the middle of a step.

    Effects: creates a process group if there is none and `mesh` is None, which is a collective on all ranks. Else not
        a collective: every rank must hold the same values. Moves the unit's parameters and buffers to the mesh's
        device.

    Source: the signature and its meaning are torch.distributed.fsdp.fully_shard's.
    """
    modules = _outer_modules(module)
    _check_arguments(modules, reshard_after_forward, shard_placement_fn, offload_policy, dp_mesh_dims)
    mesh = _default_mesh() if mesh is None else mesh
    if mesh.ndim != 1:
        raise NotImplementedError(f"Expected a 1-D mesh, got {mesh.ndim} axes ({mesh}). Pass one axis: mesh['name'].")
    policy = _as_policy(mp_policy)
    owners = [inner for _, inner in _own_modules(modules)]
    candidates = _candidates(modules, ignored_params or set())
    device = _device_of(mesh)
    _move_to(modules, device, ignored_params or set())

    context = Context(device)
    inner = _inner_units(modules)
    for below, name in inner.items():
        _check_resting(name, below)
    allocator = CachingAllocator()
    groups = [ParameterGroup(members, mesh, policy, allocator) for members in _by_dtypes(candidates, policy)]
    state = FSDPState(groups, context, policy, _as_flag(reshard_after_forward))
    for below, name in inner.items():
        below.name, below.is_outermost = name, False
        context.add(below)

    for each in modules:
        each.__class__ = _unit_class(type(each))  # type: ignore[arg-type]
        attach_state(each, state)
    register_hooks(modules, owners, state)
    return module


def _outer_modules(module: object) -> list[nn.Module]:
    """The module, or those of several that are inside no other."""
    modules: list[Any] = list(module) if isinstance(module, list | tuple) else [module]
    if not modules:
        raise ValueError("Expected `module` to be a module or several, got an empty list.")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"Expected `module` to be an nn.Module or a list of them, got {type(each).__name__}.")
    if len(set(modules)) < len(modules):
        raise ValueError("Expected different modules in `module`, got one of them twice. Name each once.")
    inside = {id(inner) for each in modules for inner in each.modules() if inner is not each}
    return [each for each in modules if id(each) not in inside]


def _inner_units(modules: list[nn.Module]) -> dict[FSDPState, str]:
    """The units below, each once, with the names of their modules."""
    names: dict[FSDPState, list[str]] = {}
    for module in modules:
        for name, inner in module.named_modules():
            if (state := find_state(inner)) is not None:
                names.setdefault(state, []).append(name)
    return {state: ", ".join(found) for state, found in names.items()}


def _check_arguments(
    modules: list[nn.Module],
    reshard_after_forward: bool | int | None,
    shard_placement_fn: object | None,
    offload_policy: object | None,
    dp_mesh_dims: object | None,
) -> None:
    for module in modules:
        _check_module(module)
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise NotImplementedError(
            f"Expected `reshard_after_forward` to be a bool or None, got {reshard_after_forward!r}. Resharding to a "
            "smaller mesh is not supported yet."
        )
    unsupported = {
        "shard_placement_fn": shard_placement_fn is not None,
        "offload_policy": isinstance(offload_policy, CPUOffloadPolicy),
        "dp_mesh_dims": dp_mesh_dims is not None,
    }
    for name, was_given in unsupported.items():
        if was_given:
            raise NotImplementedError(f"Expected `{name}` to be left at its default: it is not supported yet.")
    if not isinstance(offload_policy, OffloadPolicy | None):
        raise TypeError(
            f"Expected `offload_policy` to be an OffloadPolicy or None, got {type(offload_policy).__name__}."
        )


def _check_module(module: nn.Module) -> None:
    if find_state(module) is not None:
        raise ValueError(
            f"Expected a module that is not a unit yet, got {type(module).__name__}: apply fully_shard once."
        )
    if isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"Expected a module with a forward, got {type(module).__name__}, whose hooks would never fire. Shard what "
            "it holds, one by one."
        )


def _as_policy(policy: MixedPrecisionPolicy | fsdp2.MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    if policy is None or isinstance(policy, MixedPrecisionPolicy):
        return policy or MixedPrecisionPolicy()
    if isinstance(policy, fsdp2.MixedPrecisionPolicy):
        return MixedPrecisionPolicy(
            policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs
        )
    raise TypeError(f"Expected `mp_policy` to be a MixedPrecisionPolicy or None, got {type(policy).__name__}.")


def _as_flag(reshard_after_forward: bool | int | None) -> bool | None:
    return None if reshard_after_forward is None else bool(reshard_after_forward)


def _check_resting(name: str, state: FSDPState) -> None:
    if not state.context.is_resting:
        raise RuntimeError(
            f"Expected the unit {name!r} to be at rest, got one in the middle of a step. Call fully_shard between "
            "steps, or reset_iter_state() after an exception."
        )
    state.reshard()


def _default_mesh() -> DeviceMesh:
    device_type = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(device_type.type if device_type else "cpu", (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


# -- parameters -----------------------------------------------------------------------------------------------------


def _own_modules(modules: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules and those below them that are in no inner unit, with dotted prefixes; each once.

    One module is where names begin; of several, each begins with its place in the list.
    """
    seen: set[int] = set()

    def walk(inner: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        if id(inner) in seen or find_state(inner) is not None:
            return
        seen.add(id(inner))
        yield prefix, inner
        for name, child in inner.named_children():
            yield from walk(child, f"{prefix}{name}.")

    for i, module in enumerate(modules):
        yield from walk(module, f"{i}." if len(modules) > 1 else "")


def _candidates(modules: list[nn.Module], ignored: set[nn.Parameter]) -> list[Candidate]:
    """The unit's parameters, each once with every place that holds it."""
    found: dict[int, Candidate] = {}
    ignored_ids = {id(parameter) for parameter in ignored}
    for prefix, inner in _own_modules(modules):
        for name, parameter in inner._parameters.items():
            if parameter is None or id(parameter) in ignored_ids:
                continue
            if getattr(inner, "sparse", False):
                raise ValueError(
                    f"Expected {prefix + name!r} to have dense gradients, got {type(inner).__name__}(sparse=True). "
                    "Make it with sparse=False."
                )
            candidate = found.setdefault(id(parameter), Candidate(prefix + name, parameter, []))
            candidate.owners.append(Owner(inner._parameters, name))
    for candidate in found.values():
        _check_candidate(candidate)
    return list(found.values())


def _check_candidate(candidate: Candidate) -> None:
    name, parameter, _ = candidate
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"Expected {name!r} to be a plain parameter, got a DTensor {parameter.placements}. Shard inner modules "
            "before outer ones, and leave a module that two units share to the unit around both. Tensor-parallel "
            "parameters are not supported yet."
        )
    if (before := name_of_sharded_original(parameter)) is not None:
        raise ValueError(
            f"Expected {name!r} to be in one unit only, got a parameter that another unit sharded as {before!r}. Tied "
            "parameters must share a unit: leave both modules to the unit around them."
        )
    if parameter.ndim == 0:
        raise ValueError(f"Expected {name!r} to have at least one dim, got a 0-D parameter. Make it of shape (1,).")


def _by_dtypes(candidates: list[Candidate], policy: MixedPrecisionPolicy) -> list[list[Candidate]]:
    """Group what can share buffers: equal dtypes, and frozen apart from trainable, which alone needs gradients."""
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in candidates:
        parameter = candidate.parameter
        key = (*dtypes_of(parameter, policy), parameter.requires_grad, parameter.device.type == "meta")
        groups.setdefault(key, []).append(candidate)
    return list(groups.values())


def _move_to(modules: list[nn.Module], device: torch.device, ignored: set[nn.Parameter]) -> None:
    """Move the unit's own parameters and buffers, but those on meta."""
    ignored_ids = {id(parameter) for parameter in ignored}
    for _, inner in _own_modules(modules):
        for tensor in (*inner._parameters.values(), *inner._buffers.values()):
            if tensor is None or id(tensor) in ignored_ids or tensor.device == device or tensor.is_meta:
                continue
            tensor.data = tensor.data.to(device)


@cache
def _unit_class(original: type[nn.Module]) -> type[nn.Module]:
    return type(f"FSDP{original.__name__}", (FSDPModule, original), {})
