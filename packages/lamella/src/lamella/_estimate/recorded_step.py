"""One optimizer step, recorded: the bytes of live storages, moment by moment."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import nn

from lamella._estimate.kinds import (
    FORWARD,
    HEAD_AND_LOSS,
    adopt_gradients,
    adopt_model,
    adopt_optimizer_state,
    classify,
)
from lamella._estimate.live_bytes import LiveBytes, MemoryLog
from lamella_engine import FSDPModule

AT_REST: Final = "at rest"
FORWARD_BEGINS: Final = f"{FORWARD} begins"
BACKWARD: Final = "backward"
VALIDATION: Final = "validation"
_FORWARD_AFTER: Final = f"{FORWARD} after "


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A model with everything for an optimizer step.

    Attributes:
        model: The root unit.
        units: The units but the root.
        loss: Runs the forward of a microbatch, and returns its loss.
        optimizer: The optimizer.
        clip: Clips gradients before the optimizer's step.
        num_microbatches: Microbatches of a step.
        vocab_size: The last size of logits; None without logits.
        validate: Runs the forward of a validation's batch; None without validations.
    """

    model: nn.Module
    units: Sequence[nn.Module]
    loss: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer
    clip: Callable[[], object] = lambda: None
    num_microbatches: int = 1
    vocab_size: int | None = None
    validate: Callable[[], object] | None = None

    @property
    def unit_names(self) -> Mapping[nn.Module, str]:
        """The names of the units in the model."""
        names = {module: name for name, module in self.model.named_modules()}
        return {unit: names.get(unit, type(unit).__name__) for unit in self.units}


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """The changes of live bytes in a step, after earlier changes.

    Attributes:
        log: The changes, with the changes before the step.
        first_moment: The index of the step's first moment.
    """

    log: MemoryLog
    first_moment: int


Watch = Callable[[TrainingStep, LiveBytes], AbstractContextManager[object]]
"""Watches a step that is recorded, from before its first forward on."""


def unwatched(step: TrainingStep, live: LiveBytes) -> AbstractContextManager[object]:
    """Watch nothing."""
    return nullcontext()


def record(step: TrainingStep, live: LiveBytes) -> RecordedStep:
    """Run a step, for the engine to learn its order and the optimizer to make its state, then record a second step.

    Args:
        step: The model's parameters have storages, with memory or without.
        live: Entered by the caller.

    Effects: two optimizer steps, and a validation in between. Collective on the groups of the model's mesh.
    """
    live.sums.learn()
    adopt_model(live, step.model)
    with moments_of_units(step.unit_names, live):
        _run(step, live)
    gc.collect()  # Cycles of the first step would count as the second's.
    first_moment = len(live.log.moments)
    if step.validate is not None:
        _validate(step.model, step.validate, live)
    with moments_of_units(step.unit_names, live):
        _run(step, live)
    adopt_optimizer_state(live, step.optimizer)
    adopt_model(live, step.model)
    live.begin(AT_REST)
    classify(live.log, step.model, step.vocab_size)
    return RecordedStep(log=live.log, first_moment=first_moment)


@torch.no_grad()
def _validate(model: nn.Module, validate: Callable[[], object], live: LiveBytes) -> None:
    live.begin(VALIDATION)
    model.eval()
    validate()
    model.train()
    live.begin(AT_REST)


def _run(step: TrainingStep, live: LiveBytes) -> None:
    for index in range(step.num_microbatches):
        _run_microbatch(step, live, is_last=index == step.num_microbatches - 1)
    adopt_gradients(live, step.model)
    live.begin("clipping")
    step.clip()
    live.begin("optimizer step")
    step.optimizer.step()
    live.begin(AT_REST)
    step.optimizer.zero_grad()


def _run_microbatch(step: TrainingStep, live: LiveBytes, *, is_last: bool) -> None:
    if step.num_microbatches > 1 and isinstance(step.model, FSDPModule):
        step.model.set_requires_gradient_sync(is_last)
    live.begin(FORWARD_BEGINS)
    loss = step.loss()
    live.begin(f"backward {HEAD_AND_LOSS}")
    live.in_backward = True
    loss.backward()  # type: ignore[no-untyped-call]
    live.in_backward = False


def forwards_of_units(moments: Iterable[str]) -> tuple[str, ...]:
    """Return the moments in which forwards of the units but the root run, in their order, each once.

    Args:
        moments: The names of a step's moments.
    """
    around = (FORWARD_BEGINS, f"{FORWARD} {HEAD_AND_LOSS}")
    forwards = (moment for moment in dict.fromkeys(moments) if moment.startswith(f"{FORWARD} "))
    return tuple(name for name in forwards if name not in around and not name.startswith(_FORWARD_AFTER))


class Moments(Protocol):
    """Notes the moments of a step, one after another.

    Attributes:
        in_backward: True from the begin of a backward to its end: a forward that runs now is recomputed.
    """

    in_backward: bool

    def begin(self, moment: str) -> None:
        """Begin a moment."""


@contextmanager
def moments_of_units(unit_names: Mapping[nn.Module, str], moments: Moments) -> Iterator[None]:
    """Begin a moment at each unit's forward, and at the gradient of its output, in the block.

    Args:
        unit_names: Unit -> name, in the order of forwards.
        moments: The moments.
    """
    last = next(reversed([*unit_names]), None)
    with ExitStack() as hooks:
        for unit, name in unit_names.items():
            before, after = _hooks(moments, name, is_last=unit is last)
            hooks.callback(unit.register_forward_pre_hook(before).remove)
            hooks.callback(unit.register_forward_hook(after).remove)
        yield


def _hooks(moments: Moments, name: str, *, is_last: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    def before(module: nn.Module, arguments: Any) -> None:
        moments.begin(f"backward recomputes {name}" if moments.in_backward else f"{FORWARD} {name}")

    def after(module: nn.Module, arguments: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple | list) else output
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not moments.in_backward:
            tensor.register_hook(lambda _: moments.begin(f"backward {name}"))  # type: ignore[no-untyped-call]
        if not moments.in_backward:
            moments.begin(f"{FORWARD} {HEAD_AND_LOSS}" if is_last else f"{_FORWARD_AFTER}{name}")

    return before, after
