import dataclasses

import pytest
import torch

from lamella_precision import MixedPrecisionPolicy


def test_the_default_policy_keeps_every_parameters_own_dtype() -> None:
    policy = MixedPrecisionPolicy()
    for dtype in (torch.float32, torch.bfloat16):
        assert policy.main_dtype_of(dtype) == dtype
        assert policy.compute_dtype_of(dtype) == dtype
        assert policy.reduce_dtype_of(dtype) == dtype


def test_gradients_are_reduced_in_the_compute_dtype_unless_told_otherwise() -> None:
    assert MixedPrecisionPolicy(torch.bfloat16).reduce_dtype_of(torch.float32) == torch.bfloat16
    assert MixedPrecisionPolicy(torch.bfloat16, torch.float32).reduce_dtype_of(torch.float32) == torch.float32


def test_a_main_dtype_separates_what_is_stored_from_what_was_built() -> None:
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
