"""Layers cut over ranks by transformers' plans: logits and gradients are those of the uncut model."""

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_models import make_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lamella_testing import run_ranks
from lamella_transformers import (
    IGNORED,
    TENSOR_AXES,
    ModelError,
    SharedRows,
    check_tensor_parallel,
    cut_tensors,
    linear_cross_entropy,
)

TYPES = ("qwen2", "qwen3", "olmo2", "phi3", "gemma3_text")
for module in ("torch._dynamo", "torch.distributed.tensor.parallel"):
    importlib.import_module(module)  # Once here, and not in each forked rank.


def varied(model_type: str) -> nn.Module:
    model = make_model(model_type)
    with torch.no_grad():
        for parameter in model.parameters():  # Norms' weights of one would be equal in any order.
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


@pytest.mark.parametrize("model_type", TYPES)
def test_tensor_parallel_logits_and_gradients_are_those_of_the_uncut_model(model_type: str) -> None:
    """Linear layers with biases, norms of heads, gathered columns, split inputs, fused projections, a tied head."""
    tokens = torch.randint(300, (2, 13), generator=torch.Generator().manual_seed(1))
    model = varied(model_type)

    def on_rank() -> None:
        cut = copy.deepcopy(model)
        cut_tensors(cut, init_device_mesh("cpu", (1, 2), mesh_dim_names=TENSOR_AXES))
        logits = [_logits_after_backward(module, tokens) for module in (model, cut)]
        torch.testing.assert_close(logits[1], logits[0])
        assert sum(isinstance(parameter, DTensor) for parameter in cut.parameters()) >= 8
        for (name, parameter), (_, part) in zip(model.named_parameters(), cut.named_parameters(), strict=True):
            torch.testing.assert_close(_mean_gradient(part), parameter.grad, rtol=1e-4, atol=1e-5, msg=name)

    run_ranks(on_rank, 2)


def _logits_after_backward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens[:, :-1], use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
    return logits.detach()


def _mean_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return a cut gradient, put together; others' mean over all ranks, as `fully_shard` over all ranks has it."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


@pytest.mark.parametrize("num_rows", [8, 7, 1])
def test_a_head_shared_out_among_ranks_has_the_loss_and_the_gradients_of_one(num_rows: int) -> None:
    torch.manual_seed(0)
    tensors = (torch.randn(num_rows, 6), torch.randn(11, 6), torch.randn(11))
    targets = torch.randint(11, (num_rows,))
    targets[1:3] = IGNORED

    def on_rank() -> None:
        whole, shared = ([tensor.clone().requires_grad_() for tensor in tensors] for _ in range(2))
        expected = linear_cross_entropy(whole[0], whole[1], whole[2], targets, 5.0)
        assert dist.group.WORLD is not None
        rows = SharedRows(dist.group.WORLD)
        hidden, weight, bias = shared
        loss = rows.sum(linear_cross_entropy(rows.share(hidden), weight, bias, rows.of(targets, IGNORED), 5.0))
        torch.testing.assert_close(loss, expected)
        for value in (expected, loss):
            (3 * value).backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(hidden.grad, whole[0].grad)
        for part, parameter in zip(shared[1:], whole[1:], strict=True):
            torch.testing.assert_close(_mean_gradient(part), parameter.grad)

    run_ranks(on_rank, 2)


def test_a_parameter_beside_cut_layers_that_the_plan_leaves_out_is_refused_by_name() -> None:
    """Each rank's gradient of the activation's exponents would be of its own columns."""
    with pytest.raises(ModelError, match=r"got none for 'model.layers.0.mlp.act_fn.alpha_p'"):
        check_tensor_parallel(make_model("apertus"), 2)


def test_a_model_without_a_plan_is_refused_by_its_type() -> None:
    with pytest.raises(ModelError, match="got 'gpt2', which has none"):
        check_tensor_parallel(make_model("gpt2"), 2)
