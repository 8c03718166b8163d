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

    HFSDP's parameters have two data-parallel axes. The inner one cuts before the outer one, and both after `tp`: the
    mesh of the whole records the order, in place of the `_StridedShard` of the parameter.

    Reads into the whole fill the parameter. Experts have their own ranks: `expt_dp` and `expt_tp`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from lamella_checkpoint.extending import on_device_of
from lamella_convert import regrouped
from lamella_engine.extending import dtensor_over
from lamella_files import whole_box
from lamella_layout import Chunk, strided_placements
from lamella_megatron._checkpoint.stages import Stage, unwrapped
from lamella_megatron._model.placement import expert_parameters
from lamella_megatron._model.units import groups_of_all_stages

_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class ModelParallelGroups:
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
    def of(cls, groups: Any) -> ModelParallelGroups:
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


class GlobalModel(nn.Module):
    """A sharded megatron-core model for `lamella_checkpoint`: names, and tensors of global shapes over the same memory.

    `state_dict` leaves out `_extra_state` and the wrappers' `module.`, and names the tensors of a pipeline stage as a
    model of one stage does. `load_state_dict` tells the sharded model that its weights are new.

    Args:
        chunks: This rank's chunks: one model, or one for each virtual pipeline stage; each sharded by
            `fully_shard_model`, or a wrapper around a sharded model.
        groups: The `ProcessGroupCollection` of `fully_shard_model`.
        has_copies: Keep a last pipeline stage's copy of the embedding, which loads and is not saved again.
        layer_groups: The pattern of all layers of a HybridModel, with brackets: names are those of stacks of stacks.
            None: each layer has a number of its own.

    Attributes:
        model_groups: The groups whose ranks hold different parts.
        stage: The rank's pipeline stage.
        layer_groups: The pattern of all layers with brackets, or None.
        copies: The parameters that are left out, by `id`.
        names: Names of the tensors here, by the chunk and the name there without the wrappers' `module.`.

    Raises:
        NotImplementedError: A parameter's axes cut neither first to last nor last to first, or a stage has two copies
            of the embedding.
        ValueError: A group is missing, a parameter is not sharded, the rank has another number of chunks, or
            `layer_groups` is the pattern of other layers.

    Effects: collective: one exchange of ranks along each tensor-parallel group and data-parallel mesh. Runs the model's
        state-dict hooks, which reshard it.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        groups: Any = None,
        *,
        has_copies: bool = True,
        layer_groups: str | None = None,
    ) -> None:
        super().__init__()
        self.model_groups = ModelParallelGroups.of(groups)
        self.stage = Stage(chunks, self.model_groups.pp)
        self._global_maker = _GlobalTensors(self.model_groups)
        self._chunks = list(chunks)  # In a list: registered modules would add their own names.
        tensors = {
            (i, name): tensor
            for i, chunk in enumerate(chunks)
            for name, tensor in chunk.state_dict(keep_vars=True).items()
            if not name.endswith(_EXTRA_STATE)
        }
        copies = {key for key, tensor in tensors.items() if not has_copies and self.stage.is_copy(key[1], tensor)}
        self.copies = {id(tensors[key]) for key in copies}
        self._local_tensors = {key: tensor for key, tensor in tensors.items() if key not in copies}
        experts = {id(chunk.get_parameter(name)) for chunk in chunks for name in expert_parameters(chunk)}
        self._global_by_id: dict[int, torch.Tensor] = {}
        with on_device_of(self.parameters()):
            for (_, name), tensor in self._local_tensors.items():
                if isinstance(tensor, nn.Parameter):
                    self._global_by_id.setdefault(
                        id(tensor), self._global_maker.of(name, tensor, is_expert=id(tensor) in experts)
                    )
        self.layer_groups = layer_groups
        flat = {key: self.stage.name(*key, tensor) for key, tensor in self._local_tensors.items()}
        nested: dict[str, str] = {}
        if layer_groups is not None:
            patterns = [groups_of_all_stages(chunk, layer_groups) for chunk in chunks]
            nested = regrouped(flat.values(), patterns[0].flat, layer_groups)
        self.names = {
            (i, unwrapped(name)): nested.get(stage_free_name, stage_free_name)
            for (i, name), stage_free_name in flat.items()
        }
        if len(set(self.names.values())) < len(self.names):
            raise NotImplementedError(
                "Expected one copy of the embedding on a pipeline stage, got two: an output layer's that shares it and "
                "multi-token prediction's. Build the model with share_embeddings_and_output_weights=False."
            )
        self._by_name = dict(zip(self.names.values(), self._local_tensors.values(), strict=True))
        self._global_tensors = {name: self.global_of(tensor) for name, tensor in self._by_name.items()}

    def global_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter; a buffer itself."""
        return self._global_by_id.get(id(tensor), tensor)

    def part_of(self, name: str) -> Chunk:
        """The box of this rank's tensor-parallel part in a whole tensor."""
        global_tensor, local_tensor = self._global_tensors[name], self._by_name[name]
        chunk = whole_box(global_tensor.shape)
        if not isinstance(global_tensor, DTensor) or global_tensor.shape == local_tensor.shape:
            return chunk
        coordinate = global_tensor.device_mesh.get_local_rank("tensor")
        offsets = tuple(
            0 if a == b else coordinate * b for a, b in zip(global_tensor.shape, local_tensor.shape, strict=True)
        )
        return Chunk(offsets, tuple(local_tensor.shape))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._global_tensors.items()}

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """The tensors by name; the parameters themselves, as with `keep_vars`."""
        return dict(self._global_tensors)

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Run the chunks' hooks of a load: all data is in place."""
        for i, chunk in enumerate(self._chunks):
            chunk.load_state_dict(
                {name: tensor for (chunk_index, name), tensor in self._local_tensors.items() if chunk_index == i},
                strict=False,
            )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The chunks'."""
        return chain.from_iterable(chunk.parameters(recurse) for chunk in self._chunks)


