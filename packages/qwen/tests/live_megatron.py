"""Tiny Qwen3.5s as ranks hold them: Megatron's fused tensors, cut between rows anywhere, and Hugging Face's names.

A rank's tensors are made of whole tensors here, by slicing alone: no tested code makes an expected value.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from qwen_tiny import MemorySource, config_of, read_all, translated
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lamella_checkpoint import Correspondence, LiveCut, LiveShard, Source, load, save, written_pieces
from lamella_convert import (
    Dialect,
    Rules,
    Translated,
    from_megatron_model,
    global_expert,
    open_checkpoint,
    to_megatron_model,
)
from lamella_layout import Range
from lamella_qwen import megatron_rules, megatron_sizes
from lamella_testing.qwen import Kind

SLOTS = ("exp_avg", "exp_avg_sq")
PARTS = {"in_proj": ("query", "key", "value", "z", "beta", "alpha"), "conv1d": ("query", "key", "value")}


@dataclass(frozen=True)
class World:
    """Ranks on meshes (dp, tp) and (edp, ep, etp), the last axis of each within a host; and the forms of tensors.

    `is_even` cuts along the data axis as placements say, and not wherever a packed buffer of all parameters is cut.
    `slots` names the form of an optimizer's state: DTensors like the parameter, plain tensors of the rank's elements,
    flat tensors, or DTensors on the data axis alone. `is_sequential` names experts as modules of their own.
    """

    dp: int
    tp: int
    ep: int = 1
    etp: int = 1
    is_even: bool = False
    slots: str = "like"
    is_sequential: bool = False

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp

    @property
    def edp(self) -> int:
        return self.num_ranks // (self.ep * self.etp)

    def __str__(self) -> str:
        return f"dp{self.dp}tp{self.tp}ep{self.ep}etp{self.etp}"


def rules_of(kind: Kind, weights: Mapping[str, torch.Tensor]) -> Rules:
    """The rules for a model of a kind, with as many experts as the weights have."""
    config = config_of(kind)
    for name, tensor in weights.items():
        if name.endswith(".experts.gate_up_proj"):
            config.get("text_config", config)["num_experts"] = len(tensor)
    return megatron_rules(config)


@dataclass(frozen=True)
class FullModel:
    """A model and its Adam, whole, under the names of both sides; "" is the slot of the weights."""

    kind: Kind
    published: dict[str, Mapping[str, torch.Tensor]]
    canonical: dict[str, dict[str, torch.Tensor]]

    @property
    def rules(self) -> Rules:
        """The rules between both sides."""
        return rules_of(self.kind, self.published[""])

    @classmethod
    def of(cls, kind: Kind, weights: Mapping[str, torch.Tensor]) -> Self:
        torch.manual_seed(3)
        published: dict[str, Mapping[str, torch.Tensor]] = {"": weights}
        published |= {slot: {name: torch.rand_like(tensor) for name, tensor in weights.items()} for slot in SLOTS}
        tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
        for slot in SLOTS:
            tensors |= {f"optimizer.state.{name}.{slot}": tensor for name, tensor in published[slot].items()}
        moved = read_all(translated(MemorySource(tensors), rules_of(kind, weights), "right"))
        names = [name.removeprefix("model.") for name in moved if name.startswith("model.")]
        canonical = {"": {name: moved[f"model.{name}"] for name in names}}
        for slot in SLOTS:
            canonical[slot] = {name: moved[f"optimizer.state.{name}.{slot}"] for name in names}
        return cls(kind, published, canonical)


class RankTensor:
    """A tensor-parallel rank's part of one of a model's tensors."""

    def __init__(self, values: torch.Tensor, tp_dim: int | None, *, is_expert: bool = False) -> None:
        self.values, self.tp_dim, self.is_expert = values, tp_dim, is_expert


COLUMNS = ("linear_qkv", "linear_fc1", "in_proj", "conv1d", "word_embeddings", "output_layer")
ROWS = ("linear_proj.weight", "out_proj.weight", "linear_fc2.weight")


def tp_dim_of(name: str) -> int | None:
    name = re.sub(r"\d+$", "", name)
    if name.endswith(ROWS):
        return 1
    is_column = name.endswith(("A_log", "dt_bias")) or name.rpartition(".")[0].endswith(COLUMNS)
    return 0 if is_column and "layer_norm" not in name else None


def parts_of(canonical: Mapping[str, torch.Tensor], world: World, tp: int, ep: int, etp: int) -> dict[str, RankTensor]:
    """The tensors of a tensor-parallel rank's model, by its own names, in megatron-core's layout."""
    parts = {}
    for name, tensor in canonical.items():
        expert = re.match(r"(.*\.experts\.linear_fc\d\.weight)(\d+)$", name)
        num, rank = (world.etp, etp) if expert else (world.tp, tp)
        component = re.match(r"(.*\.self_attention\.(in_proj|conv1d)\.weight)\.query$", name)
        dim = tp_dim_of(name)
        if expert:
            mine = experts_of(canonical, world, ep)
            if int(expert[2]) not in mine:
                continue
            local_name = own_name(expert[1], int(expert[2]) - mine[0], world)
        else:
            local_name = name
        if component:
            components = [canonical[f"{component[1]}.{part}"].chunk(num)[rank] for part in PARTS[component[2]]]
            parts[component[1]] = RankTensor(torch.cat(components), 0)
        elif re.search(r"self_attention\.(in_proj|conv1d)\.weight\.", name):
            continue
        elif is_gated(name, canonical):
            parts[local_name] = RankTensor(
                torch.cat([half.chunk(num)[rank] for half in tensor.chunk(2)]), 0, is_expert=bool(expert)
            )
        else:
            values = tensor if dim is None else tensor.chunk(num, dim)[rank]
            parts[local_name] = RankTensor(values.contiguous(), dim, is_expert=bool(expert))
    return parts


def experts_of(canonical: Mapping[str, torch.Tensor], world: World, ep: int) -> range:
    """The numbers of a rank's experts, by `_bounds`."""
    numbers = {
        int(match[1])
        for match in (re.search(r"experts\.linear_fc1\.weight(\d+)$", name) for name in canonical)
        if match
    }
    return range(*_bounds(len(numbers), world.ep, ep))


