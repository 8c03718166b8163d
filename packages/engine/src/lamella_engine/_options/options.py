"""lamella's own options, beside FSDP2's arguments: one frozen object, given to `fully_shard`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace

import torch.nn as nn

from lamella_buffers import Allocator
from lamella_engine._options.placements import AxisPlacement
from lamella_layout import Keep, Rows, Whole

KeepFn = Callable[[nn.Parameter], Keep | None]


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """lamella's choices beside FSDP2's arguments; the defaults are FSDP2's behaviour.

        options = ShardingOptions(placements=ZERO2, keep_budget=12 << 30)
        for block in model.layers:
            fully_shard(block, options=options)
        fully_shard(model, options=options)
        model.set_options(keep_budget=8 << 30)      # a field of the tree; `model.sharding_options` tells all fields

    Some fields belong to the unit, and are fixed when the unit is sharded. The other fields belong to the tree of units
    below one outermost unit: the outermost unit's values count for every unit of the tree, and change by
    `FSDPModule.set_options` on the outermost unit. An inner unit leaves a field of the tree at the default or repeats
    the outermost unit's value; `fully_shard` refuses any other value. Every rank must give equal options.

    Attributes:
        placements: A field of the unit. The ZeRO stage, one for each axis of `mesh`: DDP, ZERO1, ZERO2 or ZERO3 on a
            1-D mesh; (HSDP, one of the last three) or (HFSDP, ZERO3) on a 2-D mesh. None, the default, means ZERO3, and
            gradients reduced over replicas after every microbatch.
        allocator: A field of the unit. Gives unsharded parameters, and gradients that fused kernels add to, their
            bytes. None, the default, means memory that copy engines gather into, if the ranks are on one host, else
            torch's caching allocator. A `CachingAllocator` asks for rings everywhere; a `PoolAllocator` plans for all
            units that draw from the pool, so give the same object to all units.
        keep_together: A field of the unit. The part of a parameter that must stay on one rank: `Rows(n)` for blocks of
            n rows, `Whole()`, or a function of the parameter that returns `Rows`, `Whole` or None. Such parameters are
            packed into one buffer, which is cut where the rule allows (the flat layout), so a rank may have any number
            of rows; the parameters become `RaggedDTensor`s. None, the default and also from the function, means torch's
            chunks. A unit holds the function as long as the unit lives, so a function that refers to the model is a
            cycle.
        prefetch_budget: A field of the tree. Bytes of unsharded parameters that the tree may gather ahead of the
            running unit, in forward and in backward, in the order of the step before: in the compute dtype, with
            padding, beside units that run or are kept. The next unit is always gathered ahead, at any weight. None, the
            default, gathers only the next unit. Units with a list (`set_modules_to_forward_prefetch` and its sibling)
            follow the list instead. A constant, not a share of free memory: ranks with different decisions communicate
            in different orders. `UnitResidence` tells the meaning under a schedule.
        keep_budget: A field of the tree. Bytes of unsharded parameters, counted as for `prefetch_budget`, that may stay
            from their units' forward to the end of their backward, beside the activations and beside units that were
            told to stay. Each unit that stays is gathered once less; units that backward wants first stay, by the order
            of the last forward. 0, the default, keeps none.
        order_check: A field of the tree. True compares, before each collective and at the end of each pass, the order
            in which ranks run units. Ranks that differ each get an error that names both orders, before the collective:
            nothing hangs, and gradients of different units are never added up. Slow, for finding out: each collective
            blocks the host until all ranks of the collective have come, for about a millisecond on one host and more on
            many, through the store of the default process group, without a GPU sync. Results are the same to the bit.
            None, the default, checks if `LAMELLA_DEBUG=order` is in the environment. Change the field between steps.
        order_check_timeout_s: A field of the tree. Seconds of the longest wait for a rank at a comparison, after which
            the waiting ranks give the missing rank up; 300 by default.

    Raises:
        TypeError: A field is of the wrong kind.
        ValueError: A budget is negative, or the time is not positive.
    """

    placements: AxisPlacement | tuple[AxisPlacement, ...] | None = None
    allocator: Allocator | None = None
    keep_together: Keep | KeepFn | None = None
    prefetch_budget: int | None = None
    keep_budget: int = 0
    order_check: bool | None = None
    order_check_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        _check_allocator(self.allocator)
        as_keep_fn(self.keep_together)
        if self.prefetch_budget is not None:
            _check_nbytes("prefetch_budget", self.prefetch_budget)
        _check_nbytes("keep_budget", self.keep_budget)
        if not isinstance(self.order_check, bool | None):
            raise TypeError(f"Expected `order_check` to be True, False or None, got {self.order_check!r}.")
        _check_seconds("order_check_timeout_s", self.order_check_timeout_s)

    @property
    def checks_order(self) -> bool:
        """Whether `order_check` asks for the check, or the environment if the field is None."""
        if self.order_check is None:
            return "order" in os.environ.get("LAMELLA_DEBUG", "").split(",")
        return self.order_check

    def changed(self, changes: Mapping[str, object]) -> ShardingOptions:
        """The same options with new values of some fields of the tree.

        Raises:
            TypeError: A name is no field, or a value is of the wrong kind.
            ValueError: A field belongs to the unit, or a value is out of range.
        """
        for name, value in changes.items():
            if name in UNIT_FIELDS:
                raise ValueError(
                    f"Expected `{name}` to stay as fully_shard was given it, {getattr(self, name)!r}, got {value!r}: a "
                    f"unit's shards lie by it. Shard a new model with options=ShardingOptions({name}=...)."
                )
            if name not in TREE_FIELDS:
                raise TypeError(f"Expected {_listed(TREE_FIELDS)}, got `{name}`={value!r}.{_suggestion(name)}")
        return replace(self, **changes)  # type: ignore[arg-type]  # names are checked here, values by __post_init__

    def in_tree_of(self, outermost: ShardingOptions) -> ShardingOptions:
        """These options, with the fields of the tree from the outermost unit's."""
        return replace(self, **{name: getattr(outermost, name) for name in TREE_FIELDS})

    def check_inside(self, outermost: ShardingOptions, inner: str) -> None:
        """Refuse a field of the tree that a unit gave another value than the unit around it.

        Args:
            outermost: The options of the outermost unit around.
            inner: The name of the unit that has these options.

        Raises:
            ValueError: A field is neither at the default nor the outermost unit's.
        """
        for name in TREE_FIELDS:
            chosen, outer = getattr(self, name), getattr(outermost, name)
            if chosen not in (getattr(DEFAULT_OPTIONS, name), outer):
                raise ValueError(
                    f"Expected the unit {inner!r} to leave `{name}` out or to repeat the outermost unit's, {outer!r}, "
                    f"got {chosen!r}: one value counts for the whole tree. Give `{name}` to the last fully_shard call."
                )


