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
from lamella_megatron._whole import WholeModel, over


class WholeOptimizer(torch.optim.Optimizer):
    """An optimizer's state over the tensors of a `WholeModel`; `give_back` returns loaded state to the optimizer.

    State that the optimizer keeps in a form of its own, such as moments in 8 bits with scales, is taken and given back
    through its `state_dict` and `load_state_dict`. Transformer Engine's FusedAdam has its state in fp32 there. An
    optimizer of several (`MuonAndAdam`) tells by its `parts` which of them steps a parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: WholeModel) -> None:
        self._sharded, self._model, self.defaults = optimizer, model, optimizer.defaults
        left_out = model.copies
        held = [[each for each in group["params"] if id(each) not in left_out] for group in optimizer.param_groups]
        self._parameters = {id(model.whole_of(each)): each for parameters in held for each in parameters}
        self._slots: dict[int, torch.Tensor] = {}
        self.param_groups = [
            {**group, "params": [model.whole_of(each) for each in parameters]}
            for group, parameters in zip(optimizer.param_groups, held, strict=True)
        ]
        self.state = defaultdict(dict)
        for parameter, slots in _state_of(optimizer).items():
            if id(parameter) in left_out:
                continue
            whole = model.whole_of(parameter)
            self.state[whole] = {slot: self._whole_slot(parameter, whole, value) for slot, value in slots.items()}

    def give_back(self) -> None:
        """Set the optimizer's options and state to these.

        Effects: as `Optimizer.load_state_dict`; with the tensors themselves and not copies, unless the optimizer keeps
            state in a form of its own.
        """
        for group, mine in zip(self._sharded.param_groups, self.param_groups, strict=True):
            group.update({option: value for option, value in mine.items() if option != "params"})
            if _counts_in_groups(self._sharded):
                self._count_in(group, mine["params"])
        state: dict[torch.Tensor, Any] = defaultdict(dict)
        for whole, slots in self.state.items():
            parameter = self._parameters[id(whole)]
            state[parameter] = {slot: self._own_slot(parameter, whole, value) for slot, value in slots.items()}
        if not _packs_state(self._sharded):
            self._sharded.__setstate__({"state": state, "param_groups": self._sharded.param_groups})
            return
        keys = {parameter: key for key, parameter in enumerate(held_by(self._sharded))}
        groups = [{**group, "params": [keys[each] for each in group["params"]]} for group in self._sharded.param_groups]
        by_key = {keys[parameter]: slots for parameter, slots in state.items()}
        self._sharded.load_state_dict({"state": by_key, "param_groups": groups})

    def readable(self, source: Source) -> Source:
        """A checkpoint under native names, with the entries that this optimizer reads.

        Left out are steps of parameters whose steps are not counted here, and the mark of expert-parallel
        groups: a model on other ranks has other groups.

        Raises:
            ValueError: A parameter's state is another optimizer's.
        """
        stored: dict[str, set[str]] = defaultdict(set)
        for full in (*source.tensors, *source.objects):
            if full.startswith(STATE):
                name, _, slot = full.removeprefix(STATE).rpartition(".")
                stored[name].add(slot)
        left_out = set()
        for name, (kind, slots) in self._slots_by_name().items():
            if slots - {"step"} - stored[name] and stored[name] - {"step"}:
                raise ValueError(
                    f"Expected the checkpoint to hold {_listed(slots)} of {name!r}, the state of {kind}, got "
                    f"{_listed(stored[name])}, another optimizer's. Load the weights alone: leave `optimizer` out."
                )
            if "step" not in slots:
                left_out.add(f"{STATE}{name}.step")

        def kept(name: str) -> str | None:
            is_of_ranks = name.startswith(OPTIONS) and name.endswith(".is_expert_parallel")
            return None if is_of_ranks or name in left_out else name

        return rename(source, kept)

    def _slots_by_name(self) -> dict[str, tuple[str, set[str]]]:
        """The class that steps each parameter and the slots it keeps, for the classes whose slots are known."""
        known = {}
        for part in getattr(self._sharded, "parts", (self._sharded,)):
            for group in part.param_groups:
                if (slots := _slots(part, group)) is not None:
                    known.update({id(each): (type(part).__name__, slots) for each in group["params"]})
        named = {name: self._parameters.get(id(whole)) for name, whole in self._model.state_dict().items()}
        return {name: known[id(each)] for name, each in named.items() if id(each) in known}

    def _count_in(self, group: dict[str, Any], wholes: Iterable[torch.Tensor]) -> None:
        """Move the number of steps from the parameters, where readers of checkpoints have it, to their group."""
        steps = {float(self.state[whole].pop("step")) for whole in wholes if "step" in self.state.get(whole, {})}
        if len(steps) > 1:
            raise ValueError(
                f"Expected the parameters of one group to have been stepped alike, got {sorted(steps)} steps: "
                f"{type(self._sharded).__name__} has one number a group. Load the checkpoint without the optimizer."
            )
        if steps:
            count, live = int(steps.pop()), group.get("step")
            group["step"] = torch.full_like(live, count) if isinstance(live, torch.Tensor) else count

    def _whole_slot(self, parameter: torch.Tensor, whole: torch.Tensor, slot: object) -> object:
        if not (_is_alike(slot, parameter) and isinstance(whole, DTensor) and isinstance(slot, DTensor)):
            return slot
        made = over(slot, whole.device_mesh, whole.placements, whole.shape)
        self._slots[id(made)] = slot
        return made

    def _own_slot(self, parameter: torch.Tensor, whole: torch.Tensor, slot: object) -> object:
        if id(slot) in self._slots:
            return self._slots[id(slot)]
        if _is_alike(slot, whole) and isinstance(slot, DTensor) and isinstance(parameter, DTensor):
            return over(slot, parameter.device_mesh, parameter.placements, parameter.shape)
        return slot


def _slots(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> set[str] | None:
    """The state that an optimizer keeps for each parameter of a group; None for an optimizer of another library."""
    if isinstance(optimizer, SGD | Muon):
        return {"momentum_buffer"} if group["momentum"] or isinstance(optimizer, Muon) else set()
    if isinstance(optimizer, Adam) or _packs_state(optimizer):  # AdamW is a subclass of Adam
        return {"exp_avg", "exp_avg_sq", "step"}
    return None


def _listed(slots: Iterable[str]) -> str:
    return ", ".join(sorted(slots))


def _packs_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether state means something with the optimizer's scales alone, as Transformer Engine's FusedAdam has it."""
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
