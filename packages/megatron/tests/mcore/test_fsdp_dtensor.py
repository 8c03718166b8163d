"""Checkpoints go from megatron-core's own code to lamella and back: `fsdp_dtensor` of release 0.19.

Four ranks, two data-parallel by two tensor-parallel, hold a gated layer, a row-parallel layer and a gated delta net's
fused projection, cut between rows unevenly. Values are flat indices: a misplaced element shows.
"""

import importlib
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lamella_checkpoint import Source, Wanted
from lamella_convert import MegatronOptions, Translated, convert, open_megatron
from lamella_layout import Chunk
from lamella_testing import run_ranks

PREFIX = "decoder.layers.0."
FC1, FC2 = f"{PREFIX}mlp.linear_fc1.weight", f"{PREFIX}mlp.linear_fc2.weight"
IN_PROJ, NORM = f"{PREFIX}self_attention.in_proj.weight", f"{PREFIX}self_attention.A_log"

# Of each parameter: the global shape, the dim of tensor parallelism, and the end of the first data-parallel rank's
# elements in a tensor-parallel rank's part.
PARAMETERS = {FC1: ((8, 2), 0, 6), FC2: ((2, 4), 1, 2), IN_PROJ: ((32, 1), 0, 6), NORM: ((4,), 0, 2)}
ARGS = {
    "tensor_model_parallel_size": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 2,
}
GDN_ROWS = {"query": 4, "key": 4, "value": 8, "z": 8, "beta": 4, "alpha": 4}
SLOTS = {"exp_avg": 100, "exp_avg_sq": 200}

# megatron-core and torch warn about their own code.
pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def checkpointing() -> ModuleType:
    return importlib.import_module("megatron.core.transformer.fsdp_dtensor_checkpoint")


def fsdp(module: str) -> ModuleType:
    return importlib.import_module(f"megatron.core.distributed.fsdp.src.megatron_fsdp.{module}")


def fused(name: str) -> torch.Tensor:
    """A parameter over all ranks, tensor-parallel ranks one after another along their dim."""
    shape = PARAMETERS[name][0]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def held(name: str) -> torch.Tensor:
    """This rank's shard: rows of the tensor-parallel rank's part."""
    _, tp_dim, cut = PARAMETERS[name]
    dp, tp = divmod(dist.get_rank(), 2)
    part = fused(name).chunk(2, tp_dim)[tp].reshape(-1)
    return part[:cut] if dp == 0 else part[cut:]


class MegatronFsdp(nn.Module):
    """Modules by their parameters' names, in the form of a sharding wrapper and its inner modules."""

    def add(self, name: str, parameter: nn.Parameter) -> None:
        module: nn.Module = self
        *path, last = name.split(".")
        for step in path:
            if not hasattr(module, step):
                module.add_module(step, nn.Module())
            module = getattr(module, step)
        module.register_parameter(last, parameter)


