"""A parameter of a unit, in two forms held by modules in turn: sharded and unsharded."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils.weak import WeakIdKeyDictionary

from lamella_buffers import plain_values, standalone
from lamella_engine._parameters.sharding import Sharding, local_of
from lamella_engine._ragged.dtensor import dtensor_over, lie_alike
from lamella_precision import MixedPrecisionPolicy

# Original parameters, to name and sharded parameter. An original found in a module later was tied to the parameter; an
# original found in an optimizer no longer trains, and an unsharded form in an optimizer never does. Keys and values are
# weak: the table keeps no original's memory alive. Sharded tensors are no keys: torch cannot swap the contents of a
# tensor with weak references. The process's table: an optimizer's hook knows only Parameters, and an original with a
# weak reference as an attribute could not be pickled.
_sharded_originals = WeakIdKeyDictionary()
# The process's: a module may be given a parameter of any other model, whose tree this model's units do not know.
_living: weakref.WeakSet[ShardedParameter] = weakref.WeakSet()
_MARK = "_is_lamella_shard"
_UNSHARDED = "unsharded"  # the mark's value on unsharded forms, to which it is copied


# The way to write a sharded parameter, for error messages.
COPY = "parameter.copy_(distribute_tensor(tensor, parameter.device_mesh, parameter.placements))"


Memory = tuple[torch.UntypedStorage, torch.UntypedStorage, int | torch.SymInt]


class Owner(NamedTuple):
    """A place of a parameter: a module's dict of parameters, and the name. Tied parameters have several places."""

    parameters: dict[str, nn.Parameter | None]
    name: str
    module: weakref.ref[nn.Module]  # weak: the module holds the unit, and a cycle would delay freeing the model


