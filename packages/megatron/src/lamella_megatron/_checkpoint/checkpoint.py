"""Checkpoints of a live, sharded megatron-core model: saved on any ranks, resumed on any other.

Tensor-parallel parts are stored as their slices of whole tensors and experts under their global numbers, so that a
checkpoint is independent of the ranks that wrote it: Note [Parts of whole tensors].
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args, overload

import torch
from torch import nn

from lamella_checkpoint import AsyncSaver, PartialLoad, SaveHandle, Source, load
from lamella_convert import (
    Format,
    OpenCheckpoint,
    SizeUnknown,
    from_megatron_model,
    open_checkpoint,
    open_megatron,
    save_fsdp_dtensor,
    save_torch_dist,
    sizes_of_args,
    to_megatron_model,
)
from lamella_files import MODEL, in_model, longest_known, rename, split_section
from lamella_megatron._checkpoint.global_optimizer import GlobalOptimizer
from lamella_megatron._checkpoint.global_tensors import GlobalModel
from lamella_megatron._checkpoint.scaling_states import SCALING, ScalingStates
from lamella_megatron._checkpoint.stages import without
from lamella_megatron._checkpoint.torch_dist import StoredPlaces
from lamella_megatron._checkpoint.vocabulary import with_padding

_Format = Literal["fsdp_dtensor", "torch_dist"]


@overload
def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    format: _Format = "fsdp_dtensor",
    iteration: int = 0,
    args: Namespace | None = None,
    objects: Mapping[str, object] | None = None,
    layer_groups: str | None = None,
    groups: Any = None,
    saver: None = None,
) -> Path: ...
@overload
def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    format: _Format = "fsdp_dtensor",
    iteration: int = 0,
    args: Namespace | None = None,
    objects: Mapping[str, object] | None = None,
    layer_groups: str | None = None,
    groups: Any = None,
    saver: AsyncSaver,
) -> SaveHandle: ...
def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    format: _Format = "fsdp_dtensor",  # noqa: A002  # As lamella_convert names it.
    iteration: int = 0,
    args: Namespace | None = None,
    objects: Mapping[str, object] | None = None,
    layer_groups: str | None = None,
    groups: Any = None,
    saver: AsyncSaver | None = None,
) -> Path | SaveHandle:
    """Write a model sharded by `fully_shard_model` in a format of megatron-core 0.19.

        save_checkpoint("runs/first/iter_0000100", model=model, optimizer=optimizer, iteration=100)

    No rank gathers a tensor. The scales and past amaxes of delayed scaling, of float8 weights and of Transformer
    Engine's layers, are kept as plain numbers: `load_checkpoint` reads no `_extra_state`, whose reading would run code.

    Args:
        path: The checkpoint's directory, on storage that every rank sees. Rank 0's counts. A checkpoint there is
            replaced.
        model: Read only. Of virtual pipeline stages the rank's chunks, the list that megatron-core's driver takes.
        optimizer: An optimizer over the model's parameters. None leaves the optimizer out.
        format: "fsdp_dtensor" resumes training. "torch_dist" is for `megatron.core.dist_checkpointing.load` with a
            plain model's `sharded_state_dict`; the options of parameter groups are not in it.
        iteration: Returned by `load_checkpoint`, and read by Megatron.
        args: Megatron's. None takes the plain values of the model's `config`.
        objects: Further entries by name, plain data: `opt_param_scheduler`, `num_floating_point_operations_so_far`.
            Rank 0's count.
        layer_groups: The pattern of all layers of a HybridModel, with brackets, for readers with a stack for each group
            in brackets ("[*E][*E]"). The groups of the units may be others, and change no name. None numbers each
            layer.
        groups: The `ProcessGroupCollection` of `fully_shard_model`; with `tp`, and `ep` and `expt_tp` for a model with
            experts.
        saver: Writes in the background: the call returns while the state is copied to host memory, and the checkpoint
            appears once every rank has written. Steps of optimizers of `torch.optim`, and loads, wait for the copies;
            before any other change of parameters or optimizer state call `wait_staged` of the handle. Every rank's
            `path` counts then, and must be the same. None writes before the call returns.

    Returns:
        The checkpoint's absolute path; with `saver` a handle for the outcome.

    Raises:
        CheckpointFailed: Another rank failed. A failed rank raises its own error. With `saver` also: the previous save
            failed, on any rank; every rank raises, and nothing has begun.
        FileExistsError: `path` holds something else than a checkpoint.
        NotImplementedError: A pipeline stage has two copies of the embedding: a shared output layer's and that of
            multi-token prediction.
        TypeError: `optimizer` is no `torch.optim.Optimizer`, such as a `ShardedOptimizer`.
        ValueError: The model is not sharded, or lacks chunks of the rank; a group is missing, `args` has another
            tensor-parallel size, a parameter of the optimizer is not the model's, or `layer_groups` is the pattern of
            other layers. For "torch_dist" also: a group has two layers of a kind, whose keys would be the same.

    Effects: collective on the default group (two exchanges of small objects and a gather of scales) and on the
        tensor-parallel groups (one a mesh); with delayed scaling also as `lamella_engine.scaling_state`. Every rank
        writes its own parts, and a share of the values held by several ranks. Waits until the files are on the disk.
        With `saver` one exchange on the default group in the place of the two and of the wait, and the effects of
        `AsyncSaver.save`.
    """
    _check_optimizer(optimizer)
    if format not in get_args(_Format):
        raise ValueError(f"Expected `format` to be one of {get_args(_Format)}, got {format!r}.")
    chunks = _chunks(model)
    global_model = GlobalModel(chunks, groups, has_copies=False, layer_groups=layer_groups)
    num_tp = global_model.model_groups.tp.size()
    options = _plain_options(chunks, global_model) if args is None else vars(args)
    _check_told(options, num_tp)
    written_args = {**options, "tensor_model_parallel_size": num_tp}
    common = {**(objects or {}), "checkpoint_version": 3.0, "iteration": iteration, "args": Namespace(**written_args)}
    global_optimizer = None if optimizer is None else GlobalOptimizer(optimizer, global_model)
    if scaling := ScalingStates(chunks, global_model).gathered_state():
        common[SCALING] = tuple(scaling.items())  # A dict or list would become an entry for each item.
    if format == "torch_dist":
        places = StoredPlaces.of(chunks, global_model, groups)
        return save_torch_dist(
            path,
            model=global_model,
            optimizer=global_optimizer,
            parts=places.parts,
            objects=places.objects,
            common=common,
            saver=saver,
        )
    return save_fsdp_dtensor(
        path,
        model=global_model,
        optimizer=global_optimizer,
        sizes=_sizes(chunks, global_model),
        first_expert=global_model.model_groups.first_expert(_config(chunks).num_moe_experts),
        objects=common,
        saver=saver,
    )


@overload
def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    tensor_parallel_size: int | None = None,
    vocabulary_size: int | None = None,
    strict: Literal[True] = True,
    trust: bool = False,
    verify: bool = True,
    layer_groups: str | None = None,
    groups: Any = None,
) -> dict[str, Any]: ...
@overload
def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    tensor_parallel_size: int | None = None,
    vocabulary_size: int | None = None,
    strict: Literal[False],
    trust: bool = False,
    verify: bool = True,
    layer_groups: str | None = None,
    groups: Any = None,
) -> PartialLoad: ...
def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    tensor_parallel_size: int | None = None,
    vocabulary_size: int | None = None,
    strict: bool = True,
    trust: bool = False,
    verify: bool = True,
    layer_groups: str | None = None,
    groups: Any = None,
) -> dict[str, Any] | PartialLoad:
    """Read a checkpoint of Megatron into a model sharded by `fully_shard_model`, whatever ranks wrote it.

    Reads `fsdp_dtensor` (of `save_checkpoint`, Megatron or Megatron-Bridge) and `torch_dist`. Weights go to the
    sharded main weights in the parameters' own dtype, and optimizer state to the optimizer, which needs no step before.
    Delayed scaling goes on with saved scales on as many tensor- and expert-parallel ranks; elsewhere scales start anew.
    All names and shapes are checked first: when they differ, nothing has been touched.

    Args:
        path: The directory of one iteration, or of several with a file that names the newest.
        model: The model of the checkpoint, on any number of tensor-, data- and expert-parallel ranks and pipeline
            stages; chunks as for `save_checkpoint`.
        optimizer: An optimizer over the model's parameters, stepped or not. None leaves the checkpoint's optimizer
            alone.
        tensor_parallel_size: Number of tensor-parallel ranks that wrote the checkpoint; needed for tensors stored
            rank-major (gated delta networks, Mamba) where neither `args` nor `run_config.yaml` tells.
        vocabulary_size: Number of tokens, without padding. Embedding and output layer may have more rows of padding
            than in the checkpoint, which become zeros, or fewer. None: as many rows as in the checkpoint.
        strict: False loads every match, and returns the rest.
        trust: Allow unpickling of types beyond plain data. **Unsafe: can execute code.**
        verify: Verify checksums while reading.
        layer_groups: The pattern of all layers with brackets, of the model that wrote the checkpoint.
        groups: The `ProcessGroupCollection` of `save_checkpoint`.

    Returns:
        Entries beside the tensors: `iteration`, `checkpoint_version`; with `strict=False` a `PartialLoad`.

    Raises:
        CheckpointDamaged: A file is absent, unreadable or truncated.
        CheckpointFailed: Another rank failed. A failed rank raises its own error.
        CheckpointMismatch: Names or shapes differ.
        FileNotFoundError: No checkpoint at the path.
        NotImplementedError: A pipeline stage has two copies of the embedding.
        SizeUnknown: Tensors are stored rank-major, and the number of ranks is unknown.
        TypeError: `optimizer` is no `torch.optim.Optimizer`.
        ValueError: The model is not sharded, or lacks chunks of the rank; a group is missing, `tensor_parallel_size`
            differs from the checkpoint's own, a parameter's state is another optimizer's, or parameters were stepped
            differently and the optimizer counts once a group.

    Warns:
        UserWarning: The checkpoint has delayed scales of other ranks' parts, or with another number of past amaxes.

    Effects: collective on the default group (five small exchanges) and on the tensor-parallel groups (one a mesh); each
        rank reads its own parts; allocates missing optimizer state.
    """
    _check_optimizer(optimizer)
    chunks = _chunks(model)
    global_model = GlobalModel(chunks, groups, layer_groups=layer_groups)
    config = _config(chunks)
    sizes = _sizes(chunks, global_model)
    parts = from_megatron_model(
        global_model.shapes, sizes=sizes, first_expert=global_model.model_groups.first_expert(config.num_moe_experts)
    )
    sizes_of_components = {name: size for name, size in sizes.items() if name not in ("tp", "etp")}
    spelling: dict[str, str] = {}
    scaling: dict[str, Any] = {}

    def opened() -> OpenCheckpoint:
        if tensor_parallel_size is not None:
            _check_written_by(path, tensor_parallel_size)
            sizes_of_components["tp"] = tensor_parallel_size
        checkpoint = open_checkpoint(path, trust=trust, verify=verify, sizes=sizes_of_components)
        if checkpoint.format is Format.TORCH_DIST:
            spelling.update(StoredPlaces.of(chunks, global_model, groups).spelling())
        if SCALING in checkpoint.objects:
            scaling.update(cast(Sequence[tuple[str, Any]], checkpoint.read_object(SCALING)))
        return checkpoint

    global_optimizer = None if optimizer is None else GlobalOptimizer(optimizer, global_model)

    # Where the names differ, as of a hybrid model's last norm, a source has the checkpoint's or the model's. Exchanged
    # before the checkpoint is opened: a rank that could not open it would leave the others waiting.
    foreign_modules = global_model.stage.only_elsewhere(
        {*global_model.shapes, *(name for rule in parts for name in rule.left)}
    )

    def translate(source: Source) -> Source:
        stored = without(rename(source, partial(_spelled, spelling)), foreign_modules)
        if vocabulary_size is not None:
            shapes = {name: shape for rule in parts for name, shape in rule.left.items()}
            stored = with_padding(stored, shapes, vocabulary_size)
        readable = to_megatron_model(stored, parts)
        return readable if global_optimizer is None else global_optimizer.readable(readable)

    loaded: dict[str, Any] | PartialLoad
    try:
        if strict:
            loaded = load(opened, model=global_model, optimizer=global_optimizer, translate=translate)
        else:
            loaded = load(opened, model=global_model, optimizer=global_optimizer, strict=False, translate=translate)
    except SizeUnknown as error:
        if error.size != "tp":
            raise
        way_out = "Say how many tensor-parallel ranks wrote the checkpoint, by `tensor_parallel_size`."
        raise SizeUnknown(error.size, error.known, error.needed_for, way_out) from None
    if global_optimizer is not None:
        global_optimizer.give_back()
    ScalingStates(chunks, global_model).load(scaling, config)
    return loaded


def _spelled(spelling: Mapping[str, str], name: str) -> str:
    """A native name with the model's own name of the tensor."""
    section, local_name = split_section(name)
    if section == MODEL:
        return in_model(spelling.get(local_name, local_name))
    parameter, suffix = longest_known(local_name, spelling) if section else (None, "")
    return name if parameter is None else f"{section}{spelling[parameter]}.{suffix}"


