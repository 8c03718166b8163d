"""A head and its cross entropy over a few rows of logits at a time.

Note [Logits a piece at a time]
    Logits of 8,192 tokens and a vocabulary of 128k take 2 GiB in bf16, and twice as much in fp32 for each of the
    softmax, its gradient and their copies. Here a piece of rows goes through the head, the loss and the gradients of
    both before the next piece begins: the gradients of hidden states and weight are ready after the forward, and
    backward scales these gradients. The products are the same as of whole logits, three for each row.

Note [A deferred head]
    Models of transformers compute `loss_function(logits=head(hidden), labels=...)` in their forward. While the head is
    deferred, the hidden states are its output: the loss function in place of the model's takes the states for logits
    and runs the head inside. Auxiliary losses stay the model's. A model that changes logits on the way (scales or caps
    logits) would change hidden states instead, too little for a trial to show. A head is therefore deferred only after
    the loss function has received the head's own output.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, cast

import torch
from torch import nn

from lamella_transformers._shared_rows import SharedRows

IGNORED: Final = -100
"""The target that the losses ignore, as torch's cross entropy does."""

_PIECE_NBYTES: Final = 512 << 20  # fp32 logits; their copies in the loss take 1.5 times as much again
_PIECE_ROWS: Final = 1024
"""The most rows of a piece. Each piece reads and writes the weight's gradient once more, by an H100's rates a tenth of
the time of the head's three products. Twice the rows would take a twentieth, and twice the memory."""


class DeferredHead:
    """A model whose head runs inside its loss function; see Note [A deferred head].

    Args:
        model: A causal language model of transformers. The `loss_function`, and the forward of the head, are replaced:
            outside `deferred` the replacements do the same as before.
        head: The module with the model's logits as output.
        shared: The rows of this rank where ranks work on the same tokens; None for all rows on each rank.

    Attributes:
        can_be_deferred: True once a forward has passed the head's output, unchanged, to the model's loss function.
    """

    def __init__(self, model: nn.Module, head: nn.Linear, shared: SharedRows | None = None) -> None:
        self._model, self._head, self._shared = cast(Any, model), head, shared
        self._head_forward: Callable[[torch.Tensor], torch.Tensor] = head.forward
        self._loss_function: Callable[..., torch.Tensor] = self._model.loss_function
        self._is_deferred = False
        self._head_output: Callable[[], torch.Tensor | None] = lambda: None  # weak: logits take gigabytes
        self._version = 0
        self.can_be_deferred = False
        head.__dict__["forward"] = self._run_head
        self._model.loss_function = self._loss

    @classmethod
    def of(cls, model: nn.Module, shared: SharedRows | None = None) -> "DeferredHead | None":
        """Defer the head of a model; None for a model without a linear head or a replaceable loss function.

        Args:
            model: A causal language model of transformers.
            shared: The rows of this rank where ranks work on the same tokens; None for all rows on each rank.
        """
        embeddings = getattr(model, "get_output_embeddings", lambda: None)()
        if type(embeddings) is not nn.Linear or not hasattr(model, "loss_function"):
            return None
        return cls(model, embeddings, shared)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer the head in forwards inside the block."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def remove(self) -> None:
        """Put back the model's own functions."""
        del self._head.__dict__["forward"]
        self._model.loss_function = self._loss_function

    def _run_head(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._is_deferred:
            return hidden
        logits = self._head_forward(hidden)
        self._head_output, self._version = weakref.ref(logits), logits._version
        return logits

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not self._is_deferred:
            self.can_be_deferred = logits is self._head_output() and logits._version == self._version
            return self._loss_function(logits, labels, *args, **options)
        hidden, targets = logits.flatten(0, -2), options["shift_labels"].flatten()
        shared = self._shared
        if shared is not None:
            hidden, targets = shared.share(hidden), shared.of(targets, IGNORED)
        loss = linear_cross_entropy(
            hidden, self._head.weight, self._head.bias, targets, float(options["num_items_in_batch"])
        )
        return loss if shared is None else shared.sum(loss)


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, num_targets: float
) -> torch.Tensor:
    """Return the sum of `cross_entropy(hidden @ weight.T + bias, targets)`, divided by `num_targets`; 0-D fp32.

    See Note [Logits a piece at a time].

    Args:
        hidden: (num_rows, width), any float dtype. Under autocast computed in the autocast dtype; in fp32 in place of
            fp16, whose range a scaled loss and sums over rows leave.
        weight: (vocab_size, width), as `hidden`; under autocast of another dtype too.
        bias: (vocab_size,), or None.
        targets: (num_rows,) int64, or `IGNORED`.
        num_targets: The divisor.

    Raises:
        RuntimeError: A second backward runs through the same loss.

    Effects: with gradients enabled, computes the gradients of `hidden`, `weight` and `bias` in the forward, and holds
        the gradients until backward, which scales and returns the same tensors. No host sync.
    """
    device_type = hidden.device.type
    is_autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    dtype = _computed_dtype(hidden.dtype, torch.get_autocast_dtype(device_type) if is_autocast else None)
    operands = [operand if operand is None else operand.to(dtype) for operand in (hidden, weight, bias)]
    # The function's own products write into gradients of the operands' dtype, which autocast would change.
    with torch.autocast(device_type, enabled=False) if is_autocast else nullcontext():
        loss = _LinearCrossEntropy.apply(*operands, targets, num_targets)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, loss)


