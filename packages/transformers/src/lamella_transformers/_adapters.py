"""Rules of other packages for the models of transformers: found by the `model_type` of a config.

Note [Packages announce their models]
    A package declares each of its model types as an entry point of the group `lamella.adapters`. The entry point's
    object is a module, or has the module's attributes:

        [project.entry-points."lamella.adapters"]
        qwen3_5_text = "lamella_qwen"

    `sharding_units(model)` is required and returns the modules to shard one by one, before the model.
    `keep_fp32(model)` returns a rule for parameters that compute in fp32 beside bf16 weights
    (`param_dtype_override_fn`). `NAMED_CONFIGS` maps names to the values of a config, for the package's own models.
    A package is imported once a model of its types needs the rules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final

import torch
from torch import nn

GROUP: Final = "lamella.adapters"
"""The group of entry points; the names of the entry points are model types."""

DtypeRule = Callable[[nn.Parameter], torch.dtype | None]
"""A `param_dtype_override_fn`: the dtype of a parameter in compute, or None for the policy's."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The rules of a package for its models; see Note [Packages announce their models].

    Attributes:
        sharding_units: Returns the modules of a model to shard one by one, before the model.
        keep_fp32: Returns the rule for a model's parameters that compute in fp32; None in a package without such rules.
        named_configs: The values of a config by the name of a model that comes with the package.
    """

    sharding_units: Callable[[nn.Module], list[nn.Module]]
    keep_fp32: Callable[[nn.Module], DtypeRule] | None
    named_configs: Mapping[str, Mapping[str, object]]


def find_adapter(model_type: str) -> Adapter | None:
    """Return the adapter announced by an installed package for a `model_type`; None without an adapter.

    Raises:
        ImportError: The package cannot be imported.
        TypeError: The announced object has no function `sharding_units`.
        ValueError: Two packages announce the model type.

    Effects: imports the announcing package alone.
    """
    announced = entry_points(group=GROUP, name=model_type)
    targets = sorted({entry_point.value for entry_point in announced})
    if not targets:
        return None
    if len(targets) > 1:
        raise ValueError(f"Expected one package with an adapter for {model_type!r}, got {targets}. Uninstall one.")
    rules = next(iter(announced)).load()
    if not callable(getattr(rules, "sharding_units", None)):
        raise TypeError(f"Expected {targets[0]!r} to have a function sharding_units, got {rules!r}.")
    return Adapter(
        sharding_units=rules.sharding_units,
        keep_fp32=getattr(rules, "keep_fp32", None),
        named_configs=getattr(rules, "NAMED_CONFIGS", {}),
    )
