"""The entry: checks the arguments, shards a module's parameters, and makes the module a unit."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lamella_buffers import Transport, transport_for
from lamella_engine._api.candidates import by_kind, candidates_of, ignored_parameters, move_to, own_modules
from lamella_engine._api.module import FSDPModule
from lamella_engine._api.outside_holders import refuse_outside_holders
from lamella_engine._api.own_names import hidden_names
from lamella_engine._api.reads import explain_undeclared, note_in_unit, units_read
from lamella_engine._api.verbs import UnitVerbs
from lamella_engine._common.errors import MisuseError
from lamella_engine._modules.attached import attach_state, is_torchs_unit, view_of
from lamella_engine._modules.hooks import register_hooks
from lamella_engine._modules.private_view import StateView
from lamella_engine._modules.state import FSDPState, find_state
from lamella_engine._optimizer_hooks import register_step_hooks
from lamella_engine._options.options import DEFAULT_OPTIONS, ShardingOptions, as_keep_fn
from lamella_engine._options.placements import Strategy
from lamella_engine._options.policies import DataParallelMeshDims, OffloadPolicy
from lamella_engine._parameters.new_group import new_group
from lamella_engine._parameters.offload import CPU, Offload
from lamella_engine._parameters.registrations import watch
from lamella_engine._parameters.sharded_parameter import Candidate, replace_originals
from lamella_engine._parameters.sharding import DataAxes, PlacementFn
from lamella_engine._parameters.strategy import strategy_of
from lamella_engine._tree.tree import Tree
from lamella_engine._unit.unit import Unit
from lamella_precision import MixedPrecisionPolicy

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])

# Bound here: a program may rebind torch's names.
_TorchsPolicy = fsdp2.MixedPrecisionPolicy
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | fsdp2.MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    options: ShardingOptions = DEFAULT_OPTIONS,
) -> M:
    """Shard a module's parameters, gradients and optimizer state over a mesh axis, and gather them when they are used.

    The module is changed in place: its parameters become DTensors (chunks along dim 0), its class becomes
    `FSDP<Class>`, a subclass of `FSDPModule` and of its own class. Apply `fully_shard` to inner modules first: each
    call makes one unit of all parameters that no inner unit owns, and a unit is gathered, used and freed as a whole.
    One unit a transformer block and one for the rest is the usual choice.

        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())     # after sharding

    A unit's parameters are gathered before forward and freed after; in backward again, and then the unit's gradients
    are averaged over the ranks into the shards. From the second step on, each unit is gathered while the unit before
    computes.

    Args:
        module: The module to shard. Containers without a forward are refused: their hooks would never fire. Several
            modules in a list or tuple make one unit: gathered before the first of them runs, and freed after the last.
            Of modules nested in one another the outer one counts. If a forward runs only some of the modules (`[norm,
            head]`, with the head called on chunks later), the unit is freed at the end of the outermost unit's forward.
        mesh: 1-D: parameters are sharded over the axis. 2-D with names: replicated over the first axis and sharded over
            the second (HSDP). None makes a 1-D mesh over all ranks. Parameters may come as DTensors on other axes of
            the same root mesh (tensor or expert parallel).
        reshard_after_forward: True frees the parameters between forward and backward; False keeps them, for memory
            against a second gather. None means True but for the outermost unit, whose backward comes next. A number, a
            factor of the ranks that share a parameter, keeps 1 / number of each parameter: in backward only so many
            neighbours gather from each other.
        shard_placement_fn: Returns for each parameter the dim to shard along (None means dim 0; another dim must
            divide, and costs a staging copy each way), and with FSDP2's `ShardPlacementResult` a mesh of the
            parameter's own.
        mp_policy: Number formats; torch's own policy is taken too. None keeps the parameters' own.
        offload_policy: `CPUOffloadPolicy` lets shards, gradients and optimizer state rest on the CPU, in pinned memory
            unless the policy turns pinning off; the optimizer steps on the CPU. Each gather copies this rank's shards
            to the device, each reduction the gradients back, and the host waits for the gradients at the end of
            backward.
        ignored_params: Parameters that are left alone: not sharded, moved or reduced.
        dp_mesh_dims: Names the data axes of `mesh`, which is then the whole mesh: every parameter must be a DTensor on
            the mesh, replicated over the data axes.
        options: lamella's own choices: the ZeRO stage, an allocator, the flat layout, budgets of bytes, a check of the
            order (`ShardingOptions`). The defaults are FSDP2's behaviour. FSDP2 has no such argument.

    Returns:
        `module`, changed; every module of a list is a unit's module then, and the modules share one state.

    Raises:
        ValueError: No modules, or one twice; a module has no forward, was sharded before, or a part of the module by
            torch's own FSDP2; the module is inside a unit already, or shares a parameter with another unit; a parameter
            is 0-D or has no shape yet (lazy modules), its gradient would be sparse or has hooks already, a scripted
            module holds the parameter, or an object that is no module keeps the parameter too; the mesh or
            `dp_mesh_dims` name no data axes; `shard_placement_fn` returns an unknown value; `placements` do not fit the
            mesh or `reshard_after_forward`;
            a unit below has another value in a field of `options` that belongs to the tree; a parameter's class defines
            only one of `fsdp_pre_all_gather` and `fsdp_post_all_gather`, or takes other arguments; a parameter that a
            module reads directly (`declare_reads`) is missing, or cannot be gathered with the module.
        TypeError: An argument is of the wrong type.
        NotImplementedError: A dim other than the first does not divide, a parameter is not contiguous or has a
            `grad_dtype` of its own, or a parameter whose class defines the gather has an unsupported placement.
        RuntimeError: A unit below is in the middle of a step.
        OutOfMemoryError: No memory. With a note that names the unit, its module is of no use: whole values are gone.

    Effects: creates a process group if there is none and `mesh` is None, which is a collective on all ranks. On GPUs
        the first call on a mesh axis without an allocator is a collective on the axis, after which the host waits for
        the device (`lamella_buffers.copy_engines_of`). Else not a collective: every rank must hold the same values, as
        each keeps the rows of its own copy, and nothing is broadcast. Moves the unit's parameters and buffers to the
        mesh's device; with `CPUOffloadPolicy` parameters to the CPU. The process's first call registers two hooks with
        torch, around every step of a `torch.optim` optimizer.

    Source: the signature and its meaning are torch.distributed.fsdp.fully_shard's.
    """
    modules = _outer_modules(module)
    _check_arguments(modules, mesh, shard_placement_fn, reshard_after_forward, offload_policy, options)
    ignored = ignored_parameters(ignored_params)
    inner = _inner_units(modules)
    for below, name in inner.items():
        below.tree.options.check_inside(options, name)
    axes = DataAxes.of(_default_mesh() if mesh is None else mesh, dp_mesh_dims)
    axes, strategy = strategy_of(options.placements, axes)
    _check_stage(strategy, reshard_after_forward)
    policy = as_policy(mp_policy)
    # Without scripted modules, which take no hooks: all of their parameters are ignored, or `candidates_of` refuses.
    named_owners = [entry for entry in own_modules(modules) if not isinstance(entry[1], torch.jit.ScriptModule)]
    owners = [inner for _, inner in named_owners]
    device = _device_of(axes.mesh)
    keep_fn = as_keep_fn(options.keep_together)
    candidates = candidates_of(modules, ignored, axes, shard_placement_fn, keep_fn, policy)
    refuse_outside_holders(own_modules(modules), {id(candidate.parameter): candidate.name for candidate in candidates})
    for below, name in inner.items():
        below.rest_before_put_inside(name)
    read = units_read(
        own_modules(modules),
        inner,
        module_ids={id(submodule) for module in modules for submodule in module.modules()},
        strategy=strategy,
        num_neighbours=None if isinstance(reshard_after_forward, bool) else reshard_after_forward,
    )
    neighbours = _neighbours(candidates, reshard_after_forward)
    offload = Offload.of(offload_policy, device)
    _warn_of_hidden(modules)
    classes = [_unit_class(type(outer)) for outer in modules]  # type: ignore[arg-type]  # a class may refuse
    # Before shards are made: each shard is allocated where its parameter lies.
    move_to(modules, device, CPU if offload else device, ignored)

    tree = Tree(device, options)
    groups = [
        new_group(members, options.allocator, neighbours=neighbours.get(members[0].sharding.axes), offload=offload)
        for members in by_kind(candidates)
    ]
    # Every refusal is above: the originals' values go with the candidates, and no error could bring them back.
    for group in groups:
        replace_originals(group.parameters)
    del candidates  # they hold the originals, whose bytes must go before the unsharded buffers are allocated
    try:
        for group in groups:
            group.build_unsharded()
    except Exception as error:
        classes_of_unit = ", ".join(type(outer).__name__ for outer in modules)
        error.add_note(
            f"Expected memory for the unsharded parameters of the unit {classes_of_unit} with "
            f"{groups[0].parameters[0].name!r} for a moment, got an error. Its modules hold shards of no unit now, and "
            "whole values nowhere: build them anew to call fully_shard again, with more memory or on smaller modules."
        )
        raise
    unit = Unit(groups, tree.context, _as_flag(reshard_after_forward), strategy)
    state = FSDPState(unit, tree, policy, options)
    former_modules = [former for below in read for former in _modules_of(below, modules)]
    _put_inside(state, inner, read)
    for outer, unit_class in zip(modules, classes, strict=True):
        object.__setattr__(outer, "__class__", unit_class)  # past a model's own `__setattr__`, which may refuse
        state.hooks_of_outermost.append(outer.register_forward_hook(explain_undeclared, always_call=True))
    hooks = register_hooks(modules, owners, state)
    attach_state(modules, state, StateView(state, modules, policy, hooks), former_modules=former_modules)
    note_in_unit(owners)
    watch(named_owners, unit.parameters)
    register_step_hooks()
    return module


fully_shard.state = view_of  # type: ignore[attr-defined]  # as FSDP2's function has one


def _outer_modules(module: object) -> list[nn.Module]:
    """The module, or the modules of a list outside all other modules of the list."""
    modules: list[Any] = list(module) if isinstance(module, list | tuple) else [module]
    if not modules:
        raise ValueError("Expected `module` to be a module or several, got an empty list.")
    for outer in modules:
        if not isinstance(outer, nn.Module):
            raise TypeError(f"Expected `module` to be an nn.Module or a list of them, got {type(outer).__name__}.")
    if len(set(modules)) < len(modules):
        raise ValueError("Expected different modules in `module`, got one of them twice. Name each once.")
    inner_ids = {id(inner) for outer in modules for inner in outer.modules() if inner is not outer}
    return [outer for outer in modules if id(outer) not in inner_ids]


def _inner_units(modules: list[nn.Module]) -> dict[FSDPState, str]:
    """The units below, each once, with the names of their modules."""
    names: dict[FSDPState, list[str]] = {}
    for module in modules:
        for name, inner in module.named_modules():
            if (state := find_state(inner)) is not None and id(inner) in state.unit.parameters.module_ids:
                names.setdefault(state, []).append(name)
    return {state: ", ".join(paths) for state, paths in names.items()}


def _put_inside(outer: FSDPState, inner: dict[FSDPState, str], read: Collection[FSDPState]) -> None:
    """Make units inner units of `outer`, under their names; the outer unit takes over the units in `read`."""
    for below, name in inner.items():
        below.put_inside(outer, name)
        if below not in read:
            outer.tree.add(below.unit)
    for below in read:
        outer.take_over(below)


def _modules_of(state: FSDPState, modules: list[nn.Module]) -> list[nn.Module]:
    return [inner for module in modules for inner in module.modules() if find_state(inner) is state]


def _check_arguments(
    modules: list[nn.Module],
    mesh: object,
    shard_placement_fn: object,
    reshard_after_forward: object,
    offload_policy: object | None,
    options: object,
) -> None:
    for module in modules:
        _check_module(module)
    if not isinstance(mesh, DeviceMesh | None):
        raise TypeError(
            f"Expected `mesh` to be a DeviceMesh or None, got {mesh!r}. Make one by "
            "torch.distributed.device_mesh.init_device_mesh."
        )
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(
            f"Expected `shard_placement_fn` to be a function of a parameter, got {shard_placement_fn!r}. Write "
            f"shard_placement_fn=lambda parameter: {shard_placement_fn!r}."
        )
    is_count = isinstance(reshard_after_forward, int) and reshard_after_forward >= 1
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool) or is_count):
        raise ValueError(
            f"Expected `reshard_after_forward` to be a bool, a number of ranks or None, got {reshard_after_forward!r}: "
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, not "
            f"{reshard_after_forward}."
        )
    if not isinstance(offload_policy, OffloadPolicy | None):
        raise TypeError(
            f"Expected `offload_policy` to be an OffloadPolicy or None, got {type(offload_policy).__name__}."
        )
    if not isinstance(options, ShardingOptions):
        raise TypeError(
            f"Expected `options` to be ShardingOptions, got {type(options).__name__}. Write "
            "options=ShardingOptions(...)."
        )


def _check_stage(strategy: Strategy, reshard_after_forward: bool | int | None) -> None:
    if strategy.keeps_copy and reshard_after_forward:
        raise ValueError(
            f"Expected no `reshard_after_forward` with `placements` that keep parameters whole, got "
            f"{reshard_after_forward!r}. Choose ZERO3 to free them after forward."
        )


def _check_module(module: nn.Module) -> None:
    if find_state(module) is not None:
        raise MisuseError(
            f"Expected a module that is not a unit yet, got {type(module).__name__}: apply fully_shard once. Each "
            "distinct composable distributed API can only be applied to a module once."
        )
    for name, inner in module.named_modules():
        if is_torchs_unit(inner):
            raise MisuseError(
                "Expected a module with no units of torch's own FSDP2 in it, got "
                f"{repr(name) if name else 'the module itself'} sharded by that. Shard all of a model with one of the "
                "two: import lamella's fully_shard everywhere, or call lamella_engine.install() before anything is "
                "sharded."
            )
    if isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"Expected a module with a forward, got {type(module).__name__}, whose hooks would never fire. Shard the "
            "modules inside, one by one: fully_shard does not support containers that do not implement forward."
        )


def as_policy(policy: MixedPrecisionPolicy | fsdp2.MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """A policy of this package's; None keeps every parameter's own dtype.

    Raises:
        TypeError: The policy is neither this package's nor torch's.
    """
    if policy is None or isinstance(policy, MixedPrecisionPolicy):
        return policy or MixedPrecisionPolicy()
    if isinstance(policy, _TorchsPolicy):
        return MixedPrecisionPolicy(
            policy.param_dtype,
            policy.reduce_dtype,
            policy.output_dtype,
            policy.cast_forward_inputs,
            param_dtype_override_fn=getattr(policy, "param_dtype_override_fn", None),  # torch 2.15
        )
    raise TypeError(f"Expected `mp_policy` to be a MixedPrecisionPolicy or None, got {type(policy).__name__}.")


def _as_flag(reshard_after_forward: bool | int | None) -> bool | None:
    """Whether parameters go after forward; False for a factor of 1, where each rank keeps whole parameters."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    return reshard_after_forward != 1


