"""One parameter of a unit, in the two forms that modules hold in turn."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils.weak import WeakIdKeyDictionary

from lamella_buffers import plain_values
from lamella_engine._ragged import dtensor_over, lie_alike
from lamella_engine._sharding import Sharding, local_of
from lamella_precision import MixedPrecisionPolicy

# Originals that were sharded, to what became of them. One that is still found in a module later was tied to the sharded
# one; one that is found in an optimizer is trained no more.
# (The sharded parameters are not listed: torch cannot swap the contents of a tensor that has weak references.)
_sharded_originals = WeakIdKeyDictionary()
_living: weakref.WeakSet[ShardedParameter] = weakref.WeakSet()
_MARK = "_is_lamella_shard"


class Owner(NamedTuple):
    """A place that holds a parameter: a module's parameters, and the name in it. Tied parameters have several."""

    parameters: dict[str, nn.Parameter | None]
    name: str
    module: weakref.ref[nn.Module]  # weak: the module holds what holds this


@dataclass(eq=False, kw_only=True)
class ShardedParameter:
    """One parameter, in the two forms that its owners hold in turn.

    Attributes:
        name: Full name below the unit, of its first owner.
        owners: Every place that holds it.
        sharded: What rests and what the optimizer updates: a DTensor over `shard`.
        shard: This rank's part, a view of the group's `main_weight`.
        sharding: How it lies.
        trains: Whether it takes a gradient, as last seen on both forms.
        marks: What libraries put on the parameter (`sequence_parallel`, `allreduce`, ...); both forms carry it.
        unsharded: What computes: a view of the unsharded buffer. Autograd leaves the gradient on it.
        accumulated: The sum of earlier microbatches' gradients in the reduce dtype, where that is not the gradient's
        own.
        keeps_grad_clear: Move earlier microbatches' gradients out of `.grad`, also in its own dtype: a layer may write
            over it.
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

    def adopt(self, form: torch.Tensor) -> None:
        """Make `form` the sharded form, if it is a Parameter."""
        if isinstance(form, nn.Parameter):
            self.sharded = form
            self.trains = form.requires_grad
            setattr(form, _MARK, True)

    def in_places(self) -> list[torch.Tensor | None]:
        """The tensors that its owners hold now; None where somebody took it out."""
        return [parameters.get(name) for parameters, name, _ in self.owners]

    def is_in_place(self, form: torch.Tensor | None) -> bool:
        """Whether an owner holds a tensor; of the sharded form also while it holds the unsharded one."""
        held = self.in_places()
        return any(each is form for each in held) or (
            form is self.sharded and any(each is self.unsharded for each in held)
        )

    def held(self) -> torch.Tensor | None:
        """What was put in place of the sharded form, or that.

        Raises:
            RuntimeError: Its owners were given different tensors.
        """
        others = {id(each): each for each in self.in_places() if each is not self.sharded}
        if len(others) > 1:
            raise RuntimeError(
                f"Expected the {len(self.owners)} places that hold {self.name!r} to be given one tensor, got "
                f"{len(others)} different ones. Assign the tied parameter under one name, or one tensor under all."
            )
        return next(iter(others.values()), self.sharded)

    def replacement(self) -> torch.Tensor:
        """The DTensor that was put in place of ours, or ours.

        Raises:
            TypeError: An owner holds something that is not a shard of this parameter.
            RuntimeError: Its owners were given different ones.
        """
        held = self.held()
        if held is None or held.shape != self.sharded.shape or not hasattr(held, "_local_tensor"):
            raise TypeError(
                f"Expected parameter {self.name!r} to be a DTensor of shape {tuple(self.sharded.shape)}, got "
                f"{type(held).__name__} of shape {None if held is None else tuple(held.shape)}. Only a DTensor can "
                "replace a sharded parameter; to write whole values, distribute them first (`distribute_tensor`)."
            )
        if not lie_alike(held, self.sharded) or local_of(held).shape != self.shard.shape:
            before, now = (tensor.placements for tensor in (self.sharded, held))  # type: ignore[attr-defined]
            raise TypeError(
                f"Expected parameter {self.name!r} to lie as before, {before}, got {now}. Copy into it "
                "(`load_state_dict` without `assign`), which moves the rows."
            )
        return held

    def accumulate(self, dtype: torch.dtype) -> None:
        """Add this microbatch's gradient to earlier ones in `dtype`; autograd does it itself in the gradient's own."""
        gradient = self.unsharded.grad
        if gradient is None or (gradient.dtype == dtype and not self.keeps_grad_clear):
            return
        if self.accumulated is None:
            self.accumulated = gradient.to(dtype)
        else:
            add_gradient(self.accumulated, gradient)
        self.unsharded.grad = None

    def run_hooks(self) -> None:
        """Call what `register_post_accumulate_grad_hook` put on the sharded form."""
        for hook in self.sharded._post_accumulate_grad_hooks.values():
            hook(self.sharded)

    def take_gradient(self) -> torch.Tensor | None:
        """The gradient of all microbatches since the last reduction; the parameter keeps nothing."""
        gradient = self.unsharded.grad
        if gradient is not None:
            self.unsharded.grad = None
        if self.accumulated is not None:
            if gradient is not None:
                add_gradient(self.accumulated, gradient)
            gradient, self.accumulated = self.accumulated, None
        return None if gradient is None else self.sharding.unwrap(gradient)

    def drop_gradient(self) -> None:
        """Forget what was not reduced."""
        self.unsharded.grad = None
        self.accumulated = None

    @property
    def has_gradient(self) -> bool:
        """Whether there is something to reduce."""
        return self.unsharded.grad is not None or self.accumulated is not None


def add_gradient(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient to a sum of earlier ones; to a plain sum its plain values.

    A wrapper that runs an operator on each of its parts would add all of them to the one sum.

    Effects: one add on the current stream, after a copy of a tensor subclass.
    """
    total.add_(plain_values(gradient) if type(total) is torch.Tensor else gradient)


