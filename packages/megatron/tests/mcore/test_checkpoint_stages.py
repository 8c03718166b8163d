"""Checkpoints of pipeline stages: equal to those of one stage, and read on any number of stages."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from resuming import World, assert_equal, read
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_checkpoint import CheckpointMismatch
from lamella_megatron import fully_shard_model, load_checkpoint, save_checkpoint
from lamella_testing import run_ranks
from lamella_testing.megatron import tiny_config, tiny_gpt

KINDS: dict[str, dict[str, Any]] = {
    "gated": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "ffn_hidden_size": 48},
    "tied": {},
    "experts": {
        "num_moe_experts": 4,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_topk": 2,
        "moe_aux_loss_coeff": 0.0,
        "ffn_hidden_size": 24,
    },
}


def _stage(world: World, kind: str, **changes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """This rank's stage of a model of four layers, filled by the names in the whole, and stepped once."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world.tp,
        pipeline_model_parallel_size=world.pp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
    )
    config = tiny_config(
        **{"num_layers": 4, **KINDS[kind], **changes},
        tensor_model_parallel_size=world.tp,
        pipeline_model_parallel_size=world.pp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
        pipeline_dtype=torch.float32,
    )
    module: Any = tiny_gpt(
        config,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=kind == "tied",
    )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name == "output_layer.weight" and kind == "tied":
                name = "embedding.word_embeddings.weight"
            if name.startswith("decoder.layers."):
                local = name.split(".")[2]
                number = module.decoder.layers[int(local)].layer_number - 1
                name = name.replace(f"layers.{local}.", f"layers.{number}.", 1)
            is_part = getattr(parameter, "tensor_model_parallel", False)
            ep = parallel_state.get_expert_model_parallel_rank() if ".experts." in name else 0
            tp = parallel_state.get_tensor_model_parallel_rank() if is_part else 0
            seed = zlib.crc32(f"{name} {tp} {ep}".encode())
            parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    model = fully_shard_model(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.sin(100 * parameter.detach())
    optimizer.step()
    return model, optimizer


def _save(world: World, kind: str, path: Path, form: Literal["fsdp_dtensor", "torch_dist"] = "fsdp_dtensor") -> None:
    model, optimizer = _stage(world, kind)
    save_checkpoint(path, model=model, optimizer=optimizer, format=form, iteration=3)


def _load_and_save(world: World, kind: str, path: Path, again: Path) -> None:
    """Read into a stage with zeros, state of its own and other ranks; and write what was read."""
    model, optimizer = _stage(world, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            for slot in optimizer.state[parameter].values():
                slot.zero_()
    assert load_checkpoint(path, model=model, optimizer=optimizer)["iteration"] == 3
    save_checkpoint(again, model=model, optimizer=optimizer, iteration=3)
    # The last stage's copy of the embedding, which nothing saves, has been read too.
    copies = [p for name, p in model.named_parameters() if name == "output_layer.weight"]
    assert all(copy.detach().abs().sum() > 0 and optimizer.state[copy]["exp_avg"].abs().sum() > 0 for copy in copies)


GATED = "gated", [World(4, tp=2, pp=2), World(4, pp=2), World(2)]
TIED = "tied", [World(2, pp=2), World(1), World(4, pp=4)]
EXPERTS = "experts", [World(4, ep=2, pp=2), World(2, pp=2), World(2, ep=2)]


@pytest.mark.parametrize(
    ("form", "kind", "worlds"),
    [
        ("fsdp_dtensor", *GATED),
        ("fsdp_dtensor", *TIED),
        pytest.param("fsdp_dtensor", *EXPERTS, marks=pytest.mark.slow),
        pytest.param("torch_dist", *GATED, marks=pytest.mark.slow),
        ("torch_dist", *TIED),
        pytest.param("torch_dist", *EXPERTS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stages_save_what_one_stage_does_and_read_it_on_others(
    tmp_path: Path, form: Literal["fsdp_dtensor", "torch_dist"], kind: str, worlds: list[World]
) -> None:
    first = worlds[0]
    one = replace(first, num_ranks=first.num_ranks // first.pp, pp=1)
    run_ranks(_save, one.num_ranks, one, kind, tmp_path / "one", form)
    run_ranks(_save, first.num_ranks, first, kind, tmp_path / "0", form)
    expected = read(tmp_path / "one")
    assert any(".layers.3." in name for name in expected)
    assert_equal(read(tmp_path / "0"), expected)
    for i, world in enumerate(worlds):
        again = tmp_path / f"again {i}"
        run_ranks(_load_and_save, world.num_ranks, world, kind, tmp_path / "0", again)
        if form == "fsdp_dtensor":
            assert_equal(read(again), expected)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local().detach()


def _refused(world: World, kind: str, path: Path, num_layers: int) -> str:
    model, optimizer = _stage(world, kind, num_layers=num_layers)
    before = [_local(parameter).clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointMismatch) as error:
        load_checkpoint(path, model=model, optimizer=optimizer)
    for one, other in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, _local(other))
    return f"{dist.get_rank()}: {error.value}"


def test_a_layer_that_no_stage_has_is_refused_on_every_stage(tmp_path: Path) -> None:
    run_ranks(_save, 1, World(1), "gated", tmp_path / "four")
    for message in run_ranks(_refused, 2, World(2, pp=2), "gated", tmp_path / "four", 2):
        assert "decoder.layers.2" in message
        assert "decoder.layers.1." not in message


def test_a_chunk_of_several_is_refused(tmp_path: Path) -> None:
    def on_each_rank() -> None:
        model: Any = _stage(World(2, pp=2), "gated")[0]
        model.config.virtual_pipeline_model_parallel_size = 2
        with pytest.raises(NotImplementedError, match="one of 2 chunks"):
            save_checkpoint(tmp_path / "no", model=model)

    run_ranks(on_each_rank, 2)
    assert not any(tmp_path.iterdir())
