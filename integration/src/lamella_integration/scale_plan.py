"""A rank's plan among thousands: units, bytes at rest, and bytes of a step by mesh axis."""

import gc
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lamella_engine as engine
from lamella.testing import LiveBytes, fake_ranks, no_memory
from lamella_buffers import Payload, Pending, ReduceOp, Transport
from lamella_engine.extending import placement_on
from lamella_engine.testing import named_units
from lamella_integration.scale_models import ModelShapes, ShapedModel
from lamella_layout import Rows

Mesh = Literal["fsdp", "hsdp", "hfsdp"]
_WIRE = torch.bfloat16
_STAGES: dict[str, Any] = {
    "fsdp": engine.ZERO3,
    "hsdp": (engine.HSDP, engine.ZERO3),
    "hfsdp": (engine.HFSDP, engine.ZERO3),
}


@dataclass(frozen=True, kw_only=True)
class ScaleCase:
    """A model on a number of ranks.

    Attributes:
        shapes: The model.
        num_ranks: All ranks.
        mesh: An axis of shards; or replicas of shards (HSDP), whose main weights may be sharded too (HFSDP).
        num_replicas: Ranks along the outer axis; 1 for "fsdp".
        num_experts_ranks: Ranks sharing the experts; 1 leaves each rank all experts.
        is_flat: Units are packed into a buffer each, cut between rows; otherwise each parameter is cut.
    """

    shapes: ModelShapes
    num_ranks: int
    mesh: Mesh = "fsdp"
    num_replicas: int = 1
    num_experts_ranks: int = 1
    is_flat: bool = False

    @property
    def num_shards(self) -> int:
        """Ranks sharing a parameter outside experts."""
        return self.num_ranks // self.num_replicas


class RankPlan:
    """The sharded model of a rank.

    Attributes:
        model: The root unit.
        build_seconds: CPU seconds for the model on the meta device.
        shard_seconds: CPU seconds of `fully_shard`, for all units.
        shard_nbytes: Growth of the process meanwhile, in bytes.
    """

    def __init__(self, case: ScaleCase) -> None:
        self.case = case
        began = time.process_time()
        mesh, experts = _meshes(case)
        self.model = ShapedModel(case.shapes, None if experts is None else experts["experts"])
        self.build_seconds = time.process_time() - began
        gc.collect()
        began, resident = time.process_time(), _resident_nbytes()
        _shard(self.model, case, mesh, experts)
        self.shard_seconds, self.shard_nbytes = time.process_time() - began, _resident_nbytes() - resident

    def owned_nbytes(self) -> int:
        """Bytes of this rank's main weights, without padding."""
        return sum(cast(Any, parameter).to_local().nbytes for parameter in self.model.parameters())

    def main_nbytes(self) -> int:
        """Bytes of this rank's main weights, with padding."""
        return sum(
            group.main_weight.flat.nbytes for _, unit in named_units(self.model) for group in unit.parameters.groups
        )

    def largest_unit_nbytes(self) -> int:
        """Bytes of the largest unit while unsharded, padding included."""
        return max(unit.parameters.unsharded_nbytes for _, unit in named_units(self.model))

    def padding_nbytes(self) -> int:
        """Bytes of padding moved by the gathers of all units, once."""
        total = 0
        for _, unit in named_units(self.model):
            for group in unit.parameters.groups:
                layout = group.layout
                moved = sum(slot.numel for slot in layout.wire_full_slots)
                total += _WIRE.itemsize * (moved - sum(prod(shape) for shape in layout.shapes))
        return total

    def step_traffic(self) -> Counter[tuple[str, str]]:
        """Bytes received by the rank in a step, by axis and collective.

        Layers are gathered for forward and for backward, the root once; a ring moves (N - 1) / N of a buffer.

        Effects: the model has fake memory from now on.
        """
        received: Counter[tuple[str, str]] = Counter()
        with no_memory(), LiveBytes():
            self.model.to_empty(device="cpu")
            _count(self.model, received)
            modules = [*self.model.layers, self.model]
            for module in modules[:-1]:
                _verbs(module).unshard()
                _verbs(module).reshard()
            for module in reversed(modules):
                _verbs(module).unshard()
                _fill_gradients(module)
                _verbs(module).reduce_gradients()
                _verbs(module).reshard()
            _verbs(self.model).wait_for_gradients()
        return received


