"""Checkpoints of models that train with Muon: matrices whole on single ranks, saved and resumed on any ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from background import FORMATS
from muon_runs import made, muon_config, products_in_fp64, train, whole_of, wrapped
from resuming import World, assert_equal, fill, make, on_rank_zero, read
from torch import nn

from lamella_checkpoint import CheckpointMismatch, Wanted, load, save
from lamella_convert import from_megatron_model, open_checkpoint, to_megatron_model
from lamella_engine import ShardingOptions, fully_shard
from lamella_layout import Chunk
from lamella_megatron import fully_shard_model, load_checkpoint, save_checkpoint
from lamella_testing import run_ranks
from lamella_testing.megatron_parity import Layout, Weights, own_part

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of megatron-core's own loads

TWO = Layout(num_ranks=2)


@pytest.fixture(scope="module", autouse=True)
def in_fp64(on_cpu: None) -> Iterator[None]:
    with products_in_fp64():
        yield


def _begin(kind: str, layout: Layout, written: Any, path: Path, **options: Any) -> None:
    """Train, save, and train on: the run that never stopped."""
    from lamella_megatron.training import sharded_optimizer

    model = wrapped(kind, layout, **options)
    optimizer = sharded_optimizer(muon_config(), [model])
    train(model, optimizer, 2)
    save_checkpoint(path / "saved", model=model, optimizer=optimizer.optimizer, format=written)
    train(model, optimizer, 2)
    save_checkpoint(path / "went on", model=model, optimizer=optimizer.optimizer)


def _resume(kind: str, layout: Layout, path: Path, **options: Any) -> None:
    from lamella_megatron.training import sharded_optimizer

    model = wrapped(kind, layout, **options)
    _clear(model)
    optimizer = sharded_optimizer(muon_config(), [model])
    load_checkpoint(path / "saved", model=model, optimizer=optimizer.optimizer)
    for slots in optimizer.optimizer.state.values():  # torch_dist has one number of steps for all
        assert slots.keys() in ({"momentum_buffer"}, {"exp_avg", "exp_avg_sq", "step"})
    train(model, optimizer, 2)
    save_checkpoint(path / "resumed", model=model, optimizer=optimizer.optimizer)


@torch.no_grad()
def _clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()


RESUMED = [
    ("gpt", TWO, [TWO, Layout(num_ranks=1), Layout(num_ranks=4)]),
    ("gpt", Layout(num_ranks=4, tp=2), [Layout(num_ranks=4, tp=2), Layout(num_ranks=2, tp=2)]),
    ("moe", Layout(num_ranks=2, ep=2), [Layout(num_ranks=2, ep=2), Layout(num_ranks=1), Layout(num_ranks=4, ep=2)]),
    ("moe", Layout(num_ranks=4, tp=2, ep=2), [Layout(num_ranks=2, tp=2)]),
    ("M*-", TWO, [Layout(num_ranks=4)]),
]


@pytest.mark.parametrize(
    ("kind", "first", "others", "written"),
    [  # The first cases in turns; the others, and each in the other format, among the slow tests.
        pytest.param(*case, written, marks=() if i < 3 and written == FORMATS[i % 2] else pytest.mark.slow)
        for i, case in enumerate(RESUMED)
        for written in FORMATS
    ],
    ids=str,
)
def test_muon_runs_resumed_on_other_ranks_go_on_as_uninterrupted(
    tmp_path: Path, kind: str, first: Layout, others: list[Layout], written: str
) -> None:
    run_ranks(_begin, first.num_ranks, kind, first, written, tmp_path)
    expected = read(tmp_path / "went on")
    slots = {name.rpartition(".")[2] for name in expected if name.startswith("optimizer.state")}
    assert slots == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    for layout in others:
        run_ranks(_resume, layout.num_ranks, kind, layout, tmp_path)
        # On as many ranks to the bit; on others gradients are added up in another order.
        tolerance = 0.0 if layout == first else 1e-6
        assert_equal(read(tmp_path / "resumed"), expected, rtol=tolerance, atol=tolerance)


STAGED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "DDP": (TWO, {"stage": "DDP"}),
    "ZeRO-1": (TWO, {"stage": "ZeRO-1"}),
    "ZeRO-3": (TWO, {"stage": "ZeRO-3"}),
    "HSDP": (Layout(num_ranks=4, instances=2), {}),
    "HFSDP": (Layout(num_ranks=4, instances=2), {"outer_dp_sharding_strategy": "optim"}),
}


@pytest.mark.slow
def test_every_stage_is_saved_and_resumed_in_another(tmp_path: Path) -> None:
    saved_in = {other: first for first, other in pairwise([*STAGED, "DDP"])}

    def in_stages_of(layout: Layout, run: Callable[..., None]) -> None:
        from megatron.core import parallel_state

        for stage, (layout_of_stage, options) in STAGED.items():
            if layout_of_stage == layout:
                run(stage, layout, options)
                parallel_state.destroy_model_parallel()

    def begin(stage: str, layout: Layout, options: dict[str, Any]) -> None:
        _begin("gpt", layout, "fsdp_dtensor", tmp_path / stage, **options)

    def resume(stage: str, layout: Layout, options: dict[str, Any]) -> None:
        _resume("gpt", layout, tmp_path / saved_in[stage], **options)

    for run in (begin, resume):
        for layout in (TWO, Layout(num_ranks=4, instances=2)):
            run_ranks(in_stages_of, layout.num_ranks, layout, run)
    for stage in STAGED:
        assert_equal(read(tmp_path / stage / "resumed"), read(tmp_path / stage / "went on"), rtol=1e-6, atol=1e-6)


def _with_muon(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    from lamella_megatron._driver.muon import is_matrix
    from lamella_megatron.training import keep_matrices
    from lamella_optim import MuonAndAdam

    fully_shard_model(model, options=ShardingOptions(keep_together=keep_matrices))
    return model, MuonAndAdam(
        [{"params": list(model.parameters())}], is_matrix=is_matrix, muon={"lr": 0.02}, adam={"lr": 0.02}
    )


def _save_random(world: World, kind: str, path: Path) -> None:
    model = make(world, kind)
    fill(model)
    model, optimizer = _with_muon(model)
    for parameter in model.parameters():
        parameter.grad = torch.sin(100 * parameter.detach())
    optimizer.step()
    save_checkpoint(path, model=model, optimizer=optimizer)


def _load_and_save(world: World, kind: str, path: Path, again: Path) -> None:
    model, optimizer = _with_muon(make(world, kind, seed=7))
    load_checkpoint(path, model=model, optimizer=optimizer)
    save_checkpoint(again, model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        pytest.param("gated", [World(4, tp=2), World(3), World(4, pp=2), World(4, tp=2, pp=2)], marks=pytest.mark.slow),
        ("experts", [World(4, tp=2, ep=2, etp=1), World(3), World(4, ep=4)]),
        ("hybrid", [World(4, tp=2), World(3)]),
    ],
    ids=str,
)
def test_every_element_survives_any_change_of_ranks(tmp_path: Path, kind: str, worlds: list[World]) -> None:
    """Of tensor-parallel ranks too, whose further steps differ: each orthogonalises its part of a matrix."""
    on_rank_zero(worlds[0], _save_random, kind, tmp_path / "0")
    expected = read(tmp_path / "0")
    for index, world in enumerate(worlds[1:]):
        on_rank_zero(world, _load_and_save, kind, tmp_path / f"{index}", tmp_path / f"{index + 1}")
        assert_equal(read(tmp_path / f"{index + 1}"), expected)


def _save_both(kind: str, layout: Layout, path: Path) -> Weights:
    """Train and save in both formats; this rank's parts."""
    from lamella_megatron.training import sharded_optimizer

    model = wrapped(kind, layout)
    optimizer = sharded_optimizer(muon_config(), [model])
    train(model, optimizer, 1)
    for written in ("fsdp_dtensor", "torch_dist"):
        save_checkpoint(path / written, model=model, optimizer=optimizer.optimizer, format=written)
    return {name: whole_of(parameter).clone() for name, parameter in model.module.named_parameters()}


