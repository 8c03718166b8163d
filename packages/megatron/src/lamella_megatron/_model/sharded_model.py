"""A whole megatron-core model in one call: of a built model, or during its construction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from lamella_engine import DDP, FSDPModule, fully_shard
from lamella_mamba import bind_live_parameters, declare_direct_reads
from lamella_megatron._model.auxiliary_losses import number_prediction_routers
from lamella_megatron._model.construction import after_construction
from lamella_megatron._model.expert_units import Stage, check_stage, expert_arguments, expert_modules
from lamella_megatron._model.fused_layers import connect_fused_layers
from lamella_megatron._model.placement import GroupsByName, Meshes, Placement, broadcast_weights, mark_unmarked_parts
from lamella_megatron._model.units import layers_of, with_groups, with_neighbours
from lamella_megatron._model.units import unit_classes as _layer_classes

M = TypeVar("M", bound=nn.Module)


def fully_shard_model(
    model: M,
    *,
    groups: Any = None,
    unit_classes: Collection[type[nn.Module]] | None = None,
    groups_by_name: GroupsByName | None = None,
    layer_groups: str | None = None,
    min_unit_size: int | None = None,
    expert_stage: Stage | None = None,
    **fully_shard_kwargs: Any,
) -> M:
    """Shard a megatron-core model: a unit for each layer, and a unit for the rest, each parameter over its own ranks.

        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        model = GPTModel(...)
        fully_shard_model(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    Tensor-parallel parameters keep this rank's part, sharded over the data- and context-parallel ranks with the
    same part; experts are sharded over the ranks with the same experts; all gradients are divided by the number of
    data- and context-parallel ranks. With several instances of the distributed optimizer parameters are sharded over
    the ranks of an instance and replicated over the instances (HSDP). Values are the values of the parameter's first
    rank, whatever the seeds of the peers. The context-parallel helper of Mamba mixers looks parameters up in the mixer
    from now on. Layers that fuse or delay weight gradients do (`connect_fused_layers`).

    Args:
        model: A GPTModel, MambaModel or HybridModel, changed in place.
        groups: megatron-core's `ProcessGroupCollection` with `dp_cp`, and `expt_dp` for a model with experts; for
            several instances also `intra_dp_cp`, `intra_expt_dp` and `inter_dist_opt`. None takes the groups of
            `parallel_state`.
        unit_classes: Classes of the modules to make units. None: megatron-core's layers. Modules inside each other
            are units inside each other; a convolution that a gated delta net reads directly joins the net's unit.
        groups_by_name: A function for parameters without marks: the process group of the ranks with the same tensor,
            by the parameter's name, or None to go by marks. The same answer on all ranks of the group. The divisor
            stays the size of `dp_cp`.
        layer_groups: A HybridModel's pattern with brackets around the layers of each unit, as in `"M[M*][ME]"`. Names,
            checkpoints and the forward stay as they are. A model whose groups are stacks of their own needs no
            argument.
        min_unit_size: Neighbouring layers are one unit until they hold as many of this rank's parameters: fewer hooks
            and exchanges, where the host is slower than a small layer's compute. None: each layer is a unit. Layers
            that are recomputed in several chunks had better not be joined: each chunk gathers and reduces the unit.
        expert_stage: The ZeRO stage of experts, as `placements` of `options` are of all other parameters: one, or two
            with several instances. The experts of a layer are a unit of their own then. None: the stage of `options`,
            and experts in their layer's unit.
        fully_shard_kwargs: Arguments of every `fully_shard` call alike, but `mesh` and `shard_placement_fn`.
            `placements` in `options` are one ZeRO stage, or two with several instances: (HSDP, ZERO3).

    Returns:
        `model`, changed.

    Raises:
        ImportError: megatron-core is not installed.
        ValueError: The model has no layers, or units already; a process group is missing, or its ranks hold different
            parts of the model; a parameter is a DTensor or a part of generalized tensor parallelism; `layer_groups`
            does not fit, or stands beside `min_unit_size`; `min_unit_size` is below 1; `expert_stage` for a model
            without experts, or with `groups_by_name`; or the errors of `fully_shard`.
        TypeError: `mesh` or `shard_placement_fn` was given: both follow from the groups.

    Effects: the allocations of `lamella_engine.fully_shard`, once a unit; a broadcast of each parameter with values
        over its ranks, in the parameter's dtype.
    """
    _refuse_arguments(fully_shard_kwargs, "mesh", "shard_placement_fn")
    layers = layers_of(model, unit_classes)
    if (name := next(_units_in(model), None)) is not None:
        raise ValueError(
            f"Expected a model without units, got {name!r}, a unit already. Call fully_shard_model once, on a model of "
            "which no module was sharded."
        )
    units = _units_of(model, layers, layer_groups, min_unit_size)
    sharding = _UnitArguments(groups, fully_shard_kwargs, _device_type(model), groups_by_name, expert_stage)
    placement = sharding.placement(model)
    sharding.check_expert_stage(model, unit_classes)
    declare_direct_reads(model)  # gated delta nets read their convolution without a call, which may be a unit
    for unit in (*units, model):
        sharding.shard(unit, placement)
    _finish(model)
    return model


def build_sharded_model(
    build: Callable[[], M],
    *,
    groups: Any = None,
    unit_classes: Collection[type[nn.Module]] | None = None,
    expert_stage: Stage | None = None,
    **fully_shard_kwargs: Any,
) -> M:
    """Build a megatron-core model, and shard each layer right after its construction.

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        model = build_sharded_model(lambda: GPTModel(...))

    For new models too large for a rank. Layers are built in their order and from megatron-core's random states: the
    weights equal the weights of the model built whole and sharded by `fully_shard_model`. A rank never holds more than
    its shards, one whole layer, and the parameters outside layers. The meta device would not do: megatron-core's own
    linears and embeddings have no `reset_parameters`, and forget their initialisation. A model whose weights are
    about to be loaded may be built on the meta device and given to `fully_shard_model`.

    Args:
        build: Builds the model, of parameters with values, on the device of training or on the CPU.
        groups: The `ProcessGroupCollection` of `fully_shard_model`.
        unit_classes: Classes of the modules to make units. None: megatron-core's layers.
        expert_stage: The ZeRO stage of experts, as in `fully_shard_model`.
        fully_shard_kwargs: Arguments of every `fully_shard` call alike, but `mesh` and `shard_placement_fn`.

    Returns:
        The model, sharded.

    Raises:
        ValueError: Parameters are on the meta device; or the errors of `fully_shard_model`.
        ImportError: megatron-core is not installed.
        TypeError: `mesh` or `shard_placement_fn` was given: both follow from the groups. Or `groups_by_name`,
            `layer_groups` or `min_unit_size`, which need the whole model.

    Effects: a broadcast of each parameter over its ranks, and shards, a layer at a time. The constructors of
        megatron-core's layers are exchanged while `build` runs, for all threads.
    """
    _refuse_arguments(fully_shard_kwargs, *_WAYS_OUT)
    sharding = _UnitArguments(groups, fully_shard_kwargs, expert_stage=expert_stage)

    def shard(module: nn.Module) -> None:
        sharding.find_device(module)
        sharding.shard(module, sharding.placement(module))

    with after_construction(_layer_classes() if unit_classes is None else tuple(unit_classes), shard):
        model = build()
    layers_of(model, unit_classes)  # refuses another family
    sharding.check_expert_stage(model, unit_classes)
    shard(model)
    _finish(model)
    return model


def innermost(module: nn.Module) -> nn.Module:
    """The model below plain wrappers, for example megatron-core's `Float16Module`."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


@dataclass
class _UnitArguments:
    """The arguments of every unit."""

    groups: Any
    kwargs: dict[str, Any]
    device_type: str | None = None
    groups_by_name: GroupsByName | None = None
    expert_stage: Stage | None = None

    @cached_property
    def meshes(self) -> Meshes:
        assert self.device_type is not None
        return Meshes.of(self.groups, self.device_type)

    def placement(self, module: nn.Module) -> Placement:
        """The mesh of each parameter of a model, or of a layer; refuses both where the groups do not fit."""
        options = self.kwargs.get("options")
        is_replicated = options is not None and options.placements == DDP
        return Placement(module, self.meshes, is_replicated=is_replicated, groups_by_name=self.groups_by_name)

    def find_device(self, module: nn.Module) -> None:
        """Take the device of a model in construction from the first layer.

        Raises:
            ValueError: Parameters are on the meta device.
        """
        if (
            name := next((name for name, parameter in module.named_parameters() if parameter.is_meta), None)
        ) is not None:
            raise ValueError(
                f"Expected `build` to give parameters values, got {name!r} of {type(module).__name__} on the meta "
                "device. Build outside torch.device('meta'), without init_model_with_meta_device; a model whose "
                "weights are about to be loaded goes to fully_shard_model."
            )
        self.device_type = self.device_type or _device_type(module)

    def check_expert_stage(self, model: nn.Module, unit_classes: Collection[type[nn.Module]] | None) -> None:
        """Refuse an `expert_stage` that the model or the other arguments do not fit, as `expert_units.check_stage`."""
        if self.expert_stage is not None:
            has_names = self.groups_by_name is not None
            check_stage(self.expert_stage, model, self.meshes, unit_classes or (), has_names=has_names)

    def shard(self, module: nn.Module | list[nn.Module], placement: Placement) -> None:
        """Make a module, or several together, a unit; with `expert_stage` units of the experts inside first."""
        modules = module if isinstance(module, list) else [module]
        for unit_module in modules:
            bind_live_parameters(unit_module)
            mark_unmarked_parts(unit_module)
            broadcast_weights(unit_module, placement, self.kwargs.get("ignored_params") or ())
            self._shard_experts(unit_module)
        fully_shard(module, mesh=self.meshes.dense, shard_placement_fn=placement, **self.kwargs)
        self._divide(modules[0])

    def _shard_experts(self, module: nn.Module) -> None:
        if self.expert_stage is None:
            return
        for experts in expert_modules(module):
            if not isinstance(experts, FSDPModule):  # of a layer inside a layer, or of the model
                self._divide(fully_shard(experts, **expert_arguments(self.expert_stage, self.meshes, self.kwargs)))

    def _divide(self, unit: nn.Module) -> None:
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(float(self.meshes.dense.size()))


_RANKS_BY_GROUPS = (
    "`groups` says over which ranks parameters are sharded. Leave it out, or shard by lamella_engine.fully_shard."
)
_NO_NEIGHBOURS = (
    "A layer that is being built does not know its neighbours. Build the model whole, and call fully_shard_model."
)
_WAYS_OUT = {
    "mesh": _RANKS_BY_GROUPS,
    "shard_placement_fn": _RANKS_BY_GROUPS,
    "groups_by_name": "Names below a layer that is being built are not the model's. Build the model whole, and call "
    "fully_shard_model.",
    "layer_groups": _NO_NEIGHBOURS,
    "min_unit_size": _NO_NEIGHBOURS,
}


def _refuse_arguments(kwargs: dict[str, Any], *names: str) -> None:
    for name in names:
        if name in kwargs:
            raise TypeError(f"Expected no `{name}`, got one. {_WAYS_OUT[name]}")


def _units_of(
    model: nn.Module, layers: list[nn.Module], layer_groups: str | None, min_unit_size: int | None
) -> Sequence[nn.Module | list[nn.Module]]:
    """The layers, alone or several together."""
    if min_unit_size is not None and min_unit_size < 1:
        raise ValueError(
            f"Expected `min_unit_size` of at least 1 parameter, got {min_unit_size}. Leave it out for a unit a layer."
        )
    if min_unit_size is not None and layer_groups is not None:
        raise ValueError(
            f"Expected `min_unit_size` or `layer_groups`, which both choose the layers of a unit, got {min_unit_size} "
            f"and {layer_groups!r}. Leave one of them out."
        )
    if layer_groups is not None:
        return with_groups(model, layers, layer_groups)
    return layers if min_unit_size is None else with_neighbours(model, layers, min_unit_size)


def _finish(model: nn.Module) -> None:
    """Connect all readers past hooks, once all units are made; refuse functions that take shards for whole tensors."""
    connect_fused_layers(model)
    number_prediction_routers(model)
    model.sharded_state_dict = refuse_sharded_state_dict  # type: ignore[assignment]


def refuse_sharded_state_dict(*_: Any, **__: Any) -> Any:
    """In the place of megatron-core's `sharded_state_dict`, which takes a shard for the whole tensor.

    Raises:
        NotImplementedError: Always; the way out is in the message.
    """
    raise NotImplementedError(
        "Expected a checkpoint of shards, got a request for megatron-core's sharded state dict, which describes "
        "whole tensors: ranks would write their shards over each other. Call lamella_megatron.save_checkpoint(path, "
        "model=..., optimizer=optimizer.optimizer); format='torch_dist' is what megatron-core opens."
    )


def _units_in(model: nn.Module) -> Iterator[str]:
    return (name or type(model).__name__ for name, module in model.named_modules() if isinstance(module, FSDPModule))


def _device_type(model: nn.Module) -> str:
    """The type of device that parameters compute on: a model on the meta device goes to the accelerator, if any."""
    device_types = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    if len(device_types) == 1:
        return device_types.pop()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator else "cpu"
