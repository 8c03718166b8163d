"""lamella inside `transformers.Trainer` and trainers built on it, for example TRL's: one callback.

    trainer = Trainer(..., callbacks=[ShardedTraining()])

This module imports transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import lamella_engine
import lamella_optim
from lamella_engine import FSDPModule
from lamella_transformers._profiling import step_profiler


class ShardedTraining(TrainerCallback):
    """A Trainer sharded by lamella, with settings beyond FSDP2's.

    The Trainer shards by Accelerate's plugin (`fsdp=True`, `fsdp_config={"version": 2, ...}`), on lamella in FSDP2's
    place. Losses, norms and weights equal those of the Trainer without the callback to the bit, except for
    `clips_local_shards`. One callback may serve several Trainers, one after another.

    Args:
        overlap: Let the optimizer's step hide the gathers at the begin of the next forward, as
            `lamella_optim.overlap_optimizer` does. Two units stay gathered from a step to the next forward.
        late_gradients: Let the optimizer's step hide the last reductions of backward too. A Trainer that clips needs
            all gradients before the step, so `max_grad_norm=0` is required; the logged norm is then computed behind the
            step, from the same gradients.
        clips_local_shards: Clip by `lamella_optim.clip_grad_norm_`, on plain tensors over the shards, for less time of
            the host. Norms then differ from torch's by rounding, and with them later losses.
        keep_budget: Bytes of unsharded parameters that may stay from forward to backward, as in
            `lamella_engine.ShardingOptions`. None leaves the model's setting.
        num_profiled_steps: Profile this many steps of rank 0, after three, and write the trace and the
            report on exposed communication into `output_dir/profile`. 0 profiles nothing.

    Raises:
        ValueError: `late_gradients` without `overlap`, or a negative number.

    Effects: at the end of the Trainer's `__init__`, `lamella_engine.install` and `lamella_optim.install` for the
        process. While the Trainer trains with `late_gradients` or `clips_local_shards`, another function stands in
        the place of `Accelerator.clip_grad_norm_` for the model's gradients.
    """

    def __init__(
        self,
        *,
        overlap: bool = True,
        late_gradients: bool = False,
        clips_local_shards: bool = False,
        keep_budget: int | None = None,
        num_profiled_steps: int = 0,
    ) -> None:
        if late_gradients and not overlap:
            raise ValueError("Expected `late_gradients` with `overlap`, got overlap=False. Leave one of them out.")
        for name, number in (("keep_budget", keep_budget or 0), ("num_profiled_steps", num_profiled_steps)):
            if number < 0:
                raise ValueError(f"Expected `{name}` of at least 0, got {number}. 0 is none.")
        self._overlap, self._late_gradients = overlap, late_gradients
        self._clips_local_shards = clips_local_shards
        self._keep_budget, self._num_profiled_steps = keep_budget, num_profiled_steps
        self._undo: list[Callable[[], None]] = []
        self._norms: _ModelNorms | None = None
        self._profiler: torch.profiler.profile | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put lamella in FSDP2's place, before the Trainer shards its model, and TRL the reference models."""
        lamella_engine.install()
        lamella_optim.install()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Apply the settings to the sharded model and its optimizer, with a resumed checkpoint's state.

        Raises:
            ValueError: The model is not sharded by lamella, the optimizer's step cannot be overlapped, or late
                gradients cannot be.
        """
        self._end()
        root = _outermost_unit(kwargs["model"])
        if self._late_gradients:
            _check_late_gradients(args, root)
        if self._keep_budget is not None:
            FSDPModule.set_options(root, keep_budget=self._keep_budget)
        if self._overlap:
            self._undo.append(self._overlapped(kwargs["optimizer"]))
        if self._clips_local_shards or self._late_gradients:
            self._norms = _ModelNorms(root, is_local=self._clips_local_shards, is_late=self._late_gradients)
            self._undo.append(self._norms.undo)
        if self._num_profiled_steps and state.is_world_process_zero:
            folder = Path(args.output_dir, "profile")
            self._profiler = step_profiler(self._num_profiled_steps, folder, args.device, _print_line)
            self._profiler.start()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step for the profile, here: gloo's work must not outlive the profiler that saw its begin.

        Effects: while profiling on a CPU, waits for late gradients.
        """
        if self._profiler is not None:
            if args.device.type == "cpu":
                FSDPModule.wait_for_gradients(_outermost_unit(kwargs["model"]))
            self._profiler.step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compute a late norm: the step has waited for the gradients, and has not changed them."""
        if self._norms is not None:
            self._norms.finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let optimizer and Accelerate be as before."""
        self._end()

    def _end(self) -> None:
        while self._undo:
            self._undo.pop()()
        if self._profiler is not None:
            self._profiler.stop()
        self._profiler = self._norms = None

    def _overlapped(self, optimizer: Any) -> Callable[[], None]:
        while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # in Accelerate's wrapper
        try:
            return lamella_optim.overlap_optimizer(optimizer, late_gradients=self._late_gradients).remove
        except ValueError as error:
            raise ValueError(f"{error} Or pass ShardedTraining(overlap=False).") from error


