"""Expert parallelism for transformers' mixtures of experts, in a plain forward or under an overlap schedule.

    spread_experts(model, meshes["ep"].get_group())
    shard_with_experts(model, mesh=everyone, experts_mesh=meshes["edp"])
    residence = UnitResidence(model, model.model.layers)
    losses = run([chunk(model, **batch, scale=1 / len(batches)) for batch in batches], residence=residence)

The model's own forward takes the same steps without overlap, bit by bit. Qwen3-MoE and Mixtral.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from lamella_engine import ShardingOptions, fully_shard
from lamella_schedule import Chunk, LayerSlots, Splits, exchange, route, unroute

_FAMILIES: Final = ("mixtral", "qwen3_moe")


def spread_experts(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Keep the experts of this rank in every layer, and send tokens to the ranks of their experts from now on.

    Rank r of the group keeps the experts from r * num_experts / group size on, under the parameters' names. Call the
    function before `fully_shard`, on a model with all experts, equal on all ranks.

    Args:
        model: transformers' `MixtralForCausalLM` or `Qwen3MoeForCausalLM`.
        group: The ranks that share the experts; None for all ranks.

    Raises:
        ValueError: Another model, experts that do not divide among the ranks, or experts that are spread already.

    Effects: frees the other ranks' experts; `state_dict` and checkpoints of the model raise from now on. In each
        forward and backward of a layer, two all-to-alls of tokens and one of counts on the group, for which the host
        waits.
    """
    _check_family(model)
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    found: list[Any] = [module.experts for module in model.modules() if _is_sparse(module)]
    for experts in found:
        if isinstance(experts, _SpreadExperts):
            raise ValueError("Expected experts that are not spread, got spread ones. Call spread_experts once.")
        if experts.num_experts % num_ranks:
            raise ValueError(
                f"Expected experts that divide among the {num_ranks} ranks of the group, got {experts.num_experts}. "
                "Use a group of a size that divides."
            )
    for experts in found:
        num_local = experts.num_experts // num_ranks
        for name, weight in list(experts.named_parameters(recurse=False)):
            local = weight.detach()[rank * num_local : (rank + 1) * num_local].clone()
            setattr(experts, name, nn.Parameter(local, requires_grad=weight.requires_grad))
        experts.num_all_experts, experts.num_experts, experts.group = experts.num_experts, num_local, group
        experts.register_state_dict_pre_hook(_refuse_state_dict)
        experts.__class__ = type(type(experts).__name__, (_SpreadExperts, type(experts)), {})


def _refuse_state_dict(experts: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Refuse a state dict of spread experts: a checkpoint takes tensors of one name for the same tensor on all ranks.

    Raises:
        NotImplementedError: Always, unless the group has a single rank.
    """
    spread: Any = experts
    if spread.num_experts == spread.num_all_experts:
        return
    raise NotImplementedError(
        f"Expected tensors that are equal on all ranks for a state dict, got {prefix.removesuffix('.')!r}, of whose "
        f"{spread.num_all_experts} experts each rank has {spread.num_experts}: a checkpoint would keep the experts of "
        "some ranks only. Gather the experts' parameters over the group, and save a model with all experts."
    )


def shard_with_experts(
    model: nn.Module, *, mesh: DeviceMesh, experts_mesh: DeviceMesh, options: ShardingOptions | None = None
) -> None:
    """Shard each layer and the rest of the model over `mesh`, and the layers' experts over `experts_mesh`.

    Gradients are means over all ranks of `mesh`: experts have seen the tokens of all ranks of their group.

    Args:
        model: After `spread_experts`.
        mesh: All ranks, one axis.
        experts_mesh: The ranks with the same experts, one axis.
        options: As of `fully_shard`.

    Raises:
        ValueError: Experts are not spread.

    Effects: as `fully_shard`.
    """
    experts = {
        weight for module in model.modules() if isinstance(module, _SpreadExperts) for weight in module.parameters()
    }
    if not experts:
        raise ValueError("Expected spread experts, got a model without. Call spread_experts before.")
    placed = _OnMesh(Shard(0), _MeshInfo(experts_mesh))

    def place(parameter: torch.Tensor) -> Any:
        return placed if parameter in experts else None

    for module in (*_decoder(model).layers, model):
        unit = fully_shard(module, mesh=mesh, shard_placement_fn=place, options=options or ShardingOptions())
        unit.set_gradient_divide_factor(mesh.size())


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
    _check_family(model)
    decoder = _decoder(model)
    if decoder.gradient_checkpointing and model.training:
        raise ValueError(
            "Expected a model without activation checkpointing, got one with. Switch it off: a layer in parts has none."
        )
    batch = _Batch(cast(Any, model), input_ids, labels, attention_mask, position_ids, scale)
    layers = [
        _sparse_slots(layer, batch) if _is_sparse(layer.mlp) else _dense_slots(layer, batch) for layer in decoder.layers
    ]
    return Chunk(batch.embed, layers, batch.loss)


class _MeshInfo(NamedTuple):
    """FSDP2's `FSDPMeshInfo`, as `fully_shard` reads it."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None = 0
    replicate_mesh_dim: int | None = None


class _OnMesh(NamedTuple):
    """FSDP2's `ShardPlacementResult`: a dim, and the mesh of a single parameter."""

    placement: Shard
    mesh_info: _MeshInfo


class _SpreadExperts(nn.Module):
    """Mixed into the class of a layer's experts: rows go to their experts' ranks, and their results return."""

    num_all_experts: int
    group: dist.ProcessGroup | None

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, local, order, splits = self.route(tokens, experts)
        rows = self.compute(exchange(rows, splits), local)
        return unroute(exchange(rows, splits, back=True), order, weights)

    def route(
        self, tokens: torch.Tensor, experts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Splits]:
        return route(tokens, experts, self.num_all_experts, self.group)

    def compute(self, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Run this rank's experts, by the implementation that the model's config names."""
        if not len(rows):
            # The parameters' gradients and the way back to the other ranks must not hang on this rank's tokens.
            return rows + sum(weight.sum() * 0 for weight in self.parameters())
        ones = torch.ones_like(local, dtype=rows.dtype).unsqueeze(-1)
        return cast(torch.Tensor, super().forward(rows, local.unsqueeze(-1), ones))


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
            balance = sys.modules[_family_class(model).__module__].load_balancing_loss_func
            aux = balance(router_logits, model.num_experts, model.num_experts_per_tok, self._attention_mask)
            loss += model.router_aux_loss_coef * aux
        return loss * self._scale


def _sparse_slots(layer: Any, batch: _Batch) -> LayerSlots:
    """Values are the residual, the router logits of all layers so far, and the rows on their way."""
    block = layer.mlp
    experts = block.experts
    if not isinstance(experts, _SpreadExperts):
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


def _is_sparse(module: Any) -> bool:
    return hasattr(module, "gate") and hasattr(module, "experts")


def _decoder(model: nn.Module) -> Any:
    return cast(Any, model).model


def _check_family(model: nn.Module) -> None:
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in _FAMILIES or not hasattr(model, "lm_head"):
        raise ValueError(
            f"Expected a causal language model of {' or '.join(_FAMILIES)}, got {type(model).__name__} ({family}). "
            "Write the layer's slots by hand: lamella_schedule.LayerSlots."
        )


def _family_class(model: nn.Module) -> type:
    """The model's class in transformers: `fully_shard` puts a class of its own before."""
    return next(each for each in type(model).__mro__ if each.__module__.startswith("transformers.models."))