def _computed_dtype(dtype: torch.dtype, autocast_dtype: torch.dtype | None) -> torch.dtype:
    if autocast_dtype is not None and dtype != torch.float64:
        dtype = autocast_dtype
    return torch.float32 if dtype == torch.float16 else dtype


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        num_targets: float,
    ) -> torch.Tensor:
        needs_gradients = any(context.needs_input_grad)
        hidden_grad = torch.empty_like(hidden) if context.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight) if context.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias) if bias is not None and context.needs_input_grad[2] else None
        loss = hidden.new_zeros((), dtype=torch.float32)
        num_rows = max(1, min(_PIECE_ROWS, _PIECE_NBYTES // (4 * weight.shape[0])))
        for start in range(0, hidden.shape[0], num_rows):
            rows = slice(start, start + num_rows)
            logits = nn.functional.linear(hidden[rows], weight, bias)
            piece_loss, logits_grad = _loss_and_gradient(logits, targets[rows], num_targets)
            loss += piece_loss
            if needs_gradients:
                if hidden_grad is not None:
                    torch.mm(logits_grad, weight, out=hidden_grad[rows])
                if weight_grad is not None:
                    weight_grad.addmm_(logits_grad.t(), hidden[rows])
                if bias_grad is not None:
                    bias_grad += logits_grad.sum(0)
        # No saved tensors: hooks that offload activations would copy to the host what backward reads first.
        context.gradients = (hidden_grad, weight_grad, bias_grad)
        return loss / num_targets

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, context.gradients = context.gradients, None
        if gradients is None:
            raise RuntimeError(
                "Expected one backward through a loss in pieces, which hands its gradients on, got a second one. "
                "Compute the loss again."
            )
        for gradient in gradients:
            if gradient is not None:
                # In place: all activations are alive here, and the weight's gradient has the size of the vocabulary.
                gradient.mul_(grad.to(gradient.dtype))
        return (*gradients, None, None)


def _loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, num_targets: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of a piece's losses, and the gradient of the mean by the logits, in their memory.

    Moves 20 bytes for each bf16 logit, equal to torch's cross entropy and backward.
    """
    is_target = targets != IGNORED
    indices = targets.masked_fill(~is_target, 0)[:, None]  # Other negative targets fail, as in torch's cross entropy.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probabilities = nn.functional.log_softmax(logits, -1, dtype=dtype)
    loss = torch.where(is_target, log_probabilities.gather(1, indices)[:, 0], 0.0).sum().neg()
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, indices, gradient.new_full(indices.shape, -1.0))
    return loss, torch.mul(gradient, (is_target / num_targets).to(dtype)[:, None], out=logits)
