"""The parameters of a unit with the same number formats: shards, unsharded buffers, gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

from lamella_buffers import (
    Allocator,
    CachingAllocator,
    CopyEngines,
    GatherPlan,
    LocalTransport,
    Payload,
    ReduceOp,
    ShardedBuffer,
    Transport,
    UnshardedBuffer,
    copy_engines_of,
    standalone,
    transport_for,
)
from lamella_engine._parameters.offload import Offload
from lamella_engine._parameters.sharded_parameter import (
    Candidate,
    LostChange,
    ShardedParameter,
    any_replaced,
    dtensor_for,
    install,
    put,
    put_back,
    sharded_parameter,
    undo_assigned_data,
)
from lamella_engine._parameters.sharding import DataAxes, local_of
from lamella_engine._parameters.unsharded_weight import PayloadLayouts, UnshardedWeight
from lamella_engine._scaling.scales import Scales
from lamella_layout import EvenLayout, FlatLayout
from lamella_precision import CachingRecipe, Direction, MixedPrecisionPolicy, ScaledRecipe, read_directly

MEAN, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


class Reduced(NamedTuple):
    """Gradients after the reduction over the shard axis."""

    shards: ShardedBuffer
    present: list[bool]  # by member: False where no gradient is installed


class ParameterGroup:
    """Parameters of one unit with the same dtypes, on the same data axes.

    A group's members and divisor are fixed at construction: a collective never depends on the gradients that happen to
    be present on this rank.

    Args:
        candidates: The parameters, of one set of data axes and one policy, on the resting device of shards or on meta.
            The group does not keep their storage.
        allocator: Gives the unsharded buffer its bytes. None: memory for the fastest gathers.
        offload: The offload of shards that rest on the CPU; None for shards on the mesh's device.

    Attributes:
        allocator: The source of bytes: the argument, or a `CachingAllocator`.
        offload: The offload of shards that rest on the CPU, or None.
        layout: The layout of gathered shards and of the unsharded buffer.
        main_layout: The layout of the main weights: `layout`, unless the outer axis shards main weights too.
        main_weight: This rank's main weights; the DTensors are views of the buffer.
        main_grads_dtype: The dtype of the sharded parameters' gradients; the policy does not apply to integers.
        buffers: The unsharded buffers, one a payload of the parameters' recipe.
        model_weights: By payload, this rank's shards, gathered over the outer axis; empty if not gathered, or possibly
            stale.
        scales: The scales of whole parameters, for a recipe with such scales; else None.
        divisor: Divides the sum of the ranks' gradients.
        sums_only: Divide after a sum, even if the collective itself can make the mean.
        transport: The shard axis.
        reduce_transport: The shard axis on a separate communicator for reductions, or None.
        replicas: The replicate axis, or None.
        outer: The axis over which each shard's main weights are sharded, or None.
        neighbours: Ranks that share a larger part of each parameter between forward and backward, or None.
        parts: This rank's share of the neighbours' larger parts, or None.
        partial: Gradients still to be reduced over `replicas` or `outer`.
        keeps_bytes: Freeing leaves the unsharded buffer in place, with stale contents.
        computes_with_main: The unsharded parameters are the main weights themselves, not a copy.
        is_meta: The shards have no storage yet; the unsharded buffers are made when the shards get storage.

    `build_unsharded` must follow, after the last reference to the candidates: until then originals hold their memory.

    Effects: allocates the shards on the current stream; not a collective.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        allocator: Allocator | None,
        offload: Offload | None = None,
    ) -> None:
        self._begin(candidates[0].sharding.axes, candidates[0].policy, allocator, offload)
        tensors = [local_of(candidate.parameter) for candidate in candidates]
        self._lay_out([tensor.shape for tensor in tensors], [candidate.sharding.dim for candidate in candidates])
        main_dtype, _, self.reduce_dtype = dtypes_of(candidates[0].parameter, self.policy)
        self.main_weight = self._new_main_weight(main_dtype, tensors[0].device)
        self.main_weight.copy_from(tensors)
        # Views of the buffer would carry the whole buffer's storage into every pickle and deep copy of one shard.
        shards = [standalone(shard) for shard in self.main_weight.shards]
        self.parameters = [sharded_parameter(c, shard) for c, shard in zip(candidates, shards, strict=True)]
        put(self.parameters)

    def _begin(
        self, axes: DataAxes, policy: MixedPrecisionPolicy, allocator: Allocator | None, offload: Offload | None
    ) -> None:
        """Set up transports and options; no storage yet."""
        self.axes = axes
        self.policy = policy
        self.divisor = float(self.axes.num_ranks)
        self.sums_only = False
        engines = None if allocator is not None else _engines(axes)
        self.transport = engines.transport if engines else _transport(axes, axes.shard_group) or LocalTransport()
        self._windows = engines.allocator if engines else None
        self.replicas = _transport(axes, axes.replicate_group)
        self.outer = _transport(axes, axes.outer_group)
        self.reduce_transport: Transport | None = None
        self.neighbours: Transport | None = None
        self.parts: list[torch.Tensor] | None = None
        self.partial: Reduced | None = None
        self.rank = self.axes.shard_rank
        self.allocator = CachingAllocator() if allocator is None else allocator
        self.offload = offload
        self.model_weights: dict[int, ShardedBuffer] = {}
        self.buffers: tuple[UnshardedBuffer, ...] = ()
        self._allocated: tuple[int, ...] = ()  # indices of buffers with bytes
        self.scales: Scales | None = None
        self._caches: CachingRecipe | None = None
        self.keeps_bytes = False
        self.computes_with_main = False
        self.is_meta = False

    def _lay_out(self, shapes: Sequence[tuple[int, ...]], dims: Sequence[int]) -> None:
        num_shards = self.axes.num_shards
        self.layout: EvenLayout | FlatLayout = EvenLayout.build(shapes, num_shards, dims=dims)
        self.main_layout: EvenLayout | FlatLayout = EvenLayout.build(
            shapes, num_shards * self.axes.num_outer_shards, dims=dims
        )

    # -- storage ----------------------------------------------------------------------------------------------------

    def _new_main_weight(self, dtype: torch.dtype, device: torch.device) -> ShardedBuffer:
        numel = self.main_layout.shard_numel
        if self.offload is not None and device.type == "cpu":
            flat = self.offload.empty(numel, dtype)
        else:
            flat = torch.empty(numel, dtype=dtype, device=device)
        return ShardedBuffer(self.main_layout, self.axes.main_rank, flat)

    def build_unsharded(self) -> None:
        """Make the unsharded buffers and parameters once; the buffers' bytes come and go.

        Effects: allocates the buffers for a moment, on the current stream.
        """
        self.is_meta = self.main_weight.device.type == "meta"
        self._allocated = ()
        self.type_gradients()
        if self.is_meta:
            return
        formats = self.payload_layouts(self.layout, self.main_weight.dtype)
        sends_main = all(payload_format.is_main_weight for payload_format in formats.formats)
        self._sends_main = sends_main
        self.computes_with_main = sends_main and self.axes.shard_axis is None and self.offload is None
        allocator = _Borrowed(self.main_weight.flat) if self.computes_with_main else self.allocator
        ranks = self.rank, self.axes.main_rank
        recipe = formats.recipe
        if isinstance(recipe, ScaledRecipe):
            self.scales = Scales(recipe, self.layout.shapes, self.device)
        self._caches = recipe if isinstance(recipe, CachingRecipe) else None
        layouts = self.layout, self.main_layout
        self._unsharded = UnshardedWeight(formats, *layouts, ranks, self.device, allocator, self.scales)
        self.buffers = self._unsharded.buffers
        for parameter, weight in zip(self.parameters, self._unsharded.weights, strict=True):
            # `data` has a version counter of its own: a write is told by the parameter's name, not by the group's.
            unsharded = parameter.sharding.wrap(weight.data if type(weight) is torch.Tensor else weight)
            parameter.compute_with(nn.Parameter(unsharded, requires_grad=parameter.sharded.requires_grad))
            read_directly(parameter.unsharded)
        for buffer in self.buffers:
            buffer.free()  # only now: torch checks new views against the storage's size
        self._chosen = self._choices(formats)
        self._plans: dict[tuple[int, ...], GatherPlan] = {}  # made anew: old plans would send the old main weights
        # Only now: windows belong to the gather stream, not to the current one. A unit moved off its mesh has none.
        if self._windows is not None and self.device.type == self.axes.mesh.device_type:
            for buffer in self.buffers:
                buffer.allocator = self._windows

    def type_gradients(self) -> None:
        """Let sharded parameters have gradients of the policy's dtype, where it is not the main weights'."""
        main = self.main_weight.dtype
        self.main_grads_dtype = self.policy.main_grads_dtype_of(main) if main.is_floating_point else main
        if self.main_grads_dtype != main:
            for parameter in self.parameters:
                parameter.sharded.grad_dtype = self.main_grads_dtype

    def _choices(self, formats: PayloadLayouts) -> dict[tuple[Direction, Direction | None], tuple[int, ...]]:
        """The answers of `chosen`, asked for by each gather."""
        pairs = [(direction, gathered_for) for direction in Direction for gathered_for in (None, *Direction)]
        if self.neighbours is None:
            return {
                (direction, gathered_for): formats.chosen(direction, gathered_for) for direction, gathered_for in pairs
            }
        # The neighbours' parts are of all payloads, so the first gather takes every payload.
        everything = tuple(range(len(self.buffers)))
        return {(direction, gathered_for): () if gathered_for else everything for direction, gathered_for in pairs}

    def payload_layouts(self, layout: EvenLayout | FlatLayout, main_dtype: torch.dtype) -> PayloadLayouts:
        """The payloads of parameters in `layout`."""
        return PayloadLayouts(self.policy.recipe_of(main_dtype), layout, main_dtype)

    @property
    def unsharded_weight(self) -> UnshardedBuffer:
        """The only unsharded buffer, for a recipe with one payload."""
        (only,) = self.buffers
        return only

    @property
    def is_directional(self) -> bool:
        """Whether some payload is needed in forward alone, or in backward alone."""
        formats = self.payload_layouts(self.layout, self.main_weight.dtype).formats
        return any(payload_format.direction is not Direction.BOTH for payload_format in formats)

    def chosen(self, direction: Direction, gathered_for: Direction | None) -> tuple[int, ...]:
        """The buffers that a gather for a direction fills, beside buffers filled for direction `gathered_for`."""
        return self._chosen[direction, gathered_for]

    @property
    def device(self) -> torch.device:
        """The device of gathered parameters and of reductions."""
        return self.main_weight.device if self.offload is None else self.offload.device

    @property
    def shard_and_outer(self) -> tuple[Transport, Transport | None]:
        """The axes that main weights are sharded over."""
        return self.transport, self.outer

    @property
    def is_offloaded(self) -> bool:
        """Whether shards rest on the CPU."""
        return self.offload is not None

    @property
    def is_at_home(self) -> bool:
        """Whether the shards lie on their resting device."""
        return self.offload is None or self.main_weight.device.type == "cpu"

    def on_meta(self) -> list[ShardedParameter]:
        """The members without storage."""
        return [p for p in self.parameters if local_of(p.replacement()).is_meta] if self.is_meta else []

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded group and its caches, on the model-parallel rank with the most: equal on all ranks."""
        main_dtype, _, _ = dtypes_of(self.parameters[0].sharded, self.policy)
        layout = self.layout
        largest = [p.sharding.largest_part(shape) for p, shape in zip(self.parameters, layout.shapes, strict=True)]
        if isinstance(layout, EvenLayout) and largest != list(layout.shapes):
            layout = EvenLayout.build(largest, layout.num_shards, dims=layout.dims)
        payloads = self.payload_layouts(layout, main_dtype)
        return payloads.nbytes + payloads.cached_nbytes

    def undo_assigned_data(self) -> list[str]:
        """Point members back to the group's memory after `form.data = tensor`; the group must be sharded.

        Returns:
            The names of such members.

        Effects: those of `build_unsharded`, if there are any.
        """
        if names := undo_assigned_data(self.parameters):
            self.build_unsharded()
        return names

    def adopt_replaced_shards(self, *, keep_parameters: bool) -> None:
        """Take replaced shards, or shards with replaced storage, back into one buffer.

        `to_empty`, `.to()` and `load_state_dict(assign=True)` replace shards, on the unit or on a module below. The
        group must be sharded.

        Args:
            keep_parameters: Put back the `Parameter` objects that an optimizer may hold, with the new values. Otherwise
                a `Parameter` put in a module by hand becomes the sharded form.

        Raises:
            TypeError: An owner holds something else than a shard of the parameter.
            RuntimeError: A tied parameter was replaced differently in two places.

        Effects: none if nothing was replaced; else allocates new shards and copies into them. Not a collective.
        """
        if not any_replaced(self.parameters):
            return
        shards = self._current_shards(self.parameters)
        if any(shard.is_meta for shard in shards):
            return  # some have no storage yet; `on_meta` lists them
        self._take(shards, keep_parameters=keep_parameters)

    def _current_shards(self, parameters: Sequence[ShardedParameter]) -> list[torch.Tensor]:
        """The shards in the modules now, on their resting device."""
        shards = [local_of(parameter.replacement()) for parameter in parameters]
        return shards if self.offload is None else [self.offload.bring_home(shard) for shard in shards]

    def leave_out(self, parameters: Sequence[ShardedParameter], *, keep_parameters: bool = True) -> None:
        """Remove some members; the group must be sharded. The remaining members may have been replaced.

        Args:
            parameters: The members to remove. Not of a flat layout, whose packing fixes the places of all members.
            keep_parameters: Whether to put back `Parameter` objects, as `adopt_replaced_shards` does.

        Effects: allocates new shards and copies into them. Not a collective.
        """
        remaining = [i for i, parameter in enumerate(self.parameters) if parameter not in parameters]
        shards = self._current_shards([self.parameters[i] for i in remaining])
        self._lay_out([self.layout.shapes[i] for i in remaining], [self.parameters[i].sharding.dim for i in remaining])
        self.parameters = [self.parameters[i] for i in remaining]
        self._take(shards, keep_parameters=keep_parameters)

    def _take(self, shards: list[torch.Tensor], *, keep_parameters: bool) -> None:
        """Copy local tensors into one buffer of this rank's shards."""
        self.main_weight = self._new_main_weight(shards[0].dtype, shards[0].device)
        with torch.no_grad():
            self.main_weight.flat.zero_()
            torch._foreach_copy_(list(self.main_weight.shards), shards)
        for parameter, shard in zip(self.parameters, self.main_weight.shards, strict=True):
            if not keep_parameters:
                parameter.adopt(parameter.replacement())
            self._point(parameter, standalone(shard))
        self.reduce_dtype = self.policy.reduce_dtype_of(self.main_weight.dtype)
        self.build_unsharded()
        put(self.parameters)

    def _point(self, parameter: ShardedParameter, shard: torch.Tensor) -> None:
        """Make the sharded form a DTensor over `shard`, and stay the same object."""
        sharded = parameter.sharded
        if (sharded.dtype, sharded.device) == (shard.dtype, shard.device):
            sharded._local_tensor = shard  # type: ignore[attr-defined]
        else:
            # A DTensor's dtype and device are fixed: only `swap_tensors` changes both in the object that an optimizer
            # holds.
            fresh = nn.Parameter(dtensor_for(shard, sharded, parameter.sharding), requires_grad=sharded.requires_grad)
            vars(fresh).update(vars(sharded))
            torch.utils.swap_tensors(sharded, fresh)  # type: ignore[no-untyped-call]
        parameter.shard = local_of(sharded)
        parameter.note_memory()
        # `.to()` and similar may have replaced the whole Parameter, and dropped the marks.
        parameter.marks |= vars(sharded)
        vars(sharded).update(parameter.marks)

    # -- verbs ------------------------------------------------------------------------------------------------------

    def prepare_gather(
        self, direction: Direction = Direction.BOTH, gathered_for: Direction | None = None
    ) -> GatherPlan:
        """Allocate the unsharded buffers of a direction's payloads, and find this rank's part of each.

        Args:
            direction: The passes of this gather.
            gathered_for: The passes of an earlier gather whose payloads still have their bytes, or None.

        Returns:
            The argument of `lamella_buffers.all_gather`. Main weights in the communication dtype are sent in place;
            all others are encoded into this rank's slices of the buffers, and gathered in place.

        Effects: on the current stream, which allocates the buffers. If main weights rest on the CPU, one copy of this
            rank's to the device, into memory that lives as long as the returned plan.
        """
        chosen = self._chosen[direction, gathered_for]
        self._allocate(chosen)
        if self.outer is not None:
            return self._plan_over_outer(chosen, self.outer)
        if self.offload is not None:
            return self._unsharded.plan(chosen, self.main_weight_on_device())
        if chosen not in self._plans:
            self._plans[chosen] = self._unsharded.plan(chosen, self.main_weight)
        return self._plans[chosen]

    def main_weight_on_device(self) -> ShardedBuffer:
        """The main weights, or a copy on the device of main weights at rest on the CPU.

        On a single rank, main weights that need no encoding go straight to the unsharded buffer. Any further copy has
        memory used on the current stream alone: the copy may be freed as soon as its readers are put on the stream.
        """
        offload = self.offload
        if offload is None:
            return self.main_weight
        place = None
        if self._sends_main and self.outer is None and self.layout.num_shards == 1:
            place = self.unsharded_weight.flat
        flat = offload.to_device(self.main_weight.flat, place)
        return ShardedBuffer(self.main_layout, self.axes.main_rank, flat)

    def _plan_over_outer(self, chosen: Sequence[int], outer: Transport) -> GatherPlan:
        """A gather from shards gathered over the outer axis before, or now if missing.

        Effects: if shards are missing, a collective on the outer axis, on the current stream; blocks the host on gloo.
        """
        missing = [p for p in chosen if p not in self.model_weights]
        if missing:
            # Kept for later gathers, until an update may have changed main weights (`UnitWeights.drop_copy`).
            self.model_weights |= self._unsharded.gather_shards(missing, self.main_weight_on_device(), outer)
        return self._unsharded.plan_from(self.model_weights, chosen)

    def keep_part(self) -> None:
        """Keep this rank's part of the unsharded parameters, for a later gather among the neighbours.

        Effects: on the current stream: allocates and copies 1 / neighbours of the unsharded buffers.
        """
        assert self.neighbours is not None
        share, rank = self.neighbours.num_ranks, self.neighbours.rank
        self.parts = []
        for buffer in self.buffers:
            pieces = [slot.view(share, -1)[rank] for slot in buffer.slots]
            # `cat` copies: views would lose their contents when the caller frees the buffers.
            self.parts += torch.split(torch.cat(pieces), [piece.numel() for piece in pieces])

    def take_parts(self) -> list[Payload]:
        """Allocate the unsharded buffers, and hand out the parts as payloads of a gather among the neighbours.

        Effects: on the current stream, which allocates the buffers.
        """
        parts, self.parts = self.parts or [], None
        self._allocate(range(len(self.buffers)))
        full_slots = [slot for buffer in self.buffers for slot in buffer.slots]
        return [Payload(part, full_slot) for part, full_slot in zip(parts, full_slots, strict=True) if part.numel() > 0]

    def _allocate(self, chosen: Iterable[int]) -> None:
        for p in chosen:
            if p not in self._allocated:  # held bytes were kept: `allocate` would raise
                self.buffers[p].allocate()
                self._allocated = (*self._allocated, p)

    def free_unsharded(self) -> None:
        """Give the unsharded buffers' bytes back, unless `keeps_bytes`. Nothing for buffers without bytes.

        Tensors that the weights computed from the bytes go in any case: the next gather brings other values.

        Effects: on the current stream, which must have waited for the last reader.
        """
        if self._caches is not None:
            self._caches.drop_caches([parameter.unsharded for parameter in self.parameters])
        if not self.keeps_bytes:
            allocated, self._allocated = self._allocated, ()
            for p in allocated:
                self.buffers[p].free()

    def settle_bytes(self, *, frees: bool) -> None:
        """Find out which unsharded buffers have bytes, after an exception at any point of a gather or of its end.

        Args:
            frees: Give the bytes back, as `free_unsharded` does.

        Effects: those of `free_unsharded`.
        """
        self._allocated = tuple([p for p, buffer in enumerate(self.buffers) if buffer.has_bytes])
        if frees:
            self.free_unsharded()

    def put_back(self) -> None:
        """Make the modules hold the DTensors wherever they hold unsharded parameters."""
        put_back(self.parameters)

    def install_unsharded(self) -> list[LostChange]:
        """Make the modules hold the unsharded parameters.

        Returns:
            Third tensors in modules, which are dropped.
        """
        return install(self.parameters, is_sharded=False)

    def install_sharded(self) -> list[LostChange]:
        """Make the modules hold the DTensors.

        Returns:
            Writes into the unsharded parameters, and third tensors in modules: both are dropped.
        """
        lost = install(self.parameters, is_sharded=True)
        # Unsharded parameters that are the main weights keep writes.
        return [change for change in lost if not change.is_write] if lost and self.computes_with_main else lost

    @property
    def is_trainable(self) -> bool:
        """Whether any member takes a gradient."""
        return any(parameter.sharded.requires_grad for parameter in self.parameters)

    @property
    def has_gradients(self) -> bool:
        """Whether any member has an unreduced gradient."""
        for parameter in self.parameters:
            if parameter.unsharded.grad is not None or parameter.accumulated is not None:
                return True
        return False

    @property
    def reduce_op(self) -> ReduceOp:
        """The reduction of gradients: the mean if the divisor is the number of ranks, else the sum."""
        return MEAN if self.divisor == self.axes.num_ranks and not self.sums_only else SUM


