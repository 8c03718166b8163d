"""Past amaxes and scales of delayed scaling, for checkpoints: main weights alone do not determine them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist
import torch.nn as nn

from lamella_engine._inspect.numerics import named_shards
from lamella_engine._modules.state import find_state
from lamella_engine._scaling.scales import Scales
from lamella_engine._tree.tree import finish_deferred

Rows = list[list[float]]
"""The scales of a parameter, and its past amaxes from the latest on, a row each."""


def scaling_state(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> dict[str, Rows]:
    """The scales of delayed scaling and the amaxes behind later scales, as plain numbers for `extra` of a `save`.

    Args:
        model: Sharded, between steps.
        group: The ranks whose parameters are in the state; None for all. Ranks with other parameters under the same
            names, as of other experts or of pipeline stages that count from 0, need a state for each set of ranks with
            equal parameters, and a file for each.

    Returns:
        Of parameters with delayed scaling on any rank of the group, by name: scales and past amaxes, latest first, a
        row each. Equal on all ranks of the group; empty without delayed scaling.

    Raises:
        ValueError: Ranks have other numbers under the same name.

    Effects: collective on the units' axes, also with `group`: a MAX all-reduce, as of a forward; on the group an
        all-gather of 16 bytes a parameter and the name, and a broadcast from one rank of each pipeline stage of
        parameters missing on other stages; waits for the device.
    """
    local_state = local_scaling_state(model)
    return _merged_over_ranks(local_state, group) if dist.is_initialized() else local_state


def local_scaling_state(model: nn.Module) -> dict[str, Rows]:
    """The `scaling_state` of this rank's parameters alone, whatever other ranks have under the same names.

    For a program that knows which ranks share parameters, as experts and tensor-parallel parts.

    Args:
        model: Sharded, between steps.

    Returns:
        Of this rank's parameters with delayed scaling, by name: scales and past amaxes, latest first, a row each.

    Effects: with delayed scaling collective on the units' axes: a MAX all-reduce, as of a forward; waits for the
        device.
    """
    if not any(True for _ in _delayed(model)):
        return {}
    finish_deferred()
    for tree in {id(state.tree): state.tree for module in model.modules() if (state := find_state(module))}.values():
        tree.scaling.compute_measured()
    _synchronize(model)
    return {name: scales.state_of(i) for name, scales, i in _delayed(model)}


def load_scaling_state(model: nn.Module, state: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    """Go on with saved scales, or start anew; to be called after weights were replaced.

    The next steps equal the saving run's, on any number of ranks. Without a call, weights replaced
    by hand are encoded with scales of the weights before, and larger weights saturate. `load_state_dict`, and with it
    `lamella_checkpoint.load`, starts anew by itself the scales of replaced weights (with `assign=True`, as `to` and
    `to_empty`, of the whole unit), also scales loaded before.

    Args:
        model: Sharded, between steps, with its main weights loaded.
        state: From `scaling_state`, of a model with the same recipes; other names are passed over. {}: all scales start
            anew from the current weights.

    Returns:
        The names of the parameters with delayed scaling that `state` lacks, whose scales start anew.

    Raises:
        ValueError: A parameter has another number of scales or of past amaxes, or numbers that are none of scales or
            amaxes; nothing is changed.

    Effects: waits for the device; not a collective.
    """
    finish_deferred()
    _synchronize(model)
    delayed = list(_delayed(model))
    # All checked before the first is loaded: a refused state must change nothing.
    checked = {name: _checked(name, state[name], scales.state_shape(i)) for name, scales, i in delayed if name in state}
    for name, scales, i in delayed:
        if name in checked:
            scales.load(i, checked[name])
        else:
            scales.forget(i)
    return [name for name, _, _ in delayed if name not in checked]


def _checked(name: str, rows: Sequence[Sequence[float]], expected: tuple[int, int]) -> torch.Tensor:
    way_out = "Use the state and the recipe of the run that saved, or leave the parameter out: its scales start anew."
    wish = f"Expected {expected[0]} rows of {expected[1]} numbers in `state` for {name!r}, as its recipe has"
    try:
        tensor = torch.as_tensor(rows, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:  # rows of unlike lengths, or no numbers
        raise ValueError(f"{wish}, got others: {error}. {way_out}") from error
    if tensor.shape != expected:
        raise ValueError(f"{wish}, got {tuple(tensor.shape)}. {way_out}")
    scales, past = tensor[:1], tensor[1:]
    is_right = torch.cat([scales > 0, (past >= 0) | (past == -1)]) & tensor.isfinite()
    if not is_right.all():
        raise ValueError(
            f"Expected positive scales in `state` for {name!r}, and past amaxes of 0 or more (-1: not measured), got "
            f"{tensor[~is_right][0].item()}. {way_out}"
        )
    return tensor


def _merged_over_ranks(local_state: dict[str, Rows], group: dist.ProcessGroup | None) -> dict[str, Rows]:
    """The parameters of all ranks of a group. Effects: collective, as `scaling_state`."""
    # Digests first: the numbers themselves travel only for parameters that some rank lacks.
    digests: list[dict[str, bytes]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(digests, {name: _digest(rows) for name, rows in local_state.items()}, group)
    holders = _first_holders(digests)
    lacked = {name: rank for name, rank in holders.items() if not all(name in digest for digest in digests)}
    merged = dict(local_state)
    # In the order of ranks: each rank must join the same broadcasts, one after another.
    for source in sorted(set(lacked.values())):
        is_source = source == dist.get_rank(group)
        sent = [{name: local_state[name] for name, rank in lacked.items() if rank == source} if is_source else {}]
        dist.broadcast_object_list(sent, group=group, group_src=source)
        merged |= sent[0]
    return {name: merged[name] for name in holders}


def _first_holders(digests: Sequence[Mapping[str, bytes]]) -> dict[str, int]:
    """The first rank with each name.

    Raises:
        ValueError: A later rank has other numbers.
    """
    holders: dict[str, int] = {}
    for rank, rank_names in enumerate(digests):
        for name, digest in rank_names.items():
            first = holders.setdefault(name, rank)
            if digests[first][name] != digest:
                raise ValueError(
                    f"Expected {name!r} to have the same scales on all ranks of `group`, got others on rank {rank} "
                    f"than on rank {first}. Pass as `group` the ranks that share their parameters (those with the same "
                    "experts), and save a state for each such group in a file of its own."
                )
    return holders


def _digest(rows: Rows) -> bytes:
    return blake2b(repr(rows).encode(), digest_size=16).digest()


def _delayed(model: nn.Module) -> Iterator[tuple[str, Scales, int]]:
    """Name, scales of the group and index in the group, of each parameter with delayed scaling."""
    units = {id(state.unit): state.unit for module in model.modules() if (state := find_state(module))}
    scales_by_id = {
        id(parameter.sharded): (group.scales, i)
        for unit in units.values()
        for group in unit.parameters.groups
        if group.scales is not None and group.scales.num_past
        for i, parameter in enumerate(group.parameters)
    }
    for name, parameter in named_shards(model):
        if id(parameter) in scales_by_id:
            yield (name, *scales_by_id[id(parameter)])


def _synchronize(model: nn.Module) -> None:
    """Wait for all streams: a pass may still compute scales on a stream of its unit's."""
    for device in {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}:
        torch.cuda.synchronize(device)