def _bounds(size: int, num: int, rank: int) -> tuple[int, int]:
    share = -(-size // num)
    return min(share * rank, size), min(share * (rank + 1), size)


def own_name(name: str, index: int, world: World) -> str:
    if not world.is_sequential:
        return f"{name}{index}"
    head, layer, kind = name.rsplit(".", 2)
    return f"{head}.local_experts.{index}.{layer}.{kind}"


def is_gated(name: str, canonical: Mapping[str, torch.Tensor]) -> bool:
    return ".linear_fc1.weight" in name and not name.startswith("vision_model.")


def rows_of(parts: dict[str, RankTensor], num: int, rank: int, *, is_even: bool) -> dict[str, tuple[int, int]]:
    """The rows of each part on a rank of the data axis; in a packed buffer, a part may have none there."""
    if is_even:
        return {name: _bounds(len(part.values), num, rank) for name, part in parts.items()}
    ends = list(accumulate(part.values.numel() for part in parts.values()))
    cuts = [ends[-1] * index // num for index in range(num + 1)] if ends else []
    rows_by_name: dict[str, tuple[int, int]] = {}
    for (name, part), end in zip(parts.items(), ends, strict=True):
        shape = part.values.shape
        row, start = prod(shape[1:]), end - prod(shape)
        first, last = (min(max(-(-(cut - start) // row), 0), shape[0]) for cut in cuts[rank : rank + 2])
        rows_by_name[name] = first, last
    return rows_by_name


class Meshes:
    """The two meshes of a world; tensor parallelism cuts first, as Megatron-FSDP says on its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dense = init_device_mesh("cpu", (world.dp, world.tp), mesh_dim_names=("dp", "tp"))
        axes = ("edp", "ep", "etp")
        self.experts = init_device_mesh("cpu", (world.edp, world.ep, world.etp), mesh_dim_names=axes)
        self.expert_mesh = self.experts["edp", "etp"]
        order_shards(self.dense, [1, 0])
        order_shards(self.expert_mesh, [1, 0])
        self.dp, self.tp = _coordinate(self.dense)
        self.edp, self.ep, self.etp = _coordinate(self.experts)


def order_shards(mesh: Any, order: list[int]) -> None:
    """Say, as Megatron-FSDP does, by which axis of a mesh a dim is cut first."""
    mesh._shard_order = order


def _coordinate(mesh: DeviceMesh) -> Sequence[int]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return coordinate


class Rank:
    """A rank's model, its optimizer, and the expected contents of each tensor.

    Tensors are NaN until a read. A stepped optimizer has slots to read into, of the world's kind; a fresh optimizer has
    none.
    """

    def __init__(self, full_model: FullModel, world: World, *, is_stepped: bool = False) -> None:
        self.full_model, self.world, self.meshes = full_model, world, Meshes(world)
        self.first_expert = next(iter(experts_of(full_model.canonical[""], world, self.meshes.ep)), 0)
        self.parts = {slot: self._parts(canonical) for slot, canonical in full_model.canonical.items()}
        self.rows = self._rows()
        self.model, self.params = nn.Module(), {}
        for name, part in self.parts[""].items():
            self.params[name] = self._parameter(part, self.rows[name])
            register(self.model, name, self.params[name])
        self.optimizer = make_optimizer(self.params)
        if is_stepped:
            self._step(torch.nan)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(param.shape) for name, param in self.params.items()}

    def correspondences(self, dialect: Dialect | None = None) -> list[Correspondence]:
        sizes = megatron_sizes(config_of(self.full_model.kind), tensor_parallel_size=self.world.tp)
        return from_megatron_model(
            self.shapes, sizes=sizes | {"etp": self.world.etp}, dialect=dialect, first_expert=self.first_expert
        )

    def train(self) -> None:
        """Set the optimizer's state and options to the expected ones."""
        self._step()
        for group, options in zip(self.optimizer.param_groups, OPTIONS, strict=True):
            group.update(options)

    def save(self, path: Path) -> None:
        save(path, model=self.model, optimizer=self.optimizer, correspondences=self.correspondences())

    def load(
        self, path: Path, then: Callable[[Source], Source] = lambda source: source, *, optimizer: bool = True
    ) -> None:
        """Read a checkpoint, with canonical names made by `then`."""
        mine = self.correspondences()
        load(
            partial(open_checkpoint, path),
            model=self.model,
            optimizer=self.optimizer if optimizer else None,
            translate=lambda source: to_megatron_model(then(source), mine),
        )

    def export(self, path: Path, dialect: Dialect) -> None:
        """Write `fsdp_dtensor` with torch DCP, like Megatron: pieces of tensors, and Megatron's objects."""
        cut = LiveCut(self.correspondences(dialect), to="left")
        shards = {name: self._shard(name) for name in self.params}
        model, inner = "model.module.", "module.module.module."
        weights = written_pieces(cut, {name: (shards[name], param) for name, param in self.params.items()})
        values: dict[str, Any] = {f"{model}{name}": value for name, value in weights.items()}
        for slot in SLOTS:
            shards_and_slots = {name: (shards[name], self._slot(name, slot)) for name in self.params}
            moments = written_pieces(cut, shards_and_slots)
            values |= {f"optimizer.state.{inner}{name}.{slot}": value for name, value in moments.items()}
            values |= {f"optimizer.state.{inner}{name}.step": torch.tensor(7.0) for name in moments}
        names = {id(param): global_expert(name, self.first_expert) for name, param in self.params.items()}
        for group in self.optimizer.param_groups:
            options = {option: group[option] for option in OPTIONS[0]}
            for param in group["params"]:
                prefix = f"optimizer.param_to_group_meta.{inner}{names[id(param)]}"
                values |= {f"{prefix}.{option}": value for option, value in options.items()}
        dcp.save(values | {"args": args_of(self), "iteration": 3, "checkpoint_version": 3.0}, checkpoint_id=path)  # type: ignore[attr-defined]

    def assert_holds(self, *, optimizer: bool = True) -> None:
        """Every element of every tensor is the expected one, and so are the moments and the options."""
        for name, param in self.params.items():
            assert torch.equal(local(param), self._expected(name, "")), (dist.get_rank(), name)
            state = self.optimizer.state.get(param, {})
            for slot in SLOTS if optimizer else ():
                expected = self._expected(name, slot)
                assert torch.equal(local(state[slot]).view(expected.shape), expected), (dist.get_rank(), name, slot)
            assert not optimizer or state["step"] == 7.0, name
        if optimizer:
            assert_options(self.optimizer)

    def _parts(self, canonical: Mapping[str, torch.Tensor]) -> dict[str, RankTensor]:
        return parts_of(canonical, self.world, self.meshes.tp, self.meshes.ep, self.meshes.etp)

    def _rows(self) -> dict[str, tuple[int, int]]:
        rows_by_name: dict[str, tuple[int, int]] = {}
        for is_expert, num, rank in [(False, self.world.dp, self.meshes.dp), (True, self.world.edp, self.meshes.edp)]:
            parts = {name: part for name, part in self.parts[""].items() if part.is_expert == is_expert}
            rows_by_name |= rows_of(parts, num, rank, is_even=self.world.is_even)
        return rows_by_name

    def _expected(self, name: str, slot: str) -> torch.Tensor:
        start, stop = self.rows[name]
        return self.parts[slot][name].values[start:stop]

    def _slot(self, name: str, slot: str) -> torch.Tensor:
        """The live slot; a rank without elements of a parameter may lack the slot."""
        live_slot: torch.Tensor = self.optimizer.state.get(self.params[name], {}).get(slot, self._expected(name, slot))
        return live_slot

    def _shard(self, name: str) -> LiveShard:
        part, (start, stop) = self.parts[""][name], self.rows[name]
        row = prod(part.values.shape[1:])
        num, rank = (self.world.etp, self.meshes.etp) if part.is_expert else (self.world.tp, self.meshes.tp)
        elements = Range(start * row, stop * row)
        shape = self.params[name].shape
        return LiveShard.of_rows(shape, elements, tp_dim=part.tp_dim, num_tp=num, tp_rank=rank)

    def _parameter(self, part: RankTensor, rows: tuple[int, int]) -> nn.Parameter:
        start, stop = rows
        mine = torch.full_like(part.values[start:stop], torch.nan)
        mesh = self.meshes.expert_mesh if part.is_expert else self.meshes.dense
        placements = [Shard(0), Replicate() if part.tp_dim is None else Shard(part.tp_dim)]
        shape = list(part.values.shape)
        if part.tp_dim is not None:
            shape[part.tp_dim] *= mesh.size(1)
        param = nn.Parameter(as_dtensor(mine, mesh, placements, shape))
        if not self.world.is_even:
            offsets = [start, *[0] * (mine.ndim - 1)]
            if part.tp_dim is not None:
                offsets[part.tp_dim] += part.values.shape[part.tp_dim] * mesh.get_local_rank(1)
            tell(param, offsets)
        return param

    def _step(self, value: float | None = None) -> None:
        """Give each parameter its state; none to a rank without elements."""
        for name, param in self.params.items():
            start, stop = self.rows[name]
            if start < stop:
                state = {slot: self._make_slot(name, param, slot, value) for slot in SLOTS}
                self.optimizer.state[param] = state | {"step": torch.tensor(7.0)}

    def _make_slot(self, name: str, param: Any, slot: str, value: float | None) -> torch.Tensor:
        values, part = self._expected(name, slot).clone(), self.parts[slot][name]
        if value is not None:
            values.fill_(value)
        match self.world.slots:
            case "plain":
                return values
            case "flat":
                return values.flatten()
            case "data axis":
                mesh = self.meshes.expert_mesh["edp"] if part.is_expert else self.meshes.dense["dp"]
                return as_dtensor(values, mesh, [Shard(0)], part.values.shape)
        slot_tensor = torch.zeros_like(param)
        assert isinstance(slot_tensor, DTensor)
        slot_tensor._local_tensor.copy_(values)
        return slot_tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def as_dtensor(
    values: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def tell(param: Any, offsets: Sequence[int]) -> None:
    """Let a DTensor's local tensor tell its place, like Megatron's: one chunk, and nothing to write if empty."""
    local_tensor = param._local_tensor
    chunk = ChunkStorageMetadata(torch.Size(offsets), local_tensor.shape)

    def create_write_items(name: str, _: object) -> list[WriteItem]:
        data = TensorWriteData(chunk, TensorProperties(dtype=local_tensor.dtype), param.shape)
        write_item = WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
        return [write_item] if local_tensor.numel() else []

    local_tensor.__create_write_items__ = create_write_items
    local_tensor.__create_chunk_list__ = lambda: [chunk]


def register(model: Any, name: str, param: Any) -> None:
    *path, last = name.split(".")
    for child in path:
        if not hasattr(model, child):
            model.add_module(child, nn.Module())
        model = getattr(model, child)
    model.register_parameter(last, param)


OPTIONS = (
    {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
    {"lr": 5e-4, "betas": (0.8, 0.99), "weight_decay": 0.0},
)


def make_optimizer(params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW whose norms are a group of their own, with options that are nobody's yet."""
    groups = [[param for name, param in params.items() if ("norm" in name) == is_norm] for is_norm in (False, True)]
    return torch.optim.AdamW([{"params": group, "lr": 9.0 - index} for index, group in enumerate(groups)])


def assert_options(optimizer: torch.optim.Optimizer) -> None:
    for group, options in zip(optimizer.param_groups, OPTIONS, strict=True):
        assert {option: group[option] for option in options} == options


def args_of(rank: Rank) -> Namespace:
    """What Megatron's `args` say of the sizes of rank-major tensors."""
    config = config_of(rank.full_model.kind)
    text = config.get("text_config", config)
    names = [
        f"linear_{size_name}" for size_name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    ]
    return Namespace(tensor_model_parallel_size=rank.world.tp, **{name: text[name] for name in names})


class PublishedRank:
    """The same of a model with Hugging Face's names: packed experts are cut over all three axes of their mesh."""

    def __init__(self, full_model: FullModel, world: World) -> None:
        self.full_model, self.meshes = full_model, Meshes(world)
        order_shards(self.meshes.experts, [1, 2, 0])
        self.model = nn.Module()
        self.params = {
            name: nn.Parameter(self._part(name, torch.full_like(tensor, torch.nan)))
            for name, tensor in full_model.published[""].items()
        }
        for name, param in self.params.items():
            register(self.model, name, param)
        self.optimizer = make_optimizer(self.params)

    def train(self) -> None:
        """Set the optimizer's state and options to the expected ones."""
        for name, param in self.params.items():
            state = {slot: self._part(name, self.full_model.published[slot][name]) for slot in SLOTS}
            self.optimizer.state[param] = state | {"step": torch.tensor(7.0)}
        for group, options in zip(self.optimizer.param_groups, OPTIONS, strict=True):
            group.update(options)

    def load(self, path: Path, *, is_canonical: bool = False) -> None:
        """Read a checkpoint with the model's names, or Megatron's canonical names; files of weights have the former."""
        rules = self.full_model.rules

        def published(source: Source) -> Translated:
            return translated(source, rules, "left")

        optimizer = None if (path / "model.safetensors").is_file() else self.optimizer
        load(
            partial(open_checkpoint, path),
            model=self.model,
            optimizer=optimizer,
            translate=published if is_canonical else None,
        )

    def assert_holds(self, *, optimizer: bool = True) -> None:
        """As `Rank.assert_holds`."""
        for name, param in self.params.items():
            for slot in ("", *SLOTS) if optimizer else ("",):
                tensor = self.optimizer.state[param][slot] if slot else param
                expected = self._part(name, self.full_model.published[slot][name])
                assert torch.equal(local(tensor), local(expected)), (dist.get_rank(), name, slot)
            assert not optimizer or self.optimizer.state[param]["step"] == 7.0, name
        if optimizer:
            assert_options(self.optimizer)

    def _part(self, name: str, values: torch.Tensor) -> DTensor:
        dims: tuple[int, ...]
        order: tuple[int, ...]
        if ".mlp.experts." in name:
            mesh, dims, order = self.meshes.experts, (0, 0, 1), (1, 2, 0)
        else:
            mesh, order = self.meshes.dense, (1, 0)
            dims = (0, 1 if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")) else 0)
        mine = values
        for axis in order:
            size = mine.shape[dims[axis]]
            start, stop = _bounds(size, mesh.size(axis), mesh.get_local_rank(axis))
            mine = mine.narrow(dims[axis], start, stop - start)
        return as_dtensor(mine.clone(), mesh, [Shard(dim) for dim in dims], values.shape)
