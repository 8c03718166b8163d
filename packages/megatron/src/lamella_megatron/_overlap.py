"""Expert-parallel overlap: the forward of one microbatch beside the backward of another, for megatron-core's models.

Note [The model's own forward, cut at the decoder]
    A schedule needs the layers one by one, with embeddings before and loss after. Both come from the model's own
    `forward`: the first time the decoder is exchanged for a function that keeps the decoder's arguments and leaves,
    the second time for a function that applies the final norm to the hidden states of the last layer. So position
    embeddings, tied weights, multi-token prediction and the loss are megatron-core's, whatever the model's options.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from torch import nn

from lamella_engine import FSDPModule, UnitResidence
from lamella_engine.extending import local_of
from lamella_megatron._model import innermost
from lamella_megatron._patterns import parse_pattern
from lamella_megatron._slots import Item
from lamella_schedule import Chunk, Flight, Lanes, run, run_pair


def forward_backward_overlapped(
    model: nn.Module,
    microbatches: Sequence[Mapping[str, Any]],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    layer_groups: str | None = None,
    early_release: bool = False,
    ahead: int = 1,
) -> list[torch.Tensor]:
    """One step's forwards and backwards, with the all-to-alls of experts beside the compute of another microbatch.

        losses = forward_backward_overlapped(model, batches, lambda losses: losses.mean() / len(batches))
        finalize_model_grads([model])
        optimizer.step()

    Losses and gradients are those of one microbatch after the other, bit by bit. A layer, or a group of layers with
    experts at the end, is cut into attention and router, dispatch, experts and combine; `lamella_schedule.order` is
    the order. Parameters of units are gathered a layer ahead, and up to four units are unsharded at a time.

    Args:
        model: A GPTModel or HybridModel on one pipeline stage, also in wrappers; in units of `fully_shard_model`, or
            without units.
        microbatches: Of each, the arguments of the model's forward: `input_ids`, `position_ids`, `attention_mask`,
            `labels`.
        loss_of: Takes the model's output for a microbatch, returns a 0-D loss: the microbatch's share of the step's.
        layer_groups: As for `fully_shard_model`, and the same.
        early_release: As for `lamella_schedule.run`.
        ahead: As for `lamella_schedule.run`.

    Returns:
        The loss of each microbatch.

    Raises:
        ValueError: An option of the model's configuration leaves nothing to overlap, or no order of slots keeps; or
            `layer_groups` does not fit.

    Effects: as of `lamella_schedule.run` and `UnitResidence`; reductions of gradients are not waited for on the host.
    """
    inner = innermost(model)
    _check_schedulable(inner.config)
    items = _items(inner, layer_groups)
    chunks = [_chunk(inner, items, batch, loss_of) for batch in microbatches]
    residence = None
    if isinstance(inner, FSDPModule):
        residence = UnitResidence(inner, [item[0] for item in items], num_microbatches=len(chunks))
    return run(chunks, residence=residence, early_release=early_release, ahead=ahead)


class SchedulePlan(AbstractSchedulePlan):  # type: ignore[misc]  # megatron-core has no types
    """One microbatch on its way, for megatron-core's driver with `overlap_moe_expert_parallel_comm`.

    Args:
        schedule: Of the model.
        batch: The arguments of the model's forward.
    """

    def __init__(self, schedule: _Schedule, batch: Mapping[str, Any]) -> None:
        self.schedule = schedule
        self.flight = Flight(
            _chunk(schedule.model, schedule.items, batch, lambda output: output), schedule.lanes, next(schedule.numbers)
        )
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # for the driver's loss; the lanes have others

    @staticmethod
    def run(
        f_schedule_plan: SchedulePlan | None,
        b_schedule_plan: SchedulePlan | None,
        b_grad: torch.Tensor | None = None,
        **of_stages: object,
    ) -> torch.Tensor | None:
        """Run the forward of one plan beside the backward of another.

        Args:
            f_schedule_plan: A new plan, or None.
            b_schedule_plan: A plan after its forward, or None.
            b_grad: Of the second plan's output.
            of_stages: Functions that pipeline stages call in between; None.

        Returns:
            The first plan's output, detached.

        Effects: as of `lamella_schedule.run_pair` and `UnitResidence`.
        """
        assert not any(of_stages.values()), "pipeline stages are refused by the wrapper"
        plan = f_schedule_plan or b_schedule_plan
        assert plan is not None, "the driver gives one plan at least"
        if b_schedule_plan is not None:
            b_schedule_plan.flight.begin_backward((b_grad,))
        forward, backward = (each and each.flight for each in (f_schedule_plan, b_schedule_plan))
        run_pair(forward, backward, residence=plan.schedule.residence)
        if forward is None:
            return None
        [output] = forward.outputs
        assert isinstance(output, torch.Tensor)
        return output


@dataclass
class _Schedule:
    """The plans of a model.

    Attributes:
        model: In units.
        items: The layers of each item.
        lanes: The streams of all plans.
        residence: Of the units.
        numbers: Of microbatches, over all steps.
    """

    model: Any
    items: list[list[nn.Module]]
    lanes: Lanes
    residence: UnitResidence
    numbers: Iterator[int]

    def build(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        decoder_input: None = None,
        labels: torch.Tensor | None = None,
        **more: Any,
    ) -> SchedulePlan:
        """A plan of one microbatch; takes the arguments of the model's forward."""
        given = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
        return SchedulePlan(self, {**given, "labels": labels, **more})


