"""A transformers model with spread experts, cut into the slots of an overlap schedule."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
import torch.nn as nn
from torch.nn import functional as F

from lamella_schedule import LayerSlots, ModelChunk, Splits, exchange, unroute
from lamella_transformers.experts._families import (
    check_family,
    decoder_of,
    family_class,
    is_sparse,
    layer_kinds,
    mask_function,
    positions_of,
)
from lamella_transformers.experts._spread import SpreadExperts


def chunk(
    model: nn.Module,
    *,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    scale: float = 1.0,
) -> ModelChunk:
    """Cut a microbatch's forward and loss into slots, for `lamella_schedule.run`.

    The loss is the model's own, with the auxiliary loss if `config.output_router_logits`. Layers are not recomputed.

    Args:
        model: After `spread_experts`.
        input_ids: (num_rows, length).
        labels: (num_rows, length), shifted by the model's loss.
        attention_mask: (num_rows, length), 1 for tokens and 0 for padding; None for no padding.
        position_ids: (num_rows, length); None for positions from 0 on.
        scale: The factor of the loss: 1 / number of microbatches for a mean.

    Raises:
        ValueError: Another model, activation checkpointing, which a layer in parts does not have, or a transformers too
            old for the layers' masks.
    """
    check_family(model)
    decoder = decoder_of(model)
    if decoder.gradient_checkpointing and model.training:
        raise ValueError(
            "Expected a model without activation checkpointing, got one with. Switch it off: a layer in parts has none."
        )
    batch = _Batch(cast(Any, model), input_ids, labels, attention_mask, position_ids, scale)
    layers = [
        (_sparse_slots if is_sparse(layer.mlp) else _dense_slots)(layer, kind, batch)
        for layer, kind in zip(decoder.layers, batch.kinds, strict=True)
    ]
    return ModelChunk(batch.embed, layers, batch.loss)


class _Batch:
    """A microbatch: the parts of the model's forward around the layers, and what every layer reads."""

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        scale: float,
    ) -> None:
        self._model = model
        self._input_ids, self._labels = input_ids, labels
        self._attention_mask, self._position_ids = attention_mask, position_ids
        self._scale = scale
        self.kinds = layer_kinds(model.config)
        self._mask_functions = {kind: mask_function(kind) for kind in dict.fromkeys(self.kinds)}
        self._masks: dict[str, Any] = {}
        self._for_attention: dict[str, Any] = {}

    def embed(self) -> torch.Tensor:
        decoder, config = self._model.model, self._model.config
        hidden: torch.Tensor = decoder.embed_tokens(self._input_ids)
        positions, rotary_positions = positions_of(config, hidden, self._position_ids)
        self._masks = {
            kind: make(
                config=config,
                inputs_embeds=hidden,
                attention_mask=self._attention_mask,
                past_key_values=None,
                position_ids=positions,
            )
            for kind, make in self._mask_functions.items()
        }
        rotary = decoder.rotary_emb(hidden, position_ids=rotary_positions)
        self._for_attention = {"position_ids": positions, "position_embeddings": rotary}
        return hidden

    def attend(self, layer: Any, kind: str, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer up to its MLP: the residual, and the MLP's input."""
        normed = layer.input_layernorm(hidden)
        if kind == "linear_attention":
            update = layer.linear_attn(hidden_states=normed, cache_params=None, attention_mask=self._masks[kind])
        else:
            update, _ = layer.self_attn(
                hidden_states=normed, past_key_values=None, attention_mask=self._masks[kind], **self._for_attention
            )
        residual = hidden + update
        return residual, layer.post_attention_layernorm(residual)

    def loss(self, hidden: torch.Tensor, *router_logits: torch.Tensor) -> torch.Tensor:
        model = self._model
        logits = model.lm_head(model.model.norm(hidden))
        loss: torch.Tensor = model.loss_function(logits, self._labels, model.vocab_size)
        if model.config.output_router_logits:
            balance = sys.modules[family_class(model).__module__].load_balancing_loss_func
            aux = balance(router_logits, model.num_experts, model.num_experts_per_tok, self._attention_mask)
            loss += model.router_aux_loss_coef * aux
        return loss * self._scale


def _sparse_slots(layer: Any, kind: str, batch: _Batch) -> LayerSlots:
    """Values are the residual, the shared expert's, the router logits of all layers so far, and the rows on their way.

    The shared expert is computed in `pre`, in the order of the model's own forward: the gradient of its tokens is added
    up there with the router's, in the model's own order too. In the slot of the experts its part would come as a sum of
    its own, and round otherwise.
    """
    block = layer.mlp
    experts = block.experts
    if not isinstance(experts, SpreadExperts):
        raise ValueError("Expected spread experts, got a model without. Call spread_experts before.")

    def pre(hidden: torch.Tensor, *logits: torch.Tensor) -> tuple[Any, ...]:
        residual, tokens = batch.attend(layer, kind, hidden)
        noise = getattr(block, "jitter_noise", 0)  # Mixtral's
        if block.training and noise > 0:
            tokens = tokens * torch.empty_like(tokens).uniform_(1.0 - noise, 1.0 + noise)
        tokens = tokens.view(-1, tokens.shape[-1])
        shared = block.shared_expert(tokens) if hasattr(block, "shared_expert") else None
        own_logits, weights, chosen = block.gate(tokens)
        routed = experts.route(tokens, chosen)
        if shared is not None:
            shared = F.sigmoid(block.shared_expert_gate(tokens)) * shared
        return (*routed, weights, shared, residual, *logits, own_logits)

    def dispatch(rows: torch.Tensor, *passed: Any) -> tuple[Any, ...]:
        return exchange(rows, passed[2]), *passed

    def compute(rows: torch.Tensor, local: torch.Tensor, *passed: Any) -> tuple[Any, ...]:
        return experts.compute(rows, local), *passed

    def combine(
        rows: torch.Tensor,
        order: torch.Tensor,
        splits: Splits,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
        residual: torch.Tensor,
        *logits: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        update = unroute(exchange(rows, splits, back=True), order, weights)
        if shared is not None:
            update = update + shared
        return residual + update.view_as(residual), *logits

    return LayerSlots(pre=pre, dispatch=dispatch, experts=compute, combine=combine)


def _dense_slots(layer: Any, kind: str, batch: _Batch) -> LayerSlots:
    def pre(hidden: torch.Tensor, *logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        residual, tokens = batch.attend(layer, kind, hidden)
        return tokens, residual, *logits

    def compute(tokens: torch.Tensor, residual: torch.Tensor, *logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return residual + layer.mlp(tokens), *logits

    return LayerSlots(pre=pre, experts=compute)
