"""Models on GPUs, over NCCL and megatron-core's own streams and random states, train as on one GPU."""

import pytest

from lamella_megatron import fully_shard_model
from lamella_testing.megatron_parity import Layout, assert_trains_as_on_one_rank

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of megatron-core and Transformer Engine

TOLERANCE = 1e-5  # sums of other numbers of rows, in another order


@pytest.mark.gpu1
@pytest.mark.parametrize("kind", ["gpt", "moe", "tied"])
def test_megatron_models_on_one_gpu_train_as_without_units(kind: str) -> None:
    layout = Layout(num_ranks=1)
    assert_trains_as_on_one_rank(kind, layout, fully_shard_model, tolerance=TOLERANCE, device="cuda")


@pytest.mark.gpu2
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gpt", Layout(num_ranks=2)),
        ("gpt", Layout(num_ranks=2, tp=2)),
        ("gpt", Layout(num_ranks=2, instances=2)),
        ("moe", Layout(num_ranks=2)),
        ("moe", Layout(num_ranks=2, ep=2)),
        ("moe", Layout(num_ranks=2, expert_tp=2)),
    ],
    ids=str,
)
def test_megatron_models_on_two_gpus_train_as_without_units(kind: str, layout: Layout) -> None:
    assert_trains_as_on_one_rank(kind, layout, fully_shard_model, tolerance=TOLERANCE, device="cuda")
