"""A run that is saved and resumed on other ranks goes on as if it had never stopped."""

from __future__ import annotations

import functools
import importlib
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as functional
from resuming import World, assert_equal, read, train
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lamella_checkpoint import CheckpointMismatch
from lamella_engine import DDP, ZERO1, ZERO2, FSDPModule, MixedPrecisionPolicy, ShardingOptions, fully_shard
from lamella_megatron import fully_shard_model, load_checkpoint, save_checkpoint
from lamella_testing import run_ranks
from lamella_testing.megatron import LENGTH, VOCAB_SIZE, ddp_config, tiny_config, tiny_gpt

NUM_EXPERTS = 4


@pytest.fixture(scope="module", autouse=True)
def layers_for_gpus(on_cpu: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        norms = importlib.import_module("megatron.core.transformer.torch_norm")
        patch.setattr(norms.WrappedTorchNorm, "__new__", _norm)
        # Layers whose kernels are for a GPU are built and saved, and not called.
        patch.setattr(importlib.import_module("megatron.core.ssm.mamba_mixer"), "HAVE_MAMBA_SSM", True)
        patch.setattr(importlib.import_module("megatron.core.ssm.gated_delta_net.common"), "HAVE_FLA", True)
        stacks = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
        patch.setattr(stacks, "TENorm", norms.WrappedTorchNorm)
        yield


def _norm(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> nn.Module:
    """A norm of torch, marked for sequence parallelism, which experts need and megatron-core's torch norms refuse."""
    made = nn.LayerNorm(hidden_size, eps)
    for parameter in made.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return made


GATED = {"gated_linear_unit": True, "activation_func": functional.silu}
EXPERTS = {
    "num_moe_experts": NUM_EXPERTS,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.0,
    "ffn_hidden_size": 24,
    "moe_grouped_gemm": False,
}
TIED = {"share_embeddings_and_output_weights": True}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "gated": ({**GATED, "ffn_hidden_size": 48}, {}),
    "tied": (GATED, TIED),
    "biases": ({"add_bias_linear": True, "num_query_groups": 2}, {}),
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


def _hybrid(config: Any) -> nn.Module:
    """A HybridModel of a Mamba layer, a gated delta net, attention and an MLP, of torch's own operators."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    linears: dict[str, Any] = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    gpt = get_gpt_layer_local_submodules()
    mixer = ModuleSpec(MambaMixer, params={"rmsnorm": False}, submodules=MambaMixerSubmodules(**linears))
    delta = ModuleSpec(GatedDeltaNet, submodules=GatedDeltaNetSubmodules(out_norm=WrappedTorchNorm, **linears))

    def attention(of: Any) -> Any:
        parts = TransformerLayerSubmodules(
            input_layernorm=gpt.input_layernorm, self_attention=of, self_attn_bda=gpt.self_attn_bda
        )
        return ModuleSpec(TransformerLayer, submodules=parts)

    parts = TransformerLayerSubmodules(pre_mlp_layernorm=gpt.pre_mlp_layernorm, mlp=gpt.mlp, mlp_bda=gpt.mlp_bda)
    layers = HybridStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer)),
        gdn_layer=attention(delta),
        attention_layer=attention(gpt.self_attention),
        mlp_layer=ModuleSpec(MLPLayer, submodules=parts),
    )
    model: nn.Module = HybridModel(
        config=config,
        hybrid_stack_spec=ModuleSpec(HybridStack, submodules=layers),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=LENGTH,
        hybrid_layer_pattern="MG*-",
    )
    return model


def _make(world: World, kind: str, seed: int = 0) -> nn.Module:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world.tp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
    )
    return _build(world, kind, seed)


def _build(world: World, kind: str, seed: int) -> nn.Module:
    fields, of_model = MODELS[kind]
    torch.manual_seed(seed)
    config = tiny_config(
        tensor_model_parallel_size=world.tp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=world.etp,
        sequence_parallel=world.tp > 1 and "num_moe_experts" in fields,
        **fields,
    )
    if kind == "hybrid":
        return _hybrid(config)
    if kind == "mtp":
        specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        spec = specs.get_gpt_mtp_block_spec(config, specs.get_gpt_layer_local_spec(), use_transformer_engine=False)
        of_model = {"mtp_block_spec": spec}
    return tiny_gpt(config, **of_model)


def _sharded(world: World, kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard_model(_make(world, kind, seed))
    return model, _optimizer(model)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    is_norm = {name: "norm" in name for name, _ in model.named_parameters()}
    groups = [[p for name, p in model.named_parameters() if is_norm[name] == which] for which in (False, True)]
    # Some gradients are zero but for rounding (of a key's bias), and a small eps would make steps of the rounding.
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-2, eps=1e-4
    )


def _on(world: World, run: Callable[..., Any], *args: Any) -> Any:
    """The result of rank 0."""
    return run_ranks(run, world.num_ranks, world, *args)[0]


def _begin(world: World, kind: str, path: Path) -> list[float]:
    """Train, save, and train on: the run that never stopped."""
    model, optimizer = _sharded(world, kind)
    train(model, optimizer)
    save_checkpoint(path / "saved", model=model, optimizer=optimizer, iteration=2)
    losses = train(model, optimizer)
    save_checkpoint(path / "went on", model=model, optimizer=optimizer, iteration=4)
    return losses


def _resume(world: World, kind: str, path: Path) -> list[float]:
    model, optimizer = _sharded(world, kind, seed=7)
    extra = load_checkpoint(path / "saved", model=model, optimizer=optimizer)
    assert extra["iteration"] == 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    losses = train(model, optimizer)
    save_checkpoint(path / f"resumed {world}", model=model, optimizer=optimizer, iteration=4)
    return losses


@pytest.mark.parametrize(
    ("kind", "first", "others"),
    [
        ("dense", World(4, tp=2), [World(2), World(1), World(2, tp=2)]),
        pytest.param("dense", World(1), [World(4, tp=2), World(4, tp=4)], marks=pytest.mark.slow),
        ("gated", World(4, tp=2), [World(2), World(4), World(4, tp=4)]),
        pytest.param("tied", World(4, tp=2), [World(2)], marks=pytest.mark.slow),
        pytest.param("biases", World(4, tp=2), [World(2)], marks=pytest.mark.slow),
        ("experts", World(4, tp=2, ep=2, etp=1), [World(2), World(4, ep=4)]),
    ],
    ids=str,
)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, kind: str, first: World, others: list[World]
) -> None:
    losses = _on(first, _begin, kind, tmp_path)
    expected = read(tmp_path / "went on")
    assert any(name.endswith("exp_avg_sq") for name in expected)
    for world in others:
        torch.testing.assert_close(_on(world, _resume, kind, tmp_path), losses, rtol=1e-6, atol=1e-6)
        assert_equal(read(tmp_path / f"resumed {world}"), expected, rtol=1e-5, atol=1e-6)


def _fill(model: nn.Module) -> None:
    """Numbers that no two elements of whole tensors share, but by chance; equal where ranks hold the same."""
    from megatron.core import parallel_state as ranks

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_expert, is_part = ".experts." in name, getattr(parameter, "tensor_model_parallel", False)
            tp = ranks.get_expert_tensor_parallel_rank() if is_expert else ranks.get_tensor_model_parallel_rank()
            ep = ranks.get_expert_model_parallel_rank() if is_expert else 0
            seed = zlib.crc32(f"{name} {tp if is_part else 0} {ep}".encode())
            parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed)))


def _save_random(world: World, kind: str, path: Path) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Save after a step; this rank's tensor-parallel parts of what is neither fused nor an expert's, and their dims."""
    model = _make(world, kind)
    _fill(model)
    fully_shard_model(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.sin(100 * parameter.detach())
    optimizer.step()
    save_checkpoint(path, model=model, optimizer=optimizer)
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = parameter.full_tensor().detach()
        if not any(each in name for each in ("linear_fc1", "in_proj", "conv1d", ".experts.")):
            is_part = getattr(parameter, "tensor_model_parallel", False)
            found[name] = whole, parameter.partition_dim if is_part else None  # type: ignore[attr-defined]
    return found


def _load_and_save(world: World, kind: str, path: Path, again: Path) -> None:
    model, optimizer = _sharded(world, kind, seed=7)
    load_checkpoint(path, model=model, optimizer=optimizer)
    save_checkpoint(again, model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        ("gated", [World(4, tp=2), World(1), World(4, tp=4), World(3)]),
        pytest.param("mtp", [World(4, tp=2), World(1)], marks=pytest.mark.slow),
        ("hybrid", [World(4, tp=2), World(1), World(4, tp=4), World(3)]),
        ("experts", [World(4, tp=2, ep=2, etp=2), World(2, ep=2), World(4, tp=2, ep=2, etp=1), World(1)]),
    ],
    ids=str,
)
def test_every_element_survives_any_change_of_ranks(tmp_path: Path, kind: str, worlds: list[World]) -> None:
    parts = run_ranks(_save_random, worlds[0].num_ranks, worlds[0], kind, tmp_path / "0")
    expected = read(tmp_path / "0")
    for name, (part, dim) in parts[0].items():
        whole = part if dim is None else torch.cat([of_rank[name][0] for of_rank in parts[: worlds[0].tp]], dim)
        name = name.replace("decoder.final_norm.", "decoder.final_layernorm.")
        assert torch.equal(expected[f"model.{name}"], whole), name
    for index, world in enumerate(worlds[1:]):
        _on(world, _load_and_save, kind, tmp_path / f"{index}", tmp_path / f"{index + 1}")
        assert_equal(read(tmp_path / f"{index + 1}"), expected)


def _refused(world: World, kind: str, path: Path, options: dict[str, Any]) -> tuple[str, str]:
    """The error of a load, after which nothing has changed."""
    model, optimizer = _sharded(world, kind, seed=7)
    before = {name: p.to_local().clone() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    with pytest.raises(Exception) as error:  # noqa: PT011
        load_checkpoint(path, model=model, optimizer=optimizer, **options)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.to_local(), before[name]), name
    assert not optimizer.state
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        ("wider", "model.decoder.layers.0.mlp.linear_fc2.weight: (32, 48) in the checkpoint, (64, 48) here"),
        ("deeper", "model.decoder.layers.2.mlp.linear_fc2.weight: absent from the checkpoint, (32, 48) here"),
        ("dense", "model.decoder.layers.0.mlp.linear_fc1.weight: (96, 32) in the checkpoint, (128, 32) here"),
    ],
)
def test_another_models_checkpoint_is_refused_with_all_differences(tmp_path: Path, kind: str, difference: str) -> None:
    _on(World(4, tp=2), _save_random, "gated", tmp_path)
    error, message = _on(World(2), _refused, kind, tmp_path, {})
    assert error == "CheckpointMismatch"
    assert difference in message
    assert "pass strict=False" in message


