"""Partial steps: an optimizer updates some of its parameters first, and others later.

The optimizer object stays unchanged. The step of its class is called with a *view*: an object of this class with the
optimizer's state, and param groups of some parameters, or of the plain tensors below the parameters (`_plain`). Nothing
has to be put back after an exception, options are read at the time of use, and no hook sees a narrowed group. Options
and attributes written by a step are lost with the view, and an optimizer with a counter there would count each part:
`check_steps_apart` refuses such optimizers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lamella_optim._plain import plain_view_of

Opt = TypeVar("Opt", bound=Optimizer)


def cheapest_view_of(optimizer: Opt, parts: Sequence[list[torch.Tensor]]) -> Opt:
    """A view of an optimizer for a partial step: over plain tensors where possible.

    Args:
        parts: The parameters to step, by group.

    Effects: raises the version counters of parameters stepped as plain tensors.
    """
    view = plain_view_of(optimizer, parts)
    return view_of(optimizer, parts) if view is None else view


def own_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """The step of an optimizer's class, without torch's wrapper (hooks, and a range in profiles)."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def view_of(optimizer: Opt, parts: Sequence[list[torch.Tensor]]) -> Opt:
    """A view of an optimizer: an object of the same class and state with some of the parameters, by group."""
    view = object.__new__(type(optimizer))
    vars(view).update(vars(optimizer))
    # The step of a class may call the step of its base class, around which torch has put hooks again.
    vars(view).update(_optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
    groups = zip(optimizer.param_groups, parts, strict=True)
    view.param_groups = [{**group, "params": part} for group, part in groups if part]
    return view


def check_steps_apart(optimizer: Optimizer, caller: str) -> None:
    """Refuse an optimizer whose result for a parameter depends on the other parameters of the step.

    Args:
        optimizer: The optimizer to step in parts.
        caller: Name of the public function, for the error.

    Raises:
        ValueError: The optimizer steps by other optimizers (`MuonAndAdam`), which know no view; or the trial on two
            parameters of four elements gave different results when stepped separately.

    Effects: a host sync if parameters are on a GPU; not a collective.
    """
    if type(optimizer) is torch.optim.Adagrad:
        return  # Adagrad makes state in its constructor, so a trial on other parameters is impossible
    name = type(optimizer).__name__
    expected = f"Expected an optimizer that updates each parameter from its own gradient and state, got {name}"
    way_out = f"Leave {caller} out."
    if _holds_optimizers(optimizer):  # not tried: the other optimizers would step the real parameters
        raise ValueError(f"{expected}, which steps by other optimizers. {way_out}")
    try:
        together, apart = (_try(optimizer, is_apart) for is_apart in (False, True))
    except Exception as error:
        raise ValueError(f"{expected}, which cannot be tried on two plain parameters: {error}. {way_out}") from error
    if not _are_equal(together, apart):
        raise ValueError(f"{expected}, whose parameters stepped apart differ from those stepped together. {way_out}")


def _holds_optimizers(optimizer: Optimizer) -> bool:
    attributes = [pytree.tree_leaves(value) for name, value in vars(optimizer).items() if name != "state"]
    return any(isinstance(leaf, Optimizer) for leaves in attributes for leaf in leaves)


def _try(optimizer: Optimizer, is_apart: bool) -> object:
    """Two steps of two small parameters in each group.

    Returns:
        Parameters, state and options of the groups after the two steps.
    """
    tried = view_of(optimizer, [group["params"] for group in optimizer.param_groups])
    tried.state = defaultdict(dict)
    tried.param_groups = groups = [_trial_group(group) for group in tried.param_groups]
    parameters_by_group = [list(group["params"]) for group in groups]
    parts = (
        [[group_parameters[i : i + 1] for group_parameters in parameters_by_group] for i in range(2)]
        if is_apart
        else [parameters_by_group]
    )
    for scale in (1.0, -3.0):
        for parameter in (parameter for group_parameters in parameters_by_group for parameter in group_parameters):
            parameter.grad = torch.full_like(parameter, scale) + parameter.detach()
        for part in parts:
            own_step(tried)(view_of(tried, part) if is_apart else tried)
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return (
        parameters_by_group,
        [dict(tried.state[parameter]) for group_parameters in parameters_by_group for parameter in group_parameters],
        options,
    )


def _trial_group(group: dict[str, Any]) -> dict[str, Any]:
    options = pytree.tree_map_only(
        torch.Tensor, torch.clone, {key: value for key, value in group.items() if key != "params"}
    )
    like = next((p for p in group["params"] if p.is_floating_point()), torch.empty(0))
    device = like.device_mesh.device_type if like.is_meta and isinstance(like, DTensor) else like.device
    values = torch.tensor([[0.5, -2.0], [1.0, 0.25]], dtype=like.dtype, device=device)
    return {**options, "params": [torch.nn.Parameter(values * factor) for factor in (1.0, -0.5)]}


def _are_equal(one: object, other: object) -> bool:
    leaves, other_leaves = pytree.tree_leaves(one), pytree.tree_leaves(other)
    if len(leaves) != len(other_leaves):
        return False
    pairs = zip(leaves, other_leaves, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b) for a, b in pairs)
