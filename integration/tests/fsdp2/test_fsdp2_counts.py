"""Collectives of a step, in units of one gather a unit and one reduction a unit."""

import torch
from fsdp2_models import Api, Stack, count, descend, inputs, on_ranks, shard, units
from torch import nn

NUM_BLOCKS = 3
NUM_UNITS = NUM_BLOCKS + 1


def _counts(model: nn.Module) -> list[tuple[int, int]]:
    """(gathers, reductions) of a forward and of a backward, and nothing else."""
    forward, loss = count(lambda: model(inputs()).sum())
    backward, _ = count(loss.backward)
    assert {*forward, *backward} <= {"all_gather", "reduce_scatter"}
    return [(counts.get("all_gather", 0), counts.get("reduce_scatter", 0)) for counts in (forward, backward)]


def test_a_step_gathers_and_reduces_each_unit_as_often_as_the_flag_says(api: Api) -> None:
    def scenario(reshard: bool | None, num_gathers_in_backward: int) -> None:
        model = shard(api, Stack(), reshard_after_forward=reshard)
        for _ in range(3):  # what is learned from a step must not cost the next one more
            assert _counts(model) == [(NUM_UNITS, 0), (num_gathers_in_backward, NUM_UNITS)]
            descend(model)

    on_ranks(scenario, cases=((True, NUM_UNITS), (False, 0), (None, NUM_BLOCKS)))


def test_the_flag_may_change_later_for_all_units_or_for_one(api: Api) -> None:
    def scenario(flag: bool, recurse: bool, num_gathers_in_backward: int) -> None:
        model = shard(api, Stack(), reshard_after_forward=not flag)
        model.set_reshard_after_forward(flag, recurse=recurse)
        assert _counts(model) == [(NUM_UNITS, 0), (num_gathers_in_backward, NUM_UNITS)]

    on_ranks(scenario, cases=((True, True, NUM_UNITS), (True, False, 1), (False, True, 0), (False, False, NUM_BLOCKS)))


def test_units_that_stayed_may_be_resharded_by_hand_and_are_gathered_again(api: Api) -> None:
    def scenario() -> None:
        model = shard(api, Stack(), reshard_after_forward=False)
        counts, loss = count(lambda: model(inputs()).sum())
        assert counts == {"all_gather": NUM_UNITS}
        for unit in units(api, model):
            unit.reshard()
        counts, _ = count(loss.backward)
        assert counts == {"all_gather": NUM_UNITS, "reduce_scatter": NUM_UNITS}

    on_ranks(scenario)


def test_a_unit_of_several_modules_is_gathered_once(api: Api) -> None:
    def scenario() -> None:
        model = Stack()
        api.fully_shard([model.blocks[0], model.blocks[1]])
        api.fully_shard([model.blocks[2], model.head])
        api.fully_shard(model)
        assert _counts(model) == [(3, 0), (2, 3)]

    on_ranks(scenario)


def test_a_unit_that_runs_twice_is_gathered_for_each_run_and_reduced_once(api: Api) -> None:
    """Once: autograd sums both runs' gradients before it hands them over."""

    class FirstBlockTwice(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.blocks[0](x))

    def scenario() -> None:
        model = shard(api, FirstBlockTwice())
        (num_gathers, _), (_, num_reductions) = _counts(model)
        assert (num_gathers, num_reductions) == (NUM_UNITS + 1, NUM_UNITS)

    on_ranks(scenario)


def test_a_forward_without_gradients_gathers_each_unit_once(api: Api) -> None:
    def scenario() -> None:
        model = shard(api, Stack())
        with torch.no_grad():
            counts, _ = count(lambda: model(inputs()))
        assert counts == {"all_gather": NUM_UNITS}

    on_ranks(scenario)


def test_a_unit_without_parameters_communicates_nothing(api: Api) -> None:
    def scenario() -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        for module in (*model, model):
            api.fully_shard(module)
        assert _counts(model) == [(2, 0), (2, 2)]

    on_ranks(scenario)
