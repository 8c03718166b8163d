"""Borders between slots: crossing tensors are detached, untouched tensors not copied, unsaved tensors freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from alive import Alive

from lamella_schedule import Event, Kind, Lanes, LayerSlots, ModelChunk, Slot, order, peak, run, run_order, work
from lamella_schedule._nodes import SlotNode


def _node(function: Callable[..., object]) -> SlotNode:
    return SlotNode(function, "slot pre of layer 0", Lanes(torch.device("cpu")))


def _value() -> torch.Tensor:
    return torch.arange(3.0).requires_grad_()


def test_a_tensor_crosses_without_its_graph() -> None:
    seen: list[torch.Tensor] = []
    weight = torch.ones(3, requires_grad=True)

    def product(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x * weight

    node = _node(product)
    tensor = _value()
    (out,) = node.forward((tensor,))
    assert isinstance(out, torch.Tensor) and out.grad_fn is None and out.requires_grad
    assert seen[0] is not tensor and seen[0].data_ptr() == tensor.data_ptr()
    (gradient,) = node.backward((torch.full((3,), 2.0),))
    assert gradient is not None and gradient.tolist() == [2.0, 2.0, 2.0]
    assert tensor.grad is None
    assert weight.grad is not None and weight.grad.tolist() == [0.0, 2.0, 4.0]


def test_an_untouched_tensor_is_not_copied_and_gets_the_gradients_of_all_uses() -> None:
    node = _node(lambda x, y, splits: (x * 3, x, y, splits))
    x, y, splits = _value(), torch.arange(3), [1, 2]
    out = node.forward((x, y, splits))
    for tensor, output in ((x, out[1]), (y, out[2])):
        assert isinstance(output, torch.Tensor) and output.data_ptr() == tensor.data_ptr() and output.grad_fn is None
    assert out[3] is splits
    one = torch.ones(3)
    gradients = node.backward((one, one, None, None))
    assert gradients[0] is not None and gradients[0].tolist() == [4.0, 4.0, 4.0]
    assert gradients[1:] == (None, None)
    assert one.tolist() == [1.0, 1.0, 1.0]


def test_uses_in_a_slot_add_to_the_gradient_of_later_slots_one_by_one() -> None:
    tiny = 2.0**-24  # 1 + tiny + tiny is 1, from left to right

    def slot(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * tiny + x * tiny, x

    plain = torch.ones(1, requires_grad=True)
    used, untouched = slot(begun := plain + 0)
    begun.retain_grad()
    (used + untouched).backward()  # type: ignore[no-untyped-call]
    node = _node(slot)
    node.forward((torch.ones(1, requires_grad=True),))
    (gradient,) = node.backward((torch.ones(1), torch.ones(1)))
    assert gradient is not None and begun.grad is not None
    assert gradient.item() == begun.grad.item() == 1.0


def test_the_gradient_of_a_tensor_without_other_use_is_not_copied() -> None:
    node = _node(lambda x: x)
    node.forward((_value(),))
    gradient = torch.ones(3)
    assert node.backward((gradient,))[0] is gradient


def test_an_input_that_was_changed_in_place_has_its_gradient() -> None:
    node = _node(lambda x: x.mul_(5))
    (out,) = node.forward((torch.ones(3).requires_grad_(),))
    assert isinstance(out, torch.Tensor) and out.tolist() == [5.0, 5.0, 5.0]
    (gradient,) = node.backward((torch.ones(3),))
    assert gradient is not None and gradient.tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize(
    "function", [lambda x, y: (x.mul_(5), y), lambda x, y: (x, y.mul_(5)), lambda x, y: (x.mul_(2), y.add_(1))]
)
@pytest.mark.parametrize("share", [lambda x: (x, x), lambda x: (x.view(-1), x)])
def test_a_write_in_place_that_reaches_a_second_input_is_refused(
    share: Callable[[torch.Tensor], object], function: Callable[..., object]
) -> None:
    layer = LayerSlots(pre=share, experts=function, post=lambda x, y: x + y)
    with pytest.raises(ValueError, match="slot experts of layer 0 .* share no memory with another input, got a write"):
        run([_chunk(layer)])


def test_inputs_that_share_no_memory_may_all_be_written_in_place() -> None:
    node = _node(lambda x, y, z: (x.mul_(5), y.mul_(2), z))
    node.forward((_value().detach().requires_grad_(), torch.ones(3).requires_grad_(), _value()))
    gradients = node.backward((torch.ones(3), torch.ones(3), None))
    assert [None if gradient is None else gradient[0].item() for gradient in gradients] == [5.0, 2.0, None]


@pytest.mark.parametrize("has_other_use", [True, False])
def test_a_hook_on_a_tensor_that_is_returned_untouched_gets_the_whole_gradient(has_other_use: bool) -> None:
    seen: list[torch.Tensor] = []

    def watch(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.register_hook(seen.append)  # type: ignore[no-untyped-call]
        return (x * 3, x) if has_other_use else (x,)

    node = _node(watch)
    one = torch.ones(3)
    node.forward((_value(),))
    (gradient,) = node.backward((one, one) if has_other_use else (one,))
    expected = torch.full((3,), 4.0 if has_other_use else 1.0)
    assert len(seen) == 1 and seen[0].equal(expected)
    assert gradient is not None and gradient.equal(expected)


def test_a_tensor_that_is_returned_untouched_retains_the_whole_gradient() -> None:
    seen: list[torch.Tensor] = []

    def retain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.retain_grad()
        seen.append(x)
        return x * 3, x

    node = _node(retain)
    node.forward((_value(),))
    node.backward((torch.ones(3), torch.ones(3)))
    assert seen[0].grad is not None and seen[0].grad.tolist() == [4.0, 4.0, 4.0]


def test_node_inputs_without_requires_grad_or_use_get_no_gradient() -> None:
    node = _node(lambda x, y: x + y)
    node.forward((torch.ones(3), _value()))
    first, second = node.backward((torch.ones(3),))
    assert first is None and second is not None
    unused = _node(lambda x, y: (x * 2, y * 2))
    unused.forward((_value(), _value()))
    assert unused.backward((torch.ones(3), None))[1] is None


@pytest.mark.parametrize(
    "nest", [lambda x: ([x],), lambda x: {"x": x}, lambda x: ((x, x), x), lambda x: [x, x], lambda x: [{"x": (1, [x])}]]
)
def test_a_tensor_hidden_in_a_container_is_refused(nest: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(TypeError, match=r"slot pre of layer 0 to return tensors one by one, got a (list|dict|tuple)"):
        _node(lambda x: nest(x * 2)).forward((_value(),))


def _chunk(layer: LayerSlots, num_layers: int = 1) -> ModelChunk:
    weight = torch.ones(3, requires_grad=True)
    return ModelChunk(lambda: weight * 2, [layer] * num_layers, lambda x: x.sum())


def test_a_tensor_that_reaches_a_later_slot_by_another_way_is_an_error_that_names_its_slot() -> None:
    stolen: list[torch.Tensor] = []

    def pre(x: torch.Tensor) -> torch.Tensor:
        stolen.append(x * 2)
        return x + 1

    layer = LayerSlots(pre=pre, experts=lambda x: x + stolen.pop())
    with pytest.raises(RuntimeError, match="a tensor of slot pre of layer 0 of microbatch 0 in a later slot's graph"):
        run([_chunk(layer)])


class _Keep(torch.autograd.Function):
    """Saves a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alive: Alive) -> torch.Tensor:
        saved = x.clone()
        ctx.save_for_backward(saved)
        alive.note(saved)
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (saved,) = ctx.saved_tensors
        return gradient + 0 * saved, None


