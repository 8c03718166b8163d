"""`save_checkpoint` and `load_checkpoint` of `megatron.training` over sharded models.

Note [Megatron decides, lamella reads and writes]
    Megatron's functions stay: they know `--finetune`, the file with the newest iteration, random states and old
    checkpoints to remove. Between them and the disk is a dict of state. In lamella's place the dict holds the sharded
    chunks and the optimizer themselves, next to the plain entries; writing hands both to
    `lamella_megatron.save_checkpoint`, and reading to `load_checkpoint`, for a load in place.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from megatron.core import parallel_state
from megatron.training.global_vars import get_tokenizer
from megatron.training.utils import print_rank_0
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from lamella_checkpoint import CheckpointMismatch, PartialLoad
from lamella_engine import FSDPModule
from lamella_megatron._checkpoint.checkpoint import load_checkpoint, save_checkpoint
from lamella_megatron._driver.wrapper import ShardedModel

Function = Callable[..., Any]
State = dict[str, Any]

_ENTRIES_OF_RUNS: Final = {"optimizer", "opt_param_scheduler", "rng_state"}
"""The entries of a load that goes on with a run."""

_BOUNDS: Final = ("max_lr", "min_lr", "start_wd", "end_wd")
"""The options of a parameter group that megatron's scheduler reads before its own."""

_RANDOM_STATES: Final = re.compile(r"rng_state\.\(\d+, \d+\)\.\d+\.")
"""The first part of the names of a rank's random states: pipeline stage, tensor-parallel and data-parallel rank."""

_NUM_SAMPLES: Final = "consumed_train_samples"
"""The argument by which megatron finds the place in the data."""


@dataclass(frozen=True)
class Checkpoints:
    """Megatron's own functions, for models of other wrappers.

    Attributes:
        generate_state_dict: Collects the state to save, or the state to load into.
        load_base_checkpoint: Reads one iteration into the collected state.
        preprocess: Renames Megatron-FSDP's tensors.
        save_checkpoint: Saves one iteration.
    """

    generate_state_dict: Function
    load_base_checkpoint: Function
    preprocess: Function
    save_checkpoint: Function

    def pairs(self) -> Sequence[tuple[Function, Function]]:
        """Each of megatron's functions with lamella's."""
        return [
            (self.generate_state_dict, _stand_in(self.generate_state_dict, self._generate)),
            (self.load_base_checkpoint, _stand_in(self.load_base_checkpoint, self._load_base)),
            (self.preprocess, _stand_in(self.preprocess, self._preprocess)),
            (self.save_checkpoint, _stand_in(self.save_checkpoint, self._save)),
        ]

    def _generate(self, args: Any, model: Any, optimizer: Any, *positional: Any, **named: Any) -> State:
        if not _are_sharded(model):
            state: State = self.generate_state_dict(args, model, optimizer, *positional, **named)
            return state
        state = self.generate_state_dict(args, [], None, *positional, **named)
        state.pop("rerun_state_machine", None)  # Megatron reads the machine back from torch_dist alone.
        return state | _live(args, model, optimizer)

    def _load_base(self, load_dir: Any, args: Any, rank0: bool = False, **named: Any) -> tuple[Any, ...]:
        state = named.get("sharded_state_dict")
        if rank0 or state is None or not _are_sharded(state.get("model")):
            answer: tuple[Any, ...] = self.load_base_checkpoint(load_dir, args, rank0, **named)
            return answer
        _check_kind(load_dir, named)
        plain, path, release, kind = self.load_base_checkpoint(load_dir, args, True)
        if kind is None:
            return None, path, release, kind
        if release:  # Megatron takes the weights alone, and begins at iteration 0.
            state = {name: entry for name, entry in state.items() if name not in _ENTRIES_OF_RUNS}
        begins_anew = release or args.finetune or getattr(args, "override_ckpt_iteration", None) is not None
        stored_args = None if begins_anew else plain["args"]
        strict, stored_names = args.strict_fsdp_dtensor_load, FileSystemReader(path).read_metadata().state_dict_metadata
        _check_entries(path, state, stored_names, stored_args, strict=strict)
        with _schedule_of_groups(state.get("optimizer"), args):
            state = _load(path, state, stored_names, strict=strict, vocabulary_size=_vocabulary_size(args))
        return state, path, release, kind

    def _preprocess(self, args: Any, state: State, model: Any) -> State:
        renamed: State = state if _are_sharded([model]) else self.preprocess(args, state, model)
        return renamed

    def _save(self, iteration: int, model: Any, *positional: Any, **named: Any) -> None:
        if not all(isinstance(chunk, ShardedModel) for chunk in model):
            self.save_checkpoint(iteration, model, *positional, **named)
            return
        with _writing_by(_write):
            self.save_checkpoint(iteration, model, *positional, **named)


