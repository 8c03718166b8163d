"""The parameters of one unit, by group: the record shared by the unit's weights and gradients."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn

from lamella_engine._options.placements import Strategy
from lamella_engine._parameters.group import ParameterGroup
from lamella_engine._parameters.offload import CPU
from lamella_engine._parameters.sharded_parameter import any_replaced, attributes_alone
from lamella_engine._scaling.events import WeightsListener
from lamella_engine._streams.context import Context
from lamella_engine._unit.main_grads import MainGrads


class UnitParameters:
    """A unit's parameters, and the context of the tree that communicates the parameters.

    Args:
        groups: The parameters.
        context: Shared with the rest of the tree.
        strategy: The consequences of the unit's ZeRO stage.

    Attributes:
        name: The unit's name in the outermost unit; empty for the outermost unit.
        module_ids: The ids of the unit's modules.
        groups: Changed by `replace_groups`.
        is_offloaded: Whether shards rest on the CPU.
        keeps_copies: Whether weight copies stay between uses, beside the main weights.
        listeners: The tree's listeners that the unit's weights concern, as a rule none.
        main_grads: Buffers for gradients of fused layers.
    """

    def __init__(self, groups: Sequence[ParameterGroup], context: Context, strategy: Strategy) -> None:
        self.name = ""  # until `rename`
        self.module_ids: frozenset[int] = frozenset()  # `register_hooks` sets them: ids, as modules own the unit
        self.context = context
        self.strategy = strategy
        self.main_grads: tuple[MainGrads, ...] = ()  # `set_main_grads` replaces them, and unmarks the former
        self._listeners_of_tree: tuple[WeightsListener, ...] = ()  # `join` sets them; each concerns some units
        self.replace_groups(groups)

    def join(self, context: Context, listeners: Sequence[WeightsListener]) -> None:
        """Belong to a tree from now on: run on its streams, and raise events of weights to its listeners."""
        self.context = context
        self._listeners_of_tree = tuple(listeners)
        self.replace_groups(self.groups)

    def replace_groups(self, groups: Sequence[ParameterGroup]) -> None:
        """Consist of these groups from now on."""
        # Facts of the groups, computed once: each is asked for several times a pass and unit.
        self.groups = tuple(groups)
        self.is_offloaded = any(group.offload is not None for group in self.groups)
        self.keeps_copies = self.strategy.keeps_copy or any(group.transports.outer is not None for group in self.groups)
        self.listeners = tuple(listener for listener in self._listeners_of_tree if listener.hears(self.groups))

    def rename(self, name: str) -> None:
        """Become an inner unit, under a name in the outer unit, which error messages use."""
        self.name = name
        for group in self.groups:
            for parameter in group.parameters:
                parameter.prefix = self.prefix

    @property
    def prefix(self) -> str:
        """The unit's name with a dot, before names below its module; empty for the outermost unit, and for a list."""
        return f"{self.name}." if self.name and len(self.module_ids) == 1 else ""

    @property
    def title(self) -> str:
        """The unit's name in error messages."""
        return repr(self.name) if self.name else "the outermost unit"

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The process groups of the unit's collectives."""
        all_axes = dict.fromkeys(group.axes for group in self.groups)
        # In the groups' order, not as a set: the order check enters the process groups one by one, alike on all ranks.
        groups = [g for axes in all_axes for g in (axes.shard_group, axes.replicate_group, axes.outer_group)]
        return list(dict.fromkeys(group for group in groups if group is not None))

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded parameters, equal on every rank."""
        return sum(group.unsharded_nbytes for group in self.groups)

    @property
    def has_copies(self) -> bool:
        """Whether unsharded parameters are copies, filled by a gather, and not the main weights themselves."""
        return any(not group.form.computes_with_main for group in self.groups)

    def drop_parts(self) -> None:
        """Drop the parts kept for neighbours: main weights may have been written since."""
        for group in self.groups:
            group.parts = None

    def drop_gathered_shards(self) -> None:
        """Drop the parts kept for neighbours, and shards gathered over an outer axis: main weights may have changed."""
        for group in self.groups:
            group.parts = None
            group.model_weights.clear()

    @property
    def is_replaced(self) -> bool:
        """Whether a shard, or the storage of a shard, was replaced; the unit must be sharded."""
        for group in self.groups:
            if any_replaced(group.parameters):  # a property of the group would be a call more in every pass
                return True
        return False

    @property
    def sharded_versions(self) -> list[int]:
        """Torch's version counters of the sharded DTensors, which only operators on the DTensor itself advance."""
        parameters = [parameter for group in self.groups for parameter in group.parameters]
        return [0 if p.shard.is_inference() else p.sharded._version for p in parameters]  # without a counter

    @property
    def versions(self) -> list[tuple[int, int]]:
        """Torch's version counters of each sharded parameter: a write to the local shard leaves the DTensor's alone."""
        return [
            (0, 0) if p.shard.is_inference() else (p.sharded._version, p.shard._version)  # without a counter
            for group in self.groups
            for p in group.parameters
        ]

    @property
    def home(self) -> torch.device:
        """The device where shards rest."""
        return CPU if self.is_offloaded else self.context.streams.device

    def refuse_meta(self) -> None:
        """Refuse to gather a parameter that has no storage; nothing if all have.

        Raises:
            RuntimeError: A parameter is on the meta device.
        """
        names = [parameter.full_name for group in self.groups for parameter in group.on_meta()]
        if names:
            raise RuntimeError(
                f"Expected the parameters of {self.title} on {self.home}. FSDP parameters should be materialized from "
                f"meta device before training, but the following were still on meta device: {names}. Call "
                f'`module.to_empty(device="{self.home.type}")`, and `module.reset_parameters()` on each module.'
            )

    def check_at_home(self) -> None:
        """Refuse to gather shards that should rest on the CPU and do not.

        Raises:
            RuntimeError: A group's shards are on another device.
        """
        if away := [group for group in self.groups if not group.is_at_home]:
            devices = [(p.full_name, p.shard.device) for group in away for p in group.parameters]
            raise RuntimeError(
                f"Expected the parameters of {self.title} on the CPU, as `offload_policy` says. FSDP parameters should "
                "be materialized on CPU when enabling CPU offloading: load a CPU state dict, or call "
                '`model.to_empty(device="cpu")` and initialise them. Found following parameters on non-CPU device: '
                f"{devices}."
            )

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter takes a gradient."""
        return any(group.is_trainable for group in self.groups)

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has an unreduced gradient."""
        with attributes_alone():
            for group in self.groups:
                if group.has_gradients:
                    return True
        return False

    @property
    def trained(self) -> list[nn.Parameter]:
        """The sharded parameters with `requires_grad`, or with a gradient for the next step, of a unit at rest."""
        forms = (p.sharded for group in self.groups for p in group.parameters)
        return [form for form in forms if form.requires_grad or form.grad is not None]

    def holds_any(self, ids: Container[int]) -> bool:
        """Whether any sharded parameter's id is in `ids`."""
        for group in self.groups:
            for parameter in group.parameters:
                if id(parameter.sharded) in ids:
                    return True
        return False

    def modules_with_directions(self) -> list[nn.Module]:
        """The modules with a parameter whose forward and backward need different payloads."""
        parameters = (p for group in self.groups if group.is_directional for p in group.parameters)
        modules = (owner.module() for parameter in parameters for owner in parameter.owners)
        return list(dict.fromkeys(module for module in modules if module is not None))

    def check_order(self, verb: str, nbytes: Callable[[], int]) -> None:
        """Refuse a collective that other ranks are not about to begin, if the tree checks the order.

        Effects: those of `OrderCheck.before`, with an order check.
        """
        if (check := self.context.order_check) is not None:
            check.before(f"{verb} {self.name or self.title}", self.process_groups, f" ({nbytes()} bytes)")