def test_another_number_of_writing_ranks_than_the_checkpoint_tells_is_refused(tmp_path: Path) -> None:
    _on(World(4, tp=2), _save_random, "hybrid", tmp_path)
    error, message = _on(World(2), _refused, "hybrid", tmp_path, {"tensor_parallel_size": 4})
    assert error == "ValueError"
    assert f"number of ranks that wrote {str(tmp_path)!r} (2, as its files tell), got 4. Leave it out." in message


class _OptimizerWrapper:
    """As megatron-core's around an optimizer."""


def _save_both(world: World, kind: str, path: Path) -> None:
    from lamella_megatron.training import ShardedModel

    model: Any = _make(world, kind)
    _fill(model)
    fully_shard_model(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.sin(100 * parameter.detach())
    optimizer.step()
    save_checkpoint(path / "fsdp", model=model, optimizer=optimizer)
    wrapped = ShardedModel(model.config, ddp_config(), model)
    save_checkpoint(path / "dist", model=wrapped, optimizer=optimizer, format="torch_dist", iteration=5)
    with pytest.raises(TypeError, match=r"got _OptimizerWrapper. Pass `optimizer\.optimizer`"):
        save_checkpoint(path / "other", model=wrapped, optimizer=_OptimizerWrapper())  # type: ignore[arg-type]


def _megatrons_own(world: World, kind: str, path: Path) -> bool:
    """megatron-core loads into a plain model, and lamella into a sharded one: the same parts."""
    from megatron.core import dist_checkpointing, parallel_state

    plain = _make(world, kind, seed=3)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = {"model": plain.sharded_state_dict(metadata={"dp_cp_group": group})}  # type: ignore[operator]
    loaded = dist_checkpointing.load(state, str(path / "dist"), strict="raise_unexpected")
    assert loaded["iteration"] == 5
    assert loaded["args"].hidden_size == 32
    plain.load_state_dict(loaded["model"], strict=False)
    model = fully_shard_model(_build(world, kind, seed=5))
    load_checkpoint(path / "fsdp", model=model)
    for (name, mine), own in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert torch.equal(mine.full_tensor(), own), name
    return True


@pytest.mark.filterwarnings("ignore::Warning")  # megatron-core and torch warn about what they do to themselves.
@pytest.mark.parametrize(
    ("kind", "first", "others"),
    [
        ("gated", World(4, tp=2), [World(1), World(2, tp=2)]),
        pytest.param("tied", World(2, tp=2), [World(1), World(2, tp=2)], marks=pytest.mark.slow),
        pytest.param("biases", World(4, tp=2), [World(1), World(2, tp=2)], marks=pytest.mark.slow),
        ("experts", World(4, tp=2, ep=2, etp=1), [World(1), World(2, ep=2), World(4, tp=2, ep=2, etp=2)]),
    ],
    ids=str,
)
def test_megatron_core_opens_torch_dist(tmp_path: Path, kind: str, first: World, others: list[World]) -> None:
    _on(first, _save_both, kind, tmp_path)
    for world in others:
        assert run_ranks(_megatrons_own, world.num_ranks, world, kind, tmp_path) == [True] * world.num_ranks


def _save_by_megatron(world: World, kind: str, path: Path) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    model = _make(world, kind)
    _fill(model)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})  # type: ignore[operator]
    args = Namespace(tensor_model_parallel_size=world.tp)
    (path / "dist").mkdir(exist_ok=True)
    dist_checkpointing.save({"model": state, "iteration": 12, "args": args}, str(path / "dist"))
    fully_shard_model(model)
    save_checkpoint(path / "0", model=model)