def schedule_by_plans(model: Any, layer_groups: str | None) -> None:
    """Let megatron-core's driver overlap a model's microbatches: give a sharded model a `build_schedule_plan`.

    Raises:
        ValueError: As `forward_backward_overlapped`.
    """
    _check_schedulable(model.config)
    items = _items(model, layer_groups)
    residence = UnitResidence(model, [item[0] for item in items], num_microbatches=None)
    lanes = Lanes(local_of(next(model.parameters())).device)
    model.build_schedule_plan = _Schedule(model, items, lanes, residence, itertools.count()).build


def _check_schedulable(config: Any) -> None:
    """Refuse options under which a layer cannot be cut into slots.

    Raises:
        ValueError: The first such option, its value and the reason are in the message.
    """
    modules = getattr(config, "recompute_modules", None) or []
    for name, found, wanted, reason in (
        ("pipeline_model_parallel_size", config.pipeline_model_parallel_size, 1, "Stages have schedules of their own."),
        ("virtual_pipeline_model_parallel_size", config.virtual_pipeline_model_parallel_size, None, "So have chunks."),
        ("recompute_granularity", config.recompute_granularity == "full", False, "Layers would run a second time."),
        ("recompute_modules", "moe" in modules, False, "Recomputed experts would exchange tokens a second time."),
        ("moe_shared_expert_overlap", config.moe_shared_expert_overlap, False, "Shared experts run before dispatch."),
        ("cuda_graph_impl", config.cuda_graph_impl, "none", "A graph keeps no order of two microbatches."),
        (
            "overlap_dispatch_backward_with_experts_wgrad",
            getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False),
            False,
            "The schedule computes these gradients itself.",
        ),
        ("fp8", config.fp8, None, "Scales of float8 follow the order of microbatches."),
        ("fp4", config.fp4, None, "Scales of 4-bit formats follow the order of microbatches."),
    ):
        if found != wanted:
            value = getattr(config, name)
            raise ValueError(
                f"Expected another value of `config.{name}` for an overlapped step, got {value!r}. {reason} Change the "
                "option, or step without overlap."
            )
    if config.num_moe_experts and config.moe_token_dispatcher_type == "allgather":
        raise ValueError(
            "Expected `config.moe_token_dispatcher_type` to be 'alltoall' or 'flex' for an overlapped step, got "
            "'allgather', which gathers all tokens instead of exchanging some."
        )


def _items(model: Any, layer_groups: str | None) -> list[list[nn.Module]]:
    """The layers of each item of the schedule."""
    layers = list(model.decoder.layers)
    if layer_groups is None:
        return [list(getattr(layer, "layers", None) or [layer]) for layer in layers]
    pattern = parse_pattern(layer_groups)
    if pattern.num_layers != len(layers):
        raise ValueError(
            f"Expected `layer_groups` of the model's {len(layers)} layers, got {layer_groups!r}, of "
            f"{pattern.num_layers}. Pass what fully_shard_model was given."
        )
    return [layers[item.first : item.layers.stop] for item in pattern.items]


def _chunk(
    model: Any, items: list[list[nn.Module]], batch: Mapping[str, Any], loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> Chunk:
    given: dict[str, Any] = {}  # the decoder's arguments, from the beginning of the forward on

    def preprocess() -> torch.Tensor:
        given.update(_arguments_of_decoder(model, batch))
        hidden: torch.Tensor = given.pop("hidden_states")
        return hidden

    def postprocess(hidden: torch.Tensor) -> torch.Tensor:
        return loss_of(_forward_after_decoder(model, batch, hidden))

    return Chunk(preprocess, [Item(layers, given).slots() for layers in items], postprocess)


class _ReachedDecoderError(Exception):
    """Ends a model's forward at its decoder."""


def _arguments_of_decoder(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def keep(**arguments: Any) -> None:
        found.update(arguments)
        raise _ReachedDecoderError

    with _as_decoder(model, keep), contextlib.suppress(_ReachedDecoderError):
        model.forward(**batch)
    return found


def _forward_after_decoder(model: Any, batch: Mapping[str, Any], hidden: torch.Tensor) -> torch.Tensor:
    decoder = model.decoder
    norm = getattr(decoder, "final_layernorm", None) or getattr(decoder, "final_norm", None)

    def last(**_: Any) -> torch.Tensor:
        found: torch.Tensor = hidden if norm is None else norm(hidden)
        return found

    with _as_decoder(model, last):
        # Given hidden states, the model looks up no embeddings.
        made: torch.Tensor = model.forward(**batch, decoder_input=hidden)
    return made


@contextlib.contextmanager
def _as_decoder(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    model.decoder.forward = function
    try:
        yield
    finally:
        del model.decoder.forward