class _Borrowed:
    """The allocator of an unsharded buffer over the main weights: replicated, and in the same dtype."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._flat

    def allocate(self, buffer: torch.Tensor) -> None:
        """Nothing to do: main weights always have bytes."""

    def free(self, buffer: torch.Tensor) -> None:
        """Nothing to do: main weights stay."""


def dtypes_of(parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """A parameter's main, compute and reduce dtypes; policies do not apply to integers."""
    dtype = parameter.dtype
    if not dtype.is_floating_point:
        return dtype, dtype, dtype
    return policy.main_dtype_of(dtype), policy.compute_dtype_of(dtype), policy.reduce_dtype_of(dtype)


def by_axes(groups: Sequence[ParameterGroup]) -> Sequence[Sequence[ParameterGroup]]:
    """Sets of groups that travel together, in an order that depends on the program alone: ranks must agree."""
    if len(groups) == 1:
        return (groups,)
    together: dict[object, list[ParameterGroup]] = {}
    for group in groups:
        together.setdefault((group.axes, group.reduce_op), []).append(group)
    return list(together.values())


def _engines(axes: DataAxes) -> CopyEngines | None:
    """Copy engines for gathers over the shard axis; None on a CPU mesh, even if the process group has NCCL too."""
    group = None if axes.mesh.device_type == "cpu" else axes.shard_group
    return None if group is None else copy_engines_of(group)


def _transport(axes: DataAxes, group: dist.ProcessGroup | None) -> Transport | None:
    return None if group is None else transport_for(group, axes.mesh.device_type)
