"""The loss of a microbatch: by the model's own loss function where the model heeds its arguments, else over logits.

Note [The model's own loss]
    Fused kernels (Liger's head with cross entropy, cut cross entropy) replace a model's forward or its loss function,
    and only a call with labels reaches them. So a model is called with `labels`, with `shift_labels` (the targets, at
    the positions that predict them) and with `num_items_in_batch` (the divisor of the sum). Some classes of
    transformers swallow the last two arguments and return a plain mean over shifted labels: wrong by the number of
    targets a rank, without an error. A trial on a few tokens compares the model's loss with the cross entropy of its
    logits; a model that differs is called without labels.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lamella_transformers._chunked_loss import IGNORED, DeferredHead
from lamella_transformers._documents import document_arguments, known_documents
from lamella_transformers._shared_rows import SharedRows

_TRIAL_SHAPE: Final = (2, 16)
_TRIAL_NUM_TARGETS: Final = 8  # a sequence, at its start: a model that shifts them once more drops one
_TRIAL_DIVISOR: Final = 7.0  # no mean over the trial's targets equals their sum divided by this
_TRIAL_TOLERANCE: Final = 0.01  # Fused kernels round logits to bf16; one target of sixteen changes the sum by more.


class MicrobatchLoss(NamedTuple):
    """The parts of a microbatch's loss, each 0-D fp32 and differentiable.

    Attributes:
        cross_entropy: The sum over the microbatch's targets, divided by `num_targets`.
        balance: The mean auxiliary loss of a mixture of experts, without its coefficient; None for other models.
    """

    cross_entropy: torch.Tensor
    balance: torch.Tensor | None


class LossFunction(Protocol):
    """Computes the loss of a microbatch."""

    def __call__(
        self,
        model: nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        num_targets: float,
        positions: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        /,
    ) -> MicrobatchLoss:
        """Return the loss.

        Args:
            model: A causal language model of transformers.
            inputs: (num_sequences, sequence_length) int64 tokens.
            targets: (num_sequences, sequence_length) int64: the token to predict at each position, or `IGNORED`.
            num_targets: The divisor of the sum over the targets.
            positions: (num_sequences, sequence_length) int64, from 0 on in each document of a sequence; None where a
                sequence is one document.
            starts: The offsets of documents, as `document_arguments` takes them.
        """
        ...


def target_losses(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the cross entropy of every target, and the auxiliary loss.

    Args:
        model: A causal language model of transformers.
        inputs: (num_sequences, sequence_length) int64 tokens.
        targets: (num_sequences, sequence_length) int64: the token to predict at each position, or `IGNORED`.
        positions: (num_sequences, sequence_length) int64, from 0 on in each document of a sequence; None where a
            sequence is one document.
        starts: The offsets of documents, as `document_arguments` takes them.

    Returns:
        (num_sequences, sequence_length) fp32 losses, 0 for ignored targets; and the 0-D auxiliary loss that balances
        the experts of a model whose config has `output_router_logits`, None for other models.
    """
    with known_documents(positions):
        output = model(**document_arguments(model, inputs, positions, starts), use_cache=False)
    rows = output.logits.view(*targets.shape, -1)
    # Over flat logits: torch's softmax over a middle dim takes 8 of a GPU's 132 multiprocessors. A sequence at a time:
    # fp32 copies of all logits would take gigabytes.
    losses = [
        F.cross_entropy(logits.float(), labels, reduction="none") for logits, labels in zip(rows, targets, strict=True)
    ]
    return torch.stack(losses), getattr(output, "aux_loss", None)