@dataclass(eq=False, kw_only=True)
class ShardedParameter:
    """A parameter in two forms, held by the owners in turn.

    Attributes:
        name: Full name below the unit, by the first owner.
        prefix: The unit's name, with a dot.
        owners: Every place of the parameter.
        sharded: The resting form, updated by the optimizer: a DTensor over `shard`.
        shard: This rank's part, a view of the group's `main_weight`.
        sharding: The parameter's place on the mesh.
        trains: Whether the parameter takes a gradient, as last seen on both forms.
        marks: Attributes set by libraries (`sequence_parallel`, `allreduce`, ...), on both forms.
        unsharded: The computing form: a view of the unsharded buffer. Autograd leaves the gradient here.
        memory: The storages of both forms, and the unsharded form's offset. `form.data = tensor` changes these and
            nothing else that shows: no version counter, and not the DTensor's local tensor.
        unsharded_version: The unsharded form's version counter. Gathers do not advance the counter, and writes in place
            do. None for an inference tensor, which has none.
        accumulated: The sum of earlier microbatches' gradients in the reduce dtype, if the gradient's dtype differs, or
            if the unsharded form that held the sum was made anew.
        keeps_grad_clear: Move earlier microbatches' gradients out of `.grad` in any dtype: a layer may write over
            `.grad`, or several graphs of a microbatch add to `.grad`.
    """

    name: str
    owners: list[Owner]
    sharded: nn.Parameter
    shard: torch.Tensor
    sharding: Sharding
    trains: bool
    marks: dict[str, object]
    unsharded: nn.Parameter
    accumulated: torch.Tensor | None = None
    keeps_grad_clear: bool = False
    prefix: str = ""
    memory: Memory = field(init=False)
    unsharded_version: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.note_memory()

    def note_memory(self) -> None:
        """Take the forms' memory for the right memory from now on."""
        self.memory = _memory_of(self)

    def compute_with(self, unsharded: nn.Parameter) -> None:
        """Make `unsharded` the computing form, with the marks of the sharded form.

        An optimizer built while the unit is gathered holds the form, which never has a gradient after a reduction.
        """
        vars(unsharded).update(vars(self.sharded))
        vars(unsharded)[_MARK] = _UNSHARDED
        self.unsharded = unsharded
        self.unsharded_version = None if unsharded.is_inference() else unsharded._version
        # From here on a difference from this memory is a user's `form.data = tensor`.
        self.note_memory()
        _sharded_originals[unsharded] = (self.full_name, weakref.ref(self))

    def settle_writes(self) -> bool:
        """Take the unsharded form's version counter, which has moved, for the current one.

        `torch.nn.utils.parametrize` sets a weight to itself, which counts as a write and changes nothing.

        Returns:
            Whether this rank's rows differ from its shard, or may: a wrapped weight, and a weight without rows on this
                rank, are not compared.

        Effects: a host sync, but in a CUDA graph's capture.
        """
        self.unsharded_version = self.unsharded._version
        gathered = local_of(self.unsharded).detach()
        is_captured = gathered.is_cuda and torch.cuda.is_current_stream_capturing()
        if type(gathered) is not torch.Tensor or self.shard.numel() == 0 or is_captured:
            return True
        return not torch.equal(self.sharding.own_part(gathered), self.shard.to(gathered.device, gathered.dtype))

    @property
    def full_name(self) -> str:
        """The name below the outermost unit, for errors."""
        return self.prefix + self.name

    def adopt(self, form: torch.Tensor) -> None:
        """Make `form` the sharded form, if `form` is a Parameter."""
        if isinstance(form, nn.Parameter):
            self.sharded = form
            self.trains = form.requires_grad
            # Without the mark, a second `fully_shard` would take the form for a parameter of no unit.
            setattr(form, _MARK, True)

    def in_places(self) -> list[torch.Tensor | None]:
        """The owners' tensors now; None for an owner without the name."""
        return [parameters.get(name) for parameters, name, _ in self.owners]

    def is_in_place(self, form: torch.Tensor | None) -> bool:
        """Whether an owner holds a tensor; for the sharded form, also if an owner holds the unsharded form."""
        tensors = self.in_places()
        return any(tensor is form for tensor in tensors) or (
            form is self.sharded and any(tensor is self.unsharded for tensor in tensors)
        )

    def current_form(self) -> torch.Tensor | None:
        """The tensor assigned in place of the sharded form, or the sharded form.

        Raises:
            RuntimeError: The owners hold different new tensors.
        """
        replacements = {id(tensor): tensor for tensor in self.in_places() if tensor is not self.sharded}
        if len(replacements) > 1:
            raise RuntimeError(
                f"Expected the {len(self.owners)} places that hold {self.name!r} to be given one tensor, got "
                f"{len(replacements)} different ones. Assign the tied parameter under one name, or one tensor under "
                "all."
            )
        return next(iter(replacements.values()), self.sharded)

    def replacement(self) -> torch.Tensor:
        """The Parameter assigned in place of the sharded form, or the sharded form.

        Raises:
            TypeError: An owner holds something else than a shard of the parameter.
            RuntimeError: The owners hold different new tensors.
        """
        form = self.current_form()
        if form is None:
            raise TypeError(
                f"Expected parameter {self.name!r} to stay in its module after fully_shard, got None in its place. "
                "Before fully_shard, register parametrizations, weight norms and pruning, which move the parameter, "
                "and delete parameters that are to go."
            )
        if torch._C._functorch.is_functorch_wrapped_tensor(form):
            raise TypeError(
                f"Expected parameter {self.name!r} to be sharded also in a transform of torch.func, got one that the "
                "transform wraps. Transforms of units differentiate by inputs alone (`grad`, `vjp`, `vmap`, ...): call "
                "`backward` for gradients of parameters, or transform the model before fully_shard."
            )
        if form.shape != self.sharded.shape or not hasattr(form, "_local_tensor"):
            raise TypeError(
                f"Expected parameter {self.name!r} to be a DTensor of shape {tuple(self.sharded.shape)}, got "
                f"{type(form).__name__} of shape {tuple(form.shape)}. Only a DTensor can replace a sharded parameter; "
                "to write whole values, distribute them first (`distribute_tensor`)."
            )
        if not isinstance(form, nn.Parameter):
            # `functional_call` puts the former tensor back later, unseen: the shards would keep the values of this one.
            raise TypeError(
                f"Expected parameter {self.name!r} to be replaced by an nn.Parameter, got {type(form).__name__}. Wrap "
                "it (`nn.Parameter(value)`), also for torch.func.functional_call; or copy into the parameter."
            )
        if not lie_alike(form, self.sharded) or local_of(form).shape != self.shard.shape:
            before, now = (tensor.placements for tensor in (self.sharded, form))  # type: ignore[attr-defined]
            raise TypeError(
                f"Expected parameter {self.name!r} to lie as before, {before}, got {now}. Copy into it "
                "(`load_state_dict` without `assign`), which moves the rows."
            )
        return form

    def accumulate(self, dtype: torch.dtype) -> None:
        """Add a microbatch's gradient to earlier gradients in `dtype`; in the gradient's own dtype autograd adds."""
        gradient = self.unsharded.grad
        if gradient is None or (gradient.dtype == dtype and self.accumulated is None and not self.keeps_grad_clear):
            return
        if self.accumulated is None:
            self.accumulated = gradient.to(dtype)
        else:
            add_gradient(self.accumulated, gradient)
        # Otherwise autograd would add the next microbatch to `.grad` itself, in the narrower dtype.
        self.unsharded.grad = None

    def keep_gradient(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move unreduced gradients to `accumulated`, on `device` and in `dtype`: a new unsharded form has none.

        Effects: on the current stream, copies of gradients on another device or in another dtype.
        """
        if self.accumulated is not None:
            # A copy of a layer's buffer in any case: the buffer goes with the form (`MainGrads.mark`).
            self.accumulated = self.accumulated.to(device, dtype, copy=self.keeps_grad_clear)
        # Before the first gather of an extended parameter both forms are one, and its `.grad` is a reduced gradient.
        if self.unsharded is self.sharded or (gradient := self.unsharded.grad) is None:
            return
        self.unsharded.grad = None
        if self.accumulated is None:
            self.accumulated = gradient.to(device, dtype)
        else:
            add_gradient(self.accumulated, gradient.to(device, dtype))

    def run_hooks(self) -> None:
        """Call the sharded form's hooks from `register_post_accumulate_grad_hook`."""
        for hook in self.sharded._post_accumulate_grad_hooks.values():
            hook(self.sharded)

    def take_gradient(self) -> torch.Tensor | None:
        """The gradient of all microbatches since the last reduction; the parameter keeps nothing."""
        # The caller gets the last reference, and must hold it (`Reduction`) until the collective has read the memory.
        gradient = self.unsharded.grad
        if gradient is not None:
            self.unsharded.grad = None
        if self.accumulated is not None:
            if gradient is not None:
                add_gradient(self.accumulated, gradient)
            gradient, self.accumulated = self.accumulated, None
        return None if gradient is None else self.sharding.unwrap(gradient)

    def drop_gradient(self) -> None:
        """Drop unreduced gradients."""
        self.unsharded.grad = None
        self.accumulated = None

    @property
    def has_gradient(self) -> bool:
        """Whether the parameter has an unreduced gradient."""
        return self.unsharded.grad is not None or self.accumulated is not None


def add_gradient(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient to a sum of earlier gradients; to a plain sum, add the gradient's plain values.

    A wrapper that runs operators part by part would add every part to the same sum.

    Effects: one add on the current stream, after a copy of a tensor subclass.
    """
    total.add_(plain_values(gradient) if type(total) is torch.Tensor else gradient)


# Else a wrapper's `__torch_function__` runs for every attribute that is read, microseconds each.
attributes_alone = torch._C.DisableTorchFunctionSubclass


# Called several times a step, for every parameter: one call for all parameters, which allocates nothing. Storages are
# read by `map`, without a frame or a bound method for each parameter.
_storage, _offset = torch.Tensor.untyped_storage, torch.Tensor.storage_offset
_sharded, _unsharded = attrgetter("sharded"), attrgetter("unsharded")


class LostChange(NamedTuple):
    """A change of a parameter that the exchange of forms drops."""

    parameter: ShardedParameter
    is_write: bool  # values written in place into the unsharded form; else a third tensor in an owner


def install(parameters: Iterable[ShardedParameter], *, is_sharded: bool) -> list[LostChange]:
    """Put one form into every owner; the form takes over `requires_grad` from the form visible before.

    Returns:
        Writes that changed unsharded forms, and third tensors in owners: both are dropped.

    Effects: those of `settle_writes` for each written form.
    """
    lost: list[LostChange] = []
    with attributes_alone():
        for parameter in parameters:
            if is_sharded:
                form, other = parameter.sharded, parameter.unsharded
                if (
                    (version := parameter.unsharded_version) is not None
                    and version != other._version
                    and parameter.settle_writes()
                ):
                    lost.append(LostChange(parameter, is_write=True))
            else:
                form, other = parameter.unsharded, parameter.sharded
            parameter.trains = trains = other.requires_grad
            if form.requires_grad is not trains:
                form.requires_grad_(trains)
            for owner_parameters, name, _ in parameter.owners:
                if name not in owner_parameters or (
                    owner_parameters[name] is not other and owner_parameters[name] is not form
                ):
                    lost.append(LostChange(parameter, is_write=False))
                owner_parameters[name] = form
    return lost


def report_lost(changes: Iterable[LostChange]) -> None:
    """Warn of writes dropped by `install`, and refuse third tensors.

    Raises:
        RuntimeError: A third tensor was dropped.
    """
    written = [parameter.full_name for parameter, is_write in changes if is_write]
    if written:
        warnings.warn(
            f"Expected {written} to be written while their unit is sharded, got writes into the gathered weights. They "
            f"are lost: the next gather brings the shards' values. Call reshard() first, and then {COPY} under "
            "torch.no_grad().",
            stacklevel=2,
        )
    names = [parameter.name for parameter, is_write in changes if not is_write]
    if not names:
        return
    raise RuntimeError(
        f"Expected {names} to be replaced or tied while their unit is sharded, between steps, got another tensor in "
        "place of each since the unit was gathered. Those tensors were dropped. Call reshard() first; run a backward "
        "through torch.func.functional_call inside of the call, which gives the model its parameters back at its end."
    )


def point_at(parameter: ShardedParameter, shard: torch.Tensor) -> None:
    """Make the sharded form a DTensor over `shard`, and stay the same object."""
    sharded = parameter.sharded
    if (sharded.dtype, sharded.device) == (shard.dtype, shard.device):
        sharded._local_tensor = shard  # type: ignore[attr-defined]
    else:
        # A DTensor's dtype and device are fixed: only `swap_tensors` changes both in the object that an optimizer
        # holds.
        fresh = _resting_form(shard, sharded, parameter.sharding)
        vars(fresh).update(vars(sharded))
        torch.utils.swap_tensors(sharded, fresh)  # type: ignore[no-untyped-call]
    parameter.shard = local_of(sharded)
    parameter.note_memory()
    # `.to()` and similar may have replaced the whole Parameter, and dropped the marks.
    parameter.marks |= vars(sharded)
    vars(sharded).update(parameter.marks)


def replace_originals(parameters: Iterable[ShardedParameter]) -> None:
    """Put the sharded form into every owner for the first time, and note the original that it replaces."""
    for parameter in parameters:
        for owner_parameters, name, _ in parameter.owners:
            _sharded_originals[owner_parameters[name]] = (parameter.name, weakref.ref(parameter))
            owner_parameters[name] = parameter.sharded


def put(parameters: Iterable[ShardedParameter]) -> None:
    """Put the sharded form into every owner, over any other tensor."""
    for parameter in parameters:
        for owner_parameters, name, _ in parameter.owners:
            owner_parameters[name] = parameter.sharded


def put_back(parameters: Iterable[ShardedParameter]) -> None:
    """Put the sharded form into owners that hold the unsharded form, after an `install` that may not have ended."""
    for parameter in parameters:
        sharded, unsharded = parameter.sharded, parameter.unsharded
        holders = [
            (owner_parameters, name)
            for owner_parameters, name, _ in parameter.owners
            if owner_parameters.get(name) is unsharded
        ]
        # An interrupt may have come between two owners of a tied parameter: each owner is looked at by itself.
        if holders:
            sharded.requires_grad_(unsharded.requires_grad)
        for owner_parameters, name in holders:
            owner_parameters[name] = sharded


def any_replaced(parameters: Sequence[ShardedParameter]) -> bool:
    """Whether an owner holds a new Parameter, or a form got a new storage.

    `to_empty`, `.to()` and `assign=True` replace shards; `form.data = tensor` replaces the storage of either form.
    """
    try:
        with attributes_alone():
            memories = zip(
                map(_storage, map(_sharded, parameters)),
                map(_storage, map(_unsharded, parameters)),
                map(_offset, map(_unsharded, parameters)),
                strict=True,
            )
            for parameter, memory in zip(parameters, memories, strict=True):
                sharded = parameter.sharded
                if sharded._local_tensor is not parameter.shard or memory != parameter.memory:  # type: ignore[attr-defined]
                    return True
                for owner_parameters, name, _ in parameter.owners:
                    if owner_parameters[name] is not sharded:
                        return True
    except KeyError:  # a deleted name; `get` would cost a call for each owner
        return True
    return False


def has_assigned_data(parameters: Iterable[ShardedParameter]) -> bool:
    """Whether a form got another tensor's memory by `form.data = tensor`."""
    with attributes_alone():
        return any([parameter.memory != _memory_of(parameter) for parameter in parameters])


def _memory_of(parameter: ShardedParameter) -> Memory:
    unsharded = parameter.unsharded
    return parameter.sharded.untyped_storage(), unsharded.untyped_storage(), unsharded.storage_offset()


def undo_assigned_data(parameters: Iterable[ShardedParameter]) -> list[str]:
    """Find parameters of which a form got another tensor's storage by `form.data = tensor`, and point shards back.

    The caller makes the unsharded forms anew.

    Returns:
        The names of the parameters. Forms replaced in other ways are left out.
    """
    names = []
    for parameter in parameters:
        sharded: Any = parameter.sharded
        if sharded._local_tensor is not parameter.shard or parameter.memory == _memory_of(parameter):
            continue
        if parameter.memory[0] != sharded.untyped_storage():
            sharded.data = dtensor_over(parameter.shard, sharded._spec)
        parameter.note_memory()
        names.append(parameter.full_name)
    return names


class Candidate(NamedTuple):
    """A parameter about to be sharded."""

    name: str
    parameter: nn.Parameter
    owners: list[Owner]
    sharding: Sharding
    policy: MixedPrecisionPolicy


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a unit's, in the sharded or in the unsharded form."""
    return bool(getattr(parameter, _MARK, False))


def name_of_sharded_original(parameter: nn.Parameter) -> str | None:
    """The name of the sharded parameter that a parameter object became, or is the unsharded form of; or None."""
    name, _ = _sharded_originals.get(parameter, (None, None))  # type: ignore[no-untyped-call]
    return cast("str | None", name)


def sharded_originals(tensors: Iterable[torch.Tensor]) -> dict[torch.Tensor, ShardedParameter]:
    """The originals and unsharded forms among some tensors, each with the sharded parameter.

    Without tensors of deleted units.
    """
    if not _sharded_originals:
        return {}
    return {original: parameter for original in tensors if (parameter := _sharded_from(original)) is not None}


def _sharded_from(original: torch.Tensor) -> ShardedParameter | None:
    if isinstance(original, nn.Parameter) and getattr(original, _MARK, None) is True:
        return None  # the quick answer: asked of every parameter at every step
    _, became = _sharded_originals.get(original, (None, lambda: None))  # type: ignore[no-untyped-call]
    return cast("ShardedParameter | None", became())


def sharded_parameter(candidate: Candidate, shard: torch.Tensor) -> ShardedParameter:
    """A parameter in the sharded form, over `shard`, not yet in any module."""
    original = candidate.parameter
    sharded = _resting_form(shard, original, candidate.sharding)
    # A subclass's own attributes are on every tensor of the subclass, also on unmarked tensors.
    class_attributes = vars(original.detach())
    marks = {name: mark for name, mark in vars(original).items() if name not in class_attributes} | {_MARK: True}
    vars(sharded).update(marks)
    parameter = ShardedParameter(
        name=candidate.name,
        owners=candidate.owners,
        sharded=sharded,
        shard=local_of(sharded),
        sharding=candidate.sharding,
        trains=original.requires_grad,
        marks=marks,
        unsharded=sharded,
    )
    _living.add(parameter)
    return parameter


def _resting_form(shard: torch.Tensor, tensor: torch.Tensor, sharding: Sharding) -> nn.Parameter:
    """A parameter over `shard` that requires gradients as `tensor` does."""
    # `nn.Parameter(dtensor)` would detach the DTensor, which is new and has no graph: DTensor plans that for each
    # shape, 4 ms a shape.
    parameter: Any = dtensor_for(shard, tensor, sharding).requires_grad_(tensor.requires_grad)
    parameter._is_param = True
    return cast(nn.Parameter, parameter)


def living_parameters() -> Iterable[ShardedParameter]:
    """The sharded parameters of all living units."""
    return list(_living)


def shard_like(parameter: ShardedParameter, tensor: torch.Tensor, dtype: torch.dtype) -> DTensor:
    """This rank's part of a tensor of the parameter's shape, placed as the parameter.

    Effects: allocates the part, on the parameter's device and the current stream; not a collective.
    """
    # A copy in any case: a view of the part would keep the memory of the whole tensor.
    part = parameter.sharding.own_part(local_of(tensor)).to(parameter.shard.device, dtype, copy=True).contiguous()
    return dtensor_for(part, tensor, parameter.sharding)


def dtensor_for(shard: torch.Tensor, tensor: torch.Tensor, sharding: Sharding) -> DTensor:
    """A DTensor over `shard`, on any device: `DTensor.from_local` would move the shard to the mesh's device."""
    meta = torch.empty(tensor.shape, dtype=shard.dtype, device="meta")
    tensor_meta = TensorMeta(meta.shape, meta.stride(), meta.dtype)
    return dtensor_over(shard, DTensorSpec(sharding.mesh, tuple(sharding.placements), tensor_meta=tensor_meta))


def gradient_over(parameter: ShardedParameter, local: torch.Tensor) -> DTensor:
    """A DTensor over `local`, placed as the parameter. `DTensor.from_local` does the same ten times slower."""
    sharded: Any = parameter.sharded
    if local.dtype != sharded.dtype:
        return dtensor_for(standalone(local), sharded, parameter.sharding)
    # Made over the shard and then pointed at the gradient: made over a view, a DTensor takes over the view's offset
    # (`standalone`). Without `__init__`, which does nothing and takes as long.
    gradient: DTensor = DTensor.__new__(type(sharded), parameter.shard, sharded._spec, requires_grad=False)
    gradient._local_tensor = local
    return gradient