@pytest.mark.parametrize("early_release", [False, True])
def test_the_number_of_saved_tensors_alive_follows_the_schedules_order(early_release: bool) -> None:
    saved = Alive()
    counts: list[int] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Keep.apply(x, saved)  # type: ignore[no-untyped-call]
        return result

    @contextmanager
    def around(event: Event) -> Iterator[None]:
        yield
        counts.append(saved.num)

    layer = LayerSlots(pre=keep, dispatch=keep, experts=keep, combine=keep)
    run([_chunk(layer, 3) for _ in range(3)], early_release=early_release, around=around)
    events = work(run_order(3, 3, delayed=False, early_release=early_release))
    expected, alive = [], 0
    for event in events:
        if event.layer is not None:
            alive += 1 if event.kind is Kind.FORWARD else -1
        expected.append(alive)
    assert counts == expected
    assert max(counts) == peak(events, lambda event: float(event.layer is not None))


def test_slot_outputs_that_autograd_did_not_save_are_freed_once_read() -> None:
    tensors = Alive()
    alive: list[list[int]] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        out = x * 2  # a product with a number saves nothing
        tensors.note(out)
        return out

    @contextmanager
    def around(event: Event) -> Iterator[None]:
        yield
        alive.append(tensors.places)

    run([_chunk(LayerSlots(pre=double, dispatch=double, experts=double, combine=double))], around=around)
    # Each slot's output stays until the next slot has read it.
    assert alive[:6] == [[], [0], [1], [2], [3], []]
    assert not any(alive[6:])


def test_events_run_as_the_order_lists_them() -> None:
    log: list[Event] = []

    def around(event: Event) -> AbstractContextManager[None]:
        log.append(event)
        return torch.autograd.profiler.record_function(str(event))

    layer = LayerSlots(pre=lambda x: x * 2, experts=lambda x: x * 2, delayed={Slot.EXPERTS: lambda: None})
    run([_chunk(layer, 2) for _ in range(3)], around=around)
    assert tuple(log) == work(run_order(3, [layer.plan] * 2))
    assert set(log) >= {event for event in log if event.kind is Kind.WEIGHT_GRADIENT} != set()
    assert work(order(1, 1)) != ()
