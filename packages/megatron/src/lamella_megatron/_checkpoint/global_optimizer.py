"""An optimizer's state as parts of whole tensors: read from the optimizer, and given back after a load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, Muon

from lamella_checkpoint import Source
from lamella_engine.extending import held_by
from lamella_files import OPTIONS, STATE, rename
from lamella_megatron._checkpoint.global_tensors import GlobalModel, over


class GlobalOptimizer(torch.optim.Optimizer):
    """An optimizer's state over the tensors of a `GlobalModel`; `give_back` returns loaded state to the optimizer.

    State in a form of the optimizer's own, for example moments in 8 bits with scales, is taken and given back through
    `state_dict` and `load_state_dict`. Transformer Engine's FusedAdam has its state in fp32 in this form. An optimizer
    of several (`MuonAndAdam`) tells by its `parts` which optimizer steps a parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: GlobalModel) -> None:
        self._sharded, self._model, self.defaults = optimizer, model, optimizer.defaults
        left_out = model.copies
        parameters_by_group = [
            [parameter for parameter in group["params"] if id(parameter) not in left_out]
            for group in optimizer.param_groups
        ]
        self._parameters = {
            id(model.global_of(parameter)): parameter for parameters in parameters_by_group for parameter in parameters
        }
        self._slots: dict[int, torch.Tensor] = {}
        self.param_groups = [
            {**group, "params": [model.global_of(parameter) for parameter in parameters]}
            for group, parameters in zip(optimizer.param_groups, parameters_by_group, strict=True)
        ]
        self.state = defaultdict(dict)
        for parameter, slots in _state_of(optimizer).items():
            if id(parameter) in left_out:
                continue
            global_parameter = model.global_of(parameter)
            self.state[global_parameter] = {
                slot: self._global_slot(parameter, global_parameter, value) for slot, value in slots.items()
            }

    def give_back(self) -> None:
        """Set the optimizer's options and state.

        Effects: replaces the optimizer's state by the tensors themselves and no copies, unless the optimizer keeps
            state in a form of its own.
        """
        for group, global_group in zip(self._sharded.param_groups, self.param_groups, strict=True):
            group.update({option: value for option, value in global_group.items() if option != "params"})
            if _counts_in_groups(self._sharded):
                self._count_in(group, global_group["params"])
        state: dict[torch.Tensor, Any] = defaultdict(dict)
        for global_parameter, slots in self.state.items():
            parameter = self._parameters[id(global_parameter)]
            state[parameter] = {
                slot: self._sharded_slot(parameter, global_parameter, value) for slot, value in slots.items()
            }
        if not _packs_state(self._sharded):
            self._sharded.__setstate__({"state": state, "param_groups": self._sharded.param_groups})
            return
        keys = {parameter: key for key, parameter in enumerate(held_by(self._sharded))}
        groups = [
            {**group, "params": [keys[parameter] for parameter in group["params"]]}
            for group in self._sharded.param_groups
        ]
        by_key = {keys[parameter]: slots for parameter, slots in state.items()}
        self._sharded.load_state_dict({"state": by_key, "param_groups": groups})

    def readable(self, source: Source) -> Source:
        """A checkpoint under native names, with the entries read by this optimizer.

        Left out are steps of parameters whose steps are not counted here, and the mark of expert-parallel groups: on
        other ranks a model has other groups.

        Raises:
            ValueError: A parameter's state is another optimizer's.
        """
        stored: dict[str, set[str]] = defaultdict(set)
        for full_name in (*source.tensors, *source.objects):
            if full_name.startswith(STATE):
                name, _, slot = full_name.removeprefix(STATE).rpartition(".")
                stored[name].add(slot)
        left_out = set()
        for name, (kind, slots) in self._slots_by_name().items():
            # Steps alone are of a parameter that was never stepped, in a group that counts.
            if slots - stored[name] and stored[name] - {"step"}:
                raise ValueError(
                    f"Expected the checkpoint to hold {_listed(slots)} of {name!r}, the state of {kind}, got "
                    f"{_listed(stored[name])}, another optimizer's. Load the weights alone: leave `optimizer` out."
                )
            if "step" not in slots:
                left_out.add(f"{STATE}{name}.step")

        def readable_name(name: str) -> str | None:
            is_of_ranks = name.startswith(OPTIONS) and name.endswith(".is_expert_parallel")
            return None if is_of_ranks or name in left_out else name

        return rename(source, readable_name)

    def _slots_by_name(self) -> dict[str, tuple[str, set[str]]]:
        """The class and the slots of each parameter's optimizer, for classes with known slots."""
        kinds_and_slots = {}
        for part in getattr(self._sharded, "parts", (self._sharded,)):
            for group in part.param_groups:
                if (slots := _slots(part, group)) is not None:
                    kind = Muon if isinstance(part, Muon) else type(part)
                    kinds_and_slots.update({id(parameter): (kind.__name__, slots) for parameter in group["params"]})
        parameters = {
            name: self._parameters.get(id(global_parameter))
            for name, global_parameter in self._model.state_dict().items()
        }
        return {
            name: kinds_and_slots[id(parameter)]
            for name, parameter in parameters.items()
            if id(parameter) in kinds_and_slots
        }

    def _count_in(self, group: dict[str, Any], global_parameters: Iterable[torch.Tensor]) -> None:
        """Move the number of steps from the parameters, its place in checkpoints, to their group."""
        steps = {
            float(self.state[global_parameter].pop("step"))
            for global_parameter in global_parameters
            if "step" in self.state.get(global_parameter, {})
        }
        if len(steps) > 1:
            raise ValueError(
                f"Expected the parameters of one group to have been stepped alike, got {sorted(steps)} steps: "
                f"{type(self._sharded).__name__} has one number a group. Load the checkpoint without the optimizer."
            )
        if steps:
            count, live = int(steps.pop()), group.get("step")
            group["step"] = torch.full_like(live, count) if isinstance(live, torch.Tensor) else count

    def _global_slot(self, parameter: torch.Tensor, global_parameter: torch.Tensor, slot: object) -> object:
        if not (_is_alike(slot, parameter) and isinstance(global_parameter, DTensor) and isinstance(slot, DTensor)):
            return slot
        global_slot = over(slot, global_parameter.device_mesh, global_parameter.placements, global_parameter.shape)
        self._slots[id(global_slot)] = slot
        return global_slot

    def _sharded_slot(self, parameter: torch.Tensor, global_parameter: torch.Tensor, slot: object) -> object:
        if id(slot) in self._slots:
            return self._slots[id(slot)]
        if _is_alike(slot, global_parameter) and isinstance(slot, DTensor) and isinstance(parameter, DTensor):
            return over(slot, parameter.device_mesh, parameter.placements, parameter.shape)
        return slot


