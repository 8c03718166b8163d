"""Checkpoints of models whose experts are spread: of all experts, for other ranks, other programs and other models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once here instead of once a rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from expert_training import batches_of, moe, plain_step, scheduled_step, sharded
from torch import nn
from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from lamella_checkpoint import AsyncSaver, load, save
from lamella_convert import save_safetensors
from lamella_engine import (
    MixedPrecisionPolicy,
    Rows,
    ShardingOptions,
    fully_shard,
    load_scaling_state,
    scaling_state,
)
from lamella_optim import clip_grad_norm_, step_on_local_shards
from lamella_precision import Float8Recipe
from lamella_testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Training = tuple[nn.Module, torch.optim.Optimizer]
FAMILY = "qwen3_moe"


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def _on_local_shards(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = _adamw(model)
    step_on_local_shards(optimizer)
    return optimizer


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW, foreach": lambda model: _adamw(model, foreach=True),
    "AdamW on plain shards": _on_local_shards,
}


def _training(ep: int, *, family: str = FAMILY, seed: int = 3, optimizer: str = "SGD", **options: Any) -> Training:
    model = sharded(moe(family, num_layers=1, seed=seed), ep, **options)
    return model, OPTIMIZERS[optimizer](model)


def _never_spread(seed: int, optimizer: str) -> Training:
    model: Any = moe(FAMILY, num_layers=1, seed=seed)
    for unit in (*model.model.layers, model):
        fully_shard(unit)
    return model, OPTIMIZERS[optimizer](model)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    losses = scheduled_step(model, batches_of(dist.get_rank())[:2])
    optimizer.step()
    optimizer.zero_grad()
    return losses


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, as plain torch reads it."""
    table = FileSystemReader(path).read_metadata().state_dict_metadata.items()
    tensors = {
        name: torch.empty(tensor_metadata.size, dtype=tensor_metadata.properties.dtype)
        for name, tensor_metadata in table
        if isinstance(tensor_metadata, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=path)  # type: ignore[attr-defined]
    return tensors


def _bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's weights and optimizer state."""
    tensors = [
        tensor
        for parameter in model.parameters()
        for tensor in (parameter, *optimizer.state[parameter].values())
        if isinstance(tensor, torch.Tensor)
    ]
    return [
        (sharded_tensor.to_local() if isinstance(sharded_tensor, DTensor) else sharded_tensor).detach().clone()
        for sharded_tensor in tensors
    ]


@pytest.mark.parametrize("optimizer", ["AdamW on plain shards", pytest.param("AdamW, foreach", marks=pytest.mark.slow)])
def test_all_experts_and_their_state_go_from_ranks_to_other_ranks(tmp_path: Path, optimizer: str) -> None:
    ways: list[Callable[[], Training]] = [
        lambda: _training(4, seed=4, optimizer=optimizer),  # EP 2 x DP 2 -> EP 4
        lambda: _training(1, seed=4, optimizer=optimizer, options=ShardingOptions(keep_together=Rows(1))),  # -> EP 1
        lambda: _never_spread(4, optimizer),
    ]

    def pass_on() -> None:
        training = _training(2, optimizer=optimizer)
        _step(*training)
        save(tmp_path / "0", model=training[0], optimizer=training[1])
        for i, make in enumerate(ways):
            model, its_optimizer = make()
            load(tmp_path / str(i), model=model, optimizer=its_optimizer)
            save(tmp_path / str(i + 1), model=model, optimizer=its_optimizer)

    run_ranks(pass_on, 4)
    first = _tensors(tmp_path / "0")
    for i in range(1, len(ways) + 1):
        passed_on = _tensors(tmp_path / str(i))
        assert first.keys() == passed_on.keys()
        assert all(torch.equal(passed_on[name], first[name]) for name in first), i

    model = moe(FAMILY, num_layers=1, seed=4)
    its_optimizer = _adamw(model) if "AdamW" in optimizer else OPTIMIZERS["SGD"](model)
    load(tmp_path / "0", model=model, optimizer=its_optimizer)
    assert all(torch.equal(value, first[f"model.{name}"]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        for slot, value in its_optimizer.state[parameter].items():
            assert slot == "step" or value.shape == parameter.shape
            assert torch.equal(value, first[f"optimizer.state.{name}.{slot}"])


def _saved_by_lamella(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Training], object]:
    save(path, model=model, optimizer=optimizer)
    return lambda training: load(path, model=training[0], optimizer=training[1])


def _saved_behind_a_step(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Training], object]:
    with AsyncSaver() as saver:
        handle = saver.save(path, model=model, optimizer=optimizer)
        _step(model, optimizer)
        handle.wait()
    return lambda training: load(path, model=training[0], optimizer=training[1])


def _saved_by_torch(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Training], object]:
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)  # type: ignore[attr-defined]

    def loaded(training: Training) -> None:
        state: Any = {"model": get_model_state_dict(training[0]), "optimizer": get_optimizer_state_dict(*training)}
        dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined]
        set_model_state_dict(training[0], state["model"])
        set_optimizer_state_dict(*training, state["optimizer"])

    return loaded