def _stand_in(original: Function, function: Function) -> Function:
    """A function with the name and the signature of megatron's."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _are_sharded(model: object) -> bool:
    return isinstance(model, list) and bool(model) and all(isinstance(chunk, FSDPModule) for chunk in model)


def _live(args: Any, model: Sequence[nn.Module], optimizer: Any) -> State:
    """The chunks and the optimizer as entries of the state."""
    return {"model": list(model)} | ({} if optimizer is None or args.no_save_optim else {"optimizer": optimizer})


def _check_kind(load_dir: object, named: State) -> None:
    """Refuse a checkpoint of another kind than the model's.

    Raises:
        ValueError: The checkpoint is in the format `torch_dist`, or a GPTModel's for a HybridModel.
    """
    if "_model" not in named["sharded_state_dict"]:
        raise ValueError(
            f"Expected an fsdp_dtensor checkpoint in {str(load_dir)!r}, got torch_dist. Convert it by "
            "`lamella_convert.convert(..., to='fsdp_dtensor')`."
        )
    if named.get("gpt_compat_layer_maps") is not None:
        raise ValueError(
            f"Expected the checkpoint of a HybridModel in {str(load_dir)!r}, got a GPTModel's. Resume it as a GPTModel."
        )


@contextmanager
def _writing_by(save: Function) -> Iterator[None]:
    """A function in place of `torch.distributed.checkpoint.save`, which megatron calls by its full name to write.

    Effects: on the whole process while the context lasts.
    """
    package: Any = torch.distributed.checkpoint
    torchs = package.save
    package.save = save
    try:
        yield
    finally:
        package.save = torchs


def _write(state_dict: State, storage_writer: Any) -> None:
    """Write the state, with live chunks and optimizer inside, to the directory of the writer.

    Effects: as `lamella_megatron.save_checkpoint`, and an exchange of random states over the model-parallel ranks.
    """
    state = dict(state_dict)
    chunks, optimizer = state.pop("model"), state.pop("optimizer", None)
    args, iteration = state.pop("args"), state.pop("iteration")
    if "rng_state" in state:
        state["rng_state"] = _gathered_random_states(state["rng_state"])
    if optimizer is not None and optimizer.grad_scaler is not None:
        state["grad_scaler"] = optimizer.grad_scaler.state_dict()
    _remove_if_empty(storage_writer.path)
    save_checkpoint(
        storage_writer.path,
        model=chunks,
        optimizer=None if optimizer is None else optimizer.optimizer,
        iteration=iteration,
        args=args,
        objects=_flat(state),
    )


def _flat(state: State) -> State:
    """Entries under the names in torch's reader, and so in megatron's: "opt_param_scheduler.num_steps"."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    flat: State = planner.state_dict
    return flat


def _gathered_random_states(by_place: State) -> State:
    """Random states by pipeline and tensor-parallel place: each rank has its own, and rank 0's are written."""
    group = parallel_state.get_model_parallel_group()
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, by_place, group=group)
    return {place: states for states_by_place in everyones for place, states in states_by_place.items()}


def _remove_if_empty(directory: str | os.PathLike[str]) -> None:
    """Megatron makes the directory first; lamella's appears with all files in it, in the place of a checkpoint."""
    if dist.get_rank() == 0 and Path(directory).is_dir() and not any(Path(directory).iterdir()):
        Path(directory).rmdir()


def _check_entries(path: str, state: State, stored_names: Collection[str], stored_args: Any, *, strict: bool) -> None:
    """Refuse a checkpoint without a run's schedule or place in the data.

    torch's reader leaves absent entries as they are: a new schedule would begin without a word. Checkpoints of
    Megatron-FSDP have no loss scale: a new one begins, with a warning.

    Args:
        path: The directory of one iteration.
        state: The entries that a load asks for.
        stored_names: The names in the checkpoint.
        stored_args: The checkpoint's arguments if the place in the data counts, else None.
        strict: False prints the absent names alone.

    Raises:
        ValueError: Entries are absent and the load is strict.
    """
    scaler = getattr(state.get("optimizer"), "grad_scaler", None)
    scale = {} if scaler is None else scaler.state_dict()
    schedule = state.get("opt_param_scheduler") or {}
    absent_names, absent_scale = (
        [name for name in _flat(requested) if name not in stored_names]
        for requested in ({"opt_param_scheduler": schedule}, {"grad_scaler": scale})
    )
    if stored_args is not None and not hasattr(stored_args, _NUM_SAMPLES):
        absent_names.append(f"args.{_NUM_SAMPLES}")
    if absent_names and strict:
        raise ValueError(
            f"Expected {', '.join(absent_names)} in the checkpoint {path!r}, got none: the schedule or the data would "
            "begin anew. Pass --finetune to begin both anew, --no-load-optim to begin the schedule anew, or "
            "--no-strict-fsdp-dtensor-load to go on with the rest. A save by `lamella_megatron.save_checkpoint` has "
            "them with `args=args, objects={'opt_param_scheduler': scheduler.state_dict()}`."
        )
    if absent_names or absent_scale:
        names = ", ".join([*absent_names, *absent_scale])
        print_rank_0(f"WARNING: the checkpoint {path} lacks {names}: these begin anew")