class _GlobalTensors:
    """Makes wholes; meshes are shared between parameters."""

    def __init__(self, ranks: ModelParallelGroups) -> None:
        self._model_groups = ranks
        self._meshes: dict[tuple[DeviceMesh, tuple[int, ...], bool], DeviceMesh] = {}

    def of(self, name: str, parameter: torch.Tensor, *, is_expert: bool) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            raise ValueError(
                f"Expected parameters sharded by fully_shard_model, got {name!r} as a plain tensor of shape "
                f"{tuple(parameter.shape)}. Call lamella_megatron.fully_shard_model(model) first."
            )
        placements, order = _cuts_of(name, parameter)
        mesh = self._mesh(parameter.device_mesh, order, is_expert=is_expert)
        dim = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        shape = list(parameter.shape)
        placement: Placement = Replicate()
        if dim >= 0:
            shape[dim] *= mesh.size(mesh.ndim - 1)
            placement = Shard(dim)
        global_tensor = over(parameter, mesh, (*placements, placement), torch.Size(shape))
        return nn.Parameter(global_tensor, requires_grad=parameter.requires_grad)

    def _mesh(self, data: DeviceMesh, order: tuple[int, ...], *, is_expert: bool) -> DeviceMesh:
        if (data, order, is_expert) not in self._meshes:
            tp = self._model_groups.expt_tp if is_expert else self._model_groups.tp
            if tp is None:
                raise ValueError(
                    "Expected `groups` with the process group `expt_tp`, whose ranks share an expert, got none. Pass "
                    "the ProcessGroupCollection that the model was built with."
                )
            self._meshes[data, order, is_expert] = _with_axis(data, tp, order)
        return self._meshes[data, order, is_expert]


def _cuts_of(name: str, parameter: DTensor) -> tuple[tuple[Placement, ...], tuple[int, ...]]:
    """A parameter's placements without `_StridedShard`, and the order in which the axes of its mesh cut.

    HFSDP's inner axis, the last one, cuts first: a `_StridedShard` on the outer axis records it.
    """
    placements, sizes = tuple(parameter.placements), tuple(parameter.device_mesh.shape)
    plain = tuple(
        Shard(placement.dim) if isinstance(placement, _StridedShard) else placement for placement in placements
    )
    first_to_last = tuple(range(len(sizes)))
    for order in (first_to_last, first_to_last[::-1]):
        if strided_placements(sizes, plain, order=order) == placements:
            return plain, order
    raise NotImplementedError(
        f"Expected the axes of {name!r} to cut it first to last, or last to first, got {placements!r} on a mesh of "
        f"{sizes}. Shard the model by fully_shard_model."
    )


def _with_axis(data: DeviceMesh, tp: dist.ProcessGroup, order: tuple[int, ...]) -> DeviceMesh:
    """A mesh with a last axis, which cuts first, before the others in their order. Effects: collective on the axis."""
    rank_grids: list[Any] = [None] * tp.size()
    dist.all_gather_object(rank_grids, data.mesh.tolist(), group=tp)
    # Placements alone would cut by the first axis first. The checkpoint packages read the order from the mesh.
    names = (*(f"data{axis}" for axis in range(data.ndim)), "tensor")
    groups, grid = [*data.get_all_groups(), tp], torch.tensor(rank_grids).movedim(0, -1)
    mesh: Any = DeviceMesh.from_group(groups, data.device_type, mesh=grid, mesh_dim_names=names)
    mesh._shard_order = [data.ndim, *order]
    return mesh  # type: ignore[no-any-return]


def over(tensor: DTensor, mesh: DeviceMesh, placements: Any, shape: torch.Size) -> DTensor:
    """Another DTensor over a DTensor's local memory."""
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), tensor.dtype)
    with torch.no_grad():
        local = tensor.to_local()
    return dtensor_over(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta))