def _load_torch_dist(world: World, kind: str, path: Path, *, optimizer: bool) -> None:
    model, mine = _sharded(world, kind, seed=7)
    extra = load_checkpoint(path / "dist", model=model, optimizer=mine if optimizer else None)
    assert extra["iteration"] in (5, 12)
    save_checkpoint(path / "1", model=model, optimizer=mine if optimizer else None)


@pytest.mark.filterwarnings("ignore::Warning")  # megatron-core and torch warn about what they do to themselves.
@pytest.mark.parametrize(
    ("kind", "first", "other"),
    [
        ("gated", World(2, tp=2), World(4, tp=4)),
        pytest.param("biases", World(2, tp=2), World(3), marks=pytest.mark.slow),
        ("hybrid", World(2, tp=2), World(4, tp=4)),
        pytest.param("mtp", World(2, tp=2), World(2), marks=pytest.mark.slow),
        ("experts", World(4, tp=2, ep=2, etp=1), World(2)),
    ],
    ids=str,
)
def test_torch_dist_of_megatron_core_is_loaded(tmp_path: Path, kind: str, first: World, other: World) -> None:
    files = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_process_memory", lambda: 0)  # It asks psutil, to log it.
        run_ranks(_save_by_megatron, first.num_ranks, first, kind, tmp_path)
    _on(other, functools.partial(_load_torch_dist, optimizer=False), kind, tmp_path)
    assert_equal(read(tmp_path / "1"), read(tmp_path / "0"))


