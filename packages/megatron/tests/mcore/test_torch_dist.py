"""Files of megatron-core as `torch_dist` are read: stacked layers, halves of two ranks, experts."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional

from lamella_checkpoint import Wanted
from lamella_convert import open_megatron
from lamella_layout import Chunk
from lamella_testing import run_ranks

# megatron-core and torch warn about what they do to themselves.
pytestmark = pytest.mark.filterwarnings("ignore::Warning")

# Tensors of which a rank has rows, or columns, of the whole; all others are on every rank.
ROWS = ("word_embeddings.weight", "linear_qkv.weight", "output_layer.weight")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
# Specs without Transformer Engine have norms of their own, which checkpoints name as those with it do.
NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def save_and_tell(path: Path, experts: int | None, num_tp: int) -> dict[str, torch.Tensor]:
    """Save a model, and say what this rank has of it."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=num_tp)
    torch.manual_seed(parallel_state.get_tensor_model_parallel_rank())
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        normalization="LayerNorm",
        use_cpu_initialization=True,
        tensor_model_parallel_size=num_tp,
        num_moe_experts=experts,
    )
    spec = get_gpt_layer_local_spec(num_experts=experts)
    model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=64, max_sequence_length=8)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist_checkpointing.save(
        {
            "model": model.sharded_state_dict(metadata={"dp_cp_group": group}),
            "iteration": 12,
            "checkpoint_version": 3.0,
            "args": Namespace(tensor_model_parallel_size=num_tp),
        },
        str(path),
    )
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


def canonical(name: str) -> str:
    for norm, stored_norm in NORMS.items():
        if norm == "pre_mlp_layernorm." and "experts" in name:
            continue
        name = name.replace(norm, stored_norm)
    prefix, separator, tail = name.partition("local_experts.")
    if separator:
        expert, _, tail = tail.partition(".")
        name = f"{prefix}{tail}{expert}"
    return name


def whole(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if "linear_fc1.weight" in name:
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])
    if name.endswith(ROWS):
        return torch.cat(parts)
    return torch.cat(parts, 1) if any(column in name for column in COLUMNS) else parts[0]


@pytest.mark.parametrize(("experts", "num_tp"), [(None, 2), (2, 1)])
def test_files_of_megatron_core_are_read(tmp_path: Path, experts: int | None, num_tp: int) -> None:
    ranks = run_ranks(save_and_tell, num_tp, tmp_path, experts, num_tp)
    opened = open_megatron(tmp_path)
    assert opened.format == "torch_dist"
    assert opened.sizes == {"tp": num_tp}
    assert opened.counters.found == {"checkpoint_version": 3.0, "iteration": 12}
    source = opened.source
    values = {name: torch.zeros(info.shape, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([Wanted(name, Chunk((0,) * into.ndim, tuple(into.shape)), into) for name, into in values.items()])
    expected = {f"model.{canonical(name)}": whole(canonical(name), [rank[name] for rank in ranks]) for name in ranks[0]}
    assert values.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(values[name], tensor, rtol=0, atol=0, msg=name)
