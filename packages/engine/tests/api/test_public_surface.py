"""What FSDP2 has, lamella has: the same names, arguments and classes, and none of torch's methods unimplemented."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.fsdp as fsdp2
from engine_models import Net, fsdp, shard
from torch import nn

import lamella_engine
from lamella_engine import FSDPModule, fully_shard
from lamella_engine._common.errors import MisuseError
from lamella_testing import run_ranks

# FSDP2's names; older torch lacks some.
NAMES = [
    *("fully_shard", "FSDPModule", "UnshardHandle", "MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"),
    "GradientReductionHandle",
    *("register_fsdp_forward_method", "share_comm_ctx", "DataParallelMeshDims"),
]


def _methods() -> list[str]:
    named = {name for name in vars(fsdp2.FSDPModule) if not name.startswith("_")} | {"_set_unshard_async_op"}
    return sorted(named)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_fsdp2_can_be_imported(name: str) -> None:
    assert hasattr(lamella_engine, name)


def test_an_import_leaves_torchs_compiler_out() -> None:
    program = "import sys, lamella_engine\nprint(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "lamella_engine" in modules
    assert not {"torch._dynamo", "torch._inductor"} & {*modules}, "over a second of every process's start"


def test_policies_are_torchs_own_classes() -> None:
    for name in ("OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims"):
        if hasattr(fsdp2, name):
            assert getattr(lamella_engine, name) is getattr(fsdp2, name)


def test_mesh_dims_are_the_same_on_a_torch_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fsdp2, "DataParallelMeshDims", raising=False)
    dims = _policies_anew(monkeypatch).DataParallelMeshDims
    assert dims(shard="fsdp").shard_names == ("fsdp",)
    assert dims(shard=("a", "b"), replicate="c").shard_names == ("a", "b")
    assert dims(shard="a").replicate_names == ()
    assert dims(replicate=("a", "b")).replicate_names == ("a", "b")
    with pytest.raises(ValueError, match="`shard` or `replicate`"):
        dims()


def _policies_anew(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(inspect.getfile(lamella_engine)).parent / "_options" / "policies.py"
    spec = importlib.util.spec_from_file_location("policies_anew", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "policies_anew", module)  # the place searched by dataclasses
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", _methods())
def test_every_method_of_torchs_class_is_defined_here_with_its_arguments(name: str) -> None:
    assert name in vars(FSDPModule), f"{name} would be torch's own, which finds no state of torch's"
    theirs, ours = (inspect.signature(vars(cls)[name]).parameters for cls in (fsdp2.FSDPModule, FSDPModule))
    for argument in theirs.values():
        assert argument.name in ours, f"{name}({argument.name})"
        assert (argument.kind, argument.default) == (ours[argument.name].kind, ours[argument.name].default)


def test_functions_take_torchs_arguments() -> None:
    for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx"):
        theirs = list(inspect.signature(getattr(fsdp2, name)).parameters)
        ours = list(inspect.signature(getattr(lamella_engine, name)).parameters)
        assert ours[: len(theirs)] == theirs, "what lamella adds comes after"


def test_a_unit_is_an_fsdp_module_of_torchs_too() -> None:
    def check() -> None:
        model = shard(Net())
        assert issubclass(FSDPModule, fsdp2.FSDPModule)
        assert isinstance(model, FSDPModule)
        assert isinstance(model, Net)
        assert type(model).__name__ == "FSDPNet"
        assert not isinstance(model.stem, fsdp2.FSDPModule)
        handle = fsdp(model).unshard(async_op=True)
        assert isinstance(handle, fsdp2.UnshardHandle)
        handle.wait()
        assert type(model.stem.weight) is nn.Parameter
        fsdp(model).reshard()

    run_ranks(check, 1)


def test_a_slice_of_a_sequential_is_no_unit() -> None:
    def check() -> None:
        model = fully_shard(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5)))
        part = model[:2]
        assert type(part) is nn.Sequential
        assert [layer.out_features for layer in part] == [3, 4]

    run_ranks(check, 1)


def test_a_method_that_only_torch_has_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(self: fsdp2.FSDPModule) -> None:
        for group in self._get_fsdp_state()._fsdp_param_groups:
            group.something_new = True  # type: ignore[attr-defined]

    monkeypatch.setattr(fsdp2.FSDPModule, "set_something_new", later, raising=False)

    def check() -> None:
        model = fsdp(fully_shard(nn.Linear(2, 2)))
        with pytest.raises(NotImplementedError, match=r"got 'something_new': a method of torch's"):
            model.set_something_new()  # type: ignore[attr-defined]

    run_ranks(check, 1)


def test_fsdp2_setters_without_an_effect_here_are_accepted() -> None:
    def check() -> None:
        model = fsdp(shard(Net()))
        for enable in (False, True):
            model.set_allocate_memory_from_process_group_for_comm(enable)
        for backend in (None, "NCCL"):  # one rank has nothing to gather
            model.set_symm_mem_for_comm(backend)
        model._set_unshard_async_op(True)
        with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
            model.set_reduce_scatter_divide_factor(2.0)

    run_ranks(check, 1)


def test_symmetric_memory_is_refused_where_ranks_do_not_share_it() -> None:
    def check() -> None:
        model = fsdp(shard(Net()))
        with pytest.raises(MisuseError, match=r"Expected GPUs of one host over NCCL.*'NCCL', got gathers by GlooTr"):
            model.set_symm_mem_for_comm()

    run_ranks(check, 2)


def test_setters_refuse_arguments_that_fsdp2_refuses() -> None:
    def check() -> None:
        model = shard(Net())
        sharded = fsdp(model)
        for modules in ([model.stem], [nn.Linear(2, 2)], ["layers.0"]):
            for prefetch in (sharded.set_modules_to_forward_prefetch, sharded.set_modules_to_backward_prefetch):
                with pytest.raises(ValueError, match=r"`modules` to be a list of units, got (Linear|str)"):
                    prefetch(modules)  # type: ignore[arg-type]
        for number, error in ((True, TypeError), (1.5, TypeError), (0, ValueError)):
            with pytest.raises(error, match=r"`max_input_buffers` to be"):
                sharded.set_reduce_scatter_max_input_buffers(number)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"`event` to be a recorded torch\.Event, got int"):
            sharded.set_post_optim_event(3)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=r"outermost unit, got 'layers\.0'"):
            fsdp(model.layers[0]).reset_iter_state()

    run_ranks(check, 1)


def test_recurse_reaches_the_units_below_or_does_not() -> None:
    def check() -> None:
        model = shard(Net())
        sharded, layer = fsdp(model), fsdp(model.layers[0])
        for setter, argument, flag in (
            ("set_requires_gradient_sync", False, "gradients.requires_sync"),
            ("set_reshard_after_forward", False, "reshard_after_forward"),
            ("set_reshard_after_backward", False, "reshard_after_backward"),
            ("set_reduce_scatter_unused_params", True, "gradients.reduces_unused_parameters"),
            ("set_reduce_scatter_max_input_buffers", 2, "max_reductions_in_flight"),
        ):
            root, inner = (module.__dict__["_lamella_state"].unit for module in (sharded, layer))
            look = attrgetter(flag)
            getattr(sharded, setter)(argument, recurse=False)
            assert look(root) == argument != look(inner)
            getattr(sharded, setter)(argument)
            assert look(inner) == argument

    run_ranks(check, 1)