@pytest.mark.parametrize(
    "kind", [pytest.param("gated", marks=pytest.mark.slow), "experts", pytest.param("hybrid", marks=pytest.mark.slow)]
)
def test_torch_dist_brings_the_optimizers_state_back(tmp_path: Path, kind: str) -> None:
    _on(World(4, tp=2, ep=2 if kind == "experts" else 1, etp=1), _save_both, kind, tmp_path)
    _on(World(2), functools.partial(_load_torch_dist, optimizer=True), kind, tmp_path)
    found = read(tmp_path / "1")
    assert any(name.endswith("exp_avg_sq") for name in found)
    assert_equal(found, read(tmp_path / "fsdp"))


class _Wrapper(nn.Module):
    """A wrapper of Megatron, by its name alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config = module.config


def _ask_as_megatron_does(world: World, kind: str, path: Path) -> list[str]:
    """Fill what megatron-core's training asks a checkpoint for; the names of parts that differ from the model's."""
    fsdp = "megatron.core.distributed.fsdp.src.megatron_fsdp"
    checkpoints = importlib.import_module("megatron.core.transformer.fsdp_dtensor_checkpoint")
    make = importlib.import_module(f"{fsdp}.param_and_grad_buffer").make_fsdp_dtensor
    mesh = init_device_mesh("cpu", (world.num_ranks // world.tp, world.tp), mesh_dim_names=("dp", "tp"))
    index = importlib.import_module(f"{fsdp}.utils").FSDPDistributedIndex(mesh, dp_shard_dim="dp", tp_dim="tp")
    model = _make(world, kind, seed=3)
    wrapped = _Wrapper(_Wrapper(model))
    rank, num = mesh.get_local_rank("dp"), mesh.size(0)
    weights, slots = {}, {}
    for name, parameter in model.named_parameters():
        shard: Any = parameter
        rows, row = -(-len(parameter) // num), parameter[:1].numel()
        first, last = (min(rows * each, len(parameter)) for each in (rank, rank + 1))
        shard.megatron_fsdp_slice, shard.megatron_fsdp_dist_index = slice(first * row, last * row), index
        blank = [torch.full(((last - first) * row,), -1.0) for _ in range(3)]
        made = [make(each, parameter, dist_index=index, run_check=True) for each in blank]
        weights[f"module.{name}"] = made[0]
        slots[f"module.module.module.{name}"] = {
            "exp_avg": made[1], "exp_avg_sq": made[2], "step": torch.tensor(-1.0),
        }  # fmt: skip
    asked: dict[str, Any] = {"args": None, "iteration": None, "checkpoint_version": None, "model": weights}
    asked["optimizer"] = {"state": slots}
    state = dict(asked)
    checkpoints.handle_fp8_extra_state_case(state["model"])
    if model.config.gated_linear_unit:  # type: ignore[union-attr]
        state["model"], state["optimizer"] = checkpoints.handle_swiglu_in_state_dict(
            wrapped, state["model"], state["optimizer"]
        )
    importlib.import_module(f"{fsdp}.uneven_dtensor").preprocess_state_dict_for_uneven_dtensor(state)
    dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=False))  # type: ignore[attr-defined]
    assert state["iteration"] == 2
    assert state["args"].hidden_size == 32

    mine = fully_shard_model(_build(world, kind, seed=5))
    optimizer = _optimizer(mine)
    load_checkpoint(path, model=mine, optimizer=optimizer)
    wrong = []
    for name, parameter in mine.named_parameters():
        mapped = slots[f"module.module.module.{name}"]
        for slot, filled in {"": weights[f"module.{name}"], **mapped}.items():
            own: Any = optimizer.state[parameter][slot] if slot else parameter
            local = own.to_local() if isinstance(own, DTensor) else own
            got = filled.to_local() if isinstance(filled, DTensor) else filled
            if not torch.equal(got.reshape(-1), local.detach().reshape(-1)):
                wrong.append(f"{name} {slot}")
    return wrong


def _save_fsdp(world: World, kind: str, path: Path) -> None:
    model, optimizer = _sharded(world, kind)
    train(model, optimizer)
    save_checkpoint(path, model=model, optimizer=optimizer, iteration=2)


@pytest.mark.filterwarnings("ignore::Warning")  # megatron-core and torch warn about what they do to themselves.
@pytest.mark.parametrize(
    ("kind", "first", "other"),
    [
        ("gated", World(4, tp=2), World(4, tp=2)),
        ("gated", World(1), World(4, tp=4)),
        ("biases", World(2), World(4, tp=2)),
    ],
    ids=str,
)
def test_megatron_core_opens_fsdp_dtensor(tmp_path: Path, kind: str, first: World, other: World) -> None:
    _on(first, _save_fsdp, kind, tmp_path)
    assert run_ranks(_ask_as_megatron_does, other.num_ranks, other, kind, tmp_path) == [[]] * other.num_ranks


GDN_ROWS = {"query": 16, "key": 16, "value": 32, "z": 32, "beta": 8, "alpha": 8}


def _by_component(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A gated delta net's fused tensor of one tensor-parallel rank, by component."""
    if not name.endswith(("self_attention.in_proj.weight", "self_attention.conv1d.weight")):
        return {name: tensor}
    parts = list(GDN_ROWS)[: 3 if "conv1d" in name else 6]
    cut = tensor.split([GDN_ROWS[part] for part in parts])  # type: ignore[no-untyped-call]
    return {f"{name}.{part}": each for part, each in zip(parts, cut, strict=True)}


