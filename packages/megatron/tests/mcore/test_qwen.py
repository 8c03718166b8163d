"""A tiny Qwen3.5 mixture of experts goes from Hugging Face's files through megatron-core on several ranks and back."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from resuming import World, assert_equal, read, train
from torch import nn

from lamella_convert import MegatronOptions, convert, find_family, save_safetensors
from lamella_megatron import fully_shard_model, load_checkpoint, save_checkpoint
from lamella_testing import run_ranks, write_entry_points
from lamella_testing.megatron import LENGTH, VOCAB_SIZE, seed_random_states, tiny_config

QWEN = Path(__file__).parents[3] / "qwen" / "pyproject.toml"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
    "tie_word_embeddings": False,
}
DELTA_NET = {
    "linear_attn.in_proj_qkv.weight": (80, 32),
    "linear_attn.in_proj_z.weight": (48, 32),
    "linear_attn.in_proj_b.weight": (8, 32),
    "linear_attn.in_proj_a.weight": (8, 32),
    "linear_attn.conv1d.weight": (80, 1, 4),
    "linear_attn.A_log": (8,),
    "linear_attn.dt_bias": (8,),
    "linear_attn.norm.weight": (6,),
    "linear_attn.out_proj.weight": (32, 48),
}
ATTENTION = {
    "self_attn.q_proj.weight": (64, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,),
}
MIXTURE = {
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate.weight": (4, 32),
    "mlp.experts.gate_up_proj": (4, 32, 32),
    "mlp.experts.down_proj": (4, 32, 16),
    "mlp.shared_expert.gate_proj.weight": (20, 32),
    "mlp.shared_expert.up_proj.weight": (20, 32),
    "mlp.shared_expert.down_proj.weight": (32, 20),
    "mlp.shared_expert_gate.weight": (1, 32),
}
WHOLE = {"model.embed_tokens.weight": (VOCAB_SIZE, 32), "model.norm.weight": (32,), "lm_head.weight": (VOCAB_SIZE, 32)}

# megatron-core and torch warn about what they do to themselves.
pytestmark = pytest.mark.filterwarnings("ignore::Warning")


@pytest.fixture(scope="module", autouse=True)
def qwen(on_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Qwen's rules are found by entry points."""
    with pytest.MonkeyPatch.context() as patch:
        if find_family(CONFIG["model_type"]) is None:  # A source tree has no entry points.
            site = tmp_path_factory.mktemp("site")
            project = tomllib.loads(QWEN.read_text())["project"]
            write_entry_points(site, "lamella-qwen", "lamella.families", project["entry-points"]["lamella.families"])
            patch.syspath_prepend(str(site))
        yield


class _Norm(nn.Module):
    """An RMS norm around zero, as Transformer Engine's."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], 1 + self.weight, 1e-6)


def _norm_and_linear() -> type[nn.Module]:
    """A column-parallel layer with its norm, named as Transformer Engine's."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class NormAndLinear(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.layer_norm_weight = nn.Parameter(torch.zeros(input_size))
            self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(
                functional.rms_norm(x, x.shape[-1:], 1 + self.layer_norm_weight, 1e-6), *args, **kwargs
            )

    return NormAndLinear


def _make(world: World, seed: int = 0) -> nn.Module:
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world.tp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
    )
    seed_random_states(seed)
    config = tiny_config(
        tensor_model_parallel_size=world.tp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
        sequence_parallel=world.tp > 1,
        num_layers=4,
        num_query_groups=2,
        kv_channels=8,
        qk_layernorm=True,
        attention_output_gate=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.0,
        moe_ffn_hidden_size=16,
        moe_shared_expert_intermediate_size=20,
        moe_shared_expert_gate=True,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=4,
        deterministic_mode=True,
        **{name: CONFIG[name] for name in CONFIG if name.startswith("linear_")},
    )
    norm_and_linear = _norm_and_linear()
    net = GatedDeltaNetSubmodules(in_proj=norm_and_linear, out_norm=_Norm, out_proj=RowParallelLinear)
    attention = SelfAttentionSubmodules(
        linear_qkv=norm_and_linear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=_Norm,
        k_layernorm=_Norm,
    )
    mixers = [ModuleSpec(GatedDeltaNet, submodules=net)] * 3
    mixers.append(ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention))
    layers = [
        ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                self_attention=mixer,
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=_Norm,
                mlp=get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False),
                mlp_bda=get_bias_dropout_add,
            ),
        )
        for mixer in mixers
    ]
    model: nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=_Norm),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        rotary_percent=0.25,
    )
    return model