def as_keep_fn(keep: Keep | KeepFn | None) -> KeepFn:
    """The rule `keep_together` as a function of the parameter.

    Raises:
        TypeError: Neither a function nor a value that a function may return.
    """
    if callable(keep):
        return keep
    checked_keep("every parameter", keep)
    return lambda _: keep


def checked_keep(name: str, keep: object) -> Keep | None:
    """The part of one parameter that stays on one rank.

    Raises:
        TypeError: No such part.
    """
    if keep is None or isinstance(keep, Rows | Whole):
        return keep
    raise TypeError(
        f"Expected `keep_together` to be Rows(n), Whole(), None, or a function that returns one of them, got {keep!r} "
        f"for {name}."
    )


def _check_allocator(allocator: object) -> None:
    if allocator is not None and not isinstance(allocator, Allocator):
        raise TypeError(
            f"Expected `allocator` to be an Allocator or None, got {type(allocator).__name__}. It needs the methods "
            "create, allocate and free."
        )


def _check_nbytes(name: str, nbytes: object) -> None:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise TypeError(f"Expected `{name}` to be a whole number of bytes, got {nbytes!r}.")
    if nbytes < 0:
        raise ValueError(f"Expected `{name}` to be at least 0 bytes, got {nbytes}.")


def _check_seconds(name: str, seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"Expected `{name}` to be a number of seconds, got {seconds!r}.")
    if not seconds > 0:
        raise ValueError(f"Expected `{name}` to be a positive number of seconds, got {seconds!r}.")


def _listed(names: Iterable[str]) -> str:
    return "one of " + ", ".join(f"`{name}`" for name in names)


def _suggestion(name: str) -> str:
    suggestions = difflib.get_close_matches(name, TREE_FIELDS, n=1)
    return f" Did you mean `{suggestions[0]}`?" if suggestions else ""


DEFAULT_OPTIONS = ShardingOptions()
UNIT_FIELDS = ("placements", "allocator", "keep_together")
TREE_FIELDS = tuple(field.name for field in fields(ShardingOptions) if field.name not in UNIT_FIELDS)
