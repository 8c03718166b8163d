"""Units under an overlap schedule: `lamella_schedule.Residence` by holds and reductions, without an import of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain

import torch.nn as nn

from lamella_engine._api.module import FSDPModule
from lamella_engine._api.presence import Key, Presence, ResidenceStep, key_of, peak
from lamella_engine._modules.attached import state_of
from lamella_engine._modules.handles import Hold
from lamella_engine._parameters.sharding import local_of
from lamella_engine._unit.unit import Unit


class UnitResidence:
    """Gathers, frees and reduces a model's units for a schedule that calls layers in parts.

        run(chunks, residence=UnitResidence(model, model.layers))

    `lamella_schedule.run` takes the object as `residence`, `run_pipeline` one for each stage of the rank: a stage is a
    model with an outermost unit of its own. Each pass of a microbatch holds a unit from `acquire` to `finished`, and
    the outermost unit during the whole pass. Each backward reduces with ZeRO-2 and ZeRO-3; ZeRO-1 and DDP keep
    gradients until the last microbatch. The backward of the last microbatch ends the step, as `wait_for_gradients()`
    does, once the microbatch's layers are finished. `run` tells the number of microbatches by `begin_step`; a caller of
    `run_pair` calls the model's `set_is_last_backward` before each backward, and `wait_for_gradients` after the last.

    Zero bubbles leave a layer's delayed weight gradients until after the next microbatch's backward. ZeRO-2 and ZeRO-3
    then reduce gradients without a delay for both microbatches at once, which rounds differently.

    With the schedule's `num_layers_ahead=1` up to four layers are unsharded at a time, beside the outermost unit: two
    in forward and two in backward; with `num_layers_ahead=0` up to two. `peak_nbytes` tells the bytes.

    The tree's budgets count. Layers acquired ahead of their turn weigh no more than `prefetch_budget` together, in
    forward and backward; one layer is acquired ahead at any weight, and a layer without room is gathered in its turn.
    Layers that weigh no more than `keep_budget` together, the last first, stay from a microbatch's forward to its
    backward; a microbatch without a backward leaves the layers unsharded until `reset_iter_state()`.

    Args:
        model: The outermost unit, with the parameters around the layers.
        layers: The unit of each layer, or the units of each layer, in the order of the schedule's layers.
        called: Units among `layers` whose modules the slots call: hooks end the backwards of such units.

    Raises:
        ValueError: A layer or the model is no unit.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module | Sequence[nn.Module]],
        *,
        called: Iterable[nn.Module] = (),
    ) -> None:
        self._model = _unit(model, "the model")
        self._layers = [_units(layer, f"layer {i}") for i, layer in enumerate(layers)]
        self._called_ids = {id(module) for module in called}
        self._last: int | None = None  # microbatch of a step that `begin_step` began
        # From `acquire`, or `used` for want of room, to `finished`, which may hand a forward's holds to its backward.
        self._holds: dict[Key, list[Hold]] = {}
        # Bytes acquired so far: anew when an `acquire` around the layers finds nothing held, and in `drop`.
        self._presence = self._nothing_present()

    def begin_step(self, num_microbatches: int) -> None:
        """Take the number of a step's microbatches: the last, of index `num_microbatches` - 1, ends the step.

        Args:
            num_microbatches: At least 1.
        """
        self._last = num_microbatches - 1
        # Hooks of called units end a backward before `finished` does: the flag of the step before would reduce the
        # first microbatch's gradients alone, with ZeRO-1 too.
        FSDPModule.set_is_last_backward(self._model, num_microbatches == 1)

    def acquire(self, event: ResidenceStep) -> None:
        """Start to gather a layer's parameters.

        Raises:
            ValueError: The event's layer is out of range.

        Effects: as `FSDPModule.hold`, unless the prefetch budget has no room.
        """
        if event.layer is None and not self._holds:
            self._presence = self._nothing_present()  # between steps budgets may change
        units = self._units_of(event)
        if self._presence.acquire(key_of(event)):
            self._holds[key_of(event)] = [FSDPModule.hold(unit) for unit in units]
        if event.layer is None and event.phase == "backward":
            _keep_sums_apart(self._model)

    def used(self, event: ResidenceStep) -> None:
        """Make the module hold the unsharded parameters.

        Effects: the current stream waits for the gather; blocks the host on gloo. Those of `acquire`, if the prefetch
            budget had no room then.
        """
        if self._presence.use(key_of(event)):
            self._holds[key_of(event)] = [FSDPModule.hold(unit) for unit in self._units_of(event)]
        for hold in self._holds[key_of(event)]:
            hold.wait()

    def finished(self, event: ResidenceStep) -> None:
        """Let go of the parameters. After a backward, reduce the gradients; after the step's last, end the step.

        Effects: as `FSDPModule.reduce_gradients` and `Hold.release`; after the step's last backward those of
            `FSDPModule.wait_for_gradients`.
        """
        is_last = event.phase == "backward" and event.microbatch == self._last
        if event.phase == "backward":
            if self._last is not None:
                FSDPModule.set_is_last_backward(self._model, is_last)
            for unit in (unit for unit in self._units_of(event) if id(unit) not in self._called_ids):
                _mark_read(unit)
                FSDPModule.reduce_gradients(unit)
        holds = self._holds.pop(key_of(event))
        # Delayed weight gradients of layers may come behind the backward around the layers.
        ends_step = is_last and not any(microbatch == self._last for microbatch, _, _ in self._holds)
        if not self._presence.finish(key_of(event)):
            # Handed over to the layer's backward, which then finds the layer unsharded.
            self._holds[event.microbatch, event.layer, "backward"] = holds
            return
        for hold in holds:
            hold.release()
        if ends_step:
            # Before the wait, which may raise: the next step must not end at this step's microbatch.
            self._last = None
            FSDPModule.wait_for_gradients(self._model)

    def drop(self) -> None:
        """Return the whole tree to rest after an exception; gradients of the step are lost.

        Effects: as `FSDPModule.reset_iter_state`; not a collective.
        """
        self._last = None
        self._holds.clear()
        self._presence = self._nothing_present()
        FSDPModule.reset_iter_state(self._model)

    def peak_nbytes(self, events: Iterable[object]) -> int:
        """Compute the bytes of unsharded parameters at the peak of an order, with padding, equal on every rank.

            residence.peak_nbytes(run_order(len(chunks), chunks[0].plans))

        Parameters that a rank computes with and does not gather, on a mesh of one rank, count nothing.

        Args:
            events: `lamella_schedule.order` or `run_order`.
        """
        return peak(events, self._nothing_present())

    def _nothing_present(self) -> Presence:
        options = state_of(self._model).effective_options
        return Presence(
            self._nbytes,
            [layer for layer, units in self._acting.items() if all(map(_keeps_copy, units))],
            prefetch_budget=options.prefetch_budget,
            keep_budget=options.keep_budget,
        )

    @cached_property
    def _nbytes(self) -> dict[int | None, int]:
        # Copies that stay, of a layer whose other units are freed, count as parameters around the layers.
        freed = {layer: [u for u in units if not _keeps_copy(u)] or units for layer, units in self._acting.items()}
        nbytes = {layer: sum(map(_gathered_nbytes, units)) for layer, units in freed.items()}
        nbytes[None] += sum(map(_gathered_nbytes, chain(*self._acting.values()))) - sum(nbytes.values())
        return nbytes

    @cached_property
    def _acting(self) -> dict[int | None, list[Unit]]:
        units: dict[int | None, list[FSDPModule]] = {None: [self._model], **dict(enumerate(self._layers))}
        return {layer: [state_of(unit).acting.unit for unit in layer_units] for layer, layer_units in units.items()}

    def _units_of(self, event: ResidenceStep) -> list[FSDPModule]:
        if event.layer is None:
            return [self._model]
        if event.layer >= len(self._layers):
            raise ValueError(
                f"Expected a unit for each layer of the schedule, got {len(self._layers)} units and layer "
                f"{event.layer}. Give the residence all layers."
            )
        return self._layers[event.layer]


