"""Everything that torch.distributed.fsdp says about fully_shard exists in lamella, with the same parameters."""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from fsdp2_models import Api, Stack, Where, inputs, local, on_ranks, shard
from torch import nn

FUNCTIONS = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]
CLASSES = [
    "CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "GradientReductionHandle", "MixedPrecisionPolicy",
    "OffloadPolicy", "UnshardHandle",
]  # fmt: skip
METHODS = [name for name in vars(fsdp2.FSDPModule) if not name.startswith("_")]


def _assert_takes_the_same(ours: object, torchs: object) -> None:
    """Torch's parameters, in torch's order; whatever else there is has a default and goes by name."""
    torch_parameters, got = _parameters(torchs), _parameters(ours)
    assert [parameter for parameter in got if parameter in torch_parameters] == torch_parameters
    extra = [parameter for parameter in got if parameter not in torch_parameters]
    assert all(kind is inspect.Parameter.KEYWORD_ONLY and has_default for _, kind, has_default in extra), extra


def _parameters(function: object) -> list[tuple[str, object, bool]]:
    """Names, kinds, and whether there is a default; a default's value may be the implementation's own class."""
    assert callable(function)
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default is not p.empty) for p in parameters]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_the_same_arguments(api: Api, name: str) -> None:
    _assert_takes_the_same(getattr(api, name), getattr(fsdp2, name))


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_exists(api: Api, name: str) -> None:
    if api is fsdp2 and not hasattr(api, name):
        pytest.skip(f"this torch has no {name}")
    assert inspect.isclass(getattr(api, name))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_the_same_arguments(api: Api, name: str) -> None:
    _assert_takes_the_same(getattr(api.FSDPModule, name), getattr(fsdp2.FSDPModule, name))
    assert name in vars(api.FSDPModule), "inherited from torch's FSDPModule, whose methods know nothing of this engine"


@pytest.mark.parametrize("name", ["CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"])
def test_a_policy_is_made_and_compared_as_torchs(api: Api, name: str) -> None:
    def fields(policy: object) -> dict[str, object]:
        return {field: getattr(policy, field) for field in inspect.signature(getattr(fsdp2, name)).parameters}

    if not hasattr(fsdp2, name):
        pytest.skip(f"this torch has no {name} to compare with")
    arguments = {"shard": "dp"} if name == "DataParallelMeshDims" else {}
    policy = getattr(api, name)(**arguments)
    assert fields(policy) == fields(getattr(fsdp2, name)(**arguments))
    assert policy == getattr(api, name)(**arguments)


def test_a_policy_offloads_to_the_cpu_as_a_kind_of_offloading(api: Api) -> None:
    assert issubclass(api.CPUOffloadPolicy, api.OffloadPolicy)


def test_dims_for_data_parallelism_name_at_least_one_axis(api: Api) -> None:
    with pytest.raises(ValueError, match="At least one of shard or replicate must be set"):
        api.DataParallelMeshDims()


def test_a_module_that_was_not_sharded_is_no_unit(api: Api) -> None:
    assert not isinstance(nn.Linear(2, 2), api.FSDPModule)


def test_a_step_is_logged_by_phase_and_unit(api: Api) -> None:
    def scenario() -> None:
        model = shard(api, Stack(num_blocks=2))
        with _logged("torch.distributed.fsdp.fully_shard") as lines:
            model(inputs()).sum().backward()
        phases = ("pre_forward", "post_forward", "pre_backward", "post_backward")
        expected = {f"FSDP::{phase} (blocks.{i})" for phase in phases for i in range(2)}
        assert expected | {"FSDP::root_pre_forward"} <= set(lines)
        assert any(line.startswith("FSDP::root_post_backward") for line in lines)

    on_ranks(scenario)


@contextmanager
def _logged(name: str) -> Iterator[list[str]]:
    """A logger's lines. pytest's own fixture cannot be sent to a rank."""
    logger, lines = logging.getLogger(name), list[str]()
    handler, level = logging.Handler(), logger.level
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def test_the_names_in_torchs_own_module_may_be_replaced(api: Api) -> None:
    """A migration that leaves its imports as they are."""
    torchs_function, torchs_policy = fsdp2.fully_shard, fsdp2.MixedPrecisionPolicy
    names = ("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "UnshardHandle", "CPUOffloadPolicy", "OffloadPolicy")

    def scenario() -> None:
        with mock.patch.multiple(fsdp2, **{name: getattr(api, name) for name in names}):
            with torch.device("meta"):
                model = Stack()
            shard(fsdp2, model, mp_policy=torchs_policy(param_dtype=torch.float32))
            assert torchs_function.state(model) is fsdp2.fully_shard.state(model)  # type: ignore[attr-defined]
            model.to_empty(device=Where.device)
            for parameter in model.parameters():
                nn.init.ones_(local(parameter))
            model.cpu().to(Where.device).to(torch.float64)
            model(inputs().double()).sum().backward()
            assert all(parameter.grad is not None for parameter in model.parameters())

    on_ranks(scenario)