def _slots(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> set[str] | None:
    """The state of an optimizer for each parameter of a group; None for an optimizer of another library."""
    if isinstance(optimizer, SGD | Muon):
        return {"momentum_buffer"} if group["momentum"] or isinstance(optimizer, Muon) else set()
    if isinstance(optimizer, Adam) or _packs_state(optimizer):  # AdamW is a subclass of Adam
        return {"exp_avg", "exp_avg_sq", "step"}
    return None


def _listed(slots: Iterable[str]) -> str:
    return ", ".join(sorted(slots))


def _packs_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether state has a meaning with the optimizer's scales alone, like Transformer Engine's FusedAdam's."""
    return hasattr(optimizer, "get_unscaled_state")


def _counts_in_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps are counted for each group, as fused optimizers do from their first step on."""
    return _packs_state(optimizer) or any("step" in group for group in optimizer.param_groups)


def _state_of(optimizer: torch.optim.Optimizer) -> Mapping[torch.Tensor, dict[str, Any]]:
    """An optimizer's state by parameter, of plain values."""
    if not _packs_state(optimizer):
        return optimizer.state
    parameters = held_by(optimizer)
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {parameters[key]: slots for key, slots in state.items()}


def _is_alike(slot: object, parameter: torch.Tensor) -> bool:
    return (
        isinstance(slot, DTensor)
        and isinstance(parameter, DTensor)
        and (slot.device_mesh, slot.placements, slot.shape)
        == (parameter.device_mesh, parameter.placements, parameter.shape)
    )
