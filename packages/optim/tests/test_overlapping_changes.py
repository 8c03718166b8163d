"""What a step has gathered for the next forward is thrown away, and gathered again, if something comes between."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from engine_models import BF16, EVERY_STAGE, Net, case, fsdp, local, shard, shard_on
from optimizer_pairs import ADAMW, LOSS, Act, Overlapped, X, do_nothing, run_backward
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import ShardingOptions, fully_shard, share_comm_ctx
from lamella_engine.testing import assert_at_rest, held_nbytes
from lamella_optim import overlap_optimizer
from lamella_testing import run_ranks

# -- weights between step and forward --------------------------------------------------------------------------------


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def _load_and_assign(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


def _write(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def _write_one_of_the_second_unit(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("layers.0.up.weight").copy_(model.get_parameter("layers.1.up.weight"))


def _write_rows(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("stem.weight")[:2].zero_()


def _replace_storage(model: nn.Module) -> None:
    """As `.to()` on a module inside of a unit, which the unit is not told of."""
    stem = model.get_submodule("stem")
    parameters = dict(stem.named_parameters())
    stem.to(torch.float64)
    stem.to(torch.float32)
    with torch.no_grad():
        for name, parameter in stem.named_parameters():
            assert parameter is parameters[name]
            local(parameter).mul_(2.0)


def _put_another(model: nn.Module) -> None:
    stem = model.get_submodule("stem")
    stem.weight = nn.Parameter(stem.get_parameter("weight").detach() * 0.5)


def _freeze_the_stem(model: nn.Module) -> None:
    """Frozen parameters stay frozen when prefetched weights are thrown away."""
    model.get_submodule("stem").requires_grad_(False)
    _write(model)
    assert not model.get_parameter("stem.weight").requires_grad


def _say(act: Act) -> Act:
    def said(model: nn.Module) -> None:
        act(model)
        fsdp(model).mark_updated()

    said.__name__ = f"{act.__name__} and say so"
    return said


def _write_shards(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).mul_(0.5)


def _write_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def _write_at_once(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def _step_with_another(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize(
    "act",
    [
        _load,
        _load_and_assign,
        _write,
        _write_one_of_the_second_unit,
        _write_rows,
        _replace_storage,
        _put_another,
        _freeze_the_stem,
        _say(_write_shards),
        _say(_write_data),
        _say(_write_at_once),
        _step_with_another,
    ],
    ids=lambda act: act.__name__.strip("_"),
)
def test_weights_that_change_after_the_step_are_gathered_again(act: Act) -> None:
    def check() -> None:
        def act_and_look(model: nn.Module) -> None:
            act(model)
            _look(model)

        for between in (act, act_and_look):
            pair = Overlapped()
            pair.train(between=between)
            pair.assert_looks_alike()
            pair.assert_equal()

    run_ranks(check, 2)


@pytest.mark.parametrize("stage", ["ZERO1", "ZERO2", "HSDP, ZERO3", "HFSDP, ZERO3"])
def test_copies_that_persist_are_made_again_too(stage: str) -> None:
    shape, placements = EVERY_STAGE[stage]

    def act_after_resharding(model: nn.Module) -> None:
        _reshard(model)
        _write(model)

    def check() -> None:
        for act in (_write, _freeze_the_stem, act_after_resharding):
            with case(act.__name__):
                pair = Overlapped(
                    partial(Net, dim=8),
                    shard_on(shape, options=ShardingOptions(placements=placements), mp_policy=BF16),
                    looks=False,
                )
                pair.train(between=act)
                pair.assert_looks_alike()
                pair.assert_equal()

    run_ranks(check, torch.Size(shape).numel())


def test_weights_that_change_before_a_unit_is_unsharded_by_hand_are_gathered_again() -> None:
    def check() -> None:
        pair = Overlapped()
        for use in ("unshard", "hold"):
            with case(use):
                pair.train()
                for model in pair.models:
                    _write(model)
                handles = [getattr(fsdp(model), use)() for model in pair.models]
                for handle in handles:
                    if handle is not None:
                        handle.wait()
                weights = [model.get_parameter("stem.weight").detach().clone() for model in pair.models]
                assert torch.equal(*weights)
                for model, handle in zip(pair.models, handles, strict=True):
                    if handle is not None:
                        handle.release()
                    fsdp(model).reshard()

    run_ranks(check, 2)


def test_a_shard_that_was_written_and_not_said_to_be_is_an_error_on_its_rank() -> None:
    def check() -> None:
        pair = Overlapped()
        pair.train()
        _write_shards(pair.model)
        with pytest.raises(RuntimeError, match=r"mark_updated\(\).*overlap_optimizer"):
            pair.model(X)
        for model in pair.models:
            fsdp(model).mark_updated()
        _write_shards(pair.models[0])
        pair.train()
        pair.assert_looks_alike()

    run_ranks(check, 2)


@pytest.mark.parametrize("reshards", [None, True])
def test_a_step_between_a_forward_and_its_backward_is_seen_by_the_backward_as_without(reshards: bool | None) -> None:
    def check() -> None:
        pair = Overlapped(apply=shard_on((2,), reshard_after_forward=reshards))
        pair.train()
        for act in (do_nothing, _write_one_of_the_second_unit):
            for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
                run_backward(model)
                loss = LOSS(model)
                optimizer.step()
                act(model)
                optimizer.zero_grad()
                loss.backward()
            pair.assert_equal()
            pair.step()

    run_ranks(check, 2)


# -- between steps ---------------------------------------------------------------------------------------------------


def _look(model: nn.Module) -> None:
    with torch.no_grad():
        model(X)


def _look_at_one_unit(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_submodule("layers.1")(torch.ones(2, 7))


def _look_with_gradients(model: nn.Module) -> None:
    model(X)


def _ask_for_a_state_dict(model: nn.Module) -> None:
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


def _ask_one_unit_for_a_state_dict(model: nn.Module) -> None:
    model.get_submodule("layers.0").state_dict()


def _unshard_and_reshard(model: nn.Module) -> None:
    fsdp(model).unshard()
    fsdp(model).reshard()


def _reshard(model: nn.Module) -> None:
    for layer in (model, model.get_submodule("layers.0")):
        fsdp(layer).reshard()


def _reset(model: nn.Module) -> None:
    fsdp(model).reset_iter_state()


@pytest.mark.parametrize(
    "act",
    [
        _look,
        _look_at_one_unit,
        _look_with_gradients,
        _ask_for_a_state_dict,
        _ask_one_unit_for_a_state_dict,
        _unshard_and_reshard,
        _reshard,
        _reset,
    ],
    ids=lambda act: act.__name__.strip("_"),
)
def test_uses_of_a_model_between_overlapped_steps_change_no_result(act: Act) -> None:
    def check() -> None:
        pair = Overlapped()
        assert pair.train(between=act) == ["root", "layers.0"]
        pair.assert_equal()
        pair.backward()
        assert_at_rest(pair.model)

    run_ranks(check, 2)


def test_a_forward_of_an_inner_unit_frees_units_gathered_in_the_step() -> None:
    def check() -> None:
        pair = Overlapped()
        pair.train()
        assert set(held_nbytes(pair.model)) == {"root", "layers.0"}
        _look_at_one_unit(pair.model)
        assert_at_rest(pair.model)

    run_ranks(check, 2)


def test_remove_frees_units_gathered_in_the_step_and_ends_the_overlap() -> None:
    def check() -> None:
        pair = Overlapped()
        pair.train()
        pair.handle.remove()
        assert_at_rest(pair.model)
        assert pair.train() == []
        pair.handle = overlap_optimizer(pair.optimizer)
        assert pair.train() == ["root", "layers.0"]

    run_ranks(check, 2)


def test_an_unfinished_gather_keeps_no_rank_from_ending() -> None:
    run_ranks(lambda: Overlapped().train() and None, 2)


def test_a_deleted_model_is_freed_at_once_with_units_gathered_in_the_step() -> None:
    def check() -> None:
        model = shard(Net())
        optimizer = ADAMW(model)
        overlap_optimizer(optimizer)
        for _ in range(2):
            run_backward(model)
            optimizer.step()
        gone = weakref.ref(model.layers[0])
        gc.collect()
        gc.disable()
        del model, optimizer
        try:
            assert gone() is None
        finally:
            gc.enable()

    run_ranks(check, 2)


def test_units_gathered_in_the_step_are_freed_when_a_tree_gets_shared_streams() -> None:
    def check() -> None:
        pair = Overlapped()
        pair.train()
        share_comm_ctx([fsdp(shard(Net())), fsdp(pair.model)])
        assert_at_rest(pair.model)
        pair.train()

    run_ranks(check, 2)


def test_an_outer_unit_that_comes_later_finds_nothing_gathered() -> None:
    def check() -> None:
        pair = Overlapped()
        pair.train()
        outer = nn.Sequential(pair.model)
        fully_shard(outer)
        assert_at_rest(pair.model)
        pair.backward()
        pair.step()

    run_ranks(check, 2)


def test_the_order_check_finds_nothing_to_say() -> None:
    def check() -> None:
        pair = Overlapped()
        fsdp(pair.model).set_options(order_check=True)
        assert pair.train(between=_write) == ["root", "layers.0"]
        pair.backward()

    run_ranks(check, 2)