@pytest.mark.parametrize(
    "saved", [_saved_by_lamella, _saved_by_torch, pytest.param(_saved_behind_a_step, marks=pytest.mark.slow)]
)
def test_a_resumed_run_equals_the_uninterrupted_run(tmp_path: Path, saved: Any) -> None:
    def on_each_rank() -> tuple[int, int]:
        uninterrupted = _training(2)
        _step(*uninterrupted)
        before = _bits(*uninterrupted)
        losses = _step(*uninterrupted)
        interrupted = _training(2)
        _step(*interrupted)
        loaded = saved(tmp_path / "step", *interrupted)
        resumed = _training(2, seed=4)
        loaded(resumed)
        losses_after = _step(*resumed)
        pairs = zip([*losses, *_bits(*uninterrupted)], [*losses_after, *_bits(*resumed)], strict=True)
        changed = zip(before, _bits(*resumed), strict=True)
        return sum(not torch.equal(a, b) for a, b in pairs), sum(not torch.equal(a, b) for a, b in changed)

    for num_unequal, num_changed in run_ranks(on_each_rank, 2):
        assert num_unequal == 0
        assert num_changed > 10


def test_delayed_scales_of_spread_experts_go_on_from_a_state_for_each_part_of_the_experts(tmp_path: Path) -> None:
    recipe = Float8Recipe(num_past_amaxes=2, compute_dtype=torch.float32)

    def on_each_rank() -> list[bool]:
        uninterrupted, resumed, forgetful = (_training(2, seed=seed, recipe=recipe) for seed in (3, 4, 5))
        model: Any = uninterrupted[0]
        experts = model.model.layers[0].mlp.experts.mesh
        _step(*uninterrupted)
        with pytest.raises(ValueError, match=r"experts.* to have the same scales on all ranks of `group`"):
            scaling_state(model)
        state = scaling_state(model, group=experts.get_group(0))
        save(tmp_path / "step", model=model, optimizer=uninterrupted[1])
        for training in (resumed, forgetful):
            load(tmp_path / "step", model=training[0], optimizer=training[1])
        load_scaling_state(resumed[0], json.loads(json.dumps(state)))
        expected, resumed_bits, other = (
            [*_step(*training), *_bits(*training)] for training in (uninterrupted, resumed, forgetful)
        )
        return [all(map(torch.equal, expected, resumed_bits)), all(map(torch.equal, expected, other))]

    assert run_ranks(on_each_rank, 4) == [[True, False]] * 4


def test_a_model_that_had_no_memory_is_filled_from_a_checkpoint(tmp_path: Path) -> None:
    def on_each_rank() -> None:
        save(tmp_path / "step", model=_training(2)[0])
        with torch.device("meta"):
            model = moe(FAMILY, num_layers=1)
        sharded(model, 2).to_empty(device="cpu")
        load(tmp_path / "step", model=model)
        save(tmp_path / "again", model=model)

    run_ranks(on_each_rank, 2)
    first, again = _tensors(tmp_path / "step"), _tensors(tmp_path / "again")
    assert first.keys() == again.keys()
    assert all(torch.equal(again[name], first[name]) for name in first)


def _whole_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """torch's whole state dicts: of the model, and of the optimizer's momentum."""
    full_options = StateDictOptions(full_state_dict=True)
    momenta = get_optimizer_state_dict(model, optimizer, options=full_options)
    return get_model_state_dict(model, options=full_options), momenta


def test_torchs_whole_state_dicts_have_all_experts_and_set_a_model_on_other_ranks() -> None:
    full_options = StateDictOptions(full_state_dict=True)

    def on_each_rank() -> list[bool]:
        training, other = _training(1), _training(2, seed=4)
        _step(*training)
        weights, state = _whole_states(*training)
        shapes = {name: value.shape for name, value in moe(FAMILY, num_layers=1).state_dict().items()}
        assert {name: value.shape for name, value in weights.items()} == shapes
        set_model_state_dict(other[0], weights, options=full_options)  # torch puts its own values into the given dicts
        set_optimizer_state_dict(*other, state, options=full_options)
        pairs = list(zip(_whole_states(*training), _whole_states(*other), strict=True))
        momenta = [(a["state"][name], b["state"][name]) for a, b in pairs[1:] for name in a["state"]]
        return [
            *(torch.equal(value, pairs[0][1][name]) for name, value in pairs[0][0].items()),
            *(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in momenta),
        ]

    for equal in run_ranks(on_each_rank, 2):
        assert len(equal) > 20
        assert all(equal)


def test_gradients_norm_is_that_of_all_experts() -> None:
    def on_each_rank() -> float:
        model, _ = _training(2)
        plain_step(model, batches_of(0)[:1])  # the same on both ranks: means are the gradients of one
        return float(clip_grad_norm_(model.parameters(), 1.0))

    def alone() -> float:
        model: Any = moe(FAMILY, num_layers=1)
        model(**batches_of(0)[0], use_cache=False).loss.backward()
        return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))

    assert run_ranks(on_each_rank, 2) == pytest.approx(run_ranks(alone, 1) * 2, rel=1e-5)


@pytest.mark.parametrize("family", [FAMILY, pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_an_exported_folder_opens_in_transformers(tmp_path: Path, family: str) -> None:
    published: Any = moe(family, num_layers=1)
    published.save_pretrained(tmp_path / "published")

    def on_each_rank() -> None:
        training = _training(2, family=family, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        _step(*training)
        save_safetensors(tmp_path / "exported", model=training[0], like=tmp_path / "published")
        save(tmp_path / "step", model=training[0])

    run_ranks(on_each_rank, 2)
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    model, report = opened
    assert not any(report.values()), report
    expected = _tensors(tmp_path / "step")
    assert all(torch.equal(value, expected[f"model.{name}"]) for name, value in model.state_dict().items())
