"""lamella in FSDP2's place: the replaced names, and all names back to torch's afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed._composable.fsdp as composable
import torch.distributed.fsdp as fsdp2
import torch.distributed.pipelining.stage as stage
from engine_models import Net, inputs
from torch.distributed.fsdp._fully_shard import _fully_shard as defining

import lamella_engine
from lamella_engine import install
from lamella_engine.extending import Installation
from lamella_testing import run_ranks

OURS = lamella_engine.fully_shard
KEPT = {"torchs": fsdp2.fully_shard}  # no global of this module: `install` would replace a global


@pytest.fixture(autouse=True)
def nothing_stays_installed() -> Iterator[None]:
    yield
    assert fsdp2.fully_shard is torchs()


def torchs() -> Any:
    """torch's function, whatever is installed."""
    return KEPT["torchs"]


def is_ours(function: object) -> bool:
    return getattr(function, "__wrapped__", None) is OURS


def _client(monkeypatch: pytest.MonkeyPatch, source: str) -> ModuleType:
    """A program's module, imported now."""
    client = ModuleType("client")
    monkeypatch.setitem(sys.modules, "client", client)
    exec(source, vars(client))
    return client


def test_every_name_that_torch_offers_is_replaced_and_told() -> None:
    offering = [fsdp2, composable, sys.modules["torch.distributed._composable.fsdp.fully_shard"]]
    offering += [stage] if hasattr(stage, "fully_shard") else []  # torch before 2.15
    with install() as installation:
        for module in offering:
            assert is_ours(module.fully_shard)
            assert f"{module.__name__}.fully_shard" in installation.replaced
        assert "torch.distributed.fsdp.register_fsdp_forward_method" in installation.replaced
        assert "torch.distributed.fsdp.share_comm_ctx" in installation.replaced
        assert list(installation.replaced) == sorted(installation.replaced)
    for module in offering:
        assert module.fully_shard is torchs()


def test_a_client_that_was_imported_before_gets_lamellas_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _client(monkeypatch, "from torch.distributed.fsdp import fully_shard as cut")
    with install() as installation:
        assert is_ours(client.cut)
        assert "client.cut" in installation.replaced
    assert client.cut is torchs()


def test_a_client_that_is_imported_meanwhile_gets_torchs_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    with install():
        client = _client(monkeypatch, "from torch.distributed.fsdp import fully_shard")
        assert is_ours(client.fully_shard)
    assert client.fully_shard is torchs()


def test_imports_of_lamella_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _client(monkeypatch, "from lamella_engine import fully_shard")
    with install():
        assert client.fully_shard is OURS
    assert client.fully_shard is OURS


def test_a_nested_install_replaces_no_names_and_a_second_undo_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = install()
    with install() as inner:
        assert inner.replaced == ()
    assert is_ours(fsdp2.fully_shard)
    outer.undo()
    assert fsdp2.fully_shard is torchs()
    with install():
        outer.undo()
        assert is_ours(fsdp2.fully_shard)


def test_an_installation_replaces_classes_except_in_modules_excluded_by_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs: ...

    class Ours: ...

    library, keeping = ModuleType("library"), ModuleType("keeping")
    for module in (library, keeping):
        monkeypatch.setattr(module, "Wrapper", Theirs, raising=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with Installation([(Theirs, Ours)], keeps=lambda module, _: module is keeping) as installation:
        assert installation.replaced == ("library.Wrapper",)
        assert (vars(library)["Wrapper"], vars(keeping)["Wrapper"]) == (Ours, Theirs)
    assert (vars(library)["Wrapper"], vars(keeping)["Wrapper"]) == (Theirs, Theirs)


def test_an_error_inside_install_restores_torchs_fully_shard() -> None:
    with pytest.raises(KeyError), install():
        raise KeyError
    assert fsdp2.fully_shard is torchs()


def test_torchs_own_code_keeps_its_own_function() -> None:
    def shard_by_torch() -> None:
        with install():
            assert defining.fully_shard is torchs()
            model = torchs()(Net())
            model(inputs(6)).sum().backward()
            assert not isinstance(model, lamella_engine.FSDPModule)

    run_ranks(shard_by_torch, 2)


def test_units_are_instances_of_the_fsdp2_classes_that_clients_import() -> None:
    def shard_as_clients_do() -> None:
        with install():
            from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard

            model = fully_shard(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            assert isinstance(model, lamella_engine.FSDPModule)
            assert isinstance(model, FSDPModule)
            assert isinstance(model.unshard(async_op=True), UnshardHandle)
            assert fully_shard.state(model) is OURS.state(model)  # type: ignore[attr-defined]
        assert torchs().state(model) is OURS.state(model)  # type: ignore[attr-defined]  # torch's, as it was bound before

    run_ranks(shard_as_clients_do, 2)


def test_a_model_that_torch_has_sharded_is_refused_by_name() -> None:
    def shard_by_both() -> None:
        model = Net()
        torchs()(model.layers[1])
        with pytest.raises(ValueError, match=r"no units of torch's own FSDP2 in it, got 'layers\.1'"):
            OURS(model)
        assert type(model) is Net
        with pytest.raises(ValueError, match="no units of torch's own FSDP2 in it, got the module"):
            OURS(model.layers[1])

    run_ranks(shard_by_both, 2)