def sharded_model() -> tuple[MegatronFsdp, Any]:
    """A model in the state after Megatron-FSDP: each parameter knows its slice, and the meshes."""
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel(tensor_model_parallel_size=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    index = fsdp("utils").FSDPDistributedIndex(device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp")
    model = MegatronFsdp()
    model.config = Namespace(num_moe_experts=None)  # type: ignore[assignment]
    for name, (shape, tp_dim, cut) in PARAMETERS.items():
        part = list(shape)
        part[tp_dim] //= 2
        parameter: Any = nn.Parameter(torch.empty(part))
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, tp_dim, 1
        parameter.megatron_fsdp_slice = slice(0, cut) if dist.get_rank() < 2 else slice(cut, parameter.numel())
        parameter.megatron_fsdp_dist_index = index
        model.add(f"module.module.{name}", parameter)
    return model, index


def state_dict(model: MegatronFsdp, index: Any, *, blank: bool) -> dict[str, Any]:
    """The state dict of Megatron-LM, to save or to fill (blank)."""

    def sharded(name: str, plus: int) -> DTensor:
        parameter = model.get_parameter(f"module.module.{name}")
        values = torch.full_like(held(name), -1) if blank else held(name) + plus
        make = fsdp("param_and_grad_buffer").make_fsdp_dtensor
        dtensor: DTensor = make(values, parameter, dist_index=index, run_check=True)
        return dtensor

    def slots(name: str) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(-1.0 if blank else 5.0)} | {
            slot: sharded(name, plus) for slot, plus in SLOTS.items()
        }

    return {
        "args": Namespace() if blank else Namespace(**ARGS),
        "checkpoint_version": 0 if blank else 3.0,
        "iteration": 0 if blank else 7,
        "model": {f"module.{name}": sharded(name, 0) for name in PARAMETERS},
        "optimizer": {
            "state": {f"module.module.module.{name}": slots(name) for name in PARAMETERS},
            "param_to_group_meta": {
                f"module.module.module.{name}": {"lr": 0.0 if blank else 0.5} for name in PARAMETERS
            },
        },
    }


def preprocessed(raw: dict[str, Any], model: MegatronFsdp) -> dict[str, Any]:
    """The changes of Megatron-LM's training to a state dict with gated layers, by megatron-core's functions."""
    megatron = checkpointing()
    result = raw.copy()
    megatron.handle_fp8_extra_state_case(result["model"])
    result["model"], result["optimizer"] = megatron.handle_swiglu_in_state_dict(
        model, result["model"], result["optimizer"]
    )
    fsdp("uneven_dtensor").preprocess_state_dict_for_uneven_dtensor(result)
    return result


def save_by_megatron(path: Path) -> None:
    def save_mine() -> None:
        model, index = sharded_model()
        state = preprocessed(state_dict(model, index, blank=False), model)
        dcp.save(state, checkpoint_id=path)  # type: ignore[attr-defined]

    run_ranks(save_mine, 4)


def canonical(name: str, plus: int = 0) -> dict[str, torch.Tensor]:
    """A parameter with tensor parallelism undone: components of a delta net, halves of a gated layer in order."""
    tensor = fused(name) + plus
    if name == FC1:
        gates, ups = zip(*(part.chunk(2) for part in tensor.chunk(2)), strict=True)
        return {name: torch.cat([*gates, *ups])}
    if name == IN_PROJ:
        rows = [rows // 2 for rows in GDN_ROWS.values()]
        parts_by_rank = [part.split(rows) for part in tensor.chunk(2)]  # type: ignore[no-untyped-call]
        return {
            f"{name}.{part}": torch.cat([rank_parts[i] for rank_parts in parts_by_rank])
            for i, part in enumerate(GDN_ROWS)
        }
    return {name: tensor}


def expected() -> dict[str, torch.Tensor]:
    tensors = {f"model.{part}": tensor for name in PARAMETERS for part, tensor in canonical(name).items()}
    for slot, plus in SLOTS.items():
        for name in PARAMETERS:
            tensors |= {f"optimizer.state.{part}.{slot}": tensor for part, tensor in canonical(name, plus).items()}
    return tensors


def read_all(source: Source) -> dict[str, torch.Tensor]:
    full_tensors = {name: torch.full(info.shape, -1, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([Wanted(name, Chunk((0,) * into.ndim, tuple(into.shape)), into) for name, into in full_tensors.items()])
    return full_tensors


def test_fsdp_dtensor_checkpoints_of_megatron_core_are_read(tmp_path: Path) -> None:
    save_by_megatron(tmp_path / "megatrons")
    opened = open_megatron(tmp_path / "megatrons")
    assert opened.format == "fsdp_dtensor"
    assert opened.dialect is not None
    assert opened.dialect.name == "release-0.19"
    assert opened.counters.found == {"checkpoint_version": 3.0, "iteration": 7}
    assert isinstance(opened.source, Translated)
    assert opened.source.inexact == {}
    values = read_all(opened.source)
    tensors = expected()
    for name, tensor in tensors.items():
        torch.testing.assert_close(values[name], tensor, rtol=0, atol=0)
    steps = {name for name in values if name not in tensors}
    assert steps == {f"optimizer.state.{part}.step" for name in PARAMETERS for part in canonical(name)}
    assert opened.source.read_object(f"optimizer.param_groups.{IN_PROJ}.alpha.lr") == 0.5


def test_fsdp_dtensor_checkpoints_of_lamella_are_read_by_megatron_core(tmp_path: Path) -> None:
    save_by_megatron(tmp_path / "megatrons")
    native, written = tmp_path / "native", tmp_path / "written"
    convert(tmp_path / "megatrons", native, to="dcp", translate=lambda source: source)
    convert(
        native,
        written,
        to="fsdp_dtensor",
        megatron=MegatronOptions(dialect="release-0.19", tensor_parallel_size=2),
        translate=lambda source: source,
    )

    def load_mine() -> list[str]:
        # Training looks at these first, and needs all.
        first: dict[str, Any] = {"args": None, "iteration": None, "checkpoint_version": None}
        dcp.load(first, checkpoint_id=written)  # type: ignore[attr-defined]
        assert isinstance(first["args"], Namespace)
        model, index = sharded_model()
        raw = state_dict(model, index, blank=True)
        dcp.load(preprocessed(raw, model), checkpoint_id=written, planner=DefaultLoadPlanner(allow_partial_load=False))  # type: ignore[attr-defined]
        wrong = []
        for name in PARAMETERS:
            slots = raw["optimizer"]["state"][f"module.module.module.{name}"]
            loaded = {"": (raw["model"][f"module.{name}"], 0)} | {slot: (slots[slot], SLOTS[slot]) for slot in SLOTS}
            for slot, (tensor, plus) in loaded.items():
                if not torch.equal(tensor.to_local().reshape(-1), held(name) + plus):
                    wrong.append(f"{name} {slot}: {tensor.to_local().tolist()}")
        return wrong

    assert run_ranks(load_mine, 4) == [[]] * 4
