"""The parameters of a unit that share number formats: their shards, their unsharded buffer, their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

from lamella_buffers import (
    Allocator,
    CachingAllocator,
    CopyEngines,
    CopyEngineTransport,
    GatherPlan,
    LocalTransport,
    Payload,
    ReduceOp,
    ShardedBuffer,
    Transport,
    UnshardedBuffer,
    all_reduce,
    copy_engines_of,
    standalone,
    transport_for,
)
from lamella_engine._offload import Offload
from lamella_engine._sharded_parameter import (
    Candidate,
    ShardedParameter,
    any_replaced,
    dtensor_for,
    gradient_over,
    install,
    put,
    sharded_parameter,
)
from lamella_engine._sharding import DataAxes, local_of
from lamella_engine._unsharded_weight import PayloadLayouts, UnshardedWeight
from lamella_layout import EvenLayout, FlatLayout
from lamella_precision import Direction, MixedPrecisionPolicy

_MEAN, _SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
# What autograd makes a parameter's gradient in; None if anything. Not every torch lets it be set.
_GRAD_DTYPE = "grad_dtype" if hasattr(torch.Tensor, "grad_dtype") else "dtype"


class Reduced(NamedTuple):
    """Gradients that were reduced over the shard axis."""

    shards: ShardedBuffer
    present: list[bool]  # which members have one; the others' are not installed


class ParameterGroup:
    """Parameters of one unit with the same dtypes, on the same data axes.

    A group's members and its divisor are fixed when it is built: what is communicated never depends on which gradients
    happen to be present on this rank.

    Args:
        candidates: The parameters, of one set of data axes, on the device where shards rest, or on meta. Their storage
            is not kept. All have one policy.
        allocator: Gives the unsharded buffer its bytes. None: the memory that gathers are fastest into.
        offload: How shards rest on the CPU; None where they rest on the mesh's device.

    Attributes:
        allocator: As given, or a `CachingAllocator`.
        offload: As given.
        layout: Of the shards that are gathered, and the unsharded buffer.
        main_layout: Of the main weights: the same, unless they are sharded over the outer axis too.
        main_weight: This rank's main weights, which the DTensors are views of.
        buffers: The unsharded buffers, one a payload of the parameters' recipe.
        model_weights: By payload, this rank's shards of it, gathered over the outer axis; empty if there are none, or
            they may be stale.
        divisor: What the sum of the ranks' gradients is divided by.
        sums_only: Divide after a sum, where the collective itself could have made the mean.
        transport: The axis that the parameters are sharded over.
        reduce_transport: The same axis, for reductions, where they have a communicator of their own.
        replicas: The axis that the shards are replicated over, or None.
        outer: The axis that each shard's main weights are sharded over, or None.
        neighbours: Ranks that share a larger part of each parameter between forward and backward, or None.
        parts: This rank's of those parts, while there are any.
        partial: Gradients that still have to be reduced over `replicas` or `outer`.
        keeps_bytes: The unsharded buffer stays where it is when it is freed, with its contents stale.
        computes_with_main: The unsharded parameters are the main weights themselves, and not a copy.
        is_meta: The shards still have to be given storage, and an unsharded buffer is made when they are.

    `build_unsharded` must follow, when nobody holds the candidates any more.

    Effects: allocates the shards on the current stream; not a collective.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        allocator: Allocator | None,
        offload: Offload | None = None,
    ) -> None:
        self._begin(candidates[0].sharding.axes, candidates[0].policy, allocator, offload)
        wholes = [local_of(candidate.parameter) for candidate in candidates]
        self._lay_out([whole.shape for whole in wholes], [candidate.sharding.dim for candidate in candidates])
        main_dtype, _, self.reduce_dtype = dtypes_of(candidates[0].parameter, self.policy)
        self.main_weight = self._new_main_weight(main_dtype, wholes[0].device)
        self.main_weight.copy_from(wholes)
        shards = [standalone(shard) for shard in self.main_weight.shards]
        self.parameters = [sharded_parameter(c, shard) for c, shard in zip(candidates, shards, strict=True)]
        put(self.parameters)

    def _begin(
        self, axes: DataAxes, policy: MixedPrecisionPolicy, allocator: Allocator | None, offload: Offload | None
    ) -> None:
        """Know how to communicate, before there is anything to."""
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
        self._rank = self.axes.shard_rank
        self.allocator = CachingAllocator() if allocator is None else allocator
        self.offload = offload
        self.model_weights: dict[int, ShardedBuffer] = {}
        self.buffers: tuple[UnshardedBuffer, ...] = ()
        self._held: tuple[int, ...] = ()  # the buffers that have bytes
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
        """Make the unsharded buffers and the parameters over them, once; their bytes come and go.

        Effects: allocates the buffers for a moment, on the current stream.
        """
        self.is_meta = self.main_weight.device.type == "meta"
        self._held = ()
        if self.is_meta:
            return
        formats = self.payload_layouts(self.layout, self.main_weight.dtype)
        sends_main = all(each.is_main_weight for each in formats.formats)
        self._sends_main = sends_main
        self.computes_with_main = sends_main and self.axes.shard_axis is None and self.offload is None
        allocator = _Borrowed(self.main_weight.flat) if self.computes_with_main else self.allocator
        ranks = self._rank, self.axes.main_rank
        sharded = [parameter.sharded for parameter in self.parameters]
        layouts = self.layout, self.main_layout
        self._unsharded = UnshardedWeight(formats, *layouts, ranks, self.device, allocator, sharded)
        self.buffers = self._unsharded.buffers
        for parameter, weight in zip(self.parameters, self._unsharded.weights, strict=True):
            whole = parameter.sharding.wrap(weight)
            parameter.unsharded = nn.Parameter(whole, requires_grad=parameter.sharded.requires_grad)
            vars(parameter.unsharded).update(vars(parameter.sharded))
        for buffer in self.buffers:
            buffer.free()
        self._chosen = self._choices(formats)
        self._plans: dict[tuple[int, ...], GatherPlan] = {}
        # Windows belong to the gather stream, and so come in now only. A unit that was moved off its mesh has none.
        if self._windows is not None and self.device.type == self.axes.mesh.device_type:
            for buffer in self.buffers:
                buffer.allocator = self._windows

    def _choices(self, formats: PayloadLayouts) -> dict[tuple[Direction, Direction | None], tuple[int, ...]]:
        """The answers of `chosen`, which each gather asks for."""
        pairs = [(direction, there) for direction in Direction for there in (None, *Direction)]
        if self.neighbours is None:
            return {(direction, there): formats.chosen(direction, there) for direction, there in pairs}
        # The neighbours' parts are of all payloads, so the first gather takes all of them.
        everything = tuple(range(len(self.buffers)))
        return {(direction, there): () if there else everything for direction, there in pairs}

    def payload_layouts(self, layout: EvenLayout | FlatLayout, main_dtype: torch.dtype) -> PayloadLayouts:
        """The payloads of parameters that lie as in `layout`."""
        return PayloadLayouts(self.policy.recipe_of(main_dtype), layout, main_dtype)

    @property
    def unsharded_weight(self) -> UnshardedBuffer:
        """The one unsharded buffer of parameters whose recipe has one payload."""
        (only,) = self.buffers
        return only

    @property
    def is_directional(self) -> bool:
        """Whether some payload is needed in forward alone, or in backward alone."""
        formats = self.payload_layouts(self.layout, self.main_weight.dtype).formats
        return any(each.direction is not Direction.BOTH for each in formats)

    def chosen(self, direction: Direction, there: Direction | None) -> tuple[int, ...]:
        """The buffers that a gather for a direction fills, beside those that are there for another."""
        return self._chosen[direction, there]

    @property
    def device(self) -> torch.device:
        """Where parameters are gathered and gradients reduced."""
        return self.main_weight.device if self.offload is None else self.offload.device

    @property
    def is_at_home(self) -> bool:
        """Whether the shards lie where they are to rest."""
        return self.offload is None or self.main_weight.device.type == "cpu"

    def meta_names(self) -> list[str]:
        """The members that have no storage yet."""
        return [p.name for p in self.parameters if local_of(p.replacement()).is_meta] if self.is_meta else []

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes that the group holds while unsharded, on the model-parallel rank that holds most: equal on all."""
        main_dtype, _, _ = dtypes_of(self.parameters[0].sharded, self.policy)
        layout = self.layout
        largest = [p.sharding.largest_part(shape) for p, shape in zip(self.parameters, layout.shapes, strict=True)]
        if isinstance(layout, EvenLayout) and largest != list(layout.shapes):
            layout = EvenLayout.build(largest, layout.num_shards, dims=layout.dims)
        return self.payload_layouts(layout, main_dtype).nbytes

    @property
    def is_replaced(self) -> bool:
        """Whether somebody replaced a shard, or its storage; the group must be sharded."""
        return any_replaced(self.parameters)

    def adopt_replaced_shards(self, *, keep_parameters: bool) -> None:
        """Take the shards back into one buffer if somebody replaced them, or their storage.

        `to_empty`, `.to()` and `load_state_dict(assign=True)` do, on the unit or on any module in it. The group must be
        sharded.

        Args:
            keep_parameters: Put back the `Parameter` objects that an optimizer may hold, with the new values. Otherwise
                one that was put in a module by hand becomes the sharded form.

        Raises:
            TypeError: An owner holds something that is not a shard of this parameter.
            RuntimeError: A tied parameter was replaced differently in two places.

        Effects: none if nothing was replaced; else allocates the shards anew and copies them. Not a collective.
        """
        if not self.is_replaced:
            return
        given = self._given(self.parameters)
        if any(shard.is_meta for shard in given):
            return  # not all of them have storage yet; `meta_names` tells which
        self._take(given, keep_parameters=keep_parameters)

    def _given(self, parameters: Sequence[ShardedParameter]) -> list[torch.Tensor]:
        """The shards that modules hold now, where they are to rest."""
        given = [local_of(parameter.replacement()) for parameter in parameters]
        return given if self.offload is None else [self.offload.bring_home(shard) for shard in given]

    def leave_out(self, parameters: Sequence[ShardedParameter], *, keep_parameters: bool = True) -> None:
        """Let go of some of the members; the group must be sharded. The others may have been replaced.

        Args:
            parameters: Who goes. Not of a flat layout, whose packing says how everybody else lies.
            keep_parameters: As for `adopt_replaced_shards`.

        Effects: allocates the shards anew and copies them. Not a collective.
        """
        left = [i for i, parameter in enumerate(self.parameters) if parameter not in parameters]
        given = self._given([self.parameters[i] for i in left])
        self._lay_out([self.layout.shapes[i] for i in left], [self.parameters[i].sharding.dim for i in left])
        self.parameters = [self.parameters[i] for i in left]
        self._take(given, keep_parameters=keep_parameters)

    def _take(self, given: list[torch.Tensor], *, keep_parameters: bool) -> None:
        """Make local tensors this rank's shards, in one buffer."""
        self.main_weight = self._new_main_weight(given[0].dtype, given[0].device)
        with torch.no_grad():
            self.main_weight.flat.zero_()
            torch._foreach_copy_(list(self.main_weight.shards), given)
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
            # dtype and device are the wrapper's own, and fixed: only an exchange of contents changes them.
            fresh = nn.Parameter(dtensor_for(shard, sharded, parameter.sharding), requires_grad=sharded.requires_grad)
            vars(fresh).update(vars(sharded))
            torch.utils.swap_tensors(sharded, fresh)  # type: ignore[no-untyped-call]
        parameter.shard = local_of(sharded)
        # What replaced the storage may have replaced the whole Parameter, and its marks.
        parameter.marks |= vars(sharded)
        vars(sharded).update(parameter.marks)

    # -- verbs ------------------------------------------------------------------------------------------------------

    def prepare_gather(self, direction: Direction = Direction.BOTH, there: Direction | None = None) -> GatherPlan:
        """Allocate the unsharded buffers of the payloads that a direction needs, and find this rank's part of them.

        Args:
            direction: The passes that the gather is for.
            there: The passes for which parameters were gathered already, and are there.

        Returns:
            The argument of `lamella_buffers.all_gather`. Main weights in the wire's own dtype are sent from where they
            lie; others are encoded into this rank's slices of the buffers, and gathered in place.

        Effects: on the current stream, which allocates the buffers. Where main weights rest on the CPU, one copy of
            this rank's to the device, into memory of its own that goes with the returned plan.
        """
        chosen = self._chosen[direction, there]
        self._allocate(chosen)
        if self.outer is not None:
            return self._plan_over_outer(chosen, self.outer)
        if self.offload is not None:
            return self._unsharded.plan(chosen, self._main_weight_on_device(self.offload))
        if chosen not in self._plans:
            self._plans[chosen] = self._unsharded.plan(chosen, self.main_weight)
        return self._plans[chosen]

    def _main_weight_on_device(self, offload: Offload) -> ShardedBuffer:
        """A copy on the device of the main weights that rest on the CPU.

        On a single rank main weights that compute as they are go straight to the unsharded buffer. Other copies have
        memory of their own, used on the current stream alone: it may go as soon as its readers were put on this stream.
        """
        place = None
        if self._sends_main and self.outer is None and self.layout.num_shards == 1:
            place = self.unsharded_weight.flat
        flat = offload.to_device(self.main_weight.flat, place)
        return ShardedBuffer(self.main_layout, self.axes.main_rank, flat)

    def _plan_over_outer(self, chosen: Sequence[int], outer: Transport) -> GatherPlan:
        """A gather from shards that were put together over the outer axis: those that are there, or new ones.

        Effects: a collective on the outer axis if some are made anew, on the current stream; blocks the host on gloo.
        """
        missing = [p for p in chosen if p not in self.model_weights]
        if missing:
            main = self.main_weight if self.offload is None else self._main_weight_on_device(self.offload)
            self.model_weights |= self._unsharded.gather_shards(missing, main, outer)
        return self._unsharded.plan_from(self.model_weights, chosen)

    def keep_part(self) -> None:
        """Keep the part of the unsharded parameters from which the neighbours can put them together again.

        Effects: on the current stream: allocates and copies 1 / neighbours of the unsharded buffers.
        """
        assert self.neighbours is not None
        share, rank = self.neighbours.num_ranks, self.neighbours.rank
        self.parts = []
        for buffer in self.buffers:
            pieces = [slot.view(share, -1)[rank] for slot in buffer.slots]
            self.parts += torch.split(torch.cat(pieces), [piece.numel() for piece in pieces])

    def take_parts(self) -> list[Payload]:
        """Allocate the unsharded buffers, and find the payloads that the neighbours gather. The parts are used up.

        Effects: on the current stream, which allocates the buffers.
        """
        parts, self.parts = self.parts or [], None
        self._allocate(range(len(self.buffers)))
        wholes = [slot for buffer in self.buffers for slot in buffer.slots]
        return [Payload(part, whole) for part, whole in zip(parts, wholes, strict=True) if part.numel() > 0]

    def _allocate(self, chosen: Iterable[int]) -> None:
        for p in chosen:
            if p not in self._held:  # else its bytes were kept
                self.buffers[p].allocate()
                self._held = (*self._held, p)

    def free_unsharded(self) -> None:
        """Give the unsharded buffers' bytes back, unless they are kept. Nothing for buffers without bytes.

        Effects: on the current stream, which must have waited for the last reader.
        """
        if not self.keeps_bytes:
            held, self._held = self._held, ()
            for p in held:
                self.buffers[p].free()

    def install_unsharded(self) -> list[str]:
        """Make the modules hold the unsharded parameters.

        Returns:
            Names, as `install` does.
        """
        return install(self.parameters, is_sharded=False)

    def install_sharded(self) -> list[str]:
        """Make the modules hold the DTensors.

        Returns:
            Names, as `install` does.
        """
        return install(self.parameters, is_sharded=True)

    @property
    def is_trainable(self) -> bool:
        """Whether any member takes a gradient."""
        return any(parameter.sharded.requires_grad for parameter in self.parameters)

    @property
    def has_gradients(self) -> bool:
        """Whether any member has a gradient that was not reduced."""
        for parameter in self.parameters:
            if parameter.unsharded.grad is not None or parameter.accumulated is not None:
                return True
        return False

    def accumulate_gradients(self) -> None:
        """Keep a microbatch's gradients unreduced."""
        for parameter in self.parameters:
            parameter.accumulate(self.reduce_dtype)

    def take_gradients(self) -> dict[int, torch.Tensor | None]:
        """The gradients of the members that train, by index; None where backward made none."""
        return {i: p.take_gradient() for i, p in enumerate(self.parameters) if p.trains or p.has_gradient}

    @property
    def wire_dtype(self) -> torch.dtype:
        """What gradients may travel in: what autograd makes them in, where the reduce dtype holds all of that.

        Else the reduce dtype. It follows from the parameters alone: ranks agree, whatever gradients each of them has.
        """
        own, *others = {getattr(p.unsharded, _GRAD_DTYPE) for p in self.parameters}
        if own is None or others or own == self.reduce_dtype:
            return self.reduce_dtype
        return own if torch.promote_types(own, self.reduce_dtype) == self.reduce_dtype else self.reduce_dtype

    def gradient_nbytes(self, members: Iterable[int], wire: torch.dtype) -> int:
        """What a reduction of these members' gradients carries, by their indices; all of a flat layout travels."""
        layout = self.layout
        if isinstance(layout, FlatLayout):
            return layout.full_numel * wire.itemsize
        return sum(layout.full_slot(i).numel for i in members) * wire.itemsize

    @property
    def sum_dtype(self) -> torch.dtype:
        """What gradients are added up in over the shard axis: the reduce dtype, or one that is wider and costs less.

        Copy engines leave the sum to a kernel that may as well write the main weights' dtype, which spares a cast.
        """
        pushes = isinstance(self.reduce_transport or self.transport, CopyEngineTransport)
        main = self.main_weight.dtype
        is_last = self.replicas is None and self.outer is None  # another axis would carry what is wider
        widens = pushes and is_last and torch.promote_types(self.reduce_dtype, main) == main
        return main if widens else self.reduce_dtype

    @property
    def reduce_op(self) -> ReduceOp:
        """How the ranks' gradients become one: their mean where the divisor is their number, else their sum."""
        return _MEAN if self.divisor == self.axes.num_ranks and not self.sums_only else _SUM

    def new_reduced(
        self,
        gradients: Mapping[int, torch.Tensor | None],
        dtype: torch.dtype,
        *,
        installs_all: bool,
        without_gaps: bool = False,
    ) -> Reduced:
        """A buffer for reduced gradients.

        Args:
            gradients: Of the members that take part in the reduction.
            dtype: What they are added up in.
            installs_all: Whether those of them that have none here are to get one too.
            without_gaps: Leave out the alignment between slots, which nobody writes: a hook is shown the whole buffer.

        Effects: allocates it on the current stream; zeroes it if some member takes no part.
        """
        layout = _without_gaps(self.layout) if without_gaps else self.layout
        shards = ShardedBuffer.empty(layout, self._rank, dtype, self.device)
        members = range(len(self.parameters))
        if len(gradients) < len(members):
            shards.flat.zero_()
        if installs_all:
            return Reduced(shards, [i in gradients for i in members])
        return Reduced(shards, [gradients.get(i) is not None for i in members])

    def add_partial(self, reduced: Reduced) -> Reduced:
        """Add `partial`, what earlier microbatches left to be reduced over the replicas.

        Effects: on the current stream: one add.
        """
        assert self.partial is not None
        earlier, self.partial = self.partial, None
        if reduced.shards.layout is earlier.shards.layout:
            reduced.shards.flat.add_(earlier.shards.flat)
        else:  # a hook came or went between the two
            torch._foreach_add_(list(reduced.shards.slots), list(earlier.shards.slots))
        return Reduced(reduced.shards, [a or b for a, b in zip(reduced.present, earlier.present, strict=True)])

    def reduce_over_outer(self, reduced: Reduced) -> Reduced:
        """Reduce over the axes that are left after the shard axis, if there are any.

        Effects: a collective on the replicate axis, in place, or on the outer one, into a new buffer; on the current
            stream.
        """
        if self.replicas is not None:
            all_reduce([reduced.shards.flat], self.replicas, self.reduce_op).wait()
        if self.outer is None:
            return reduced
        is_dense = reduced.shards.layout is not self.layout
        layout = _without_gaps(self.main_layout) if is_dense else self.main_layout
        parts = ShardedBuffer.empty(layout, self.axes.main_rank, self.reduce_dtype, self.device)
        moves = zip(parts.slots, reduced.shards.slots, strict=True)
        self.outer.reduce_scatter([Payload(a, b) for a, b in moves if b.numel() > 0], self.reduce_op).wait()
        return Reduced(parts, reduced.present)

    def show_gradients(self, reduced: Reduced, hook: Callable[[torch.Tensor], None]) -> bool:
        """Call a hook on reduced gradients, which it may change: their mean, or their sum where `sums_only` is set.

        Returns:
            Whether they were divided before.

        Effects: those of the hook, on the current stream; one division before it, unless the collective divided.
        """
        divides = self.reduce_op is not _MEAN and not self.sums_only
        if divides:
            reduced.shards.flat.div_(self.divisor)
        hook(reduced.shards.flat)
        return divides

    def install_gradients(self, reduced: Reduced, *, are_divided: bool = False) -> None:
        """Put reduced gradients on the sharded parameters, in the main weights' dtype, or add them to those there.

        Args:
            reduced: What `reduce_op` made of all ranks' gradients. Members that are not present keep their `.grad`.
            are_divided: Whether a sum was divided already.

        Effects: on the current stream: one cast of the shards where the dtypes differ, one add where gradients are
            there already. Where shards rest on the CPU, one copy to it, or one each way of those that are added to:
            the host must wait for the stream before it reads them.
        """
        shards, present = reduced
        if self.reduce_op is not _MEAN and not are_divided:
            shards.flat.div_(self.divisor)
        if shards.dtype != self.main_weight.dtype:
            shards = shards.cast_to(self.main_weight.dtype)
        fresh, totals = [], {}
        for i, (parameter, wanted) in enumerate(zip(self.parameters, present, strict=True)):
            if not wanted:
                _check_absent_everywhere(parameter, shards.shards[i])
            elif (grad := parameter.sharded.grad) is None:
                fresh.append(i)
            else:
                totals[i] = local_of(grad)
        if totals:
            add = torch._foreach_add_ if self.offload is None else self.offload.add_
            add(list(totals.values()), [shards.shards[i] for i in totals])
        if fresh and self.offload is not None:
            shards = ShardedBuffer(shards.layout, shards.rank, self.offload.to_host(shards.flat))
        for i in fresh:
            self.parameters[i].sharded.grad = gradient_over(self.parameters[i], shards.shards[i])

    def hooks(self, present: Sequence[bool]) -> list[Callable[[], None]]:
        """What calls the hooks of members that were given a gradient and have some."""
        return [
            parameter.run_hooks
            for parameter, wanted in zip(self.parameters, present, strict=True)
            if wanted and parameter.sharded._post_accumulate_grad_hooks
        ]


