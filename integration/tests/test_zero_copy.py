"""Nothing of parameter size is copied: shown on a CPU by operators (on GPUs by kernels, in test_nccl).

What gloo's transport packs, which NCCL's does not, counts as a part of the collective.
"""

import pytest
import torch
import torch._dynamo  # The optimizer imports torch._dynamo: imported once here, instead of once a rank.
from torch import nn

from lamella_integration.backends import BACKENDS, Training, Workload
from lamella_integration.profile import PROOF, PROOF_SMALL, parameter_sizes, profile_steps
from lamella_integration.trace import parameter_copies
from lamella_testing import run_ranks

NUM_TOKENS = 61


def _workload(reduce_dtype: torch.dtype = torch.bfloat16) -> Workload:
    return Workload(config=PROOF_SMALL, device=torch.device("cpu"), reduce_dtype=reduce_dtype)


def _num_copies(training: Training, workload: Workload) -> int:
    kernels = profile_steps(training, *workload.batch(NUM_TOKENS))
    return len(parameter_copies(kernels, parameter_sizes(workload, NUM_TOKENS)))


@pytest.mark.parametrize(
    ("num_ranks", "reduce_dtype"),
    [
        (2, torch.bfloat16),
        (4, torch.float32),
        pytest.param(2, torch.float32, marks=pytest.mark.slow),
        pytest.param(4, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_lamella_copies_no_parameter_and_no_gradient(num_ranks: int, reduce_dtype: torch.dtype) -> None:
    def num_copies() -> int:
        return _num_copies(BACKENDS["lamella"](_workload(reduce_dtype)), _workload())

    assert run_ranks(num_copies, num_ranks) == [0] * num_ranks


def test_the_same_measure_finds_the_copies_of_fsdp2() -> None:
    assert min(run_ranks(lambda: _num_copies(BACKENDS["fsdp2"](_workload()), _workload()), 2)) > 20


def _clone_a_weight(block: nn.Module, _: object) -> None:
    block.get_parameter("ffn.up.weight").detach().clone()


def test_the_same_measure_finds_one_planted_copy() -> None:
    def num_copies() -> int:
        training = BACKENDS["lamella"](_workload())
        training.model.get_submodule("blocks.1").register_forward_pre_hook(_clone_a_weight)
        return _num_copies(training, _workload())

    assert run_ranks(num_copies, 2) == [2, 2]  # a copy a step


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_sizes_of_the_proof_are_unambiguous_on_gpus_too(num_ranks: int) -> None:
    workload = Workload(config=PROOF, device=torch.device("cuda"))
    for sizes in run_ranks(lambda: parameter_sizes(workload, 1021), num_ranks):
        assert sizes.cast_numel is not None


def test_sizes_that_prove_nothing_are_refused() -> None:
    def refuse() -> None:
        with pytest.raises(ValueError, match="Expected sizes that tell shards"):
            parameter_sizes(_workload(), 64)

    run_ranks(refuse, 2)
