"""The parameters of two published models, and of small ones: names and shapes on the meta device, without a forward."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """The parameters of a decoder.

    Attributes:
        layers: The parameters of each layer by name; equal layers are one object.
        ends: The parameters outside layers: embedding, last norm and head.
        expert_names: The parameters of a layer that stack all routed experts along dim 0.
    """

    layers: tuple[Mapping[str, Shape], ...]
    ends: Mapping[str, Shape]
    expert_names: frozenset[str] = field(default=frozenset())

    def named_shapes(self) -> Iterator[tuple[str, Shape]]:
        """Each parameter's name and shape."""
        for index, layer in enumerate(self.layers):
            yield from ((f"layers.{index}.{name}", shape) for name, shape in layer.items())
        yield from self.ends.items()

    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(torch.Size(shape).numel() for _, shape in self.named_shapes())


def llama(*, num_layers: int, dim: int, ffn_dim: int, kv_dim: int, vocab_size: int) -> ModelShapes:
    """Return the shapes of a Llama, under transformers' names."""
    layer = {
        "input_layernorm.weight": (dim,),
        "self_attn.q_proj.weight": (dim, dim),
        "self_attn.k_proj.weight": (kv_dim, dim),
        "self_attn.v_proj.weight": (kv_dim, dim),
        "self_attn.o_proj.weight": (dim, dim),
        "post_attention_layernorm.weight": (dim,),
        "mlp.gate_proj.weight": (ffn_dim, dim),
        "mlp.up_proj.weight": (ffn_dim, dim),
        "mlp.down_proj.weight": (dim, ffn_dim),
    }
    return ModelShapes(layers=(layer,) * num_layers, ends=_ends(vocab_size, dim))


def deepseek(
    *, num_layers: int, num_dense: int, dim: int, num_heads: int, num_experts: int, ffn_dim: int, vocab_size: int
) -> ModelShapes:
    """Return the shapes of a DeepSeek-V3, under transformers' names: latent attention, routed and shared experts."""
    query_rank, latent_rank, nope, rope, head = dim * 3 // 14, dim // 14, 128, 64, 128
    attention = {
        "input_layernorm.weight": (dim,),
        "self_attn.q_a_proj.weight": (query_rank, dim),
        "self_attn.q_a_layernorm.weight": (query_rank,),
        "self_attn.q_b_proj.weight": (num_heads * (nope + rope), query_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (latent_rank + rope, dim),
        "self_attn.kv_a_layernorm.weight": (latent_rank,),
        "self_attn.kv_b_proj.weight": (num_heads * (nope + head), latent_rank),
        "self_attn.o_proj.weight": (dim, num_heads * head),
        "post_attention_layernorm.weight": (dim,),
    }
    dense = {**attention, **_feed_forward("mlp", dim, 9 * ffn_dim)}
    experts = {
        "mlp.experts.gate_up_proj": (num_experts, 2 * ffn_dim, dim),
        "mlp.experts.down_proj": (num_experts, dim, ffn_dim),
    }
    router = {"mlp.gate.weight": (num_experts, dim), "mlp.gate.e_score_correction_bias": (num_experts,)}
    sparse = {**attention, **router, **experts, **_feed_forward("mlp.shared_experts", dim, ffn_dim)}
    layers = (dense,) * num_dense + (sparse,) * (num_layers - num_dense)
    return ModelShapes(layers=layers, ends=_ends(vocab_size, dim), expert_names=frozenset(experts))


def _feed_forward(name: str, dim: int, ffn_dim: int) -> dict[str, Shape]:
    return {
        f"{name}.gate_proj.weight": (ffn_dim, dim),
        f"{name}.up_proj.weight": (ffn_dim, dim),
        f"{name}.down_proj.weight": (dim, ffn_dim),
    }


def _ends(vocab_size: int, dim: int) -> dict[str, Shape]:
    return {"embed_tokens.weight": (vocab_size, dim), "norm.weight": (dim,), "lm_head.weight": (vocab_size, dim)}


MODELS: Final = {
    "llama-405b": llama(num_layers=126, dim=16384, ffn_dim=53248, kv_dim=1024, vocab_size=128256),
    "deepseek-v3": deepseek(
        num_layers=61, num_dense=3, dim=7168, num_heads=128, num_experts=256, ffn_dim=2048, vocab_size=129280
    ),
    "llama-tiny": llama(num_layers=3, dim=256, ffn_dim=832, kv_dim=64, vocab_size=1000),
    "deepseek-tiny": deepseek(
        num_layers=3, num_dense=1, dim=224, num_heads=4, num_experts=8, ffn_dim=64, vocab_size=1000
    ),
}


class ShapedModule(nn.Module):
    """Parameters on the meta device, in modules by the parts of their names; units communicate without a forward."""

    def __init__(self, shapes: Mapping[str, Shape], experts: Mapping[str, DeviceMesh] | None = None) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_at(name, _parameter(shape, (experts or {}).get(name)))

    def register_at(self, name: str, parameter: nn.Parameter) -> None:
        """Register a parameter under a name with dots, in modules made on the way."""
        *path, last = name.split(".")
        module: nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, ShapedModule({}))
            module = module.get_submodule(part)
        module.register_parameter(last, parameter)

    def forward(self, *arguments: Any) -> Any:
        """Refuse: a shape computes nothing."""
        raise NotImplementedError(f"Expected no forward of a model of shapes, got {len(arguments)} arguments.")


def _parameter(shape: Shape, mesh: DeviceMesh | None) -> nn.Parameter:
    if mesh is None:
        return nn.Parameter(torch.empty(shape, device="meta"))
    local = torch.empty((shape[0] // mesh.size(), *shape[1:]), device="meta")
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


class ShapedModel(ShapedModule):
    """A decoder of shapes.

    Args:
        shapes: The shapes.
        experts: The mesh of the ranks with shares of the experts; None leaves each rank all experts.
    """

    def __init__(self, shapes: ModelShapes, experts: DeviceMesh | None = None) -> None:
        super().__init__(shapes.ends)
        spread = {} if experts is None else dict.fromkeys(shapes.expert_names, experts)
        self.layers = nn.ModuleList(ShapedModule(layer, spread) for layer in shapes.layers)

    def spread_parameters(self) -> set[int]:
        """The ids of experts' parameters that are spread over ranks."""
        return {id(parameter) for parameter in self.parameters() if isinstance(parameter, DTensor)}
