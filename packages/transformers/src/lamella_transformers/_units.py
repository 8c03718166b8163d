"""The units of a model and the dtypes of parameters in compute, by an adapter's rules or by transformers' names."""

from typing import Any, cast

from torch import nn

from lamella_transformers._adapters import DtypeRule, find_adapter
from lamella_transformers._errors import ModelError


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules to shard one by one, before the model.

    They follow from the rule of the adapter for the model's type, or are the layers that transformers names
    (`_no_split_modules`).

    Args:
        model: A model of transformers; may be on the meta device.

    Raises:
        ModelError: The model names no layers.

    Effects: imports the package of the adapter.
    """
    model_type = _model_type(model)
    if (adapter := find_adapter(model_type)) is not None:
        return adapter.sharding_units(model)
    names = set(getattr(model, "_no_split_modules", None) or ())
    units = [module for module in model.modules() if type(module).__name__ in names]
    if not units:
        raise ModelError(f"Expected decoder layers named by transformers, got none for {model_type!r}.")
    return units


def fp32_parameters(model: nn.Module) -> DtypeRule | None:
    """Return the adapter's rule for parameters that compute in fp32 beside bf16 weights: a `param_dtype_override_fn`.

    None for models without such a rule.
    """
    adapter = find_adapter(_model_type(model))
    return None if adapter is None or adapter.keep_fp32 is None else adapter.keep_fp32(model)


def _model_type(model: nn.Module) -> str:
    return str(cast(Any, model).config.model_type)
