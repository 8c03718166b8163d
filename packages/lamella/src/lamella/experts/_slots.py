"""A transformers model with spread experts, cut into the slots of an overlap schedule."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
import torch.nn as nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from lamella.experts._families import check_family, decoder_of, family_class, is_sparse
from lamella.experts._spread import SpreadExperts
from lamella_schedule import Chunk, LayerSlots, Splits, exchange, unroute


def chunk(
    model: nn.Module,
    *,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    scale: float = 1.0,
) -> Chunk:
    """Cut a microbatch's forward and loss into slots, for `lamella_schedule.run`.

    The loss is the model's own, with the auxiliary loss if `config.output_router_logits`. Layers are not recomputed.

    Args:
        model: After `spread_experts`.
        input_ids: (num_rows, length).
        labels: (num_rows, length), shifted by the model's loss.
        attention_mask: (num_rows, length), 1 for tokens and 0 for padding; None for no padding.
        position_ids: (num_rows, length); None for positions from 0 on.
        scale: Of the loss: 1 / number of microbatches for a mean.

    Raises:
        ValueError: Another model, or activation checkpointing, which a layer in parts does not have.
    """
    check_family(model)
    decoder = decoder_of(model)
    if decoder.gradient_checkpointing and model.training:
        raise ValueError(
            "Expected a model without activation checkpointing, got one with. Switch it off: a layer in parts has none."
        )
    batch = _Batch(cast(Any, model), input_ids, labels, attention_mask, position_ids, scale)
    layers = [
        _sparse_slots(layer, batch) if is_sparse(layer.mlp) else _dense_slots(layer, batch) for layer in decoder.layers
    ]
    return Chunk(batch.embed, layers, batch.loss)


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
        self._for_attention: dict[str, Any] = {}

    def embed(self) -> torch.Tensor:
        decoder, config = self._model.model, self._model.config
        hidden: torch.Tensor = decoder.embed_tokens(self._input_ids)
        positions = self._position_ids
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        mask_of = create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask
        mask = mask_of(
            config=config,
            inputs_embeds=hidden,
            attention_mask=self._attention_mask,
            past_key_values=None,
            position_ids=positions,
        )
        rotary = decoder.rotary_emb(hidden, position_ids=positions)
        self._for_attention = {"attention_mask": mask, "position_ids": positions, "position_embeddings": rotary}
        return hidden

    def attend(self, layer: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer up to its MLP: the residual, and the MLP's input."""
        update, _ = layer.self_attn(
            hidden_states=layer.input_layernorm(hidden), past_key_values=None, **self._for_attention
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


def _sparse_slots(layer: Any, batch: _Batch) -> LayerSlots:
    """Values are the residual, the router logits of all layers so far, and the rows on their way."""
    block = layer.mlp
    experts = block.experts
    if not isinstance(experts, SpreadExperts):
        raise ValueError("Expected spread experts, got a model without. Call spread_experts before.")

    def pre(hidden: torch.Tensor, *logits: torch.Tensor) -> tuple[Any, ...]:
        residual, tokens = batch.attend(layer, hidden)
        noise = getattr(block, "jitter_noise", 0)  # Mixtral's
        if block.training and noise > 0:
            tokens = tokens * torch.empty_like(tokens).uniform_(1.0 - noise, 1.0 + noise)
        tokens = tokens.view(-1, tokens.shape[-1])
        own_logits, weights, chosen = block.gate(tokens)
        return (*experts.route(tokens, chosen), weights, residual, *logits, own_logits)

    def dispatch(rows: torch.Tensor, *passed: Any) -> tuple[Any, ...]:
        return exchange(rows, passed[2]), *passed

    def compute(rows: torch.Tensor, local: torch.Tensor, *passed: Any) -> tuple[Any, ...]:
        return experts.compute(rows, local), *passed

    def combine(
        rows: torch.Tensor,
        order: torch.Tensor,
        splits: Splits,
        weights: torch.Tensor,
        residual: torch.Tensor,
        *logits: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        update = unroute(exchange(rows, splits, back=True), order, weights)
        return residual + update.view_as(residual), *logits

    return LayerSlots(pre=pre, dispatch=dispatch, experts=compute, combine=combine)


def _dense_slots(layer: Any, batch: _Batch) -> LayerSlots:
    def pre(hidden: torch.Tensor, *logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        residual, tokens = batch.attend(layer, hidden)
        return tokens, residual, *logits

    def compute(tokens: torch.Tensor, residual: torch.Tensor, *logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return residual + layer.mlp(tokens), *logits

    return LayerSlots(pre=pre, experts=compute)