def add_to_trainers(callback: ShardedTraining) -> None:
    """Give a callback to every Trainer made from now on, for programs not to be edited.

    Effects: adds to transformers' list of default callbacks, for the process.
    """
    from transformers import trainer

    callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    callbacks.append(callback)


class _ModelNorms:
    """Norms of one model's gradients under the name of Accelerate's function, until `undo()`.

    Args:
        model: The sharded model.
        is_local: Clip by `lamella_optim.clip_grad_norm_`.
        is_late: Put off norms without clipping until `finish()`.
    """

    def __init__(self, model: torch.nn.Module, *, is_local: bool, is_late: bool) -> None:
        from accelerate import Accelerator

        self._ids = {id(parameter) for parameter in model.parameters()}
        self._is_local, self._is_late = is_local, is_late
        self._finish: Callable[[], None] | None = None
        self._accelerator_class: Any = Accelerator
        self._accelerates = Accelerator.clip_grad_norm_

        def clip_grad_norm_(accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            return self._clip(accelerator, list(parameters), max_norm, norm_type)

        self._accelerator_class.clip_grad_norm_ = clip_grad_norm_

    def _clip(self, accelerator: Any, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> Any:
        if any(id(parameter) not in self._ids for parameter in parameters):
            return self._accelerates(accelerator, parameters, max_norm, norm_type)  # another model's
        if not self._is_late:
            return self._norm(accelerator, parameters, max_norm, norm_type)
        late_norm = torch.zeros((), device=parameters[0].device)
        self._finish = lambda: _copy(self._norm(accelerator, parameters, max_norm, norm_type), late_norm)
        return late_norm

    def _norm(self, accelerator: Any, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> Any:
        if not self._is_local:
            return self._accelerates(accelerator, parameters, max_norm, norm_type)
        accelerator.unscale_gradients()
        return lamella_optim.clip_grad_norm_(parameters, max_norm, norm_type)

    def finish(self) -> None:
        """Write the deferred norm into the tensor in the Trainer's log. Effects: the effects of clipping."""
        if self._finish is not None:
            self._finish()
            self._finish = None

    def undo(self) -> None:
        """Give Accelerate its function back."""
        self._accelerator_class.clip_grad_norm_ = self._accelerates


def _copy(norm: torch.Tensor, late_norm: torch.Tensor) -> None:
    late_norm.copy_(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _print_line(line: str) -> None:
    print(line, flush=True)


def _outermost_unit(model: torch.nn.Module) -> Any:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            return module
    raise ValueError(
        f"Expected a model with units of lamella, got {type(model).__name__} without any. Pass fsdp=True and "
        'fsdp_config={"version": 2} to TrainingArguments, and run on two ranks or more.'
    )


def _check_late_gradients(args: Any, model: torch.nn.Module) -> None:
    if args.max_grad_norm:
        raise ValueError(
            f"Expected `max_grad_norm` of 0 with late_gradients, got {args.max_grad_norm}: clipping needs all "
            "gradients before the step. Pass max_grad_norm=0 to TrainingArguments, or leave late_gradients out."
        )
    if args.fp16:
        raise ValueError(
            "Expected `fp16` to be off with late_gradients, got True: a scaler reads gradients before the step. Pass "
            "bf16=True in its place, or leave late_gradients out."
        )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    meshes = {parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in parameters}
    if len(meshes) > 1 or None in meshes:
        raise ValueError(
            f"Expected trained parameters on one mesh with late_gradients, got {len(meshes)} (None is unsharded): "
            f"{meshes}. Leave late_gradients out."
        )
