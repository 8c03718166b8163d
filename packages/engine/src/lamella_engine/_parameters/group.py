"""The parameters of a unit with the same number formats: shards, unsharded buffers, gradients.

Note [Tensors of a parameter]. From rest to the optimizer's step a parameter is in turn these tensors:

    main_weight     the group's one flat buffer of this rank's rows, in the main dtype; lives as long as the group
    shard           a parameter's view of it. The sharded form, a DTensor over the shard, is the optimizer's parameter
    payloads        the bytes on the wire: main weights as they are, or encodings written into this rank's slots of
                    the unsharded buffers, on the gather stream
    unsharded       the compute form, over the unsharded buffers. The tensors and their storages are made once, since
                    autograd holds views of them; the bytes come with each gather and go with each reshard
    unsharded.grad  made by autograd on the compute stream; taken by the reduction, whose record then holds it
    accumulated     the sum of earlier microbatches' gradients, in the reduce dtype; gone with the reduction
    reduced         this rank's rows of the sum over the shard axis, on the reduce stream
    partial         a reduced sum that waits for later microbatches before it goes over the outer axis
    sharded.grad    a DTensor over the reduced rows in the gradients' dtype; freed by `zero_grad`

`parts` and `model_weights` are copies between the moments: this rank's share of its neighbours' larger parts between
forward and backward, and shards gathered over an outer axis until main weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, final

import torch
import torch.distributed as dist
import torch.nn as nn

from lamella_buffers import (
    Allocator,
    CachingAllocator,
    GatherPlan,
    Payload,
    ReduceOp,
    ShardedBuffer,
    Transport,
    UnshardedBuffer,
)
from lamella_engine._parameters.group_transports import GroupTransports
from lamella_engine._parameters.offload import Offload
from lamella_engine._parameters.sharded_parameter import (
    LostChange,
    ShardedParameter,
    any_replaced,
    install,
    put,
    put_back,
    undo_assigned_data,
)
from lamella_engine._parameters.sharding import DataAxes, local_of
from lamella_engine._parameters.unsharded_weight import PayloadLayouts
from lamella_engine._scaling.scales import Scales
from lamella_layout import EvenLayout, FlatLayout
from lamella_precision import CachingRecipe, Direction, MixedPrecisionPolicy

MEAN, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
Layout = EvenLayout | FlatLayout


class Reduced(NamedTuple):
    """Gradients after the reduction over the shard axis."""

    shards: ShardedBuffer
    present: list[bool]  # by member: False where no gradient is installed


class GroupForm(Protocol):
    """The part in which groups differ: the memory of shards, and the way from shards to unsharded parameters.

    `PayloadForm` serves parameters in one buffer, in the even and in the flat layout; `ExtendedForm` serves parameters
    whose class defines the gather. A form does not refer to its group, which would be a cycle: methods get the group.

    Attributes:
        allocated: Indices of the group's buffers with bytes. The group adds and clears.
        sends_main: Every payload is the main weight itself. Set by `build`.
        computes_with_main: The unsharded parameters are the main weights themselves, not a copy. Set by `build`.
        is_unreceived: Whether gathered tensors have yet to become unsharded parameters (`receive`).
        caches: The recipe, if unsharded weights keep tensors computed from their bytes; else None. Set by `build`.
    """

    allocated: tuple[int, ...]
    sends_main: bool
    computes_with_main: bool
    caches: CachingRecipe | None

    @property
    def is_unreceived(self) -> bool: ...

    def take(self, group: ParameterGroup, layout: Layout, shards: list[torch.Tensor], *, keep_parameters: bool) -> None:
        """Make other local tensors the shards, in `layout` of main weights; `build` follows."""

    def build(self, group: ParameterGroup) -> None:
        """Make the group's unsharded buffers and parameters once; the buffers' bytes come and go."""

    def chosen(self, direction: Direction, gathered_for: Direction | None) -> tuple[int, ...]:
        """The buffers that a gather for a direction fills, beside buffers filled for direction `gathered_for`."""

    def prepare_gather(
        self, group: ParameterGroup, direction: Direction, gathered_for: Direction | None = None
    ) -> GatherPlan:
        """Allocate the unsharded buffers of a direction's payloads, and find this rank's part of each.

        Args:
            group: The form's group.
            direction: The passes of this gather.
            gathered_for: The passes of an earlier gather whose payloads still have their bytes, or None.

        Returns:
            The argument of `lamella_buffers.all_gather`.

        Effects: on the current stream, which allocates the buffers.
        """

    def receive(self) -> None:
        """Make unsharded parameters from gathered tensors, after each gather that `is_unreceived`."""


@final
class ParameterGroup:
    """Parameters of one unit with the same dtypes, on the same data axes.

    A group's members and divisor are fixed at construction: a collective never depends on the gradients that happen to
    be present on this rank.

    Args:
        parameters: The members in the sharded form, of one set of data axes.
        layout: The layout of gathered shards and of the unsharded buffer.
        main_weight: This rank's main weights; the members' shards are views of the buffer.
        reduce_dtype: The dtype of sums of gradients.
        policy: Number formats.
        form: The memory of shards, and the way to unsharded parameters.
        transports: The axes that the members communicate over.
        allocator: Gives the unsharded buffer its bytes. None: a `CachingAllocator`.
        offload: The offload of shards that rest on the CPU; None for shards on the mesh's device.

    Attributes:
        parameters: Changed by `remove_members` alone.
        axes: The data axes.
        policy: See above; as are `form`, `transports`, `allocator`, `offload`, `layout`, `main_weight`, `reduce_dtype`.
        main_grads_dtype: The dtype of the sharded parameters' gradients; the policy does not apply to integers. Set by
            `build_unsharded`.
        buffers: The unsharded buffers, one a payload of the parameters' recipe. Made by the form's `build`.
        scales: The scales of whole parameters, for a recipe with such scales; else None. Made by the form's `build`.
        model_weights: By payload, this rank's shards, gathered over the outer axis. Filled by gathers; cleared when
            main weights may have changed.
        divisor: Divides the sum of the ranks' gradients, in float16 in two parts.
        sums_only: Divide after a sum, even if the collective itself can make the mean.
        parts: This rank's share of the neighbours' larger parts, from `keep_part` to the next gather, or to the next
            change of main weights.
        partial: Gradients still to be reduced over the outer axes, kept by one reduction for the next.
        keeps_bytes: Freeing leaves the unsharded buffer in place, with stale contents.
        is_meta: The shards have no storage yet; the unsharded buffers are made when the shards get storage.

    `build_unsharded` must follow, after the last reference to the originals: until then originals hold their memory.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        layout: Layout,
        main_weight: ShardedBuffer,
        reduce_dtype: torch.dtype,
        *,
        policy: MixedPrecisionPolicy,
        form: GroupForm,
        transports: GroupTransports,
        allocator: Allocator | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.parameters = list(parameters)
        # Of the mesh, fixed: main weights lie by them. The caller's choices of collectives are in `transports`.
        # Read by every collective of the group: members on other axes would reduce over other ranks.
        self.axes: DataAxes = parameters[0].sharding.axes
        self.policy = policy
        self.form = form
        self.transports = transports
        self.allocator = CachingAllocator() if allocator is None else allocator
        self.offload = offload
        self.layout = layout
        self.main_weight = main_weight
        self.reduce_dtype = self.main_grads_dtype = reduce_dtype
        # Every `build` makes new ones: a view of an earlier buffer that is kept past `adopt_replaced_shards` reads
        # memory that no gather fills.
        self.buffers: tuple[UnshardedBuffer, ...] = ()
        self.scales: Scales | None = None
        # Filled on the gather stream, cleared by `drop_gathered_shards`: past an update of the main weights these
        # shards would be gathered as weights of the step before, without an error.
        self.model_weights: dict[int, ShardedBuffer] = {}
        # Choices of the caller, which the next reduction reads; equal on every rank.
        self.divisor = float(self.axes.num_ranks)
        self.sums_only = False
        self.parts: list[torch.Tensor] | None = None
        self.partial: Reduced | None = None
        self.keeps_bytes = False
        # Set by each `build_unsharded` from the main weights: true until `to_empty` gives the shards storage.
        self.is_meta = False

    # -- storage ----------------------------------------------------------------------------------------------------

    def build_unsharded(self) -> None:
        """Make the unsharded buffers and parameters once; the buffers' bytes come and go.

        Gradients that earlier microbatches left on former unsharded parameters are kept.

        Effects: allocates the buffers for a moment, on the current stream.
        """
        main = self.main_weight.dtype
        self.is_meta = self.main_weight.device.type == "meta"
        self.keep_gradients()
        self.form.allocated = ()
        self.main_grads_dtype = self.policy.main_grads_dtype_of(main) if main.is_floating_point else main
        if self.main_grads_dtype != main:  # torch refuses a gradient of another dtype than the parameter's, unless told
            for parameter in self.parameters:
                parameter.sharded.grad_dtype = self.main_grads_dtype
        self.form.build(self)

    def keep_gradients(self) -> None:
        """Move unreduced gradients out of unsharded parameters that are about to be replaced."""
        with torch.inference_mode(False), torch.no_grad():  # later microbatches are added to the sums in place
            for parameter in self.parameters:
                parameter.keep_gradient(self.device, self.reduce_dtype)

    def payload_layouts(self, layout: Layout, main_dtype: torch.dtype) -> PayloadLayouts:
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

    @property
    def device(self) -> torch.device:
        """The device of gathered parameters and of reductions."""
        return self.main_weight.device if self.offload is None else self.offload.device

    @property
    def shard_and_outer(self) -> tuple[Transport, Transport | None]:
        """The axes that main weights are sharded over."""
        return self.transports.shard, self.transports.outer

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

    # -- replaced shards ----------------------------------------------------------------------------------------------

    def check_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Refuse a conversion of shards to a dtype that the policy's recipe does not compute in.

        Args:
            convert: Applied to an empty tensor.

        Raises:
            ValueError: The recipe's `compute_dtype` is not what `param_dtype` would stand for.
        """
        if self.policy.recipe is None:
            return
        parameter, shape = self.parameters[0], self.layout.shapes[0]
        dtype = convert(local_of(parameter.sharded).new_empty(0)).dtype
        try:
            self.policy.resolved_for(nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
        except ValueError as error:
            raise ValueError(
                f"Expected {parameter.name!r} to stay in {parameter.sharded.dtype}, or a `param_dtype` in `mp_policy` "
                f"that is the recipe's `compute_dtype`, got a conversion to {dtype}: {error}"
            ) from error

    def undo_assigned_data(self) -> list[str]:
        """Point members back to the group's memory after `form.data = tensor`; the group must be sharded.

        Returns:
            The names of such members.

        Effects: those of `build_unsharded`, if there are any.
        """
        # Either form may lie over the assigned memory: unsharded forms are made anew, over buffers of the group.
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
        self._take(self.main_weight.layout, shards, keep_parameters=keep_parameters)

    def remove_members(self, parameters: Sequence[ShardedParameter], *, keep_parameters: bool = True) -> None:
        """Remove some members; the group must be sharded. The remaining members may have been replaced.

        Args:
            parameters: The members to remove. Not of a flat layout, whose packing fixes the places of all members.
            keep_parameters: Whether to put back `Parameter` objects, as `adopt_replaced_shards` does.

        Effects: allocates new shards and copies into them. Not a collective.
        """
        remaining = [i for i, parameter in enumerate(self.parameters) if parameter not in parameters]
        shards = self._current_shards([self.parameters[i] for i in remaining])
        self.layout, main_layout = even_layouts(
            self.axes, [self.layout.shapes[i] for i in remaining], [self.parameters[i].sharding.dim for i in remaining]
        )
        self.parameters = [self.parameters[i] for i in remaining]
        self._take(main_layout, shards, keep_parameters=keep_parameters)

    def _current_shards(self, parameters: Sequence[ShardedParameter]) -> list[torch.Tensor]:
        """The shards in the modules now, on their resting device."""
        shards = [local_of(parameter.replacement()) for parameter in parameters]
        return shards if self.offload is None else [self.offload.bring_home(shard) for shard in shards]

    def _take(self, layout: Layout, shards: list[torch.Tensor], *, keep_parameters: bool) -> None:
        self.form.take(self, layout, shards, keep_parameters=keep_parameters)
        self.build_unsharded()
        # Last: a tensor that `take` refuses stays in its module, where the user finds it.
        put(self.parameters)

    # -- verbs ------------------------------------------------------------------------------------------------------

    def main_weight_on_device(self) -> ShardedBuffer:
        """The main weights, or a copy on the device of main weights at rest on the CPU.

        On a single rank, main weights that need no encoding go straight to the unsharded buffer. Any further copy has
        memory used on the current stream alone: the copy may be freed as soon as its readers are put on the stream.
        """
        if self.offload is None:
            return self.main_weight
        place = None
        if self.form.sends_main and self.transports.outer is None and self.layout.num_shards == 1:
            place = self.unsharded_weight.flat
        flat = self.offload.to_device(self.main_weight.flat, place)
        return ShardedBuffer(self.main_weight.layout, self.axes.main_rank, flat)

    def keep_part(self) -> None:
        """Keep this rank's part of the unsharded parameters, for a later gather among the neighbours.

        Effects: on the current stream: allocates and copies 1 / neighbours of the unsharded buffers.
        """
        neighbours = self.transports.neighbours
        assert neighbours is not None
        share, rank = neighbours.num_ranks, neighbours.rank
        self.parts = []
        for buffer in self.buffers:
            pieces = [slot.view(share, -1)[rank] for slot in buffer.slots]
            # `cat` copies: views would lose their contents when the caller frees the buffers.
            self.parts += torch.split(torch.cat(pieces), [piece.numel() for piece in pieces])

    def take_parts(self) -> list[Payload]:
        """Allocate the unsharded buffers, and hand out the parts as payloads of a gather among the neighbours.

        Effects: on the current stream, which allocates the buffers.
        """
        # The payloads hold the only references from here on: the caller keeps them until the stream has passed the
        # gather.
        parts, self.parts = self.parts or [], None
        self.allocate(range(len(self.buffers)))
        full_slots = [slot for buffer in self.buffers for slot in buffer.slots]
        return [Payload(part, full_slot) for part, full_slot in zip(parts, full_slots, strict=True) if part.numel() > 0]

    def allocate(self, chosen: Iterable[int]) -> None:
        """Give some unsharded buffers bytes, unless they have some. Effects: on the current stream."""
        form = self.form
        for p in chosen:
            if p not in form.allocated:  # held bytes were kept: `allocate` would raise
                self.buffers[p].allocate()
                # Buffer by buffer: if the next allocation raises, `free_unsharded` must find this one.
                form.allocated = (*form.allocated, p)

    def free_unsharded(self) -> None:
        """Give the unsharded buffers' bytes back, unless `keeps_bytes`. Nothing for buffers without bytes.

        Tensors that the weights computed from the bytes go in any case: the next gather brings other values.

        Effects: on the current stream, which must have waited for the last reader.
        """
        form = self.form
        if form.caches is not None:
            form.caches.drop_caches([parameter.unsharded for parameter in self.parameters])
        if not self.keeps_bytes:
            # Cleared first: after an interrupt between two frees `settle_bytes` looks for bytes itself, and a second
            # free of one buffer would raise.
            allocated, form.allocated = form.allocated, ()
            for p in allocated:
                self.buffers[p].free()

    def settle_bytes(self, *, frees: bool) -> None:
        """Find out which unsharded buffers have bytes, after an exception at any point of a gather or of its end.

        Args:
            frees: Give the bytes back, as `free_unsharded` does.

        Effects: those of `free_unsharded`.
        """
        self.form.allocated = tuple([p for p, buffer in enumerate(self.buffers) if buffer.has_bytes])
        if frees:
            self.free_unsharded()

    def put_back(self) -> None:
        """Make the modules hold the DTensors wherever they hold unsharded parameters."""
        put_back(self.parameters)

    def install_unsharded(self) -> list[LostChange]:
        """Make the modules hold the unsharded parameters.

        Returns:
            Third tensors in modules, which are dropped.

        Effects: those of the form's `receive`.
        """
        # Before modules hold the forms: the first `receive` makes the unsharded form of an extended parameter.
        if self.form.is_unreceived:
            self.form.receive()
        return install(self.parameters, is_sharded=False)

    def install_sharded(self) -> list[LostChange]:
        """Make the modules hold the DTensors.

        Returns:
            Writes into the unsharded parameters, and third tensors in modules: both are dropped.
        """
        lost = install(self.parameters, is_sharded=True)
        # Unsharded parameters that are the main weights keep writes.
        return [change for change in lost if not change.is_write] if lost and self.form.computes_with_main else lost

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
        # A sum in float16 overflows first: gradients are divided before and after (`predivisor`).
        has_range = self.reduce_dtype is not torch.float16
        return MEAN if self.divisor == self.axes.num_ranks and not self.sums_only and has_range else SUM

    @property
    def predivisor(self) -> int:
        """The part of `divisor` that divides gradients before their sum: in float16 about its root, else 1.

        Source: FSDP2's `_get_gradient_divide_factors`.
        """
        predivisor = 1
        if self.reduce_dtype is torch.float16:
            while self.divisor % predivisor == 0 and self.divisor / predivisor > predivisor:
                predivisor *= 2
        return predivisor

    @property
    def postdivisor(self) -> float:
        """The part of `divisor` that divides the gradients' sum."""
        return self.divisor / self.predivisor

    @property
    def outer_divisor(self) -> float:
        """The part of `divisor` that gradients reduced over the shard axis are still to be divided by."""
        is_mean = self.reduce_op is MEAN
        return self.axes.num_ranks / self.axes.num_shards if is_mean else self.postdivisor


def even_layouts(
    axes: DataAxes, shapes: Sequence[tuple[int, ...]], dims: Sequence[int]
) -> tuple[EvenLayout, EvenLayout]:
    """The even layouts of gathered shards, and of main weights, which an outer axis may shard once more."""
    num_shards = axes.num_shards
    layout = EvenLayout.build(shapes, num_shards, dims=dims)
    return layout, EvenLayout.build(shapes, num_shards * axes.num_outer_shards, dims=dims)


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