def _neighbours(candidates: list[Candidate], reshard_after_forward: bool | int | None) -> dict[DataAxes, Transport]:
    """The ranks that share larger parts between forward and backward, for each mesh; none without a number."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return {}
    all_axes = dict.fromkeys(candidate.sharding.axes for candidate in candidates)
    groups = {axes: axes.group_of(reshard_after_forward) for axes in all_axes}
    # As many neighbours as ranks is True, and one is False.
    return {axes: transport_for(group, axes.mesh.device_type) for axes, group in groups.items() if group is not None}


def _default_mesh() -> DeviceMesh:
    device_type = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(device_type.type if device_type else "cpu", (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


@cache
def _unit_class(original: type[nn.Module]) -> type[nn.Module]:
    # `UnitVerbs` is named once more, behind the last of the model's classes: all of these come before it in the order
    # that Python looks names up in. `Generic` is no base without parameters, and has no names of a model.
    last = next(cls for cls in reversed(original.__mro__[:-1]) if cls not in (Generic, Protocol))
    return type(f"FSDP{original.__name__}", tuple(dict.fromkeys((FSDPModule, original, last, UnitVerbs))), {})


# Not `zero_grad`, which calls the model's own.
_FSDP2_METHODS = frozenset(name for name in vars(FSDPModule) if not name.startswith("_")) - {"zero_grad"}


def _warn_of_hidden(modules: Iterable[nn.Module]) -> None:
    """Name the attributes of modules that FSDP2's methods are about to hide."""
    for module in modules:
        if names := hidden_names(module, _FSDP2_METHODS):
            warnings.warn(
                f"Expected {type(module).__name__} to have no attribute with the name of one of FSDP2's methods, got "
                f"{names}: the unit's methods hide them, as in FSDP2. Rename them, or shard a module around this one.",
                stacklevel=3,
            )