def _check_optimizer(optimizer: object) -> None:
    """Refuse megatron-core's wrapper of an optimizer, before the first exchange between ranks."""
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        raise TypeError(
            f"Expected `optimizer` to be a torch.optim.Optimizer or None, got {type(optimizer).__name__}. Pass "
            "`optimizer.optimizer`."
        )


def _check_told(args: Mapping[str, Any], num_tp: int) -> None:
    """Refuse `args` of other ranks: readers take rank-major tensors apart by this number."""
    num_told = args.get("tensor_model_parallel_size", num_tp)
    if num_told != num_tp:
        raise ValueError(
            f"Expected `args.tensor_model_parallel_size` to be the number of tensor-parallel ranks ({num_tp}), got "
            f"{num_told!r}: readers would take fused tensors apart by it. Pass the args that the model was built with."
        )


def _check_written_by(path: str | os.PathLike[str], num_tp: int) -> None:
    num_written = open_megatron(Path(path)).sizes.get("tp", num_tp)
    if num_written != num_tp:
        raise ValueError(
            f"Expected `tensor_parallel_size` to be the number of ranks that wrote {str(path)!r} ({num_written}, as "
            f"its files tell), got {num_tp}. Leave it out."
        )


def _chunks(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


def _modules(chunks: Sequence[nn.Module]) -> Iterator[Any]:
    return (module for chunk in chunks for module in chunk.modules())


def _config(chunks: Sequence[nn.Module]) -> Any:
    """The `TransformerConfig` of a model's chunks, also in wrappers."""
    config = next((module.config for module in _modules(chunks) if hasattr(module, "config")), None)
    if config is None:
        kinds = ", ".join(type(chunk).__name__ for chunk in chunks)
        raise ValueError(
            f"Expected a megatron-core model with a `config`, got {kinds or 'nothing'} without one. Pass a GPTModel, "
            "MambaModel or HybridModel."
        )
    return config


def _plain_options(chunks: Sequence[nn.Module], global_model: GlobalModel) -> dict[str, Any]:
    """The plain values of a model's `config`, by name; with the number of Mamba heads, which mixers may compute.

    Effects: an exchange between several pipeline stages: not every stage has a mixer, and all read a checkpoint's.
    """
    options = {
        name: setting for name, setting in vars(_config(chunks)).items() if isinstance(setting, int | float | str)
    }
    mixer = next(
        (module for module in _modules(chunks) if hasattr(module, "ngroups") and hasattr(module, "nheads")), None
    )
    num_heads = [
        num
        for num in global_model.stage.from_every_stage(None if mixer is None else int(mixer.nheads))
        if num is not None
    ]
    return {**options, "mamba_num_heads": num_heads[0]} if num_heads else options


def _sizes(chunks: Sequence[nn.Module], global_model: GlobalModel) -> dict[str, int]:
    """Sizes of the components of rank-major tensors."""
    expt_tp = global_model.model_groups.expt_tp
    sizes = {**sizes_of_args(_plain_options(chunks, global_model)), "tp": global_model.model_groups.tp.size()}
    return sizes if expt_tp is None else {**sizes, "etp": expt_tp.size()}