def _read_unsharded(kind: str, path: Path) -> tuple[Weights, Weights]:
    """The weights in a model without units: `torch_dist` by megatron-core, `fsdp_dtensor` by lamella."""
    from megatron.core import dist_checkpointing, parallel_state

    plain: Any = made(kind, Layout(num_ranks=1))
    _clear(plain)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    asked = {"model": plain.sharded_state_dict(metadata={"dp_cp_group": group})}
    loaded = dist_checkpointing.load(asked, str(path / "torch_dist"), strict="raise_unexpected")
    plain.load_state_dict(loaded["model"], strict=False)
    by_megatron = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    _clear(plain)
    shapes = {name: tuple(parameter.shape) for name, parameter in plain.named_parameters()}
    parts = from_megatron_model(shapes, sizes={"tp": 1, "etp": 1})
    source = to_megatron_model(open_checkpoint(path / "fsdp_dtensor"), parts)
    by_lamella = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    source.read(
        [Wanted(f"model.{name}", Chunk((0,) * len(shape), shape), by_lamella[name]) for name, shape in shapes.items()]
    )
    return by_megatron, by_lamella


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("gpt", Layout(num_ranks=4, tp=2)), ("moe", Layout(num_ranks=4, tp=2, ep=2)), ("moe", Layout(num_ranks=4, ep=2))],
    ids=str,
)
def test_an_unsharded_model_reads_the_weights(tmp_path: Path, kind: str, layout: Layout) -> None:
    parts = run_ranks(_save_both, layout.num_ranks, kind, layout, tmp_path)
    [read_back] = run_ranks(_read_unsharded, 1, kind, tmp_path)

    def compare() -> None:
        mine = parts[torch.distributed.get_rank()]
        for name, parameter in made(kind, layout).named_parameters():
            for weights in read_back:
                assert torch.equal(own_part(name, parameter, weights), mine[name]), name

    run_ranks(compare, layout.num_ranks)


