"""The model's own loss is taken where it heeds its arguments, and equals the loss over logits."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lamella_transformers import (
    IGNORED,
    LossFunction,
    ModelLoss,
    choose_loss,
    linear_cross_entropy,
    loss_of_logits,
    target_losses,
)

VOCAB_SIZE = 300
TARGETS = torch.randint(VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(1))
INPUTS = torch.randint(VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(2))
TARGETS[0, :5] = IGNORED

LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA |= {"num_key_value_heads": 2}
MIXTRAL = LLAMA | {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
XLNET = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 24}
BART = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "is_decoder": True}


def causal_model(model_type: str, values: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, **values)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.train()
    return model


def choice(model: nn.Module, balance_coefficient: float = 0.0) -> LossFunction:
    return choose_loss(model, VOCAB_SIZE, balance_coefficient, torch.device("cpu"))


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("model_type", "values", "coefficient"),
    [("llama", LLAMA, 0.0), ("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2}, 0.0), ("mixtral", MIXTRAL, 0.5)],
)
def test_a_model_that_heeds_the_arguments_computes_its_own_loss(
    model_type: str, values: dict[str, Any], coefficient: float
) -> None:
    model = causal_model(model_type, values)  # In training mode: gpt2 drops out, in every forward of the trial alike.
    loss_function = choice(model, coefficient)
    assert isinstance(loss_function, ModelLoss) and loss_function.is_chunked
    model.eval()
    losses = [function(model, INPUTS, TARGETS, 5.0) for function in (loss_function, loss_of_logits)]
    torch.testing.assert_close(*losses)
    assert (losses[0].balance is not None) == (model_type == "mixtral")
    torch.testing.assert_close(*(gradients(model, loss.cross_entropy) for loss in losses))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral"])
def test_layers_see_no_number_that_changes_from_step_to_step(model_type: str) -> None:
    model: Any = causal_model(model_type, MIXTRAL if model_type == "mixtral" else LLAMA)
    numbers: list[str] = []

    def keep_numbers(_: nn.Module, __: object, kwargs: dict[str, object]) -> None:
        numbers.extend(name for name, argument in kwargs.items() if isinstance(argument, float))

    for layer in model.model.layers:
        layer.register_forward_pre_hook(keep_numbers, with_kwargs=True)
    for loss_function in (ModelLoss(0.0), choice(model)):
        loss_function(model, INPUTS, TARGETS, 5.0)
    assert numbers == [] and not model.model._forward_pre_hooks


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return [*torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], materialize_grads=True)]


@pytest.mark.parametrize("model_type", ["gemma2", "granite"])
def test_the_loss_of_a_model_with_scaled_or_capped_logits_is_not_chunked(model_type: str) -> None:
    values = LLAMA | {"head_dim": 8, "final_logit_softcapping": 30.0, "logits_scaling": 4.0}
    model = causal_model(model_type, values)
    loss_function = choice(model)
    assert isinstance(loss_function, ModelLoss) and not loss_function.is_chunked
    losses = [function(model.eval(), INPUTS, TARGETS, 5.0) for function in (loss_function, loss_of_logits)]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_loss_a_piece_at_a_time_has_the_gradients_of_whole_logits(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 24 rows in pieces of 7.
    monkeypatch.setattr("lamella_transformers._chunked_loss._PIECE_NBYTES", 4 * 7 * VOCAB_SIZE)
    torch.manual_seed(0)
    hidden, weight = torch.randn(24, 16, dtype=torch.double), torch.randn(VOCAB_SIZE, 16, dtype=torch.double)
    tensors = [hidden, weight, *([torch.randn(VOCAB_SIZE, dtype=torch.double)] if has_bias else [])]
    for tensor in tensors:
        tensor.requires_grad_()
    bias = tensors[2] if has_bias else None
    pieces = 3.0 * linear_cross_entropy(hidden, weight, bias, TARGETS.flatten(), 5.0)
    logits = F.linear(hidden, weight, bias)
    expected = 3.0 * F.cross_entropy(logits, TARGETS.flatten(), reduction="sum") / 5.0
    torch.testing.assert_close(pieces.double(), expected)
    torch.testing.assert_close(
        torch.autograd.grad(pieces, tensors), torch.autograd.grad(expected, tensors), rtol=1e-5, atol=1e-6
    )


def test_a_loss_in_pieces_has_the_gradients_of_whole_logits_under_autocast() -> None:
    torch.manual_seed(0)
    tensors = torch.randn(24, 16, requires_grad=True), torch.randn(VOCAB_SIZE, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(*tensors).float()
        expected = F.cross_entropy(logits, TARGETS.flatten(), reduction="sum") / 5.0
        pieces = linear_cross_entropy(*tensors, None, TARGETS.flatten(), 5.0)
    torch.testing.assert_close(pieces, expected)
    gradients = torch.autograd.grad(pieces, tensors)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, tensors), rtol=2e-2, atol=1e-2)


def test_a_scaled_loss_in_pieces_has_finite_and_exact_gradients_in_fp16() -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, 16, dtype=torch.float16, requires_grad=True) for size in (24, VOCAB_SIZE))
    scale = 2.0**16  # `GradScaler`'s first: infinite in fp16
    pieces = scale * linear_cross_entropy(hidden, weight, None, TARGETS.flatten(), 5e4)
    logits = F.linear(hidden.double(), weight.double())
    expected = scale * F.cross_entropy(logits, TARGETS.flatten(), reduction="sum") / 5e4
    gradients = (torch.autograd.grad(loss, (hidden, weight)) for loss in (pieces, expected))
    for gradient, exact in zip(*gradients, strict=True):
        assert (gradient.double() - exact).norm() < 1e-3 * exact.norm()


def test_negative_targets_beside_the_ignored_one_are_refused() -> None:
    with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
        linear_cross_entropy(torch.randn(2, 4), torch.randn(3, 4), None, torch.tensor([1, -1]), 2.0)


def test_backward_hands_the_gradients_of_a_loss_in_pieces_on_and_refuses_a_second_time() -> None:
    hidden, weight = torch.randn(24, 16, requires_grad=True), torch.randn(VOCAB_SIZE, 16, requires_grad=True)
    saved_shapes: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved_shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = linear_cross_entropy(hidden, weight, None, TARGETS.flatten(), 5.0)
    assert saved_shapes == []  # Hooks that offload activations would copy the gradients to the host.
    address = cast(Any, loss.grad_fn).gradients[1].data_ptr()
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.data_ptr() == address  # no second tensor of the vocabulary's size
    with pytest.raises(RuntimeError, match="Expected one backward through a loss in pieces"):
        loss.backward()  # type: ignore[no-untyped-call]


class _HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the values of tensors that Python reads: on a GPU the host waits for each."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_step_on_rows_of_one_document_reads_no_value_on_the_host(model_type: str, is_whole: bool) -> None:
    model = causal_model(model_type, LLAMA)
    loss_function = loss_of_logits if is_whole else choice(model)
    with _HostReads() as reads:  # type: ignore[no-untyped-call]
        loss_function(model, INPUTS, TARGETS, 5.0).cross_entropy.backward()  # type: ignore[no-untyped-call]
    assert reads.count == 0


@pytest.mark.parametrize(("model_type", "values"), [("xlnet", XLNET), ("bart", BART)])
def test_a_model_that_swallows_the_arguments_takes_the_loss_over_its_logits(
    model_type: str, values: dict[str, Any]
) -> None:
    assert choice(causal_model(model_type, values)) is loss_of_logits


class _Faulty(nn.Module):
    """A causal model whose loss is wrong in one way."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB_SIZE, 16)
        self.head = nn.Linear(16, VOCAB_SIZE)
        self._loss = loss

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, use_cache: bool = False, **options: Any
    ) -> Any:
        class Output:
            logits = self.head(self.embedding(input_ids))
            loss = None if labels is None else self._loss(logits.flatten(0, 1), labels, **options)

        return Output()


def _right(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: float, **_: Any) -> torch.Tensor:
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


def _mean(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return F.cross_entropy(logits, labels.flatten())


def _shifted(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: float, **_: Any) -> torch.Tensor:
    shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return F.cross_entropy(logits, shifted.flatten(), reduction="sum") / num_items_in_batch


def _unmasked(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: float, **_: Any) -> torch.Tensor:
    return F.cross_entropy(logits, labels.flatten().clamp(min=0), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(("loss", "is_heeded"), [(_right, True), (_mean, False), (_shifted, False), (_unmasked, False)])
def test_a_loss_of_another_divisor_position_or_mask_is_refused(
    loss: Callable[..., torch.Tensor], is_heeded: bool
) -> None:
    assert isinstance(choice(_Faulty(loss)), ModelLoss) == is_heeded


def test_a_trial_leaves_the_random_state_alone() -> None:
    model = causal_model("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2})

    state = torch.get_rng_state()
    choice(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_ignored_targets_have_no_loss() -> None:
    losses, balance = target_losses(causal_model("llama", LLAMA), INPUTS, TARGETS)
    assert losses.shape == TARGETS.shape and balance is None
    assert torch.equal(losses == 0, TARGETS == IGNORED)