def _publish(path: Path) -> None:
    """Hugging Face's files: names and shapes as transformers has them."""
    shapes = dict(WHOLE)
    for layer in range(4):
        layer_tensors = {**(DELTA_NET if layer < 3 else ATTENTION), **MIXTURE}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_tensors.items()}
    model, random = nn.Module(), torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        *steps, last = name.split(".")
        module = model
        for step in steps:
            if not hasattr(module, step):
                module.add_module(step, nn.Module())
            module = getattr(module, step)
        module.register_parameter(last, nn.Parameter(torch.randn(shape, generator=random) * 0.2))
    save_safetensors(path, model=model)
    (path / "config.json").write_text(json.dumps(CONFIG))


def _sharded(world: World, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard_model(_make(world, seed))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def _begin(world: World, path: Path) -> list[float]:
    model, optimizer = _sharded(world, 1)
    load_checkpoint(path / "bridge", model=model)
    save_checkpoint(path / "untrained", model=model)
    train(model, optimizer, 2)
    save_checkpoint(path / "saved", model=model, optimizer=optimizer, iteration=2)
    losses = train(model, optimizer, 2)
    save_checkpoint(path / "went on", model=model, optimizer=optimizer, iteration=4)
    return losses


def _resume(world: World, path: Path) -> list[float]:
    model, optimizer = _sharded(world, 2)
    load_checkpoint(path / "saved", model=model, optimizer=optimizer)
    losses = train(model, optimizer, 2)
    save_checkpoint(path / "resumed", model=model, optimizer=optimizer, iteration=4)
    return losses


def test_queries_and_keys_are_normed_as_by_the_kernel_of_transformers() -> None:
    """With transformers' eps: a norm without one lengthens heads of small elements, and the logits are others."""
    from megatron.core.ssm.gated_delta_net import common

    heads = torch.tensor([[1e-3, 0.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([0.5, 1 / (1 + 1e-6), 0.0], dtype=torch.float64).sqrt()
    torch.testing.assert_close(common.l2norm(heads).norm(dim=-1), expected, rtol=1e-12, atol=0)


def test_qwen_trains_on_other_ranks_and_goes_back_to_hugging_face(tmp_path: Path) -> None:
    _publish(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "bridge", to="fsdp_dtensor", megatron=MegatronOptions(dialect="bridge"))
    first, other = World(4, tp=2, ep=2, etp=1), World(2)
    losses = run_ranks(_begin, first.num_ranks, first, tmp_path)[0]
    resumed = run_ranks(_resume, other.num_ranks, other, tmp_path)[0]
    torch.testing.assert_close(resumed, losses, rtol=1e-5, atol=1e-5)
    assert_equal(read(tmp_path / "resumed"), read(tmp_path / "went on"), rtol=1e-4, atol=1e-5)
    for name in ("untrained", "resumed"):
        convert(tmp_path / name, tmp_path / f"hf {name}", to="hf", like=tmp_path / "hf")
    published, trained = read(tmp_path / "hf"), read(tmp_path / "hf resumed")
    back = read(tmp_path / "hf untrained")
    norms = {name for name in published if name.endswith("linear_attn.norm.weight")}
    assert_equal(
        {name: back[name] for name in back.keys() - norms}, {name: published[name] for name in published.keys() - norms}
    )
    for name in norms:  # Stored around zero in between.
        torch.testing.assert_close(back[name], published[name])
    assert {name: tensor.shape for name, tensor in trained.items()} == {
        n: tensor.shape for n, tensor in published.items()
    }
    assert not any(torch.equal(trained[name], published[name]) for name in published)
