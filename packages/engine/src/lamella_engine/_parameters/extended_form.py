"""Parameters with all-gather extensions: their local tensors have FSDP2's two methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, final

import torch
import torch.nn as nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh

from lamella_buffers import (
    GatherPlan,
    ShardedBuffer,
    Transport,
    UnshardedBuffer,
    plain_values,
)
from lamella_engine._common.errors import MisuseError
from lamella_engine._parameters.group import Layout, ParameterGroup, dtypes_of
from lamella_engine._parameters.offload import Offload
from lamella_engine._parameters.sharded_parameter import Candidate, ShardedParameter, point_at
from lamella_engine._parameters.sharding import DataAxes, Sharding, local_of
from lamella_layout import EvenLayout, FlatLayout
from lamella_precision import CachingRecipe, Direction, MixedPrecisionPolicy, refuse_quantized

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(tensor: torch.Tensor) -> bool:
    """Whether a local tensor has the two methods of all-gather extensions.

    Raises:
        MisuseError: The tensor has only one of the two methods.
    """
    has = [hasattr(tensor, name) for name in (_PRE, _POST)]
    if any(has) and not all(has):
        raise MisuseError(
            f"Expected {type(tensor).__name__} to have both methods or neither, got one. Both {_PRE} and {_POST} "
            f"should be defined if using all-gather extensions: {tensor}."
        )
    return all(has)


@final
class ExtendedForm:
    """The form of parameters whose local tensors define `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

    A gather sends the first method's tensors instead of the shard's bytes; the second method makes the unsharded
    parameter from the gathered tensors. A shard is a separate tensor, of the original parameter's class. Gradients,
    possibly of the same class, are reduced as for all parameters.

    The first gather allocates the gathered tensors. `GroupForm` has the meanings of methods and attributes.

    Args:
        axes: The data axes of the parameters.

    Attributes:
        extensions: The two methods of each parameter. Made by `build`.
    """

    sends_main = False
    computes_with_main = False
    caches: CachingRecipe | None = None

    def __init__(self, axes: DataAxes) -> None:
        self.allocated: tuple[int, ...] = ()
        self.extensions: list[_Extension] = []
        self._gathered: _Gathered  # as `extensions` made anew by each `build`: unsharded parameters are made once
        self._mesh = _mesh_of(axes)
        self._compute_dtype: torch.dtype
        self._num_shards = axes.num_shards
        self._main_rank = axes.main_rank

    @property
    def is_unreceived(self) -> bool:
        """Whether gathered tensors have yet to become unsharded parameters."""
        return self._gathered.is_unreceived

    def describe(
        self, parameters: Sequence[ShardedParameter], layout: Layout, policy: MixedPrecisionPolicy
    ) -> tuple[ShardedBuffer, torch.dtype]:
        """Describe separate shards as a buffer without memory, and tell the reduce dtype."""
        shard = parameters[0].shard
        _, self._compute_dtype, reduce_dtype = dtypes_of(parameters[0].sharded, policy)
        return _Apart(layout, self._main_rank, shard.dtype, shard.device), reduce_dtype

    def take(self, group: ParameterGroup, layout: Layout, shards: list[torch.Tensor], *, keep_parameters: bool) -> None:
        """Make other tensors of the class that was sharded the shards.

        Raises:
            TypeError: A tensor does not define the two methods.
        """
        for parameter, shard, shape in zip(group.parameters, shards, group.layout.shapes, strict=True):
            if not is_extended(shard):
                raise TypeError(
                    f"Expected the local tensor of {parameter.name!r} to define {_PRE} as before, got "
                    f"{type(shard).__name__}. Give it a tensor of the class that was sharded."
                )
            if not keep_parameters:
                parameter.adopt(parameter.replacement())
            point_at(parameter, _with_room(shard, shape, self._num_shards, group.offload))
        group.main_weight, group.reduce_dtype = self.describe(group.parameters, layout, group.policy)
        group.keep_gradients()
        for parameter in group.parameters:
            # Until the next gather makes another: the former unsharded form may be of another dtype or device.
            parameter.unsharded = parameter.sharded
            parameter.unsharded_version = None
            parameter.note_memory()

    def build(self, group: ParameterGroup) -> None:
        """Drop the gathered tensors; the next gather makes new tensors."""
        pairs = zip(group.parameters, group.layout.shapes, strict=True)
        self.extensions = [_Extension(parameter, shape, self._num_shards) for parameter, shape in pairs]
        self._gathered = _Gathered(self.extensions, self._num_shards)
        group.buffers = (self._gathered,)

    def chosen(self, direction: Direction, gathered_for: Direction | None) -> tuple[int, ...]:
        """The first gather serves both directions: a second gather has nothing to fill."""
        return (0,) if gathered_for is None else ()

    def prepare_gather(
        self, group: ParameterGroup, direction: Direction = Direction.BOTH, gathered_for: Direction | None = None
    ) -> GatherPlan:
        """Get the tensors to send from `fsdp_pre_all_gather`, and allocate the gathered tensors.

        Raises:
            MisuseError: A tensor to send has too few rows.
            ValueError: A tensor to send has another size than in the gather before.

        Effects: as `fsdp_pre_all_gather`, on the current stream.
        """
        if gathered_for is not None:
            return GatherPlan([])
        # First: if a method raises, tensors that earlier parameters have made must be freed too.
        self.allocated = (0,)
        with torch.inference_mode(False), torch.no_grad():  # a later pass may train on the same tensors
            sent = [extension.send(self._mesh, group.policy, group.offload) for extension in self.extensions]
            self._gathered.allocate()
        return GatherPlan([(list(chain.from_iterable(sent)), self._gathered)])

    def receive(self) -> None:
        """Make unsharded parameters from the gathered tensors. Effects: as `fsdp_post_all_gather`."""
        with torch.inference_mode(False), torch.no_grad():
            for extension in self.extensions:
                extension.receive(self._compute_dtype)
        # After the second methods, which write into the gathered tensors too: none of these writes may advance a
        # counter.
        self._gathered.settle()


class _Extension:
    """A parameter's two methods, and the gathered tensors in between."""

    def __init__(self, parameter: ShardedParameter, shape: tuple[int, ...], num_shards: int) -> None:
        self._parameter = parameter
        self._shape = torch.Size(shape)
        self._num_shards = num_shards
        self._takes_more = _takes_more(parameter.shard)
        # From the first method to the second, and until the tensors go: kernels may read it late (`forget_metadata`).
        self._metadata: object = None
        self._shapes: list[torch.Size] = []  # of the tensors that the first method sends, equal in every gather
        self._is_built = False  # the unsharded parameter is made once: autograd may hold views
        # Gathered tensors, and tensors that the second method made over them: their storages stay, their bytes go.
        self.outputs: list[torch.Tensor] = []
        self.inner: tuple[torch.Tensor, ...] = ()

    def send(
        self, mesh: DeviceMesh, policy: MixedPrecisionPolicy, offload: Offload | None = None
    ) -> list[torch.Tensor]:
        """This rank's tensors to send, flat. A shard at rest on the CPU is copied to the device first."""
        shard: Any = self._parameter.shard
        if offload is not None:
            # The copy goes when the first method is done with it: both use the current stream alone.
            shard = shard.to(offload.device, non_blocking=True)
        more = (self._shape, _stride(self._shape), self._parameter.owners[0].module(), policy)
        inputs, self._metadata = shard.fsdp_pre_all_gather(mesh, *(more if self._takes_more else ()))
        inputs = tuple(map(plain_values, inputs))
        self._check_rows(inputs)
        shapes = [tensor.shape for tensor in inputs]
        if not self.outputs:  # made once: `receive` and autograd keep views, and later gathers refill the bytes
            self.outputs = [tensor.new_empty(self._num_shards * tensor.numel()) for tensor in inputs]
        elif shapes != self._shapes or [t.dtype for t in inputs] != [t.dtype for t in self.outputs]:
            raise ValueError(
                f"Expected {_PRE} of {self._parameter.name!r} to return tensors of shapes {self._shapes}, as before, "
                f"got {shapes}. The unsharded parameter is made once."
            )
        self._shapes = shapes
        return [tensor.reshape(-1) for tensor in inputs]

    def _check_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        """Refuse too few rows: only ranks with smaller shards can be at fault, and all others would wait for them."""
        num_rows = _num_rows(self._shape, self._num_shards)
        if not self._takes_more or self._parameter.shard.shape[:1] == (num_rows,):
            return
        if any(tensor.shape[:1] != (num_rows,) for tensor in inputs):
            raise MisuseError(
                f"Expected {_PRE} of {self._parameter.name!r}, of shape {tuple(self._shape)} over {self._num_shards} "
                f"ranks, to return tensors of {num_rows} rows on every rank, got {[tuple(t.shape) for t in inputs]}. "
                "Pad them: it must return all-gather inputs with the padded sharded size."
            )

    def receive(self, dtype: torch.dtype) -> None:
        """Make the unsharded parameter once, and fill it after later gathers: autograd may hold views of the object."""
        shard: Any = self._parameter.shard
        gathered = tuple(
            output.view(self._num_shards * shape[0], *shape[1:]) if shape else output
            for output, shape in zip(self.outputs, self._shapes, strict=True)
        )
        if self._is_built:
            shard.fsdp_post_all_gather(gathered, self._metadata, dtype, out=self._parameter.unsharded)
            return
        unsharded, self.inner = shard.fsdp_post_all_gather(gathered, self._metadata, dtype)
        parameter = self._parameter.sharding.wrap(torch.as_strided(unsharded, self._shape, _stride(self._shape), 0))
        self._parameter.compute_with(nn.Parameter(parameter, requires_grad=self._parameter.sharded.requires_grad))
        self._is_built = True

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors whose memory comes and goes."""
        return (*self.outputs, *self.inner)

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """Tensors written by a gather whose version counters autograd may have saved."""
        return (*self.tensors, local_of(self._parameter.unsharded)) if self._is_built else self.tensors

    def forget_metadata(self) -> None:
        """Drop the metadata together with the tensors: earlier, a GPU's kernels may not have read the metadata yet."""
        self._metadata = None


class _Gathered(UnshardedBuffer):
    """The unsharded buffer of `lamella_buffers.all_gather`, made of tensors in separate memory."""

    def __init__(self, extensions: Sequence[_Extension], num_shards: int) -> None:
        with torch.inference_mode(False):
            self.flat = torch.empty(0)
        self._extensions = extensions
        self._num_shards = num_shards
        self._versions: _unsafe_preserve_version_counter | None = None
        self.is_unreceived = False

    @property
    def has_bytes(self) -> bool:
        return True  # maybe; freeing twice does nothing

    def allocate(self) -> None:
        for extension in self._extensions:
            for tensor in extension.tensors:
                storage, nbytes = tensor.untyped_storage(), tensor.numel() * tensor.itemsize
                if storage.nbytes() != nbytes:  # equal if bytes were kept: `resize_` would move them
                    storage.resize_(nbytes)
        # At every gather: the first one has made the outputs a moment ago, in `send`.
        self.slots = tuple(output for extension in self._extensions for output in extension.outputs)
        self.layout = EvenLayout.build([slot.shape for slot in self.slots], self._num_shards)
        # Saved before the gather writes: autograd would refuse its views from forward, though values are the same.
        if self._versions is None:
            written = tuple(tensor for extension in self._extensions for tensor in extension.written)
            self._versions = _unsafe_preserve_version_counter(written)
        self.is_unreceived = True

    def settle(self) -> None:
        """Put version counters back: the same values in the same places are no modification."""
        if self._versions is not None:
            self._versions.__exit__(None, None, None)
        self._versions, self.is_unreceived = None, False

    def free(self) -> None:
        # A gather may be freed before its `receive`: the saved counters, put back later, would hide a write in between.
        self.settle()
        for extension in self._extensions:
            extension.forget_metadata()
            for tensor in extension.tensors:
                tensor.untyped_storage().resize_(0)  # dropping the tensor frees nothing: autograd may hold views


class _Apart(ShardedBuffer):
    """Describes shards in separate memory; a meta tensor stands for the buffer."""

    def __init__(self, layout: EvenLayout | FlatLayout, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layout, rank, torch.empty(layout.shard_numel, dtype=dtype, device="meta"))
        self.device = device


def _takes_more(shard: torch.Tensor) -> bool:
    """Whether the first method takes all five arguments, or the mesh only."""
    method: Callable[..., object] = getattr(shard, _PRE)
    signature = inspect.signature(method)
    if len(signature.parameters) not in (1, 5):
        raise MisuseError(
            f"Expected {_PRE}(mesh) or {_PRE}(mesh, outer_size, outer_stride, module, mp_policy) of "
            f"{type(shard).__name__}, got {signature}. Invalid {_PRE}: {signature}."
        )
    return len(signature.parameters) == 5


def check_lies(name: str, sharding: Sharding, neighbours: Transport | None) -> None:
    """Refuse a placement that extended parameters do not have.

    Raises:
        NotImplementedError: The placement is unsupported.
    """
    axes = sharding.axes
    unsupported = {
        f"`shard_placement_fn` to shard {name!r} along dim 0": sharding.dim != 0,
        f"no number as `reshard_after_forward` for {name!r}": neighbours is not None,
        f"`keep_together` to return None for {name!r}": sharding.keep is not None,
        f"`placements` that shard {name!r} over one axis": axes.shard_axis is None or axes.outer_axis is not None,
    }
    for expected, is_so in unsupported.items():
        if is_so:
            raise NotImplementedError(
                f"Expected {expected}, got another: its local tensor defines {_PRE}, and that is not supported there. "
                "Give the parameter a unit of its own that is."
            )


def check_policy(candidate: Candidate) -> None:
    """Refuse number formats beside those that the class defines.

    Raises:
        NotImplementedError: The policy has a main dtype or a recipe for the parameter.
    """
    dtype, (main_dtype, _, _) = candidate.parameter.dtype, dtypes_of(candidate.parameter, candidate.policy)
    if main_dtype != dtype or candidate.policy.recipe is not None:
        refuse_quantized(candidate.name, local_of(candidate.parameter))
    if main_dtype != dtype:
        raise NotImplementedError(
            f"Expected `main_dtype` to be None or {dtype} for {candidate.name!r}, whose class defines {_PRE}, got "
            f"{main_dtype}. Build the parameter in the dtype that it is to rest in."
        )
    if candidate.policy.recipe is not None:
        raise NotImplementedError(
            f"Expected `recipe` to give None for {candidate.name!r}, whose class defines {_PRE}, got "
            f"{candidate.policy.recipe!r}. Either the class or the recipe decides what is gathered."
        )


def _mesh_of(axes: DataAxes) -> DeviceMesh:
    """The shard axis alone."""
    names = axes.mesh.mesh_dim_names
    if axes.mesh.ndim == 1 or names is None or axes.shard_axis is None:
        return axes.mesh
    return axes.mesh[names[axes.shard_axis]]


def chunk(tensor: torch.Tensor, axes: DataAxes, offload: Offload | None) -> torch.Tensor:
    """A copy of this rank's rows, of the same class, with memory for as many rows as the first rank's."""
    with torch.no_grad():
        chunks = torch.chunk(tensor.detach(), axes.num_shards)
        rank = axes.shard_rank
        rows = chunks[rank] if rank < len(chunks) else tensor.detach().narrow(0, 0, 0)
        padded = tensor.new_zeros((_num_rows(tensor.shape, axes.num_shards), *tensor.shape[1:]))
        return _fill(padded if offload is None else offload.pinned(padded), rows)


def _with_room(
    rows: torch.Tensor, shape: tuple[int, ...], num_shards: int, offload: Offload | None = None
) -> torch.Tensor:
    """The rows on their resting device, copied if memory for the first rank's number of rows is missing."""
    num_rows = _num_rows(shape, num_shards)
    with torch.no_grad():
        padded = rows if len(rows) == num_rows else rows.new_zeros((num_rows, *shape[1:]))
        padded = padded if offload is None else offload.pinned(padded)
        return rows if padded is rows else _fill(padded, rows)


def _fill(padded: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    filled = padded.narrow(0, 0, len(rows))
    if len(rows):
        filled.copy_(rows)
    return filled


def _num_rows(shape: tuple[int, ...], num_shards: int) -> int:
    """The first rank's number of rows, the largest."""
    return -(-shape[0] // num_shards)


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
