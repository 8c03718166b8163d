"""A unit under the names of FSDP2's private state, for readers of the state: pipeline schedules, tests, tools.

Only names with a known reader exist (docs/reference/fsdp2.md lists both), with lamella's values. Writing is refused:
lamella would not see a value set by a method of torch's. The exceptions are tools' wrappers around a unit's
boundaries: the state then holds the wrapper in place of the method, and a step without tools has no wrapper.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn, Self

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as TorchsState
from torch.utils.hooks import RemovableHandle

from lamella_engine._modules.hooks import Args, Kwargs, post_forward, pre_forward
from lamella_engine._modules.state import FSDPState
from lamella_engine._parameters.group import ParameterGroup, dtypes_of
from lamella_engine._parameters.sharded_parameter import ShardedParameter
from lamella_engine._parameters.sharding import DataAxes
from lamella_engine._tree.tree import Tree
from lamella_engine._unit.unit import Unit
from lamella_precision import MixedPrecisionPolicy


class _LackedError(NotImplementedError, AttributeError):
    """A part of FSDP2's state that lamella lacks; `hasattr` gives False."""


class _View:
    """An object that shows and takes only the names of the class."""

    def __setattr__(self, name: str, value: object) -> None:
        raise self._lacks(name)

    def __getattr__(self, name: str) -> NoReturn:
        raise self._lacks(name)

    def _lacks(self, name: str) -> _LackedError:
        return _LackedError(
            f"Expected a name of FSDP2's private state that lamella has, got {name!r}: a method of torch's that "
            "lamella does not support yet, or a tool that changes FSDP2's insides."
        )


class StateView(_View):
    """The value of `fully_shard.state(module)`.

    Args:
        state: The unit's state.
        modules: The unit's modules.
        policy: The unit's number formats.
        hooks: The handles to remove the unit's hooks before forward, and after.
    """

    _state: FSDPState
    modules: tuple[weakref.ref[nn.Module], ...]  # weak: the modules hold the view
    _mp_policy: MixedPrecisionPolicy
    _pre_forward_hook_handle: RemovableHandle
    _post_forward_hook_handle: RemovableHandle

    def __init__(
        self,
        state: FSDPState,
        modules: Sequence[nn.Module],
        policy: MixedPrecisionPolicy,
        hooks: tuple[RemovableHandle, RemovableHandle],
    ) -> None:
        before, after = hooks
        # Past `__setattr__`, which refuses changes without effect.
        vars(self).update(
            _state=state,
            modules=tuple(weakref.ref(module) for module in modules),
            _mp_policy=policy,
            _pre_forward_hook_handle=before,
            _post_forward_hook_handle=after,
        )

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("_pre_forward_hook_handle", "_post_forward_hook_handle"):
            raise self._lacks(name)
        vars(self)[name] = value

    @property  # type: ignore[misc]
    def __class__(self) -> type[TorchsState]:  # type: ignore[override]
        """Torch's class, for `isinstance`: tools tell units from modules with other states by class."""
        return TorchsState

    @property
    def _pre_forward(self) -> Callable[..., tuple[Args, Kwargs]]:
        return partial(pre_forward, self._state)

    @property
    def _post_forward(self) -> Callable[..., object]:
        return partial(post_forward, self._state)

    @property
    def _training_state(self) -> TrainingState:
        return _training_state(self._state)

    @property
    def _is_root(self) -> bool:
        return self._state.unit.is_outermost

    def _lazy_init(self) -> None:
        """Does nothing: `fully_shard` has initialised everything."""

    @property
    def _state_ctx(self) -> Self:
        return self

    @property
    def all_states(self) -> list[object]:
        """The states of the tree, the outermost unit's first."""
        return [unit.view() for unit in _outermost_first(self._state.tree)]

    @property
    def _comm_ctx(self) -> object:
        tree = self._state.tree
        return tree.streams.shown.setdefault(CommView, CommView(tree))

    @property
    def _fsdp_param_groups(self) -> list[GroupView]:
        together: dict[DataAxes, list[ParameterGroup]] = {}
        for group in self._state.unit.parameters.groups:
            together.setdefault(group.axes, []).append(group)
        # Made for each reader: between passes `replace_groups` may give the unit other groups.
        return [GroupView(self._state, groups) for groups in together.values()]

    @property
    def _fsdp_param_group(self) -> GroupView | None:
        groups = self._fsdp_param_groups
        if len(groups) > 1:
            raise AssertionError(
                f"Expected at most 1 param group for backward compatibility, but got {len(groups)}: the unit's "
                "parameters lie on several meshes. Use `_fsdp_param_groups`."
            )
        return groups[0] if groups else None

    @property
    def _modules_to_run_forward(self) -> set[nn.Module]:
        """Of several modules, the modules not yet run in the forward under way."""
        if len(self.modules) == 1:
            return set()
        awaited = self._state.unit.awaited
        return {module for ref in self.modules if (module := ref()) is not None and id(module) in awaited}

    def _root_post_backward_final_callback(self) -> None:
        self._state.tree.step_end.finish_backward()