class _Borrowed:
    """The allocator of an unsharded buffer that is the main weights: replicated, and in the same dtype."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._flat

    def allocate(self, buffer: torch.Tensor) -> None:
        """Nothing to do: they are there."""

    def free(self, buffer: torch.Tensor) -> None:
        """Nothing to do: they stay."""


def dtypes_of(parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """A parameter's main, compute and reduce dtypes; a policy says nothing about integers."""
    own = parameter.dtype
    if not own.is_floating_point:
        return own, own, own
    return policy.main_dtype_of(own), policy.compute_dtype_of(own), policy.reduce_dtype_of(own)


@lru_cache(maxsize=4096)  # asked for in every reduction that a hook is shown
def _without_gaps(layout: EvenLayout | FlatLayout) -> EvenLayout | FlatLayout:
    """The layout with slots one right after another. The gaps of a flat one are zeros, as all of it travels."""
    return replace(layout, alignment=1) if isinstance(layout, EvenLayout) else layout


def by_axes(groups: Sequence[ParameterGroup]) -> list[list[ParameterGroup]]:
    """The groups that travel together, in an order that follows from the program alone."""
    if len(groups) == 1:
        return [list(groups)]
    together: dict[object, list[ParameterGroup]] = {}
    for group in groups:
        together.setdefault((group.axes, group.reduce_op), []).append(group)
    return list(together.values())


def _engines(axes: DataAxes) -> CopyEngines | None:
    """What gathers over the shard axis without multiprocessors; a group of NCCL's may have a mesh of CPUs too."""
    group = None if axes.mesh.device_type == "cpu" else axes.shard_group
    return None if group is None else copy_engines_of(group)


def _transport(axes: DataAxes, group: dist.ProcessGroup | None) -> Transport | None:
    return None if group is None else transport_for(group, axes.mesh.device_type)


def _check_absent_everywhere(parameter: ShardedParameter, shard: torch.Tensor) -> None:
    """Refuse a gradient that other ranks have and this one has not: a part of the weight would train, and a part not.

    On CPU only. On a GPU the answer would make the host wait.
    """
    if shard.device.type == "cpu" and bool(shard.any()):
        raise RuntimeError(
            f"Expected no rank to have a gradient for {parameter.name!r}, as this one has none, got one from another "
            "rank. Where ranks use different parameters, call set_reduce_scatter_unused_params(True)."
        )
