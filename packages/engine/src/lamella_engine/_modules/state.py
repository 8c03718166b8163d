"""The state of a module that is a unit: the unit, its tree, and the casts at the module's boundary."""

from __future__ import annotations

import torch
from torch.utils.hooks import RemovableHandle

from lamella_engine._options.options import DEFAULT_OPTIONS, ShardingOptions
from lamella_engine._tree.tree import Tree
from lamella_engine._unit.unit import Unit
from lamella_precision import MixedPrecisionPolicy


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