@contextmanager
def rank_plan(case: ScaleCase, rank: int) -> Iterator[RankPlan]:
    """Yield the plan of a rank; the default process group is fake in the block."""
    with fake_ranks(case.num_ranks, rank, "cuda"):
        yield RankPlan(case)


def even_row_numel(shape: Sequence[int]) -> int:
    """Elements of an index of dim 0."""
    return prod(shape[1:])


def gathered_numel(case: ScaleCase) -> int:
    """Elements filled by the gathers of all parameters, once, each parameter cut by rows.

    By arithmetic alone: each rank sends as many rows as the rank with most.
    """
    return sum(
        case.num_shards * -(-shape[0] // case.num_shards) * even_row_numel(shape)
        for _, shape in case.shapes.named_shapes()
    )


def _verbs(module: nn.Module) -> Any:
    return module


def _meshes(case: ScaleCase) -> tuple[DeviceMesh, DeviceMesh | None]:
    shape, names = (case.num_replicas, case.num_shards), ("replicas", "shards")
    mesh = init_device_mesh("cpu", shape[-1:], mesh_dim_names=names[-1:])
    if case.mesh != "fsdp":
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if case.num_experts_ranks == 1:
        return mesh, None
    shape = (case.num_ranks // case.num_experts_ranks, case.num_experts_ranks)
    return mesh, init_device_mesh("cpu", shape, mesh_dim_names=("experts_data", "experts"))


def _shard(model: ShapedModel, case: ScaleCase, mesh: DeviceMesh, experts: DeviceMesh | None) -> None:
    policy = engine.MixedPrecisionPolicy(param_dtype=_WIRE, reduce_dtype=_WIRE)
    spread = model.spread_parameters()

    def keep(parameter: nn.Parameter) -> Rows | None:
        return None if id(parameter) in spread else Rows(1)

    options = engine.ShardingOptions(placements=_STAGES[case.mesh], keep_together=keep if case.is_flat else None)
    placed = None if experts is None else _placed_experts(spread, experts)
    for module in (*model.layers, model):
        engine.fully_shard(module, mesh=mesh, mp_policy=policy, options=options, shard_placement_fn=placed)


def _placed_experts(spread: set[int], experts: DeviceMesh) -> Any:
    """Cut experts over the ranks with the same experts."""
    data = experts["experts_data"]

    def place(parameter: torch.Tensor) -> Any:
        if id(parameter) not in spread:
            return None
        return placement_on(data, dim=experts_dim(cast(Any, parameter)._local_tensor.shape, data.size()))

    return place


def experts_dim(shape: Sequence[int], num_ranks: int) -> int:
    """The dim of a stack of experts to cut: the next if ranks would be left without experts."""
    return 1 if shape[0] < num_ranks and shape[1] % num_ranks == 0 else 0


class _CountingTransport:
    """A transport that counts the bytes a rank receives."""

    def __init__(self, axis: str, inner: Transport, received: Counter[tuple[str, str]]) -> None:
        self._axis, self._inner, self._received = axis, inner, received
        self.rank, self.num_ranks = inner.rank, inner.num_ranks

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        self._add("gather", sum(payload.full.nbytes for payload in payloads))
        return self._inner.all_gather(payloads)

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        self._add("reduce-scatter", sum(payload.full.nbytes for payload in payloads))
        return self._inner.reduce_scatter(payloads, op)

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        self._add("all-reduce", 2 * sum(tensor.nbytes for tensor in tensors))
        return self._inner.all_reduce(tensors, op)

    def _add(self, kind: str, nbytes: int) -> None:
        self._received[self._axis, kind] += nbytes * (self.num_ranks - 1) // self.num_ranks


def _count(model: nn.Module, received: Counter[tuple[str, str]]) -> None:
    for _, unit in named_units(model):
        for group in unit.parameters.groups:
            names = group.axes.mesh.mesh_dim_names or ("shards",)
            transports = group.transports
            transports.shard = _CountingTransport(names[-1], transports.shard, received)
            for attribute in ("replicas", "outer"):
                if (inner := getattr(transports, attribute)) is not None:
                    setattr(transports, attribute, _CountingTransport(names[0], inner, received))


def _fill_gradients(module: nn.Module) -> None:
    unit = dict(named_units(module))["root"]
    for group in unit.parameters.groups:
        for parameter in group.parameters:
            parameter.unsharded.grad = torch.empty_like(parameter.unsharded)


def _resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
