"""A sharded model's tensors as parts of whole tensors: tensor-parallel ranks' parts told apart.

Note [Parts of whole tensors]
    A tensor-parallel rank's parameter is a DTensor over the data-parallel ranks, of the shape of this rank's part: the
    DTensor knows nothing of other parts. A checkpoint needs the place in the whole tensor. So each parameter has a
    second DTensor over the same memory, on a mesh with the tensor-parallel ranks as the last axis, which cuts first:

        parameter (dp_cp)         whole (dp_cp, tp)             cut
        [4, 2] Shard(0)           [8, 2] Shard(0), Shard(0)     dim 0 by tp, each part's dim 0 by dp_cp
        [4, 2] Shard(0)           [4, 4] Shard(0), Shard(1)     dim 1 by tp, dim 0 by dp_cp
        [4, 2] RaggedShard        [8, 2] RaggedShard, Shard(0)  dim 0 by tp, each part's rows at bounds by dp_cp
        [4] Shard(0), no mark     [4]    Shard(0), Replicate    dim 0 by dp_cp; the same on all tensor-parallel ranks

    Reads into the whole fill the parameter. Experts have their own ranks: `expt_dp` and `expt_tp`.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.optim import SGD, Adam, Muon

from lamella_checkpoint import Source
from lamella_checkpoint.live import on_device_of
from lamella_checkpoint.sources import OPTIONS, STATE, rename, whole_box
from lamella_convert import regrouped
from lamella_engine.extending import dtensor_over, held_by
from lamella_layout import Chunk, RaggedShard
from lamella_megatron._placement import expert_parameters
from lamella_megatron._stages import Stage, unwrapped
from lamella_megatron._units import groups_of_all_stages

_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class Ranks:
    """The groups that hold different parts of a model, besides the data-parallel groups of the parameters' meshes.

    Attributes:
        tp: Tensor-parallel ranks.
        expt_tp: Tensor-parallel ranks of experts; None for a model without experts.
        ep: Expert-parallel ranks; None for a model without experts.
        pp: Ranks with the other pipeline stages; None for a single stage.
    """

    tp: dist.ProcessGroup
    expt_tp: dist.ProcessGroup | None
    ep: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None

    @classmethod
    def of(cls, groups: Any) -> Ranks:
        """The groups of a `ProcessGroupCollection`; None takes those of `parallel_state`.

        Raises:
            ValueError: `tp` is missing.
        """
        if groups is None:
            config = importlib.import_module("megatron.core.process_groups_config")
            groups = config.ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "ep", "expt_tp"])
        tp = getattr(groups, "tp", None)
        if tp is None:
            raise ValueError(
                "Expected `groups` with the process group `tp`, got none. Call "
                "parallel_state.initialize_model_parallel() first, or pass a ProcessGroupCollection that has it."
            )
        return cls(tp, *(getattr(groups, name, None) for name in ("expt_tp", "ep", "pp")))

    def first_expert(self, num_experts: int | None) -> int:
        """The global number of this rank's first expert."""
        if not num_experts or self.ep is None:
            return 0
        return int(self.ep.rank() * (num_experts // self.ep.size()))


class WholeModel(nn.Module):
    """A sharded megatron-core model for `lamella_checkpoint`: names, and tensors of global shapes over the same memory.

    `state_dict` leaves out `_extra_state` and the wrappers' `module.`, and names the tensors of a pipeline stage as a
    model of one stage does. `load_state_dict` tells the sharded model that its weights are new.

    Args:
        model: Sharded by `fully_shard_model`, or a wrapper around it.
        groups: As for `fully_shard_model`.
        has_copies: With a last pipeline stage's copy of the embedding, which loads and is not saved again.
        layer_groups: The pattern of all layers of a HybridModel, with brackets: names are those of stacks of stacks.
            None: each layer has a number of its own.

    Attributes:
        ranks: Of the parts.
        stage: Of the pipeline.
        layer_groups: As given.
        copies: The parameters that are left out, by `id`.
        names: Of the tensors here, by the sharded model's names without the wrappers' `module.`.

    Raises:
        NotImplementedError: A parameter's placements record an order of cuts (`_StridedShard`), the model is a chunk of
            a rank's several virtual pipeline stages, or a stage has two copies of the embedding.
        ValueError: A group is missing, a parameter is not sharded, or `layer_groups` is the pattern of other layers.

    Effects: collective: one exchange of ranks along each tensor-parallel group and data-parallel mesh. Runs the model's
        state-dict hooks, which reshard it.
    """

    def __init__(
        self, model: nn.Module, groups: Any = None, *, has_copies: bool = True, layer_groups: str | None = None
    ) -> None:
        super().__init__()
        self.ranks = Ranks.of(groups)
        self.stage = Stage(model, self.ranks.pp)
        self._wholes = _Wholes(self.ranks)
        self._sharded = [model]  # In a list: a registered module would add its own names.
        held = {
            name: value for name, value in model.state_dict(keep_vars=True).items() if not name.endswith(_EXTRA_STATE)
        }
        copies = {name for name, value in held.items() if not has_copies and self.stage.is_copy(name, value)}
        self.copies = {id(held[name]) for name in copies}
        self._own = {name: value for name, value in held.items() if name not in copies}
        parameters = dict(model.named_parameters())
        experts = {id(parameters[name]) for name in expert_parameters(model)}
        self._of: dict[int, torch.Tensor] = {}
        with on_device_of(model.parameters()):
            for name, value in self._own.items():
                if isinstance(value, nn.Parameter):
                    self._of.setdefault(id(value), self._wholes.of(name, value, is_expert=id(value) in experts))
        self.layer_groups = layer_groups
        flat = {name: self.stage.name(name, value) for name, value in self._own.items()}
        nested: dict[str, str] = {}
        if layer_groups is not None:
            nested = regrouped(flat.values(), groups_of_all_stages(model, layer_groups).flat, layer_groups)
        self.names = {unwrapped(name): nested.get(of_all, of_all) for name, of_all in flat.items()}
        if len(set(self.names.values())) < len(self.names):
            raise NotImplementedError(
                "Expected one copy of the embedding on a pipeline stage, got two: an output layer's that shares it and "
                "multi-token prediction's. Build the model with share_embeddings_and_output_weights=False."
            )
        self._by_name = dict(zip(self.names.values(), self._own.values(), strict=True))
        self._whole = {name: self.whole_of(value) for name, value in self._by_name.items()}

    def whole_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter; a buffer itself."""
        return self._of.get(id(tensor), tensor)

    def part_of(self, name: str) -> Chunk:
        """The box of this rank's tensor-parallel part in a whole tensor."""
        whole, own = self._whole[name], self._by_name[name]
        chunk = whole_box(whole.shape)
        if not isinstance(whole, DTensor) or whole.shape == own.shape:
            return chunk
        coordinate = whole.device_mesh.get_local_rank("tensor")
        offsets = tuple(0 if a == b else coordinate * b for a, b in zip(whole.shape, own.shape, strict=True))
        return Chunk(offsets, tuple(own.shape))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes by name."""
        return {name: tuple(value.shape) for name, value in self._whole.items()}

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """The tensors by name; the parameters themselves, as with `keep_vars`."""
        return dict(self._whole)

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Run the sharded model's hooks of a load: all data is in place."""
        return self._sharded[0].load_state_dict(self._own, strict=False)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The sharded model's."""
        return self._sharded[0].parameters(recurse)


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
        made = _over(slot, whole.device_mesh, whole.placements, whole.shape)
        self._slots[id(made)] = slot
        return made

    def _own_slot(self, parameter: torch.Tensor, whole: torch.Tensor, slot: object) -> object:
        if id(slot) in self._slots:
            return self._slots[id(slot)]
        if _is_alike(slot, whole) and isinstance(slot, DTensor) and isinstance(parameter, DTensor):
            return _over(slot, parameter.device_mesh, parameter.placements, parameter.shape)
        return slot


class _Wholes:
    """Makes wholes; meshes are shared between parameters."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._meshes: dict[tuple[DeviceMesh, bool], DeviceMesh] = {}

    def of(self, name: str, parameter: torch.Tensor, *, is_expert: bool) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            raise ValueError(
                f"Expected parameters sharded by fully_shard_model, got {name!r} as a plain tensor of shape "
                f"{tuple(parameter.shape)}. Call lamella_megatron.fully_shard_model(model) first."
            )
        if others := [each for each in parameter.placements if type(each) not in (Shard, RaggedShard, Replicate)]:
            raise NotImplementedError(
                f"Expected {name!r} placed by Shard, RaggedShard and Replicate alone, got {others[0]!r}, which records "
                "an order of cuts that leaves out tensor parallelism. Shard the model with one sharding axis."
            )
        mesh = self._mesh(parameter.device_mesh, is_expert=is_expert)
        dim = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        shape = list(parameter.shape)
        placement: Placement = Replicate()
        if dim >= 0:
            shape[dim] *= mesh.size(mesh.ndim - 1)
            placement = Shard(dim)
        made = _over(parameter, mesh, (*parameter.placements, placement), torch.Size(shape))
        return nn.Parameter(made, requires_grad=parameter.requires_grad)

    def _mesh(self, data: DeviceMesh, *, is_expert: bool) -> DeviceMesh:
        if (data, is_expert) not in self._meshes:
            tp = self._ranks.expt_tp if is_expert else self._ranks.tp
            if tp is None:
                raise ValueError(
                    "Expected `groups` with the process group `expt_tp`, whose ranks share an expert, got none. Pass "
                    "the ProcessGroupCollection that the model was built with."
                )
            self._meshes[data, is_expert] = _with_axis(data, tp)
        return self._meshes[data, is_expert]


def _with_axis(data: DeviceMesh, tp: dist.ProcessGroup) -> DeviceMesh:
    """A mesh with a last axis, which cuts first. Effects: collective on the axis."""
    parts: list[Any] = [None] * tp.size()
    dist.all_gather_object(parts, data.mesh.tolist(), group=tp)
    # Placements alone would cut by the first axis first. The checkpoint packages read the order from the mesh.
    names = (*(f"data{axis}" for axis in range(data.ndim)), "tensor")
    groups, grid = [*data.get_all_groups(), tp], torch.tensor(parts).movedim(0, -1)
    mesh: Any = DeviceMesh.from_group(groups, data.device_type, mesh=grid, mesh_dim_names=names)
    mesh._shard_order = [data.ndim, *range(data.ndim)]
    return mesh  # type: ignore[no-any-return]


def _over(tensor: DTensor, mesh: DeviceMesh, placements: Any, shape: torch.Size) -> DTensor:
    """Another DTensor over a DTensor's local memory."""
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), tensor.dtype)
    with torch.no_grad():
        local = tensor.to_local()
    return dtensor_over(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta))


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