def _save_evenly(kind: str, layout: Layout, path: Path) -> None:
    from lamella_megatron.training import sharded_optimizer

    model = wrapped(kind, layout, for_muon=False)
    optimizer = sharded_optimizer(muon_config(optimizer="adam"), [model])
    train(model, optimizer, 1)
    save_checkpoint(path, model=model, optimizer=optimizer.optimizer)


def _load_weights(kind: str, layout: Layout, path: Path, for_muon: bool) -> str:
    """Load weights alone, after the optimizer's state was refused; the error."""
    from lamella_megatron.training import sharded_optimizer

    model = wrapped(kind, layout, for_muon=for_muon)
    before = {name: whole_of(parameter).clone() for name, parameter in model.named_parameters()}
    optimizer = sharded_optimizer(muon_config(**{} if for_muon else {"optimizer": "adam"}), [model])
    with pytest.raises(ValueError, match="Load the weights alone") as error:
        load_checkpoint(path, model=model, optimizer=optimizer.optimizer)
    assert not optimizer.optimizer.state
    assert all(torch.equal(whole_of(parameter), before[name]) for name, parameter in model.named_parameters())
    load_checkpoint(path, model=model)
    save_checkpoint(path.parent / "again", model=model)
    return str(error.value)


@pytest.mark.parametrize("for_muon", [False, True])
def test_weights_move_between_whole_matrices_and_even_shards_without_the_optimizer(
    tmp_path: Path, for_muon: bool
) -> None:
    layout, other = Layout(num_ranks=4, tp=2, ep=2), TWO
    if for_muon:
        run_ranks(_save_evenly, layout.num_ranks, "moe", layout, tmp_path / "fsdp_dtensor")
    else:
        run_ranks(_save_both, layout.num_ranks, "moe", layout, tmp_path)
    path = tmp_path / "fsdp_dtensor"
    errors = run_ranks(_load_weights, other.num_ranks, "moe", other, path, for_muon)
    slots = ("exp_avg, exp_avg_sq, step", "momentum_buffer")
    own_slots, stored = reversed(slots) if for_muon else slots
    kind = "Muon" if for_muon else "AdamW"
    assert errors[0] == (
        f"Expected the checkpoint to hold {own_slots} of 'embedding.position_embeddings.weight', the state of {kind}, "
        f"got {stored}, another optimizer's. Load the weights alone: leave `optimizer` out."
    )
    weights = {name: tensor for name, tensor in read(path).items() if name.startswith("model.")}
    assert_equal(read(tmp_path / "again"), weights)


def test_lamellas_own_checkpoints_resume_and_tell_muon_from_other_optimizers(tmp_path: Path) -> None:
    """A model of torch's modules: megatron-core's have state without tensors, which lamella-checkpoint refuses."""

    def made_and_sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
        from lamella_megatron._driver.muon import is_matrix
        from lamella_megatron.training import keep_matrices
        from lamella_optim import MuonAndAdam

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8), nn.LayerNorm(8))
        fully_shard(model, options=ShardingOptions(keep_together=keep_matrices))
        return model, MuonAndAdam(
            [{"params": list(model.parameters())}], is_matrix=is_matrix, muon={"lr": 0.02}, adam={"lr": 0.02}
        )

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()  # equal on all ranks, so that sums over any number are exact
            optimizer.step()

    def begin() -> None:
        model, optimizer = made_and_sharded()
        step(model, optimizer)
        save(tmp_path / "saved", model=model, optimizer=optimizer)
        step(model, optimizer)
        save(tmp_path / "went on", model=model, optimizer=optimizer)

    def resume() -> None:
        model, optimizer = made_and_sharded()
        _clear(model)
        load(tmp_path / "saved", model=model, optimizer=optimizer)
        step(model, optimizer)
        save(tmp_path / "resumed", model=model, optimizer=optimizer)
        for other in (torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)):
            with pytest.raises(CheckpointMismatch, match=r"optimizer: a .*MuonAndAdam in the checkpoint, a torch"):
                load(tmp_path / "saved", model=model, optimizer=other)

    run_ranks(begin, 2)
    for num_ranks in (1, 2, 4):
        run_ranks(resume, num_ranks)
        assert_equal(read(tmp_path / "resumed"), read(tmp_path / "went on"))
