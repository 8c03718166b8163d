"""megatron-core's layers in the slots of a schedule: attention and router, dispatch, experts, combine.

Values of one slot go to the next as return values, along with values for later slots.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from lamella_engine import FSDPModule
from lamella_schedule import LayerSlots, Slot

PassedOn: TypeAlias = torch.Tensor | int | None
PredictionInput: TypeAlias = tuple[torch.Tensor, tuple[PassedOn, ...]]
Delayable: TypeAlias = Mapping[Slot, list[Any]]

# Arguments of the decoder and of its layers, under the same names.
_ATTENTION_ARGUMENTS = (
    "attention_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "packed_seq_params",
    "sequence_len_offset",
    "padding_mask",
)
_MAMBA_ARGUMENTS = ("attention_mask", "packed_seq_params")


@dataclass
class SlottedLayers:
    """A layer, or a group of layers: the last layer's MLP or experts in slots of their own, all before in one slot.

    Attributes:
        layers: The layers in order.
        arguments: The arguments of layers, once the forward has begun.
        delayable: The modules that may leave weight gradients to `backward_dw`, by slot.
    """

    layers: list[nn.Module]
    arguments: dict[str, Any]
    delayable: Delayable

    def slots(self) -> LayerSlots:
        """The functions of the schedule's slots."""
        last: Any = self.layers[-1]
        delayed = _delayed(self.delayable)
        if _has_experts(last):
            return LayerSlots(
                pre=self._route,
                dispatch=self._dispatch,
                experts=self._compute,
                combine=self._combine,
                delayed=delayed,
            )
        experts = self._run_mlp if _has_mlp(last) else lambda *values: values
        return LayerSlots(pre=self._run_to_mlp, experts=experts, delayed=delayed)

    def _run_to_mlp(self, hidden: torch.Tensor, *passed_on: PassedOn) -> tuple[PassedOn, ...]:
        return self._attend(hidden), *passed_on

    def _run_mlp(self, hidden: torch.Tensor, *passed_on: PassedOn) -> tuple[PassedOn, ...]:
        last: Any = self.layers[-1]
        return last._forward_mlp(hidden), *passed_on

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        """All layers up to the last one's MLP."""
        with _random_states(self.layers[-1]):
            *before, last = self.layers
            for layer in before:
                hidden = self._uncut(layer, hidden)
            if not _is_transformer(last):
                return self._uncut(last, hidden)
            attention: Any = last
            hidden, _ = attention._forward_attention(hidden, **self._chosen(_ATTENTION_ARGUMENTS))
            return hidden

    def _route(self, hidden: torch.Tensor, *passed_on: PassedOn) -> tuple[PassedOn, ...]:
        """Up to the rows that leave the rank, along with the values for the combine.

        The values are the residual, the shared experts' output, the samples in a row (None: as they came), and the
        indices of the dispatcher: as values, the indices are marked as read by the communication stream.
        """
        residual = self._attend(hidden)
        last: Any = self.layers[-1]
        with _random_states(last):
            normed = last._forward_pre_mlp_layernorm(residual)
            if isinstance(normed, tuple):  # a norm fused with the residual addition
                normed, residual = normed
            if last.config.fp32_residual_connection:
                residual = residual.float()
            experts = last.mlp
            normed, mask, num_samples = last._maybe_unflatten_for_moe(
                normed, self.arguments.get("padding_mask"), self.arguments.get("packed_seq_params")
            )
            shared = experts.shared_experts_compute(normed)
            probabilities, routing = experts.route(normed, None if mask is None else mask.transpose(0, 1).bool())
            leaving = experts.preprocess(normed, probabilities, routing)
            kept_indices = _indices_of(experts.token_dispatcher)
            return (*leaving, residual, shared, num_samples, len(kept_indices), *kept_indices, *passed_on)

    def _dispatch(self, rows: torch.Tensor, probabilities: torch.Tensor, *passed_on: PassedOn) -> tuple[PassedOn, ...]:
        last: Any = self.layers[-1]
        return (*last.mlp.dispatch(rows, probabilities), *passed_on)

    def _compute(self, rows: torch.Tensor, probabilities: torch.Tensor, *passed_on: PassedOn) -> tuple[PassedOn, ...]:
        last: Any = self.layers[-1]
        with _random_states(last):
            output, _ = last.mlp.routed_experts_compute(rows, probabilities)
        if last.recompute_pre_mlp_layernorm:
            # Here, and not again after the combine: the norm would be recomputed too early, into other gradients.
            last.pre_mlp_norm_checkpoint.discard_output_and_register_recompute(output)
        return (output, *passed_on)

    def _combine(
        self,
        rows: torch.Tensor,
        residual: torch.Tensor,
        shared: torch.Tensor | None,
        num_samples: int | None,
        num_kept: int,
        *passed_on: PassedOn,
    ) -> tuple[PassedOn, ...]:
        last: Any = self.layers[-1]
        with _random_states(last), last.bias_dropout_add_exec_handler():
            output = last.mlp.postprocess(last.mlp.combine(rows), shared)
            output = last._maybe_reflatten_from_moe(output, self.arguments.get("packed_seq_params"), num_samples)
            add = last.mlp_bda(last.training, last.config.bias_dropout_fusion)
            return add((output, None), residual, last.hidden_dropout), *passed_on[num_kept:]

    def _uncut(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """A layer without cuts, past the hooks of its unit, which the schedule holds."""
        if _is_transformer(layer):
            hidden, _ = layer.forward(hidden_states=hidden, **self._chosen(_ATTENTION_ARGUMENTS))
            return hidden
        output: torch.Tensor = layer.forward(hidden_states=hidden, **self._chosen(_MAMBA_ARGUMENTS))
        return output

    def _chosen(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: self.arguments[name] for name in names if name in self.arguments}


@dataclass
class Prediction:
    """A depth of multi-token prediction: an item between the projection before and the norm behind.

    From depth to depth go the tokens, their positions and the padding mask, each rolled once a depth, and behind these
    the decoder's output and the output of each depth.

    Attributes:
        layer: megatron-core's layer of the depth.
        arguments: The arguments of all depths, once the first has begun.
        delayable: The modules that may leave weight gradients to `backward_dw`, by slot.
        enter: The first depth's function from the decoder's last hidden states to this depth's input and the values
            above.
    """

    layer: Any
    arguments: dict[str, Any]
    delayable: Delayable
    enter: Callable[[torch.Tensor], PredictionInput] | None = None
    _inner_arguments: dict[str, Any] = field(default_factory=dict)

    def slots(self) -> LayerSlots:
        """The functions of the schedule's slots."""
        inner = SlottedLayers(layers_inside(self.layer), self._inner_arguments, self.delayable).slots()
        return replace(inner, pre=lambda *values: inner.pre(*self._project(*values)), post=self._norm)

    def _project(self, *passed_on: Any) -> tuple[PassedOn, ...]:
        """The input of the layers inside, from the hidden states of the depth before and the next tokens."""
        hidden, passed_on = (passed_on[-1], passed_on) if self.enter is None else self.enter(*passed_on)
        ids, positions, mask, *outputs = passed_on
        if isinstance(self.layer, FSDPModule):
            # Without overlap the unit's hooks sum the gradients of all uses inside before adding others; summed in
            # another order, gradients of norms of several operators round differently.
            hidden = hidden.view_as(hidden)
        ids, positions, mask, embedded, hidden = self.layer._get_embeddings(
            input_ids=ids,
            position_ids=positions,
            embedding=self.arguments["embedding"],
            hidden_states=hidden,
            packed_seq_params=self.arguments.get("packed_seq_params"),
            padding_mask=mask,
        )
        self._inner_arguments.update(self.arguments, padding_mask=mask)
        with _random_states(self.layer):
            return self.layer._concat_embeddings(hidden, embedded), ids, positions, mask, *outputs

    def _norm(self, hidden: torch.Tensor, *passed_on: PassedOn) -> tuple[PassedOn, ...]:
        return *passed_on, self.layer._postprocess(hidden)


def layers_inside(prediction: Any) -> list[nn.Module]:
    """The layers in a layer of multi-token prediction: one, or a stack's."""
    inner = prediction.mtp_model_layer
    return list(getattr(inner, "layers", None) or [inner])


def delayable(layers: list[nn.Module], before: Sequence[nn.Module] = ()) -> Delayable:
    """The modules that may leave weight gradients to `backward_dw`, in the order of backward.

    The experts' or the MLP's, and all others. A scan of all modules: for a step, not for each microbatch.

    Args:
        layers: The layers of a `SlottedLayers`.
        before: Modules that the first slot calls before the layers.
    """
    last: Any = layers[-1]
    ends = last.mlp if _has_mlp(last) else None
    late = [] if ends is None else _delayable_in(getattr(ends, "experts", None) or ends)
    early = [layer for module in (*layers, *before) for layer in _delayable_in(module) if layer not in late]
    return {Slot.PRE: early, Slot.EXPERTS: late}


def _delayable_in(module: nn.Module) -> list[Any]:
    """Layers of Transformer Engine's kind: a wrapper around them has no store of its own."""
    return [layer for layer in module.modules() if getattr(layer, "need_backward_dw", None) is not None][::-1]


def _delayed(delayable_modules: Delayable) -> dict[Slot, Callable[[], object]]:
    """Weight gradients left out by backward. Modules are asked for each microbatch: the answer may change."""
    needing = {
        slot: [module for module in modules if module.need_backward_dw()] for slot, modules in delayable_modules.items()
    }
    return {slot: _all_of(modules) for slot, modules in needing.items() if modules}


def _all_of(modules: list[Any]) -> Callable[[], None]:
    def compute() -> None:
        for module in modules:
            module.backward_dw()

    return compute


@contextlib.contextmanager
def _random_states(layer: Any) -> Iterator[None]:
    """megatron-core's random state of the tensor-parallel region, the same as the decoder sets around its layers."""
    if not layer.config.sequence_parallel:
        yield
        return
    with importlib.import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker().fork():
        yield


def _indices_of(dispatcher: Any) -> tuple[torch.Tensor, ...]:
    """The indices of a dispatcher of tokens for its exchanges, made on the compute stream."""
    owners = (dispatcher, getattr(dispatcher, "_comm_manager", None))
    attributes = [attribute for owner in owners if owner is not None for attribute in vars(owner).values()]
    return tuple(
        attribute
        for attribute in attributes
        if isinstance(attribute, torch.Tensor) and not attribute.is_floating_point()
    )


def _is_transformer(layer: nn.Module) -> bool:
    return hasattr(layer, "_forward_attention")


def _has_mlp(layer: Any) -> bool:
    return _is_transformer(layer) and type(layer.mlp).__name__ != "IdentityOp"


def _has_experts(layer: Any) -> bool:
    return _has_mlp(layer) and hasattr(layer.mlp, "token_dispatcher")