def _write_as_bridge_does(world: World, kind: str, path: Path) -> None:
    """A directory of Megatron-Bridge's, from Hugging Face's weights: no `args`, no optimizer; and lamella's own."""
    model = _make(world, kind)
    _fill(model)
    stored: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 1}
    for name, parameter in model.named_parameters():
        for part, tensor in _by_component(name, parameter.detach()).items():
            halves = {f"{part}_w": tensor.chunk(2)[0], f"{part}_v": tensor.chunk(2)[-1]}
            is_gated = "mlp" in part and "linear_fc1.weight" in part
            stored |= {f"model.module.{own}": t for own, t in (halves if is_gated else {part: tensor}).items()}
    directory = path / "iter_0000003"
    dcp.save(stored, checkpoint_id=directory)  # type: ignore[attr-defined]
    (directory / "run_config.yaml").write_text("model:\n  tensor_model_parallel_size: 1\n")
    for file in (directory / "train_state.pt", path / "latest_train_state.pt"):
        torch.save({"step": torch.tensor(3), "consumed_train_samples": torch.tensor(24)}, file)
    fully_shard_model(model)
    save_checkpoint(path / "0", model=model)


def _load_bridge(world: World, kind: str, path: Path) -> bool:
    model = fully_shard_model(
        _make(world, kind, seed=7), mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    )
    extra = load_checkpoint(path, model=model)
    assert (extra["iteration"], extra["consumed_train_samples"]) == (3, 24)
    save_checkpoint(path / "1", model=model)
    unit: Any = next(module for module in model.modules() if isinstance(module, FSDPModule) and module is not model)
    main = {name: p.full_tensor() for name, p in unit.named_parameters() if isinstance(p, DTensor)}
    unit.unshard()
    return all(
        parameter.dtype is torch.bfloat16 and torch.equal(parameter, main[name].bfloat16())
        for name, parameter in unit.named_parameters()
    )


