"""Scales of whole tensors: each rank measures its rows, and a MAX reduction gives all ranks the amaxes of all blocks.

a forward's own   the unit is measured with some later units: one reduction for all on the same axes
a gather at rest  (a verb, or a gather inside the optimizer's step): the unit alone is measured
other gathers     the scales of the pass

Delayed scaling reads weights for the first measurement alone: encodings raise the amaxes, which are reduced, for all
units at once, before the first gather after an update. Updates are an optimizer's steps and `mark_updated`; before the
first update each pass counts as one, since any code may write main weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from lamella_buffers import ShardedBuffer
from lamella_precision import ScaledRecipe, WeightRows

# Float8 products on GPUs refuse a scale whose address is no multiple of 16 bytes.
_ALIGNMENT = 4  # elements
_NEVER = -1.0  # a past amax that was not measured
# About an optimizer's first update of zeros: e4m3 then has all bits from 2.2e-6 on, and saturates at 0.0625.
_AMAX_AFTER_ZEROS = 2.0**-4


class Scales:
    """The scales of a group's parameters, equal on all ranks.

    Args:
        recipe: The recipe of the parameters.
        shapes: The shapes of the whole parameters.
        device: The device of gathers.

    Attributes:
        recipe: The recipe of the parameters.
        amaxes: (n,), fp32, of all parameters, each from a multiple of 16 bytes on, raised by `measure` and by
            encodings.
        amaxes_of_each: The amaxes of each parameter, as `parameter_scales`.
        parameter_scales: The scales of each parameter, of the recipe's `scale_shape`.
        num_past: Number of the latest measurements behind a scale.
        are_due: Whether the next gather from rest computes scales anew.
        are_measured: Whether no read of main weights is needed then: encodings measure (delayed scaling).

    Effects: allocates 4 * (2 + num_past) bytes a scale, and writes the first scales, on the current stream.
    """

    def __init__(self, recipe: ScaledRecipe, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self.recipe = recipe
        shapes_of_scales = [recipe.scale_shape(shape) for shape in shapes]
        self.amaxes = torch.zeros(sum(_aligned(shape) for shape in shapes_of_scales), device=device)
        # A single tensor for the life of the scales, written in place: decoded weights keep views of it.
        self._scales = torch.ones_like(self.amaxes)
        self.num_past = recipe.num_past
        self._past = torch.full((recipe.num_past, len(self.amaxes)), _NEVER, device=device)
        if recipe.num_past:
            # Kept by weights that start as zeros: under a scale of 1 their first values would all become zeros.
            recipe.rescale(torch.full_like(self.amaxes, _AMAX_AFTER_ZEROS), self._scales, self._past.clone())
        self.parameter_scales = _split(self._scales, shapes_of_scales)
        self._past_of_each = [_split(row, shapes_of_scales) for row in self._past]
        self.amaxes_of_each = _split(self.amaxes, shapes_of_scales)
        # Due until the first measurement, and measured by encodings only after it: before, nothing was encoded.
        self.are_due, self.are_measured = True, False
        self._hears_updates = False  # until an event of an update: from then on passes alone change no scale
        self._columns: tuple[Sequence[object], ...] | None = None  # of main weights that stay where they are

    def expire(self) -> None:
        """Compute scales anew before the next gather, unless encodings measure and updates are known by events."""
        self.are_due |= not (self.are_measured and self._hears_updates)

    def note_update(self) -> None:
        """Note an event of an update: scales are due."""
        self._hears_updates = self.are_due = True

    def measure(self, main_weight: ShardedBuffer, *, stays: bool) -> None:
        """Raise `amaxes` to the amaxes of this rank's rows; with delayed scaling, only amaxes never measured.

        Args:
            main_weight: This rank's.
            stays: Every measurement is of the same memory, kept alive from then on; otherwise of a passing copy.

        Effects: as the recipe's `measure`, on the current stream.
        """
        columns = self._columns
        if columns is None:
            _, shards, parts = parts_in(main_weight, self.amaxes_of_each)
            columns = self.recipe.measure_columns(shards, parts)
            self._columns = columns if stays else None
        if not self.num_past:
            self.recipe.measure(*columns)
            return
        # The measurement raises the amaxes of all parameters: those with a past get their own back below.
        raised = self.amaxes.clone()
        self.recipe.measure(*columns)
        self.amaxes.copy_(torch.where(self._past[0] < 0, self.amaxes, raised))  # of a group, some may start anew

    def note_computed(self) -> None:
        """Note that scales were computed of the measured amaxes. Effects: on the current stream."""
        if self.num_past and not self.are_measured:
            # Zeros count as measured from here on, else a resumed run would measure the values that follow them.
            self._past[0].clamp_min_(0.0)
        self.are_due, self.are_measured = False, self.num_past > 0

    def state_shape(self, i: int) -> tuple[int, int]:
        """Rows and columns of `state_of`."""
        return 1 + self.num_past, self.parameter_scales[i].numel()

    def state_of(self, i: int) -> list[list[float]]:
        """The scales of parameter `i`, and its past amaxes from the latest on, a row each. Effects: host sync."""
        rows: list[list[float]] = torch.stack([row.flatten() for row in self._rows(i)]).tolist()
        return rows

    def load(self, i: int, rows: torch.Tensor) -> None:
        """Write the numbers of `state_of`. Effects: on the current stream."""
        for row, values in zip(self._rows(i), rows, strict=True):
            row.copy_(values.view(row.shape))
        self._measure_anew(i)
        self._hears_updates = True  # as in the saving run, whose microbatches changed no scale either

    def forget(self, i: int) -> None:
        """Let the next scales of parameter `i` be of the weight then. Effects: on the current stream; no host sync."""
        for past in self._past_of_each:
            past[i].fill_(_NEVER)
        self._measure_anew(i)

    def _measure_anew(self, i: int) -> None:
        self.amaxes_of_each[i].zero_()  # of the weight before
        self.are_due, self.are_measured = True, False

    def _rows(self, i: int) -> list[torch.Tensor]:
        return [self.parameter_scales[i], *(past[i] for past in self._past_of_each)]


def rescale(several: Sequence[Scales], amaxes: torch.Tensor) -> None:
    """Compute scales of one recipe: a recipe's twenty small kernels would cost the host as much for each unit again.

    Args:
        several: Scales of groups with equal recipes, at least one.
        amaxes: (n,), fp32, over all ranks' rows: of all `several`, in a row.

    Effects: as the recipe's `rescale`, on the current stream; for more than one a copy each way.
    """
    scales = joined([scales_of_group._scales for scales_of_group in several])
    past = joined([scales_of_group._past for scales_of_group in several], dim=1)
    several[0].recipe.rescale(amaxes, scales, past)
    if len(several) > 1:
        numels = [len(scales_of_group.amaxes) for scales_of_group in several]
        # Back into the tensors under decoded weights' views; for a single group `rescale` has written them in place.
        torch._foreach_copy_([scales_of_group._scales for scales_of_group in several], torch.split(scales, numels))
        if len(past):
            torch._foreach_copy_(
                [scales_of_group._past for scales_of_group in several], torch.split(past, numels, dim=1)
            )


def joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """The tensors in a row along a dim: a single tensor is itself."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def parts_in(
    main_weight: ShardedBuffer,
    scales: Sequence[torch.Tensor | None],
    amaxes: Sequence[torch.Tensor] | None = None,
) -> tuple[list[int], list[torch.Tensor], list[WeightRows]]:
    """The parameters with elements on this rank: indices, shards, and their places in the whole.

    Args:
        main_weight: This rank's shards.
        scales: The scales of each parameter: of the whole parameter, or None.
        amaxes: The amaxes of each parameter, raised by encodings; None for encodings without a measurement.
    """
    layout, rank, shards = main_weight.layout, main_weight.rank, main_weight.shards
    owned = [i for i, shard in enumerate(shards) if shard.numel() > 0]
    raised = [None] * len(shards) if amaxes is None else amaxes
    parts = [WeightRows(layout.shapes[i], layout.chunk(i, rank).offsets[0], scales[i], raised[i]) for i in owned]
    return owned, [shards[i] for i in owned], parts


def _split(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    pieces = torch.split(flat, [_aligned(shape) for shape in shapes])
    return [piece[: prod(shape)].view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def _aligned(shape: Sequence[int]) -> int:
    """Elements of scales of a shape, with padding."""
    return -(-prod(shape) // _ALIGNMENT) * _ALIGNMENT
