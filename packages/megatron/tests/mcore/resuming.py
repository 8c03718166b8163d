"""Models and runs on some ranks, and their checkpoints, for tests of resuming on other ranks."""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import nn
from torch.distributed.tensor import DTensor

import lamella_optim
from lamella_checkpoint import Wanted
from lamella_convert import open_checkpoint
from lamella_layout import Chunk
from lamella_megatron import fully_shard_model, load_checkpoint, save_checkpoint
from lamella_testing import run_ranks
from lamella_testing.megatron import (
    EXPERTS,
    LENGTH,
    VOCAB_SIZE,
    seed_random_states,
    tiny_config,
    tiny_gpt,
    tiny_hybrid,
    token_losses,
)

BATCH = torch.randint(VOCAB_SIZE, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class World:
    """Ranks, and the parallel sizes of a model on the ranks."""

    num_ranks: int
    tp: int = 1
    ep: int = 1
    etp: int | None = None
    pp: int = 1
    vp: int | None = None
    instances: int = 1

    def __str__(self) -> str:
        stages = "" if self.pp == 1 else f"-pp{self.pp}" + (f"-vp{self.vp}" if self.vp else "")
        expert = "" if self.ep == 1 and self.etp is None else f"-ep{self.ep}-etp{self.etp}"
        instances = "" if self.instances == 1 else f"-instances{self.instances}"
        return f"{self.num_ranks}ranks-tp{self.tp}{stages}{expert}{instances}"


GATED = {"gated_linear_unit": True, "activation_func": functional.silu}
TIED = {"share_embeddings_and_output_weights": True}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "gated": ({**GATED, "ffn_hidden_size": 48}, {}),
    "tied": ({**GATED, "num_layers": 4}, TIED),
    "eight": ({**GATED, "num_layers": 8}, TIED),
    "biases": ({"add_bias_linear": True, "num_query_groups": 2}, {}),
    "offsets": ({"softmax_type": "learnable"}, {}),
    "experts": ({**EXPERTS, **GATED}, {}),
    "wider": ({**GATED, "ffn_hidden_size": 48, "hidden_size": 64}, {}),
    "deeper": ({**GATED, "ffn_hidden_size": 48, "num_layers": 3}, {}),
    "mtp": ({**GATED, "ffn_hidden_size": 48, "mtp_num_layers": 1}, {}),
    "hybrid": (
        {
            **GATED,
            "ffn_hidden_size": 48,
            "num_layers": 4,
            "mamba_state_dim": 8,
            "mamba_head_dim": 8,
            "mamba_num_groups": 4,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 4,
            "linear_num_value_heads": 8,
            "linear_value_head_dim": 4,
            "linear_conv_kernel_dim": 4,
            "deterministic_mode": True,
        },
        {},
    ),
}


def make(world: World, kind: str, seed: int = 0) -> nn.Module:
    [model] = make_chunks(world, kind, seed)
    return model


def make_chunks(world: World, kind: str, seed: int = 0) -> list[nn.Module]:
    """This rank's model, or a model for each virtual pipeline stage."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world.tp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
        pipeline_model_parallel_size=world.pp,
        virtual_pipeline_model_parallel_size=world.vp,
        num_distributed_optimizer_instances=world.instances,
    )
    return [build(world, kind, seed, chunk) for chunk in (range(world.vp) if world.vp else [None])]


def build(world: World, kind: str, seed: int, chunk: int | None = None) -> nn.Module:
    """A model on this rank's pipeline stage, or on a virtual stage."""
    from megatron.core import parallel_state

    fields, model_arguments = MODELS[kind]
    seed_random_states(seed)
    config = tiny_config(
        tensor_model_parallel_size=world.tp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
        pipeline_model_parallel_size=world.pp,
        virtual_pipeline_model_parallel_size=world.vp,
        pipeline_dtype=torch.float32,
        sequence_parallel=world.tp > 1 and "num_moe_experts" in fields,
        **fields,
    )
    stage_arguments = {"vp_stage": chunk, "ignore_virtual": chunk is None}
    is_first = parallel_state.is_pipeline_first_stage(**stage_arguments)
    is_last = parallel_state.is_pipeline_last_stage(**stage_arguments)
    stage = {"pre_process": is_first, "post_process": is_last, "vp_stage": chunk}
    if kind == "hybrid":
        return tiny_hybrid(config, {1: "*-MG", 2: "*-|MG", 4: "*|-|M|G"}[world.pp * (world.vp or 1)], **stage)
    if kind == "mtp":
        specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        spec = specs.get_gpt_mtp_block_spec(config, specs.get_gpt_layer_local_spec(), use_transformer_engine=False)
        model_arguments = {"mtp_block_spec": spec}
    return tiny_gpt(config, **model_arguments, **stage)


def sharded(world: World, kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    [model], optimizer = sharded_chunks(world, kind, seed)
    return model, optimizer


def sharded_chunks(world: World, kind: str, seed: int = 0) -> tuple[list[nn.Module], torch.optim.Optimizer]:
    chunks = [fully_shard_model(chunk) for chunk in make_chunks(world, kind, seed)]
    return chunks, adamw(*chunks)


def adamw(*chunks: nn.Module) -> torch.optim.Optimizer:
    """AdamW on local shards: on DTensors, as tests of Qwen's models resume, a first step takes a rank 0.2 s of CPU."""
    lamella_optim.install()
    named = [item for chunk in chunks for item in chunk.named_parameters()]
    groups = [[parameter for name, parameter in named if ("norm" in name) == is_norm] for is_norm in (False, True)]
    # Some gradients are zero but for rounding (of a key's bias), and a small eps would make steps of the rounding.
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-2, eps=1e-4
    )