class GroupView(_View):
    """The parameters of a unit on a mesh; inside, lamella has a group for each set of dtypes.

    `pre_backward` and `post_backward` may be replaced by wrappers, and put back.
    """

    _state: FSDPState
    _groups: Sequence[ParameterGroup]

    def __init__(self, state: FSDPState, groups: Sequence[ParameterGroup]) -> None:
        # A wrapper set through an earlier view is on the state, for every later view.
        wrappers = {
            name: vars(state)[method_name] for name, method_name in _WRAPPED.items() if method_name in vars(state)
        }
        vars(self).update(_state=state, _groups=groups, **wrappers)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _WRAPPED:
            self._wrap(name, value)
        elif (name, value) != ("_training_state", TrainingState.IDLE):  # set by tools that move a model
            raise self._lacks(name)

    def _wrap(self, name: str, value: object) -> None:
        if getattr(value, "__func__", None) is vars(GroupView)[name]:
            vars(self._state).pop(_WRAPPED[name], None)
            vars(self).pop(name, None)
        else:
            # On the state too, for autograd's hooks: a wrapper sees every backward of the unit.
            vars(self._state)[_WRAPPED[name]] = vars(self)[name] = value

    @property
    def _module_fqn(self) -> str:
        return self._state.unit.parameters.name

    @property
    def fsdp_params(self) -> list[ParameterView]:
        """The unit's parameters on the mesh."""
        names = dict(_module_names(self._state.tree))
        return [
            ParameterView(sharded_parameter, group.policy, names)
            for group in self._groups
            for sharded_parameter in group.parameters
        ]

    @property
    def mesh_info(self) -> MeshView:
        """The mesh of the parameters."""
        return MeshView(self._groups[0].axes)

    @property
    def is_unsharded(self) -> bool:
        """Whether the modules hold unsharded parameters."""
        return self._state.unit.weights.is_unsharded

    @property
    def is_sharded(self) -> bool:
        """Whether the modules hold shards."""
        return not self.is_unsharded

    @property
    def _orig_dtype(self) -> torch.dtype | None:
        return self._dtypes[0]

    @property
    def _reduce_dtype(self) -> torch.dtype | None:
        return self._dtypes[2]

    @property
    def _dtypes(self) -> tuple[torch.dtype | None, ...]:
        for group in self._groups:
            dtypes = dtypes_of(group.parameters[0].sharded, group.policy)
            if dtypes[0].is_floating_point:
                return dtypes
        return (None, None, None)

    @property
    def reduce_scatter_max_input_buffers(self) -> int:
        """The unit's own number."""
        return self._state.unit.max_reductions_in_flight

    @property
    def _training_state(self) -> TrainingState:
        return _training_state(self._state)

    @property
    def _reshard_after_forward(self) -> bool:
        unit = self._state.unit
        return not unit.is_outermost if unit.reshard_after_forward is None else unit.reshard_after_forward

    def pre_backward(self, *_: object) -> None:
        """Begin the unit's backward, unless begun."""
        FSDPState.begin_backward(self._state)

    def post_backward(self, *_: object) -> None:
        """End the unit's backward, if begun.

        Schedules call the method for every group before the outermost unit's last callback, which would end it too.
        """
        if self._state.unit.is_in_backward:
            FSDPState.end_backward(self._state)


