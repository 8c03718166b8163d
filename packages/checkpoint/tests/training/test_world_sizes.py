"""A save by any number of ranks is loaded by any number. 0 stands for a process without a group."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]

from lamella_checkpoint import load, save
from lamella_testing import run_ranks
from lamella_testing.tiny import Kit

WORLD_SIZES = [0, 1, 2, 3, 4]


State = dict[str, torch.Tensor]
Trained = tuple[State, list[float], State]
T = TypeVar("T")


def run(num_ranks: int, fn: Callable[[], T]) -> T:
    return run_ranks(fn, num_ranks)[-1] if num_ranks else fn()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def saved(root: Path, kit: Kit) -> dict[int, Trained]:
    """By world size: the state that was saved, and the losses and the state after training went on."""

    def train_save_train(num_ranks: int) -> Trained:
        model, optimizer = kit.build(sharded=num_ranks > 0)
        kit.train(model, optimizer)
        save(root / str(num_ranks), model=model, optimizer=optimizer, extra={"step": 2})
        state = kit.state(model, optimizer)
        return state, kit.train(model, optimizer, num_steps=1), kit.state(model, optimizer)

    return {num_ranks: run(num_ranks, partial(train_save_train, num_ranks)) for num_ranks in WORLD_SIZES}


@pytest.fixture(scope="module")
def loaded(root: Path, kit: Kit, saved: dict[int, Trained]) -> dict[tuple[int, int], Trained]:
    """By (saving, loading) world size: the loaded state, and the state after training."""

    def load_all_train(num_ranks: int) -> dict[int, Trained]:
        results = {}
        for source in WORLD_SIZES:
            model, optimizer = kit.build(sharded=num_ranks > 0, seed=1)
            assert load(root / str(source), model=model, optimizer=optimizer) == {"step": 2}
            state = kit.state(model, optimizer)
            results[source] = state, kit.train(model, optimizer, num_steps=1), kit.state(model, optimizer)
        return results

    by_target = {target: run(target, partial(load_all_train, target)) for target in WORLD_SIZES}
    return {(source, target): by_target[target][source] for source in WORLD_SIZES for target in WORLD_SIZES}


@pytest.mark.parametrize("target", WORLD_SIZES)
@pytest.mark.parametrize("source", WORLD_SIZES)
def test_weights_buffers_and_optimizer_arrive_bit_equal(
    saved: dict[int, Trained], loaded: dict[tuple[int, int], Trained], source: int, target: int
) -> None:
    expected, arrived = saved[source][0], loaded[source, target][0]
    assert set(arrived) == set(expected)
    assert "norm.num_batches_tracked" in arrived and "hidden.weight/exp_avg_sq" in arrived
    assert "frozen.weight/step" not in arrived
    different = [name for name in expected if not torch.equal(expected[name], arrived[name])]
    assert not different


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
def test_training_continues_bit_equal_on_the_same_ranks(
    saved: dict[int, Trained], loaded: dict[tuple[int, int], Trained], num_ranks: int
) -> None:
    _, losses, after = saved[num_ranks]
    _, resumed_losses, resumed = loaded[num_ranks, num_ranks]
    assert resumed_losses == losses
    assert all(torch.equal(resumed[name], after[name]) for name in after)


@pytest.mark.parametrize("target", WORLD_SIZES)
@pytest.mark.parametrize("source", WORLD_SIZES)
def test_training_continues_closely_on_other_ranks(
    saved: dict[int, Trained], loaded: dict[tuple[int, int], Trained], source: int, target: int
) -> None:
    # Ranks sum gradients in another order: fp32 rounding, which Adam's division by small moments spreads.
    _, losses, after = saved[source]
    _, resumed_losses, resumed = loaded[source, target]
    assert resumed_losses == pytest.approx(losses, rel=1e-5)
    for name in after:
        torch.testing.assert_close(resumed[name], after[name], rtol=1e-4, atol=1e-5)


def test_names_do_not_depend_on_the_number_of_ranks(root: Path, saved: dict[int, Trained]) -> None:
    names = [set(FileSystemReader(root / str(n)).read_metadata().state_dict_metadata) for n in WORLD_SIZES]
    assert all(name == names[0] for name in names)


def test_shards_are_written_by_the_ranks_that_own_them(root: Path, saved: dict[int, Trained]) -> None:
    assert {path.name for path in Path(root / "3").glob("*.distcp")} == {f"__{n}_0.distcp" for n in range(3)}
