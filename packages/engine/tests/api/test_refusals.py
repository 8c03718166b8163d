"""Unsupported arguments are refused at the call, and the message has the way out."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from block_recipe import BlockRecipe
from engine_models import Net, fsdp, inputs, shard
from extended_models import Halves
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lamella_engine import MixedPrecisionPolicy, OffloadPolicy, Rows, ShardingOptions, fully_shard
from lamella_engine._api.candidates import move_to
from lamella_engine.extending import local_of
from lamella_testing import run_ranks


def _on_one_rank(check: Callable[[], None]) -> None:
    run_ranks(check, 1)


def test_torchs_own_policies_are_taken() -> None:
    def check() -> None:
        model = fully_shard(
            nn.Linear(2, 2),
            mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64),
            offload_policy=fsdp2.OffloadPolicy(),
        )
        assert model(torch.ones(1, 2)).dtype == torch.float64
        fully_shard(nn.Linear(2, 2), offload_policy=OffloadPolicy())
        with pytest.raises(TypeError, match=r"`mp_policy`.*got dtype"):
            fully_shard(nn.Linear(2, 2), mp_policy=torch.bfloat16)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"`offload_policy`.*got bool"):
            fully_shard(nn.Linear(2, 2), offload_policy=True)  # type: ignore[arg-type]

    _on_one_rank(check)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": 2}, r"`mesh` to be a DeviceMesh or None, got 2\..*init_device_mesh"),
        ({"shard_placement_fn": Shard(1)}, r"function of a parameter, got Shard\(dim=1\)\. Write"),
        ({"ignored_params": {"weight"}}, r"`ignored_params` to hold parameters alone, got 'weight'\..*get_parameter"),
        ({"ignored_params": [1]}, r"`ignored_params` to hold parameters alone, got 1\.$"),
        ({"ignored_params": [torch.ones(2)]}, r"to hold parameters alone, got a Tensor of shape \(2,\)"),
        ({"ignored_params": nn.Parameter(torch.ones(1))}, r"a set of parameters, got a Parameter of shape \(1,\)"),
        ({"ignored_params": ""}, r"a set of parameters, got ''\. Pass \{parameter\}"),
        ({"ignored_params": 3}, r"a set of parameters, got 3\."),
    ],
)
def test_fully_shard_arguments_of_a_wrong_type_are_refused_before_sharding(arguments: Any, message: str) -> None:
    def check() -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(TypeError, match=message):
            fully_shard(model, **arguments)
        with pytest.raises(ValueError, match="positive gradient divide factor, got '2'"):
            fsdp(fully_shard(model)).set_gradient_divide_factor("2")  # type: ignore[arg-type]
        fsdp(model).set_gradient_divide_factor(torch.tensor(2.0))  # type: ignore[arg-type]

    _on_one_rank(check)


def test_ignored_parameters_may_come_from_an_iterator() -> None:
    def check() -> None:
        model = nn.Linear(2, 2)
        bias = model.bias
        fully_shard(model, ignored_params=(parameter for parameter in [bias]))  # type: ignore[arg-type]
        assert model.bias is bias and isinstance(model.weight, DTensor)

    _on_one_rank(check)


@pytest.mark.parametrize(
    "container",
    [
        lambda: nn.ModuleList([nn.Linear(2, 2)]),
        lambda: nn.ModuleDict({"a": nn.Linear(2, 2)}),
        lambda: nn.ParameterList([nn.Parameter(torch.ones(2))]),
        lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}),
    ],
)
def test_containers_without_a_forward_are_refused(container: Callable[[], nn.Module]) -> None:
    def check() -> None:
        with pytest.raises(ValueError, match=r"with a forward, got .*(List|Dict)"):
            fully_shard(container())

    _on_one_rank(check)


def test_a_container_that_has_a_forward_is_a_unit_like_any_other() -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = layer(x)
            return x

    def check() -> None:
        model = fully_shard(Chain([nn.Linear(2, 2), nn.Linear(2, 2)]))
        model(torch.ones(1, 2)).sum().backward()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())

    _on_one_rank(check)


def test_a_module_is_sharded_once() -> None:
    def check() -> None:
        model = shard(Net())
        for module in (model, model.layers[1]):
            with pytest.raises(ValueError, match=r"not a unit yet, got FSDP\w+: apply fully_shard once"):
                fully_shard(module)

    _on_one_rank(check)


def test_an_inner_module_cannot_be_sharded_after_the_outer_one() -> None:
    def check() -> None:
        model = fully_shard(Net())
        with pytest.raises(ValueError, match=r"'(up\.weight|gain)'.*Shard inner modules before outer ones"):
            fully_shard(model.layers[1])

    _on_one_rank(check)


def test_a_sharded_module_is_not_copied() -> None:
    def check() -> None:
        model = shard(Net())
        for module in (model, model.layers[0], model.layers, nn.Sequential(model)):
            with pytest.raises(ValueError, match=r"Expected to copy a module before it is sharded"):
                copy.deepcopy(module)

    _on_one_rank(check)


def test_a_sharded_module_is_not_pickled_and_its_state_dict_is() -> None:
    def check() -> None:
        model = shard(Net())
        for module in (model, nn.Sequential(model)):
            with pytest.raises(pickle.PicklingError, match=r"sharded module FSDPNet.*Save model\.state_dict\(\)"):
                torch.save(module, io.BytesIO())
        torch.save(model.state_dict(), io.BytesIO())

    _on_one_rank(check)


def test_a_lazy_module_is_refused_by_name_until_its_first_forward() -> None:
    def check() -> None:
        model = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
        with pytest.raises(ValueError, match=r"'0\.weight' to have a shape, got a Uninit.*Call the model once on"):
            fully_shard(model)
        assert type(model) is nn.Sequential
        model(torch.ones(1, 2))
        fully_shard(model)(torch.ones(1, 2)).sum().backward()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())

    _on_one_rank(check)


def test_a_parameter_without_dims_is_refused_by_name_and_nothing_was_changed() -> None:
    def check() -> None:
        model = Net()
        model.head.scale = nn.Parameter(torch.tensor(1.0))
        with pytest.raises(ValueError, match=r"'head\.scale'.*0-D.*Change head\.scale to a 1D tensor"):
            fully_shard(model)
        assert type(model) is Net
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())

    _on_one_rank(check)


def test_a_dtensor_on_a_mesh_of_another_device_type_is_refused_before_it_moves() -> None:
    """Without a GPU the move itself is asked for."""

    def check() -> None:
        layer = nn.Linear(2, 2)
        mesh = init_device_mesh("cpu", (1,))
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate()]))
        gpu = torch.device("cuda", 0)
        with pytest.raises(ValueError, match=r"mesh of cuda devices.*got cpu for DTensor and cuda for FSDP"):
            move_to([layer], gpu, gpu, set())
        assert local_of(layer.weight).device.type == "cpu"

    _on_one_rank(check)


def test_a_scripted_modules_parameters_are_refused_by_name_and_may_be_left_out() -> None:
    def build() -> nn.Sequential:
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
        return nn.Sequential(nn.Linear(2, 2), scripted)

    def check() -> None:
        model = build()
        with pytest.raises(ValueError, match=r"Expected '1\.0\.weight' to be in a module of Python, got .*Script"):
            fully_shard(model)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        fully_shard(model, ignored_params=set(model[1].parameters()))
        model(torch.ones(1, 2)).sum().backward()
        assert [isinstance(parameter.grad, DTensor) for parameter in model.parameters()] == [True] * 2 + [False] * 2
        model.load_state_dict(model.state_dict())

    _on_one_rank(check)


def test_a_model_refused_while_its_shards_are_made_may_be_sharded_otherwise() -> None:
    def check() -> None:
        model = nn.Sequential(nn.Linear(12, 10), nn.Linear(10, 4))
        model[0].pair = nn.Parameter(Halves.encode(torch.ones(4, 6)))
        parameters = dict(model.named_parameters())
        # Ten rows lie as five a rank, their three blocks of four rows as two and one.
        uncut = MixedPrecisionPolicy(recipe=lambda p: BlockRecipe(block_rows=1) if p.shape == (10, 12) else None)
        with pytest.raises(ValueError, match="are whole blocks of"):
            fully_shard(model, mp_policy=uncut)
        with pytest.raises(NotImplementedError, match="to return None for '0.pair'"):
            fully_shard(model, options=ShardingOptions(keep_together=Rows(1)))
        odd_method = patch.object(Halves, "fsdp_pre_all_gather", lambda self, mesh, more: None)
        with odd_method, pytest.raises(ValueError, match="Invalid fsdp_pre_all_gather"):
            fully_shard(model)
        for name, parameter in model.named_parameters():
            assert parameter is parameters[name]
        fully_shard(model)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

    run_ranks(check, 2)


def test_sparse_gradients_are_refused_by_name() -> None:
    def check() -> None:
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
        with pytest.raises(ValueError, match=r"'0\.weight'.*sparse=True"):
            fully_shard(model)

    _on_one_rank(check)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_from_before_sharding_are_refused_by_name_until_they_are_removed(register: str) -> None:
    def check() -> None:
        model = Net()
        handle = getattr(model.get_parameter("layers.1.up.weight"), register)(lambda _: None)
        with pytest.raises(ValueError, match=r"'layers\.1\.up\.weight' before fully_shard, got 1, which nothing"):
            fully_shard(model)
        handle.remove()
        fully_shard(model)

    _on_one_rank(check)


def test_hooks_on_sharded_parameters_that_autograd_never_calls_are_refused_by_name() -> None:
    def check() -> None:
        model = shard(Net())
        weight = model.layers[1].get_parameter("up.weight")
        handle = weight.register_hook(lambda gradient: 0 * gradient)  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match=r"'layers\.1\.up\.weight' from .* got one from register_hook"):
            model(inputs()).sum().backward()
        handle.remove()
        fsdp(model).reset_iter_state()
        model(inputs()).sum().backward()
        assert weight.grad is not None

    _on_one_rank(check)


def test_setters_refuse_invalid_reshard_flags_and_gradient_divide_factors() -> None:
    def check() -> None:
        model = fsdp(shard(Net()))
        with pytest.raises(ValueError, match=r"`reshard_after_forward` to be a bool, got 2"):
            model.set_reshard_after_forward(2)  # type: ignore[arg-type]
        for factor in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match=r"positive gradient divide factor"):
                model.set_gradient_divide_factor(factor)

    _on_one_rank(check)


def test_fully_shard_refuses_an_object_that_is_no_module() -> None:
    def check() -> None:
        with pytest.raises(TypeError, match=r"`module` to be an nn\.Module or a list of them, got str"):
            fully_shard("model")  # type: ignore[type-var]

    _on_one_rank(check)


def test_policies_are_frozen() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(AttributeError):
        policy.param_dtype = torch.float32  # type: ignore[misc]


@pytest.mark.skipif(not hasattr(torch.Tensor, "_has_grad_dtype_override"), reason="torch before 2.15 does not tell")
def test_gradients_of_a_dtype_of_their_own_are_refused_by_name() -> None:
    def check() -> None:
        model = nn.Linear(2, 2).bfloat16()
        model.weight.grad_dtype = torch.bfloat16
        model.bias.grad_dtype = torch.float32
        with pytest.raises(NotImplementedError, match=r"gradient of 'bias'.*got grad_dtype=torch\.float32.*main_dtype"):
            fully_shard(model)
        model.bias.grad_dtype = torch.bfloat16
        fully_shard(model)

    _on_one_rank(check)
