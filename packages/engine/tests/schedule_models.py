"""A model called in pieces, as by schedules for expert parallelism, and drivers for the model without hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from engine_models import fsdp
from torch import nn
from torch.nn import functional as F

from lamella_engine import Hold, delay_gradient

DIM, HIDDEN, NUM_LAYERS = 8, 12, 3


class SingleUse(torch.autograd.Function):
    """A norm whose backward uses up the tensors saved by forward, as in Transformer Engine's operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        ctx.saved = [x.detach(), gain]
        return x * gain

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert ctx.saved is not None, "a second backward over what the first has used up"
        (x, gain), ctx.saved = ctx.saved, None
        return gradient * gain, (gradient * x).sum(0)


class LateLinear(nn.Linear):
    """Backward makes the input's gradient; `backward_dw` makes the weight's gradient and calls `on_gradient`."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out, bias=False)
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.on_gradient: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        late: torch.Tensor = _LateProduct.apply(x, self.weight, self.queue)  # type: ignore[no-untyped-call]
        return late

    def backward_dw(self) -> None:
        x, gradient = self.queue.pop(0)
        with torch.no_grad():
            weight_gradient = gradient.T @ x
            self.weight.grad = weight_gradient if self.weight.grad is None else self.weight.grad + weight_gradient
        if self.on_gradient is not None:
            self.on_gradient()


class _LateProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, queue: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.queue.append((x.detach(), gradient))
        return gradient @ weight, None, None


class ScheduledBlock(nn.Module):
    """Attention's half, dispatch, experts, combine. Parameters are read outside of their modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, DIM))
        self.mix = nn.Linear(DIM, DIM)
        self.router = nn.Parameter(torch.full((1,), 0.3))
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = LateLinear(HIDDEN, DIM)

    @property
    def pieces(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        return [self.attend, self.dispatch, self.experts, self.combine]

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = SingleUse.apply(x, self.gain)  # type: ignore[no-untyped-call]
        return x + torch.tanh(F.linear(normed, self.mix.weight, self.mix.bias))

    def dispatch(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(0)

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.router * self.down(torch.tanh(self.up(x)))
        return x + update

    def combine(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for piece in self.pieces:
            x = piece(x)
        return x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, DIM)
        self.layers = nn.ModuleList(ScheduledBlock() for _ in range(NUM_LAYERS))
        self.final_gain = nn.Parameter(torch.linspace(1.5, 0.5, DIM))
        self.head = nn.Linear(DIM, 5)

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = SingleUse.apply(x, self.final_gain)  # type: ignore[no-untyped-call]
        loss: torch.Tensor = self.head(normed).float().square().mean()
        return loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.finish(x)


def backward_dw(model: nn.Module) -> None:
    """All queued products at once, as in a model without a schedule."""
    for module in model.modules():
        while isinstance(module, LateLinear) and module.queue:
            module.backward_dw()


def delay(model: nn.Module) -> None:
    """Declare late gradients to each unit, and give each layer the unit's callback."""
    for layer in model.get_submodule("layers").children():
        assert isinstance(layer, ScheduledBlock)
        layer.down.on_gradient = delay_gradient(layer, layer.down.get_parameter("weight"))


class _Slot:
    """A piece of one microbatch, on detached inputs: its backward can run alone."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._input = x.detach().requires_grad_(x.is_floating_point())
        self._output = self._run(self._input)
        return self._output.detach()

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        torch.autograd.backward((self._output,), (gradient,))
        input_gradient = self._input.grad
        del self._input, self._output
        assert input_gradient is not None
        return input_gradient


class Microbatch:
    """Runs one microbatch slot by slot, by verbs alone. Forward and backward are generators of slots."""

    def __init__(self, model: Stack, x: torch.Tensor, *, dw_at_once: bool = True) -> None:
        self._model = model
        self._x = x
        self._dw_at_once = dw_at_once
        self.loss = 0.0

    def forward(self) -> Iterator[str]:
        layers, root = list(self._model.layers), fsdp(self._model).hold()
        self._stem, self._tail = _Slot(self._model.stem), _Slot(self._model.finish)
        self._slots = [[_Slot(piece) for piece in layer.pieces] for layer in layers]  # type: ignore[union-attr]
        root.wait()
        next_hold = fsdp(layers[0]).hold()
        x = self._stem.forward(self._x)
        for i, slots in enumerate(self._slots):
            hold, next_hold = next_hold, self._layer_hold(layers, i + 1)
            hold.wait()
            for slot in slots:
                x = slot.forward(x)
                yield f"forward {i}"
            hold.release()
        self.loss = (loss := self._tail.forward(x)).item()
        self._gradient = torch.ones_like(loss)
        root.release()
        yield "forward"

    def backward(self) -> Iterator[str]:
        layers, root = list(self._model.layers), fsdp(self._model).hold()
        root.wait()
        next_hold = fsdp(layers[-1]).hold()
        gradient = self._tail.backward(self._gradient)
        for i in reversed(range(len(layers))):
            hold, next_hold = next_hold, self._layer_hold(layers, i - 1)
            hold.wait()
            for slot in reversed(self._slots[i]):
                gradient = slot.backward(gradient)
                yield f"backward {i}"
            fsdp(layers[i]).reduce_gradients()
            if self._dw_at_once:
                layers[i].down.backward_dw()  # type: ignore[union-attr, operator]
            hold.release()
        self._stem.backward(gradient)
        fsdp(self._model).reduce_gradients()
        root.release()
        yield "backward"

    def _layer_hold(self, layers: Sequence[nn.Module], i: int) -> Hold:
        # After the last layer the last layer again: a second hold, released with the first.
        return fsdp(layers[i]).hold() if 0 <= i < len(layers) else _NoHold()  # type: ignore[return-value]


class _NoHold:
    def wait(self) -> None: ...

    def release(self) -> None: ...


def in_turns(*ways: Iterator[str], between: Callable[[], None] = lambda: None) -> None:
    """One slot of each pass in turn, until all passes are through."""
    going = list(ways)
    while going:
        for way in list(going):
            if next(way, None) is None:
                going.remove(way)
            between()
