"""Expert parallelism for transformers' mixtures of experts, in a plain forward or under an overlap schedule.

    meshes = init_device_mesh("cuda", (2, 4), mesh_dim_names=("experts_data", "experts"))
    spread_experts(model, meshes)
    shard_with_experts(model, mesh=everyone)
    residence = UnitResidence(model, model.model.layers)
    losses = run([chunk(model, **batch, scale=1 / len(batches)) for batch in batches], residence=residence)

The model's own forward takes the same steps without overlap, bit by bit. Checkpoints of the model have all experts, and
open on other ranks and in models that were never spread. Causal language models of Mixtral, Qwen2-MoE, Qwen3-MoE,
Qwen3-Next and Qwen3.5-MoE (text).
"""

from lamella_transformers.experts._slots import chunk as chunk
from lamella_transformers.experts._spread import check_spread as check_spread
from lamella_transformers.experts._spread import expert_arguments as expert_arguments
from lamella_transformers.experts._spread import shard_with_experts as shard_with_experts
from lamella_transformers.experts._spread import spread_experts as spread_experts
