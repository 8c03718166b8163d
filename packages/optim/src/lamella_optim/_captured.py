"""A training step as one CUDA graph, for hosts that are slower than their GPUs.

Note [Inputs of a replay]
    A graph repeats kernels and copies at fixed addresses. Weights, gradients and optimizer state keep their memory,
    inputs are copied to the captured inputs' memory, and generators of random numbers advance. Python code does not
    run: a number read during the capture is the number of every replay. Therefore plain inputs, shapes and options of
    param groups are compared with the captured values, state that `Optimizer.load_state_dict` has replaced is refused,
    and pre-hooks of the optimizer that only wait are called.
    Evaluations run between replays on the weights that a replay has written: units are made stale after each.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lamella_engine.extending import forget_measured, held_by, hides_tensors, map_tensors, note_step, tensors_in
from lamella_optim._hooks import wait_before_update
from lamella_optim._installation import install
from lamella_optim._overlap import drop_early

P = ParamSpec("P")
R = TypeVar("R")


class CapturedStep(Generic[P, R]):
    """A callable with the step's signature; made by `capture_step`.

    Attributes:
        is_on_cuda: Whether the step will be captured: parameters are on a GPU.
        is_captured: Whether the next call is a replay.
    """

    def __init__(self, step: Callable[P, R], optimizer: Optimizer, num_eager_steps: int) -> None:
        self._step = step
        self._optimizer = optimizer
        self._num_eager_left = num_eager_steps
        self._device = _device_of(optimizer)
        self._inputs: list[Any] = []
        self._tree: pytree.TreeSpec | None = None
        self._options: list[dict[str, Any]] = []
        self._state: object = None  # the optimizer's state at the capture: a loaded state dict is another object
        self._recorded: tuple[torch.cuda.CUDAGraph, R] | None = None
        # Autograd runs backward on the streams of forward: one stream for all, so a capture finds no work elsewhere.
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def is_on_cuda(self) -> bool:
        return self._stream is not None

    @property
    def is_captured(self) -> bool:
        return self._recorded is not None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self._take(*pytree.tree_flatten((args, kwargs)))
        if self._num_eager_left > 0:
            self._num_eager_left -= 1
            return self._run()
        self._check_state()
        self._check_options()
        if self._stream is None:
            return self._run()
        if self._recorded is None:
            self._recorded = self._capture(self._stream)
        graph, outputs = self._recorded
        wait_before_update(self._optimizer)
        forget_measured(self._optimizer)
        graph.replay()
        note_step(self._optimizer)  # no hook has run
        return _copies_of(outputs)

    def reset(self) -> None:
        """Give the graph's memory back. The next call runs eagerly, and the one after it captures another graph.

        In the eager call new parameters get their state: made in a graph, every replay would make the state anew.

        A graph holds on to the communicators of its collectives: `torch.distributed.destroy_process_group` waits for
        graphs that are alive, without an end. Reset the step before.

        Effects: local; no host sync: CUDA lets a replay under way finish.
        """
        self._options, self._state = [], None
        self._num_eager_left = max(self._num_eager_left, 1)
        if self._recorded is None:
            return
        (graph, _), self._recorded = self._recorded, None
        graph.reset()

    def _take(self, leaves: list[Any], tree: pytree.TreeSpec) -> None:
        """Put the inputs in place: on CUDA always at the first call's addresses."""
        if self._tree is None:
            for index, leaf in enumerate(leaves):
                if not isinstance(leaf, torch.Tensor) and (hides_tensors(leaf) or tensors_in(leaf)):
                    raise _unseen(f"input {index} of", leaf, "Pass its contents: `dict(batch)`, for one")
            self._tree = tree
            self._inputs = [_held_on(self._device, leaf) for leaf in leaves]
            return
        if tree != self._tree:
            raise ValueError(
                f"Expected a captured step to be called as the first time, with {self._tree}, got {tree}. "
                "Capture another one for it."
            )
        for index, (input_tensor, leaf) in enumerate(zip(self._inputs, leaves, strict=True)):
            if not _is_alike(input_tensor, leaf):
                raise ValueError(
                    f"Expected input {index} of a captured step to be {_text(input_tensor)} in each call, got "
                    f"{_text(leaf)}. Pad batches to one shape, pass numbers as tensors, or capture another step for it."
                )
        if self._stream is None:
            self._inputs = leaves
            return
        for input_tensor, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(input_tensor, torch.Tensor):
                input_tensor.copy_(leaf.detach(), non_blocking=True)

    def _call(self) -> R:
        assert self._tree is not None
        args, kwargs = pytree.tree_unflatten(self._inputs, self._tree)
        outputs = self._step(*args, **kwargs)
        if hides_tensors(outputs):
            raise _unseen("what is returned by", outputs, "Return its tensors")
        return map_tensors(torch.Tensor.detach, outputs)

    def _run(self) -> R:
        if self._stream is None:
            return _copies_of(self._call())
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = _copies_of(self._call())
        current.wait_stream(self._stream)
        return outputs

    def _capture(self, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, R]:
        drop_early(self._optimizer)
        note_step(self._optimizer)  # an evaluation has renewed copies and scales, which each replay must renew
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()  # A graph has a memory pool of its own: cached blocks of eager steps would lie beside.
        graph = torch.cuda.CUDAGraph()
        failure: BaseException | None = None
        try:
            # Other threads may go on: a data loader pins batches.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                try:
                    outputs = self._call()
                except BaseException as error:
                    failure = error
                    raise
        except RuntimeError:
            if failure is None:
                raise
            # Ending the broken capture raises too, about the capture: the step's error would stay unseen.
            raise failure from None
        return graph, outputs

    def _check_state(self) -> None:
        """Refuse a loaded state: a replay would go on with the tensors of the state before."""
        state: object = self._optimizer.state
        if self._state is None:
            self._state = state
        if state is not self._state:
            raise RuntimeError(
                f"Expected the state of the {type(self._optimizer).__name__} that was captured, got another one from "
                "`load_state_dict`, which a replay does not see. Call `reset()` on the captured step: a graph of the "
                "loaded state is captured then. Or load by `lamella_checkpoint.load`, which fills the captured tensors."
            )

    def _check_options(self) -> None:
        """Refuse changed options of param groups: a replay would not see them."""
        now = [
            {key: option for key, option in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]
        self._options = self._options or now
        if len(now) != len(self._options):
            raise RuntimeError(
                f"Expected the {len(self._options)} param groups that were captured, got {len(now)}. Capture another "
                "step."
            )
        for index, (before, after) in enumerate(zip(self._options, now, strict=True)):
            for key in {**before, **after}:
                captured, current = before.get(key), after.get(key)
                if _is_same(captured, current):
                    continue
                if isinstance(captured, torch.Tensor):
                    raise RuntimeError(
                        f"Expected {key!r} of param group {index} to stay the tensor that was captured, got another "
                        f"{type(current).__name__}, which a replay does not see. Write into the captured tensor "
                        "(`copy_`), as schedulers do; or call `reset()` on the captured step."
                    )
                raise RuntimeError(
                    f"Expected {key!r} of param group {index} to stay {captured} in a captured step, got {current}, "
                    f"which a replay does not see. Build the optimizer with a tensor on {self._device} for it, and "
                    "write into that, as schedulers do; or capture another step."
                )


def capture_step(step: Callable[P, R], optimizer: Optimizer, *, num_eager_steps: int = 3) -> CapturedStep[P, R]:
    """Capture a whole training step in a CUDA graph and replay it: the host's part becomes one launch.

    The first calls run eagerly: units learn their order, optimizers make their state. The next call is captured, and
    later calls are replays. A replay computes the eager step's result, bit by bit, wherever kernels are repeatable.

    Args:
        step: Forward, backward, `optimizer.step()` and `zero_grad()`, with everything between: clipping, several
            microbatches. The step must not read values from the device (`.item()`, a branch on a tensor's value), and
            must make the same calls each time. Arguments and result are nests of tensors and plain values.
        optimizer: The optimizer of the step; over CUDA tensors built with `capturable=True` if its class has the
            option. A scheduled learning rate must be a tensor. No other option of a param group may change.
        num_eager_steps: Number of eager steps before the capture.

    Returns:
        A replacement of `step`, for every rank alike, to call with tensors of the first call's shapes and dtypes on any
        device; inputs are copied to the parameters' device. The result is a copy of the step's result, without history.

    Raises:
        ValueError: Now: an optimizer that is not `capturable`, parameters on several devices, no eager step. In a call,
            before any work: inputs unlike the first call's, or an object that may hide tensors. After the first step:
            its result is such an object.
        TypeError: `step` is not callable, or `num_eager_steps` is not an int.
        RuntimeError: A param group has changed before a call, or a state dict was loaded into the optimizer. From
            torch, in the capturing call: an operation of the step cannot be captured.

    Effects: eager steps run on a stream of their own, and the current stream waits for it; the capture waits for the
        device and empties torch's cache; a replay goes to the current stream, with no host sync. A graph keeps the
        step's memory. With `overlap_optimizer` a captured step gathers nothing for the next step; late gradients stay
        late. The process group cannot be destroyed before the captured step is `reset`. Over parameters on the CPU all
        calls run eagerly, and all is checked alike. Calls `install`.
    """
    if not callable(step):
        raise TypeError(f"Expected `step` to be a callable of a whole training step, got {step!r}.")
    if isinstance(num_eager_steps, bool) or not isinstance(num_eager_steps, int):
        raise TypeError(f"Expected `num_eager_steps` to be an int, got {num_eager_steps!r}.")
    if num_eager_steps < 1:
        raise ValueError(
            f"Expected `num_eager_steps` of at least 1, since units learn their order in the first step, got "
            f"{num_eager_steps}."
        )
    install()
    captured = CapturedStep(step, optimizer, num_eager_steps)
    for index, group in enumerate(optimizer.param_groups):
        if captured.is_on_cuda and group.get("capturable") is False:
            raise ValueError(
                f"Expected a {type(optimizer).__name__} built with `capturable=True`, got param group {index} without. "
                "Its counts of steps must lie on the device."
            )
    return captured


def _device_of(optimizer: Optimizer) -> torch.device:
    devices = {parameter.device for parameter in held_by(optimizer)}
    if len(devices) != 1:
        raise ValueError(
            f"Expected an `optimizer` of parameters on one device, got {sorted(map(str, devices))}. Capture a step of "
            "each device's by itself."
        )
    return devices.pop()


def _held_on(device: torch.device, leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor) or device.type == "cpu":
        return leaf
    return torch.empty_like(leaf, device=device, requires_grad=False).copy_(leaf.detach(), non_blocking=True)


def _is_alike(captured: object, leaf: object) -> bool:
    if isinstance(captured, torch.Tensor):
        return isinstance(leaf, torch.Tensor) and (leaf.shape, leaf.dtype) == (captured.shape, captured.dtype)
    return _is_same(captured, leaf)


def _is_same(one: object, other: object) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return False
    if isinstance(one, tuple) and isinstance(other, tuple):  # betas, which may be tensors
        return len(one) == len(other) and all(map(_is_same, one, other))
    is_nan = one != one and other != other
    return bool(one == other or is_nan)


def _text(leaf: object) -> str:
    return f"{tuple(leaf.shape)} in {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(leaf)


def _copies_of(outputs: R) -> R:
    """Copies of outputs, which the next call does not overwrite."""
    return map_tensors(torch.Tensor.clone, outputs)


def _unseen(description: str, hiding_object: object, way_out: str) -> ValueError:
    """An error for an object with hidden tensors: each replay would use the captured ones."""
    return ValueError(
        f"Expected {description} a captured step to be tensors and plain values, in lists, tuples and dicts, got "
        f"{type(hiding_object).__name__}, which may hold tensors out of sight. {way_out}."
    )