def on_rank_zero(world: World, run: Callable[..., Any], *args: Any) -> Any:
    """The result of rank 0."""
    return run_ranks(run, world.num_ranks, world, *args)[0]


def name_in_the_whole(model: Any, name: str) -> str:
    """A parameter's name in a model of one stage, with layers counted from 0."""
    if name == "output_layer.weight" and getattr(model, "share_embeddings_and_output_weights", False):
        return "embedding.word_embeddings.weight"
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    return re.sub(r"(?<=decoder\.layers\.)\d+", lambda match: str(numbers[int(match[0])]), name)


def fill(model: nn.Module) -> None:
    """Numbers that differ between elements of whole tensors, but for chance; equal on ranks with the same part."""
    from megatron.core import parallel_state as ranks

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_expert = ".experts." in name
            # megatron-core splits the offsets of a softmax without a mark.
            is_part = getattr(parameter, "tensor_model_parallel", name.endswith(".softmax_offset"))
            tp = ranks.get_expert_tensor_parallel_rank() if is_expert else ranks.get_tensor_model_parallel_rank()
            ep = ranks.get_expert_model_parallel_rank() if is_expert else 0
            seed = zlib.crc32(f"{name_in_the_whole(model, name)} {tp if is_part else 0} {ep}".encode())
            parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed)))


def save_random(
    world: World, kind: str, path: Path, forms: Sequence[Any] = ()
) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Save after a step; this rank's tensor-parallel parts of what is neither fused nor an expert's, and their dims.

    With `forms`, each has a directory of its name in the path.
    """
    chunks = make_chunks(world, kind)
    for chunk in chunks:
        fill(chunk)
        fully_shard_model(chunk)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    lamella_optim.install()
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.sin(100 * parameter.detach())
    optimizer.step()
    for form, directory in [(form, path / form) for form in forms] or [("fsdp_dtensor", path)]:
        save_checkpoint(directory, model=chunks, optimizer=optimizer, format=form)
    tensors = {}
    for name, parameter in (item for chunk in chunks for item in chunk.named_parameters()):
        assert isinstance(parameter, DTensor)
        full_tensor = parameter.full_tensor().detach()
        if not any(fused_name in name for fused_name in ("linear_fc1", "in_proj", "conv1d", ".experts.")):
            is_part = getattr(parameter, "tensor_model_parallel", False)
            tensors[name] = full_tensor, parameter.partition_dim if is_part else None  # type: ignore[attr-defined]
    return tensors


def load_and_save(world: World, kind: str, path: Path, again: Path) -> None:
    model, optimizer = sharded(world, kind, seed=7)
    load_checkpoint(path, model=model, optimizer=optimizer)
    save_checkpoint(again, model=model, optimizer=optimizer)


def train(model: nn.Module | list[nn.Module], optimizer: torch.optim.Optimizer, num_steps: int = 2) -> list[float]:
    """Steps on the data-parallel rank's rows of one batch; the losses of the whole batch."""
    chunks = model if isinstance(model, list) else [model]
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    num, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    rows = BATCH.chunk(num)[rank]

    def forward(_: object, module: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        return token_losses(module, rows), lambda losses: (losses.mean(), losses.detach().mean())

    losses = []
    for _ in range(num_steps):
        stage_losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[None for _ in chunks],
            model=chunks,
            # The interleaved schedule asks for a microbatch a stage: all have the same rows.
            num_microbatches=1 if len(chunks) == 1 else parallel_state.get_pipeline_model_parallel_world_size(),
            seq_length=LENGTH,
            micro_batch_size=len(rows),
        )
        for parameter in (own_parameter for chunk in chunks for own_parameter in chunk.parameters()):
            if getattr(parameter, "sequence_parallel", False):  # Each rank saw a part of the tokens.
                assert isinstance(parameter.grad, DTensor)
                dist.all_reduce(parameter.grad.to_local(), group=parallel_state.get_tensor_model_parallel_group())
            if getattr(parameter, "shared_embedding", False):  # Each stage read its own copy.
                assert isinstance(parameter.grad, DTensor)
                dist.all_reduce(parameter.grad.to_local(), group=parallel_state.get_embedding_group())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(stage_losses[0] if stage_losses else torch.zeros(()))  # The last stage has the losses.
    mean = torch.stack(losses)
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    dist.all_reduce(mean, group=parallel_state.get_pipeline_model_parallel_group())
    return (mean / num).tolist()  # type: ignore[no-any-return]


def read(path: Path) -> dict[str, torch.Tensor]:
    """All whole tensors of a checkpoint, by native names."""
    source = open_checkpoint(path)
    full_tensors = {name: torch.full(info.shape, -1, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([Wanted(name, Chunk((0,) * into.ndim, tuple(into.shape)), into) for name, into in full_tensors.items()])
    return full_tensors


def assert_equal(
    loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """The same names, and values within the tolerances."""
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=rtol, atol=atol, msg=name)