@pytest.mark.filterwarnings("ignore::Warning")  # torch warns about deprecated parts of its own.
@pytest.mark.parametrize(("kind", "world"), [("hybrid", World(4, tp=2)), ("experts", World(4, ep=2))], ids=str)
def test_bridges_checkpoint_fills_main_weights_at_full_precision(tmp_path: Path, kind: str, world: World) -> None:
    _on(World(1), _write_as_bridge_does, kind, tmp_path)
    expected = read(tmp_path / "0")
    assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in expected.values())
    assert run_ranks(_load_bridge, world.num_ranks, world, kind, tmp_path) == [True] * world.num_ranks
    assert_equal(read(tmp_path / "1"), expected)


def _refused_optimizer(world: World, kind: str, path: Path) -> str:
    model, optimizer = _sharded(world, kind, seed=7)
    with pytest.raises(CheckpointMismatch) as error:
        load_checkpoint(path, model=model, optimizer=optimizer)
    left = load_checkpoint(path, model=model, optimizer=optimizer, strict=False)
    assert {name.partition(".")[0] for name in left.left.missing} == {"optimizer"}
    assert not optimizer.state
    return str(error.value)


@pytest.mark.filterwarnings("ignore::Warning")  # torch warns about deprecated parts of its own.
def test_an_optimizer_that_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    _on(World(1), _write_as_bridge_does, "gated", tmp_path)
    message = _on(World(2, tp=2), _refused_optimizer, "gated", tmp_path)
    assert "optimizer.param_groups.embedding.word_embeddings.weight: absent from the checkpoint" in message


