"""The kinds of bytes, and the kind of each storage of a recorded step."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lamella._estimate.live_bytes import LiveBytes, MemoryLog, TrackedStorage
from lamella_buffers import FakeCopyEngineTransport
from lamella_engine.extending import local_of, unit_of

MAIN_WEIGHTS: Final = "main weights"
GATHERED: Final = "gathered weights"
GRADIENTS: Final = "gradients"
FLYING_GRADIENTS: Final = "gradients in flight"
OPTIMIZER_STATE: Final = "optimizer state"
ACTIVATIONS: Final = "activations"
HOST_ACTIVATIONS: Final = "activations on the host"
LOGITS: Final = "logits and loss"
BUFFERS: Final = "buffers and inputs"
LIBRARIES: Final = "libraries"
IDLE_WINDOWS: Final = "idle windows"
TEMPORARIES: Final = "temporaries"

KINDS: Final = (
    *(MAIN_WEIGHTS, OPTIMIZER_STATE, GRADIENTS, GATHERED, FLYING_GRADIENTS, ACTIVATIONS, LOGITS, BUFFERS),
    *(TEMPORARIES, LIBRARIES, HOST_ACTIVATIONS),
)

FORWARD: Final = "forward"
HEAD_AND_LOSS: Final = "head and loss"
_AT_REST: Final = (MAIN_WEIGHTS, OPTIMIZER_STATE, GRADIENTS)


def adopt_model(live: LiveBytes, model: nn.Module) -> None:
    """Count the shards, the gathered weights and the buffers of a sharded model, and idle windows."""
    for group in _groups(model):
        # Copies over an outer axis too. Main weights last: under DDP they are the memory of the gathered buffers.
        for buffer in (*group.buffers, *group.model_weights.values()):
            live.adopt(buffer.flat, GATHERED)
        live.adopt(group.main_weight.flat, MAIN_WEIGHTS)
        if isinstance(group.transports.shard, FakeCopyEngineTransport):
            for idle in group.transports.shard.idle_windows:
                live.adopt(idle, IDLE_WINDOWS)
    for parameter in model.parameters():
        if unsharded_outside(parameter):
            live.adopt(parameter.detach(), MAIN_WEIGHTS)
    for tensor in model.buffers():
        live.adopt(tensor, BUFFERS)


def adopt_gradients(live: LiveBytes, model: nn.Module) -> None:
    """Count the gradients for the optimizer."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            live.adopt(local_of(parameter.grad), GRADIENTS)


def adopt_optimizer_state(live: LiveBytes, optimizer: torch.optim.Optimizer) -> None:
    """Count the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor):
                live.adopt(local_of(tensor), OPTIMIZER_STATE)


def unsharded_outside(parameter: nn.Parameter) -> bool:
    """True for a parameter outside all units, which is whole on every rank."""
    return not isinstance(parameter, DTensor)


def classify(log: MemoryLog, model: nn.Module, vocab_size: int | None) -> None:
    """Give storages without a kind a kind, by the moment of birth and the shape of the tensor.

    Args:
        log: The changes of a step, changed in place.
        model: The step's model, sharded.
        vocab_size: The last size of logits; None without logits.
    """
    gradient_shapes = _gradient_shapes(model)
    survivors = _survivors_of_forwards(log)
    for tracked in dict.fromkeys(change.storage for change in log.changes):
        if not tracked.kind:
            tracked.kind = _kind(tracked, log.moments[tracked.moment], gradient_shapes, survivors, vocab_size)


def on_host(rests_on_cpu: bool) -> frozenset[str]:
    """Return the kinds in the host's memory."""
    return frozenset((HOST_ACTIVATIONS, *(_AT_REST if rests_on_cpu else ())))


def _kind(
    tracked: TrackedStorage,
    moment: str,
    gradient_shapes: frozenset[tuple[int, ...]],
    survivors: set[TrackedStorage],
    vocab_size: int | None,
) -> str:
    shape = tracked.shape
    # The loss may compute gradients in its forward, see `linear_cross_entropy`; units do not.
    if shape in gradient_shapes and (HEAD_AND_LOSS in moment or moment.startswith("backward")):
        return FLYING_GRADIENTS
    if vocab_size is not None and len(shape) > 1 and shape[-1] == vocab_size:
        return LOGITS
    if moment.startswith(FORWARD):
        return ACTIVATIONS if tracked in survivors else TEMPORARIES
    # The engine reduces gradients into flat buffers; layers compute with matrices.
    return FLYING_GRADIENTS if moment.startswith("backward") and len(shape) == 1 else TEMPORARIES


def _survivors_of_forwards(log: MemoryLog) -> set[TrackedStorage]:
    """Return the storages born in a moment of a forward and alive in a later one."""
    survivors = set()
    for change in log.changes:
        if change.nbytes < 0 and change.moment > change.storage.moment:
            survivors.add(change.storage)
    return survivors


def _gradient_shapes(model: nn.Module) -> frozenset[tuple[int, ...]]:
    shapes = {tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad}
    return frozenset(shapes | {shape[::-1] for shape in shapes if len(shape) == 2} - {()})


def _groups(model: nn.Module) -> Iterator[Any]:
    units = {id(unit): unit for module in model.modules() if (unit := unit_of(module))}
    for unit in units.values():
        yield from unit.parameters.groups