# Both are asked of every parameter several times a step: one call for all of them, and nothing is made in it.


def install(parameters: Iterable[ShardedParameter], *, is_sharded: bool) -> list[str]:
    """Make every owner hold one form, which takes over whether the form that was visible is to be trained.

    Returns:
        The names of those of which an owner held a third tensor; it is dropped.
    """
    displaced: list[str] = []
    for parameter in parameters:
        if is_sharded:
            form, other = parameter.sharded, parameter.unsharded
        else:
            form, other = parameter.unsharded, parameter.sharded
        parameter.trains = trains = other.requires_grad
        if form.requires_grad is not trains:
            form.requires_grad_(trains)
        for held, name, _ in parameter.owners:
            if name not in held or (held[name] is not other and held[name] is not form):
                displaced.append(parameter.name)
            held[name] = form
    return displaced


def refuse_displaced(names: Sequence[str]) -> None:
    """Say that `install` has dropped tensors.

    Raises:
        RuntimeError: In any case.
    """
    raise RuntimeError(
        f"Expected {names} to be replaced or tied while their unit is sharded, between steps, got another tensor in "
        "place of each since the unit was gathered. Those tensors were dropped. Call reshard() first."
    )


def put(parameters: Iterable[ShardedParameter]) -> None:
    """Make every owner hold the sharded form, whatever it held."""
    for parameter in parameters:
        for held, name, _ in parameter.owners:
            held[name] = parameter.sharded


def any_replaced(parameters: Iterable[ShardedParameter]) -> bool:
    """Whether an owner holds another Parameter, or ours got other storage (`to_empty`, `.to()`, `assign=True`)."""
    try:
        for parameter in parameters:
            sharded = parameter.sharded
            if sharded._local_tensor is not parameter.shard:  # type: ignore[attr-defined]
                return True
            for held, name, _ in parameter.owners:
                if held[name] is not sharded:
                    return True
    except KeyError:  # deleted; asking for it with `get` would be a call for each
        return True
    return False


class Candidate(NamedTuple):
    """A parameter that is about to be sharded."""

    name: str
    parameter: nn.Parameter
    owners: list[Owner]
    sharding: Sharding
    policy: MixedPrecisionPolicy


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a unit's sharded form."""
    return bool(getattr(parameter, _MARK, False))


def name_of_sharded_original(parameter: nn.Parameter) -> str | None:
    """The name under which this very parameter was sharded before, or None."""
    name, _ = _sharded_originals.get(parameter, (None, None))  # type: ignore[no-untyped-call]
    return cast("str | None", name)


def sharded_originals(held: Iterable[torch.Tensor]) -> dict[torch.Tensor, ShardedParameter]:
    """The originals among some tensors, each with its sharded parameter; without originals of deleted units."""
    if not _sharded_originals:
        return {}
    return {original: parameter for original in held if (parameter := _sharded_from(original)) is not None}


def _sharded_from(original: torch.Tensor) -> ShardedParameter | None:
    if isinstance(original, nn.Parameter) and is_sharded(original):
        return None  # it is one; asked of every parameter at every step, so this answer is quick
    _, became = _sharded_originals.get(original, (None, lambda: None))  # type: ignore[no-untyped-call]
    return cast("ShardedParameter | None", became())


def sharded_parameter(candidate: Candidate, shard: torch.Tensor) -> ShardedParameter:
    """A parameter in its sharded form, over `shard`; nothing holds it yet.

    Effects: none.
    """
    original = candidate.parameter
    sharded = nn.Parameter(dtensor_for(shard, original, candidate.sharding), requires_grad=original.requires_grad)
    # A subclass's own attributes are on every tensor of it, also on one that was never marked.
    own = vars(original.detach())
    marks = {name: mark for name, mark in vars(original).items() if name not in own} | {_MARK: True}
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
    _sharded_originals[original] = (candidate.name, weakref.ref(parameter))
    _living.add(parameter)
    return parameter


def living_parameters() -> Iterable[ShardedParameter]:
    """The sharded parameters of every unit that there is."""
    return list(_living)


def shard_like(parameter: ShardedParameter, whole: torch.Tensor, dtype: torch.dtype) -> DTensor:
    """This rank's part of a tensor of the parameter's shape, which lies as the parameter does.

    Effects: allocates the part, on the parameter's device and the current stream; not a collective.
    """
    own = parameter.sharding.own_part(local_of(whole)).to(parameter.shard.device, dtype, copy=True).contiguous()
    return dtensor_for(own, whole, parameter.sharding)


def dtensor_for(shard: torch.Tensor, whole: torch.Tensor, sharding: Sharding) -> DTensor:
    """A DTensor over `shard`, wherever it lies: `DTensor.from_local` would move it to the mesh's device."""
    meta = torch.empty(whole.shape, dtype=shard.dtype, device="meta")
    tensor_meta = TensorMeta(meta.shape, meta.stride(), meta.dtype)
    return dtensor_over(shard, DTensorSpec(sharding.mesh, tuple(sharding.placements), tensor_meta=tensor_meta))


def gradient_over(parameter: ShardedParameter, local: torch.Tensor) -> DTensor:
    """A DTensor over `local` that lies as the parameter does. `DTensor.from_local` says the same ten times slower."""
    sharded: Any = parameter.sharded
    # Made over the shard and then pointed at the gradient, for the reason that `standalone` gives; without `__init__`,
    # which does nothing and takes as long.
    gradient: DTensor = DTensor.__new__(type(sharded), parameter.shard, sharded._spec, requires_grad=False)
    gradient._local_tensor = local
    return gradient
