"""The state of a module that is a unit: the unit, its tree, and the casts at the module's boundary."""

from __future__ import annotations

from typing import cast

import torch
from torch.utils.hooks import RemovableHandle

from lamella_engine._options.options import DEFAULT_OPTIONS, ShardingOptions
from lamella_engine._parameters.registrations import late_modules
from lamella_engine._tree.tree import Tree
from lamella_engine._unit.unit import Unit
from lamella_engine._unit.weights import refuse_holds
from lamella_precision import MixedPrecisionPolicy

STATE = "_lamella_state"  # the attribute of a unit's modules, set by `attach_state`


class FSDPState:
    """The state that `fully_shard` attaches to the modules of a unit.

    Args:
        unit: The unit of the modules.
        tree: The unit's tree, which gains the unit.
        policy: Number formats; only the dtypes of inputs and outputs are used here.
        options: The `options` of `fully_shard`; the fields of the tree count in `tree`.

    Attributes:
        reader: State of the outer unit which took the parameters over (`declare_reads`), or None.
        hooks_of_outermost: Hooks removed when the unit becomes an inner unit.
    """

    def __init__(
        self, unit: Unit, tree: Tree, policy: MixedPrecisionPolicy, options: ShardingOptions = DEFAULT_OPTIONS
    ) -> None:
        self.unit = unit
        self.tree = tree  # until `put_inside`: all units below one outermost unit are in its tree
        self.options = options
        self.input_dtype: torch.dtype | None = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype = policy.output_dtype
        # Added by `fully_shard`, removed for good by `put_inside`.
        self.hooks_of_outermost: list[RemovableHandle] = []
        # Set by `take_over` of the reader, and never cleared: from then on the reader's hooks and verbs are the unit's.
        self.reader: FSDPState | None = None
        tree.add(unit)

    @property
    def effective_options(self) -> ShardingOptions:
        """The options that count for the unit; fields of the tree are the outermost unit's."""
        return self.options.in_tree_of(self.tree.options)

    @property
    def acting(self) -> FSDPState:
        """The state whose unit has the parameters: `self`, or the reader's state after a takeover."""
        return self if self.reader is None else self.reader.acting

    def put_inside(self, outer: FSDPState, name: str) -> None:
        """Become an inner unit of `outer`, under a name in `outer`, without the hooks of an outermost unit."""
        self.unit.is_outermost = False
        self.unit.parameters.rename(name)
        for hook in self.hooks_of_outermost:
            hook.remove()
        self.hooks_of_outermost.clear()
        self.tree = outer.tree

    def rest_before_put_inside(self, name: str) -> None:
        """Bring the unit to rest, before an outer unit's tree takes it over under a name.

        Raises:
            RuntimeError: The unit has a holder, or its tree is in the middle of a step.

        Effects: those of `StepEnd.finish_reductions` and `UnitWeights.reshard`.
        """
        if not self.tree.context.is_resting or self.tree.step_end.is_unfinalized:
            raise RuntimeError(
                f"Expected the unit {name!r} to be at rest, got one in the middle of a step. Call fully_shard, and add "
                "units to modules, between steps, or call reset_iter_state() after an exception."
            )
        refuse_holds(self.unit.weights)
        self.tree.step_end.finish_reductions()  # no step of the outer tree would wait for the streams left behind
        # The outer unit may take the shards over: no module may hold an unsharded form then.
        self.unit.weights.reshard()

    def adopt_late_units(self) -> None:
        """Put units inside the tree that its modules were given after `fully_shard`, as if they had been there before.

        Else the end of the tree's backward would not come to them, and gradients that it should reduce would stay for
        the next step.

        Raises:
            RuntimeError: Such a unit is not at rest.
            ValueError: A field of the tree in its options differs.

        Effects: those of `rest_before_put_inside`.
        """
        late: dict[FSDPState, str] = {}
        trees: set[Tree] = set()
        for name, module in late_modules(unit.parameters for unit in self.tree.units):
            below = find_state(module)
            if below is None or below.tree is self.tree:
                continue
            if below.unit.is_outermost:
                trees.add(below.tree)
            if below.tree in trees:  # and no unit that is another model's too
                late.setdefault(below, name)
        for below, name in late.items():
            below.tree.options.check_inside(self.tree.options, name)
            below.rest_before_put_inside(name)
        for below, name in late.items():
            below.put_inside(self, name)
            self.tree.add(below.unit)

    def take_over(self, other: FSDPState) -> None:
        """Communicate another unit's parameters together with this unit's from now on. Both must be at rest."""
        self.unit.take_over(other.unit)
        other.reader = self

    def begin_backward(self, *_: object) -> None:
        """Begin the unit's backward: a hook on the unit's outputs. Tools may wrap the method on one state."""
        self.tree.begin_backward(self.unit)

    def end_backward(self) -> None:
        """End the unit's backward: a hook behind the unit's inputs. Tools may wrap the method on one state."""
        self.tree.step_end.end_backward(self.unit)


def find_state(module: object) -> FSDPState | None:
    """A module's state, or None without a unit."""
    return cast("FSDPState | None", getattr(module, "__dict__", {}).get(STATE))