def _save_main_weights(world: World, kind: str, path: Path) -> dict[str, torch.Tensor]:
    """A bf16 model, and its distributed optimizer's fp32 weights beside it, written by megatron-core."""
    from megatron.core import dist_checkpointing, parallel_state

    model = _make(world, kind)
    _fill(model)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    exact = {f"model.{name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
    told = model.sharded_state_dict(metadata={"dp_cp_group": group})  # type: ignore[operator]
    told = {name: each for name, each in told.items() if isinstance(each.data, torch.Tensor)}
    main = {name: replace(each, key=f"optimizer.state.fp32_param.{each.key}") for name, each in told.items()}
    rounded = {
        name: replace(each, data=each.data.bfloat16()) for name, each in told.items() if hasattr(each, "build_fn")
    }
    rounded |= {
        name: replace(each, data=each.data.bfloat16(), dtype=torch.bfloat16)
        for name, each in told.items()
        if name not in rounded
    }
    (path / "dist").mkdir()
    dist_checkpointing.save({"model": rounded, "optimizer": main, "iteration": 12}, str(path / "dist"))
    return exact


@pytest.mark.filterwarnings("ignore::Warning")  # megatron-core and torch warn about what they do to themselves.
def test_main_weights_of_torch_dist_are_the_models(tmp_path: Path) -> None:
    files = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_process_memory", lambda: 0)  # It asks psutil, to log it.
        expected = _on(World(1), _save_main_weights, "gated", tmp_path)
    _on(World(4, tp=2), functools.partial(_load_torch_dist, optimizer=False), "gated", tmp_path)
    assert_equal(read(tmp_path / "1"), expected)


def _save_in_stage(world: World, kind: str, path: Path, stage: Any) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection

    model = _make(world, kind)
    _fill(model)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    fully_shard_model(model, groups=groups, options=ShardingOptions(placements=stage))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.sin(100 * parameter.detach())
    optimizer.step()
    save_checkpoint(path / "0", model=model, optimizer=optimizer, groups=groups)
    for slots in optimizer.state.values():
        slots["exp_avg"].zero_()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint(path / "0", model=model, optimizer=optimizer, groups=groups)
    save_checkpoint(path / "1", model=model, optimizer=optimizer, groups=groups)


@pytest.mark.parametrize("stage", [DDP, ZERO1, ZERO2], ids=str)
def test_every_stage_saves_and_loads_what_full_sharding_does(tmp_path: Path, stage: Any) -> None:
    world = World(4, tp=2, ep=2, etp=1)
    _on(world, _save_in_stage, "experts", tmp_path, stage)
    _on(world, _save_random, "experts", tmp_path / "full")
    assert_equal(read(tmp_path / "0"), read(tmp_path / "full"))
    assert_equal(read(tmp_path / "1"), read(tmp_path / "full"))


def test_models_and_groups_without_a_place_in_a_checkpoint_are_refused(tmp_path: Path) -> None:
    def on_each_rank() -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        model = _make(World(2), "gated")
        with pytest.raises(ValueError, match=r"got 'embedding.*' as a plain tensor.*Call lamella_megatron.fully_shard"):
            save_checkpoint(tmp_path / "no", model=model)
        fully_shard_model(model)
        with pytest.raises(ValueError, match="process group `tp`, got none"):
            save_checkpoint(tmp_path / "no", model=model, groups=ProcessGroupCollection())
        with pytest.raises(ValueError, match=r"`format` to be one of \('fsdp_dtensor', 'torch_dist'\), got 'zarr'"):
            save_checkpoint(tmp_path / "no", model=model, format="zarr")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"number of tensor-parallel ranks \(1\), got 2"):
            save_checkpoint(tmp_path / "no", model=model, args=Namespace(tensor_model_parallel_size=2))

    run_ranks(on_each_rank, 2)
    assert not any(tmp_path.iterdir())


def _save_replicated(world: World, kind: str, path: Path) -> None:
    model = _make(world, kind)
    _fill(model)
    rank, num = dist.get_rank(), world.num_ranks // world.tp  # Tensor-parallel ranks are neighbours.
    grid = torch.arange(world.num_ranks).view(2, num // 2, world.tp)
    mesh = init_device_mesh("cpu", tuple(grid.shape), mesh_dim_names=("replicate", "shard", "tensor"))
    assert mesh.get_local_rank("tensor") == rank % world.tp
    fully_shard(model, mesh=mesh["replicate", "shard"])
    save_checkpoint(path, model=model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint(path, model=model)
    save_checkpoint(path.with_name("again"), model=model)


def _save_filled(world: World, kind: str, path: Path) -> None:
    model = _make(world, kind)
    _fill(model)
    save_checkpoint(path, model=fully_shard_model(model))


def test_parameters_replicated_between_instances_are_saved_once(tmp_path: Path) -> None:
    _on(World(8, tp=2), _save_replicated, "gated", tmp_path / "0")
    _on(World(2, tp=2), _save_filled, "gated", tmp_path / "1")
    for name in ("0", "again"):
        assert_equal(read(tmp_path / name), read(tmp_path / "1"))
