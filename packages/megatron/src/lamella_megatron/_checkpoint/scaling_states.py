"""Scales and past amaxes of delayed scaling: of float8 weights, and of Transformer Engine's layers.

Note [Scales belong to ranks' parts]
    Main weights do not determine delayed scales, so a checkpoint has the scales beside the weights. A scale is of a
    tensor-parallel rank's part of a weight, or of the experts of a rank, and no other cut of the weight has the same
    amax: the names of a state say the rank's place among the tensor-parallel, or the expert-parallel ranks. Ranks at
    another place, on as many or on more ranks, find no state and start anew. Data-parallel ranks share scales, and
    megatron-core reduces amaxes of activations over them (but for `tp_only_amax_red`): the first rank's state counts.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import load_scaling_state, local_scaling_state
from lamella_megatron._checkpoint.global_tensors import GlobalModel
from lamella_megatron._checkpoint.stages import unwrapped

Rows = list[list[float]]
State = dict[str, Rows]
"""By name and place: the scales, and the past amaxes from the latest on, a row each; plain, as a checkpoint opens."""

SCALING: Final = "lamella_scaling"
"""The name of the entry in a checkpoint: pairs of the state's names and rows."""

_TENSORS: Final = {"scaling_fwd": 3, "scaling_bwd": 2}
"""Transformer Engine's names of a layer's scales, and the number of tensors with scales in each product."""


class ScalingStates:
    """The delayed scaling of a rank's chunks.

    Args:
        chunks: Sharded by `fully_shard_model`, between steps.
        global_model: The global tensors of the chunks.
    """

    def __init__(self, chunks: Sequence[nn.Module], global_model: GlobalModel) -> None:
        self._chunks, self._stage, self._groups = chunks, global_model.stage, global_model.model_groups

    def gathered_state(self) -> State:
        """On rank 0 the state of all ranks, to save; elsewhere empty.

        Effects: collective: as `local_scaling_state` of the engine, and a gather of objects on the default group.
        """
        local_state: State = {}
        for i, chunk in enumerate(self._chunks):
            first_held = {unwrapped(name) for name, parameter in chunk.named_parameters() if _is_first(parameter)}
            for name, rows in local_scaling_state(chunk).items():
                if unwrapped(name) in first_held:
                    local_state[self._key(i, name)] = rows
            for name, layer in _layers(chunk):
                if _is_first(next(layer.parameters(), next(chunk.parameters()))):
                    local_state |= {self._key(i, f"{name}.{key}"): rows for key, rows in _rows_of(layer).items()}
        states: list[State] | None = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(local_state, states)
        return {key: rows for state in states or () for key, rows in state.items()}

    def load(self, saved: State, config: Any) -> None:
        """Go on with a saved state; weights and layers without an equal start anew.

        Args:
            saved: From `gathered_state`, of the weights that the model has. {}: all weights start anew.
            config: The model's `TransformerConfig`.

        Warns:
            UserWarning: The state has a weight or layer of this rank only of other ranks' part, or with another number
                of past amaxes.

        Effects: those of the engine's `local_scaling_state` and `load_scaling_state`.
        """
        saved_names = {key.partition(" ")[0] for key in saved}
        differing: list[str] = []
        for i, chunk in enumerate(self._chunks):
            fitting: dict[str, Rows] = {}
            for name, current in local_scaling_state(chunk).items():
                rows = saved.get(self._key(i, name))
                if rows is not None and _shape(rows) == _shape(current):
                    fitting[name] = rows
            missing = load_scaling_state(chunk, fitting)
            differing += [name for name in missing if self._stage_free(i, name) in saved_names]
            for name, layer in _layers(chunk) if config.fp8 and config.fp8_recipe == "delayed" else ():
                names = {key: f"{name}.{key}" for key in _TENSORS}
                is_saved = all(self._stage_free(i, full_name) in saved_names for full_name in names.values())
                rows_by_key = {key: saved.get(self._key(i, full_name)) for key, full_name in names.items()}
                if is_saved and not _load_rows(layer, rows_by_key, config):
                    differing.append(name)
        if differing:
            warnings.warn(
                f"Expected scales of {differing[0]!r} in the checkpoint as this rank has them, got other ranks' part "
                f"or another number of past amaxes: {len(differing)} weights and layers start anew. Resume on as many "
                "tensor- and expert-parallel ranks, with the same recipe, to go on with the saved scales.",
                stacklevel=3,
            )

    def _key(self, i: int, name: str) -> str:
        """The name in a model of one stage, and this rank's place: Note [Scales belong to ranks' parts]."""
        axes: dict[str, dist.ProcessGroup | None] = {"tp": self._groups.tp}
        if ".experts." in f".{name}":
            axes = {"ep": self._groups.ep, "etp": self._groups.expt_tp}
        places = [f"{axis}{group.rank()}of{group.size()}" for axis, group in axes.items() if group is not None]
        return " ".join([self._stage_free(i, name), *places])

    def _stage_free(self, i: int, name: str) -> str:
        return self._stage.name(i, name, torch.empty(0))


def _is_first(parameter: torch.Tensor) -> bool:
    """Whether this rank is the first of those that share a parameter's shards, and so its scales."""
    return not isinstance(parameter, DTensor) or not any(parameter.device_mesh.get_coordinate() or ())


def _layers(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of Transformer Engine that may scale activations and gradients, with their names."""
    return ((name, module) for name, module in chunk.named_modules() if isinstance(_scaling_of(module), dict))


def _scaling_of(layer: Any) -> Any:
    return getattr(layer, "fp8_meta", None)


def _rows_of(layer: Any) -> State:
    """A layer's scales and past amaxes; empty before a forward in float8, and without delayed scaling."""
    scalings = {key: _scaling_of(layer).get(key) for key in _TENSORS}
    if not all(hasattr(scaling, "amax_history") for scaling in scalings.values()):
        return {}
    return {
        key: torch.cat([scaling.scale.unsqueeze(0), scaling.amax_history]).tolist() for key, scaling in scalings.items()
    }


def _load_rows(layer: Any, rows_by_key: Mapping[str, Rows | None], config: Any) -> bool:
    """Write a layer's scales and past amaxes, made first for a layer without a forward; False if they do not fit.

    Source: `set_extra_state` of Transformer Engine 2.11, which unpickles what a checkpoint has.
    """
    saved = {key: rows for key, rows in rows_by_key.items() if rows is not None}
    if len(saved) < len(_TENSORS):
        return False
    if not layer.fp8_meta_tensors_initialized:
        _scaling_of(layer)["num_gemms"] = _shape(saved["scaling_fwd"])[1] // _TENSORS["scaling_fwd"]
        layer.init_fp8_meta_tensors(importlib.import_module("megatron.core.fp8_utils").get_fp8_recipe(config))
    current = _rows_of(layer)
    if any(key not in current or _shape(current[key]) != _shape(rows) for key, rows in saved.items()):
        return False
    for key, rows in saved.items():
        scaling = _scaling_of(layer)[key]
        # In place: quantisers, and Transformer Engine's list of amaxes to reduce, keep views.
        scaling.scale.copy_(torch.tensor(rows[0]))
        scaling.amax_history.copy_(torch.tensor(rows[1:]))
    return True


def _shape(rows: Rows) -> tuple[int, int]:
    return len(rows), len(rows[0])
