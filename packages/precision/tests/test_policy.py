import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from lamella_precision import Float8Recipe, MixedPrecisionPolicy, matrices_of, use_float8_matmul


def test_the_default_policy_keeps_every_parameters_own_dtype() -> None:
    policy = MixedPrecisionPolicy()
    for dtype in (torch.float32, torch.bfloat16):
        assert policy.main_dtype_of(dtype) == dtype
        assert policy.compute_dtype_of(dtype) == dtype
        assert policy.reduce_dtype_of(dtype) == dtype


@pytest.mark.parametrize(("is_new", "unsaid"), [(False, torch.bfloat16), (True, torch.float32)])
def test_the_default_reduce_dtype_follows_fsdp2_of_the_installed_torch(
    is_new: bool, unsaid: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella_precision._choice.policy._REDUCES_IN_MAIN_DTYPE", is_new)
    assert MixedPrecisionPolicy(torch.bfloat16).reduce_dtype_of(torch.float32) == unsaid
    assert MixedPrecisionPolicy(torch.bfloat16, torch.float32).reduce_dtype_of(torch.float32) == torch.float32
    assert MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16).reduce_dtype_of(torch.float32) == torch.bfloat16


def test_a_parameter_may_be_said_to_compute_in_its_own_dtype() -> None:
    answers = {2: torch.float32, 3: torch.bfloat16, 4: None}
    policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda parameter: answers[len(parameter)])
    policies = {size: policy.resolved_for(nn.Parameter(torch.zeros(size))) for size in answers}
    fp32_policy, *bf16_policies = policies.values()
    assert fp32_policy == MixedPrecisionPolicy(torch.float32)
    assert bf16_policies == 2 * [MixedPrecisionPolicy(torch.bfloat16)]
    assert MixedPrecisionPolicy().resolved_for(nn.Parameter(torch.zeros(2))) == MixedPrecisionPolicy()


@pytest.mark.parametrize("answer", [torch.float16, "bf16"])
def test_a_parameter_cannot_compute_in_a_third_dtype(answer: Any) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda parameter: answer)
    with pytest.raises(ValueError, match=r"shape \(2,\), got .*param_dtype_override_fn must return None"):
        policy.resolved_for(nn.Parameter(torch.zeros(2)))


def test_main_dtype_replaces_the_dtype_that_a_parameter_was_built_in() -> None:
    policy = MixedPrecisionPolicy(main_dtype=torch.float32)
    assert policy.main_dtype_of(torch.bfloat16) == torch.float32
    assert policy.compute_dtype_of(torch.bfloat16) == torch.float32
    assert dataclasses.replace(policy, param_dtype=torch.bfloat16).compute_dtype_of(torch.bfloat16) == torch.bfloat16


def test_the_policy_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MixedPrecisionPolicy().param_dtype = torch.bfloat16  # type: ignore[misc]


@pytest.mark.parametrize(
    ("bad", "error"), [("bf16", TypeError), (torch.int8, ValueError), (torch.float8_e4m3fn, ValueError)]
)
@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype", "main_dtype"])
def test_a_wrong_dtype_is_refused_by_the_name_of_its_field(field: str, bad: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"`{field}`"):
        MixedPrecisionPolicy(**{field: bad})  # type: ignore[arg-type]


def test_the_class_of_a_recipe_is_refused_in_place_of_an_instance() -> None:
    wrong: Any = Float8Recipe
    with pytest.raises(TypeError, match="got <class .*Float8Recipe'>.* of a class, pass an instance"):
        MixedPrecisionPolicy(recipe=wrong)
    with pytest.raises(TypeError, match="`recipe` to return a Recipe or None"):
        MixedPrecisionPolicy(recipe=lambda _: wrong).resolved_for(nn.Parameter(torch.zeros(4, 4)))
    with pytest.raises(TypeError, match="Pass an instance"):
        matrices_of(nn.Linear(4, 4), wrong)
    with pytest.raises(TypeError, match=r"Pass Float8Recipe\(\)"):
        use_float8_matmul(nn.Sequential(nn.Linear(16, 16)), wrong)