def _units(layer: nn.Module | Sequence[nn.Module], name: str) -> list[FSDPModule]:
    return [_unit(layer, name)] if isinstance(layer, nn.Module) else [_unit(inner, name) for inner in layer]


def _unit(module: nn.Module, name: str) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise ValueError(
            f"Expected {name} to be a unit, got a {type(module).__name__} that is none. Call fully_shard on it."
        )
    return module


def _keeps_copy(unit: Unit) -> bool:
    return unit.parameters.strategy.keeps_copy


def _gathered_nbytes(unit: Unit) -> int:
    return sum(group.unsharded_nbytes for group in unit.parameters.groups if not group.form.computes_with_main)


def _keep_sums_apart(unit: FSDPModule) -> None:
    """Keep earlier microbatches' gradients out of `.grad`, to which each slot of a microbatch adds.

    A pass in one graph adds up a parameter's gradients before `.grad` sees them. Without the sum apart, gradients of a
    tied or twice-read embedding would be added in another order.
    """
    for group in state_of(unit).acting.unit.parameters.groups:
        for parameter in group.parameters:
            parameter.keeps_grad_clear = True


def _mark_read(unit: FSDPModule) -> None:
    """Mark a unit's gradients as read by the current stream, which waits for the reduction before it lets go of them.

    The final norm's gradient may be made on the schedule's communication stream. Freed without a mark, its memory
    would go back to that stream, which does not wait for the reduction.
    """
    acting = state_of(unit).acting.unit
    streams = acting.parameters.context.streams
    if streams.device.type == "cpu":
        return
    for group in acting.parameters.groups:
        for parameter in group.parameters:
            if (gradient := parameter.unsharded.grad) is not None:
                local_of(gradient).record_stream(streams.compute_stream)  # a DTensor has no memory of its own