_WRAPPED = {"pre_backward": "begin_backward", "post_backward": "end_backward"}  # FSDP2's names, and a state's own


class ParameterView(_View):
    """A parameter. As in FSDP2, a dtype without a cast is None."""

    _param_fqn: str
    sharded_param: nn.Parameter
    unsharded_param: nn.Parameter
    _unsharded_param: nn.Parameter
    orig_dtype: torch.dtype
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None

    def __init__(self, parameter: ShardedParameter, policy: MixedPrecisionPolicy, module_names: dict[int, str]) -> None:
        # The forms of this moment: `.to()` and `to_empty` give a parameter another unsharded form, and an old view has
        # the old form, whose bytes no gather fills any more.
        owner = parameter.owners[0]
        prefix = module_names.get(id(owner.module()), "")
        main, compute, _ = dtypes_of(parameter.sharded, policy)
        vars(self).update(
            _param_fqn=f"{prefix}.{owner.name}" if prefix else owner.name,
            sharded_param=parameter.sharded,
            unsharded_param=parameter.unsharded,
            _unsharded_param=parameter.unsharded,
            orig_dtype=main,
            param_dtype=None if compute == main else compute,
            reduce_dtype=None if policy.reduce_dtype == policy.param_dtype else policy.reduce_dtype,
        )


class MeshView(_View):
    """The axes of sharding and replication."""

    mesh: DeviceMesh
    shard_process_group: dist.ProcessGroup | None
    replicate_process_group: dist.ProcessGroup | None

    def __init__(self, axes: DataAxes) -> None:
        vars(self).update(
            mesh=axes.mesh, shard_process_group=axes.shard_group, replicate_process_group=axes.replicate_group
        )


class CommView(_View):
    """The streams of a tree: one object for trees with shared streams, since tools compare the objects."""

    _tree: weakref.ref[Tree]  # weak: the tree's streams hold the view
    all_gather_stream: torch.Stream
    reduce_scatter_stream: torch.Stream
    all_reduce_stream: torch.Stream

    # Streams not used before are made here, and serve the passes from then on: no second set exists.
    def __init__(self, tree: Tree) -> None:
        vars(self).update(
            _tree=weakref.ref(tree),
            all_gather_stream=tree.streams.all_gather_stream,
            reduce_scatter_stream=tree.streams.reduce_scatter_stream,
            all_reduce_stream=tree.streams.all_reduce_stream,
        )

    @property
    def reduce_scatter_max_input_buffers(self) -> int:
        """The largest number of the tree's units; with shared streams, of the tree whose view was made first."""
        tree = self._tree()
        return max((unit.max_reductions_in_flight for unit in tree.units), default=1) if tree else 1


def _training_state(state: FSDPState) -> TrainingState:
    """A unit's phase. In the tree's backward all units are in backward: each gather then serves a backward."""
    if state.tree.context.is_in_backward:
        return TrainingState.PRE_BACKWARD
    return TrainingState.FORWARD if state.unit.awaited else TrainingState.IDLE


def _outermost_first(tree: Tree) -> list[Unit]:
    return sorted(tree.units, key=lambda unit: not unit.is_outermost)


def _module_names(tree: Tree) -> Iterator[tuple[int, str]]:
    """The names of modules by identity, from the outermost unit on."""
    view = _outermost_first(tree)[0].view()
    assert isinstance(view, StateView)
    for ref in view.modules:
        if (root := ref()) is not None:
            yield from ((id(module), name) for name, module in root.named_modules())