@contextmanager
def _schedule_of_groups(optimizer: Any, args: Any) -> Iterator[None]:
    """Keep, check or replace the bounds of the schedule in each parameter group during a load, as the arguments say.

    Megatron's scheduler compares its own bounds with the checkpoint's, and computes rates by the groups' bounds.

    Raises:
        ValueError: The checkpoint has other bounds, on any rank, and no argument says which count.

    Effects: a gather of objects on the default group: pipeline stages have different groups.
    """
    if optimizer is None or args.use_checkpoint_opt_param_scheduler:
        yield
        return
    bounds = [{name: group[name] for name in _BOUNDS if name in group} for group in optimizer.param_groups]
    yield
    problem = None
    for i, (group, live) in enumerate(zip(optimizer.param_groups, bounds, strict=True)):
        loaded = {name: group[name] for name in live}
        if loaded != live and problem is None and not args.override_opt_param_scheduler:
            problem = (
                f"Expected parameter group {i} with {live!r} in the checkpoint, as the command line has it, got "
                f"{loaded!r}. Pass --override-opt-param-scheduler to go on with the command line's, or "
                "--use-checkpoint-opt-param-scheduler to go on with the checkpoint's."
            )
        group.update(live)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for problem in filter(None, problems):
        raise ValueError(problem)


def _vocabulary_size(args: Any) -> int | None:
    """The number of tokens that megatron pads; None if unknown."""
    try:
        tokenizer = get_tokenizer()
    except AssertionError:  # A program without a tokenizer.
        return getattr(args, "vocab_size", None)
    return int(tokenizer.vocab_size)


def _load(
    path: str, state: State, stored_names: Collection[str], *, strict: bool, vocabulary_size: int | None
) -> State:
    """Fill chunks and optimizer in place, and the remaining entries of the state; return the state for megatron.

    Effects: as `lamella_megatron.load_checkpoint`, and an exchange of torch's reader; without `strict` a gather of
        differences, which rank 0 prints.
    """
    state = dict(state)
    chunks, optimizer = state.pop("_model"), state.pop("optimizer", None)
    del state["model"]
    steps = None if optimizer is None else optimizer.optimizer
    options: dict[str, Any] = {"model": chunks, "optimizer": steps, "vocabulary_size": vocabulary_size}
    if strict:
        try:
            load_checkpoint(path, **options)
        except CheckpointMismatch as error:
            error.way_out = "On the command line: --no-strict-fsdp-dtensor-load."
            raise
    else:
        _print_differences(path, load_checkpoint(path, **options, strict=False))
    scaler = None if optimizer is None else optimizer.grad_scaler
    state |= {"num_floating_point_operations_so_far": 0} | (
        {} if scaler is None else {"grad_scaler": scaler.state_dict()}
    )
    random_states = state.get("rng_state") or {}
    kept_states = _absent_random_states(path, random_states, stored_names)
    load(state, storage_reader=FileSystemReader(path), planner=DefaultLoadPlanner(allow_partial_load=True))
    for (place, i), states in kept_states.items():
        random_states[place][i] = states
    keys = ["model"] if len(chunks) == 1 else [f"model{place}" for place in range(len(chunks))]
    # Megatron copies these to the chunks, each tensor onto itself.
    state |= {key: chunk.state_dict() for key, chunk in zip(keys, chunks, strict=True)}
    if optimizer is not None:
        state["optimizer"] = {} if scaler is None else {"grad_scaler": state.pop("grad_scaler")}
    return state


def _print_differences(path: str, loaded: PartialLoad) -> None:
    """Print, on rank 0, the differences of all ranks that a load left as they are.

    Effects: a gather of objects on the default group.
    """
    loads: list[PartialLoad] | None = [loaded] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(replace(loaded, extra={}), loads)
    lines = {line: None for partial_load in loads or () for line in _lines(partial_load)}
    if lines:
        print_rank_0("\n  ".join([f"WARNING: the checkpoint {path} differs, and these stay as they are:", *lines]))


def _lines(loaded: PartialLoad) -> Iterator[str]:
    yield from loaded.left.lines()
    yield from (f"{name}: absent from the checkpoint" for name in loaded.kept)


def _absent_random_states(path: str, by_place: State, names: Iterable[str]) -> dict[tuple[str, int], State]:
    """This rank's random states without a counterpart in the checkpoint, by model- and data-parallel place.

    torch's reader would leave None in them: the rank goes on with the states that it has.

    Effects: rank 0 prints the number of absent states, of all model-parallel places.
    """
    stored_places = {match[0] for match in map(_RANDOM_STATES.match, names) if match}
    num_data = max(map(len, by_place.values()), default=0)  # 1, or all ranks' with --data-parallel-random-init
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    num_parts = parallel_state.get_tensor_model_parallel_world_size()
    places = {
        f"rng_state.({stage}, {part}).{i}."
        for stage, part, i in product(range(num_stages), range(num_parts), range(num_data))
    }
    if num_absent := len(places - stored_places):
        print_rank_0(
            f"WARNING: the checkpoint {path} lacks {num_absent} of {len(places)} random states, kept as they are"
        )
    return {
        (place, i): dict(states)
        for place, states_of_place in by_place.items()
        for i, states in enumerate(states_of_place)
        if f"rng_state.{place}.{i}." not in stored_places
    }