def loss_of_logits(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    num_targets: float,
    positions: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> MicrobatchLoss:
    """Return the loss over the model's logits: a `LossFunction` for every causal language model."""
    losses, balance = target_losses(model, inputs, targets, positions, starts)
    return MicrobatchLoss(losses.sum() / num_targets, balance)


class ModelLoss:
    """The loss that a model computes from labels, a `LossFunction`; see Note [The model's own loss].

    Args:
        balance_coefficient: The weight of the auxiliary loss in the model's loss, which `cross_entropy` leaves out.
        head: Runs a few rows at a time inside the loss; None for whole logits, or a fused forward.
    """

    def __init__(self, balance_coefficient: float, head: DeferredHead | None = None) -> None:
        self._balance_coefficient, self._head = balance_coefficient, head

    @property
    def is_chunked(self) -> bool:
        """True where the model's logits never exist as a whole."""
        return self._head is not None

    def __call__(
        self,
        model: nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        num_targets: float,
        positions: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> MicrobatchLoss:
        """Return the loss of a microbatch."""
        arguments = document_arguments(model, inputs, positions, starts)
        labels = targets.contiguous().view_as(arguments["input_ids"])  # Loss functions flatten by `view`.
        deferred = nullcontext() if self._head is None else self._head.deferred()
        with known_documents(positions), deferred, _divisor_kept_from_layers(model):
            output = model(
                **arguments, use_cache=False, labels=labels, shift_labels=labels, num_items_in_batch=num_targets
            )
        balance = getattr(output, "aux_loss", None)
        if balance is None:
            return MicrobatchLoss(output.loss, None)
        return MicrobatchLoss(output.loss - self._balance_coefficient * balance, balance)


def _divisor_kept_from_layers(model: nn.Module) -> AbstractContextManager[object]:
    """Let no layer in the block see `num_items_in_batch`, which models pass on with arguments that they do not know.

    Under torch 2.11 a number among the arguments of a checkpoint is a constant of a compiled layer: with targets on
    answers alone each step would compile anew, and past the eighth the layers would run eagerly.
    """
    base: nn.Module = getattr(model, "base_model", model)
    return nullcontext() if base is model else base.register_forward_pre_hook(_drop_divisor, with_kwargs=True)


def _drop_divisor(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    kwargs.pop("num_items_in_batch", None)
    return args, kwargs


def choose_loss(
    model: nn.Module,
    vocab_size: int,
    balance_coefficient: float,
    device: torch.device,
    shared: SharedRows | None = None,
) -> LossFunction:
    """Return the cheapest loss that equals the loss over the model's logits in a trial.

    `ModelLoss` with a deferred head comes before `ModelLoss` with whole logits, and `loss_of_logits` is the last.

    Args:
        model: Has its weights, sharded or not.
        vocab_size: A bound of the trial's tokens.
        balance_coefficient: The weight of the auxiliary loss in the model's loss.
        device: The device of the model's inputs.
        shared: The rows of this rank in a deferred head, where ranks work on the same tokens.

    Effects: collective over all ranks: for one loss or two, three forwards of 32 tokens in the model's present mode,
        and one all-reduce. The random state stays; waits for the device. May replace the head's forward, as
        `DeferredHead` does.
    """
    if not _takes_labels(model):
        return loss_of_logits
    head = DeferredHead.of(model, shared)
    with_whole_logits = ModelLoss(balance_coefficient)
    is_heeded = _equals_loss_of_logits(model, with_whole_logits, vocab_size, device)
    if head is not None:
        in_pieces = ModelLoss(balance_coefficient, head)
        if is_heeded and head.can_be_deferred and _equals_loss_of_logits(model, in_pieces, vocab_size, device):
            return in_pieces
        head.remove()
    return with_whole_logits if is_heeded else loss_of_logits


def assumed_loss(model: nn.Module, balance_coefficient: float, shared: SharedRows | None = None) -> LossFunction:
    """Return the loss of `choose_loss` for a model whose own loss heeds its arguments, without a trial.

    For a model whose tensors have no memory: losses cannot be compared.

    Args:
        model: On fake tensors.
        balance_coefficient: The weight of the auxiliary loss in the model's loss.
        shared: The rows of this rank, as `choose_loss` takes them.

    Effects: a forward of 32 tokens. May replace the head's forward, as `DeferredHead` does.
    """
    if not _takes_labels(model):
        return loss_of_logits
    with_whole_logits = ModelLoss(balance_coefficient)
    head = DeferredHead.of(model, shared)
    if head is None:
        return with_whole_logits
    inputs = torch.zeros(_TRIAL_SHAPE, dtype=torch.int64)
    with torch.no_grad():
        with_whole_logits(model, inputs, inputs, _TRIAL_DIVISOR)
    if head.can_be_deferred:
        return ModelLoss(balance_coefficient, head)
    head.remove()
    return with_whole_logits


def _equals_loss_of_logits(model: nn.Module, model_loss: LossFunction, vocab_size: int, device: torch.device) -> bool:
    expected, actual = _trial_losses(model, model_loss, vocab_size, device)
    # Ranks that differ in the last bits must not differ in the choice.
    is_equal = torch.tensor(float(abs(actual - expected) <= _TRIAL_TOLERANCE * abs(expected)), device=device)
    dist.all_reduce(is_equal, op=dist.ReduceOp.MIN)
    return bool(is_equal.item())


def _takes_labels(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return "labels" in parameters and (takes_any or {"shift_labels", "num_items_in_batch"} <= parameters.keys())


@torch.no_grad()
def _trial_losses(
    model: nn.Module, model_loss: LossFunction, vocab_size: int, device: torch.device
) -> tuple[float, float]:
    """Return a trial's cross entropy by the model's logits, and by the model's own loss.

    The targets are the tokens that the model predicts: other tokens have nearly one loss in a fresh model, and targets
    of the wrong positions would pass.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):

        def seed() -> None:
            torch.manual_seed(0)  # Equal dropout masks in each forward.

        seed()
        inputs = torch.randint(vocab_size, _TRIAL_SHAPE).to(device)
        seed()
        targets = model(**document_arguments(model, inputs, None), use_cache=False).logits.argmax(-1)
        targets[:, _TRIAL_NUM_TARGETS:] = IGNORED
        losses = []
        for loss_function in (loss_of_logits, model_loss):
            seed()
            losses.append(loss_function(model, inputs, targets, _TRIAL_DIVISOR).cross_entropy.item())
    expected, actual = losses
    return expected, actual
