"""torchao's float8 weights: replaced by plain ones, and encoded to the bytes of its own all-gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from lamella_precision._choice.foreign import replace_weights
from lamella_precision._protocol import Direction, Recipe
from lamella_precision._recipes.float8 import Float8Recipe
from lamella_precision._scales.encoding import encode_cuts
from lamella_precision._scales.tiles import TiledShard

_CLASS = "WeightWithDynamicFloat8CastTensor"
_EPSILON = 1e-12  # torchao's smallest amax


def replace_quantized_weights(
    model: nn.Module, *, compute_dtype: torch.dtype = torch.bfloat16
) -> Callable[[nn.Parameter], Recipe | None]:
    """Replace a model's weights of torchao by plain ones, and return their recipes, as `MixedPrecisionPolicy.recipe`.

    For a model after `convert_to_float8_training` with `enable_fsdp_float8_all_gather=True`, before `fully_shard` and
    before an optimizer. Layers find torchao's `Float8TrainingTensor` in each pass: a unit's weights are encoded
    together, and the scales of all units come from one reduction, so `precompute_float8_dynamic_scale_for_fsdp` has
    no weight left to serve. Without this call each weight is gathered by torchao's own methods.

    Args:
        model: Changed in place. The new parameters share the weights' memory, on the meta device too.
        compute_dtype: Dtype that the gathered weights stand for, and of their gradients: the policy's `param_dtype`.

    Returns:
        A function of a parameter: the recipe of a replaced weight, else None. The function keeps no parameter alive.

    Raises:
        ValueError: The model has no such weight.
        NotImplementedError: A weight is a DTensor (tensor parallel), is no matrix, or has a format other than e4m3fn
            and e5m2.

    Source: torchao 0.17, `float8/fsdp_utils.py` and `float8/float8_utils.py`.
    """

    def recipe_of(name: str, _module: nn.Module, parameter: nn.Parameter) -> Recipe | None:
        weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if type(weight).__name__ != _CLASS or type(weight).__module__.partition(".")[0] != "torchao":
            return None
        formats = (torch.float8_e4m3fn, torch.float8_e5m2)
        options, dtype = (vars(weight)[key] for key in ("_linear_mm_config", "_dtype"))
        if isinstance(parameter, DTensor) or weight.ndim != 2 or dtype not in formats:
            raise NotImplementedError(
                f"Expected {name!r} as a plain matrix with a format of {formats}, got a {type(parameter).__name__} of "
                f"shape {tuple(parameter.shape)} and {dtype}. Call this before fully_shard, or leave the model "
                "to torchao's own methods, without this call."
            )
        return CastWeights(kind=type(weight), linear_mm_config=options, dtype=dtype, compute_dtype=compute_dtype)

    choose = replace_weights(model, recipe_of, lambda parameter: vars(parameter)["_tensor"])
    if choose is None:
        raise ValueError(
            "Expected a model with float8 weights of torchao, got none. Convert it by `convert_to_float8_training` "
            "with `Float8LinearConfig(enable_fsdp_float8_all_gather=True)`, and call this before fully_shard."
        )
    return choose


@dataclass(frozen=True, kw_only=True)
class CastWeights(Float8Recipe):
    """The recipe of `WeightWithDynamicFloat8CastTensor`: float8 data with a number a matrix that it is multiplied by.

    The amaxes are of all ranks' rows, and the arithmetic is torchao's: the gathered bytes are those of its own
    `fsdp_pre_all_gather` on the main weights' rows.

    Args:
        kind: The class, whose `fsdp_post_all_gather` makes the gathered tensor, once.
        linear_mm_config: torchao's options of products.
    """

    kind: type[torch.Tensor]
    linear_mm_config: Any

    def divides_at(self, shape: Sequence[int], row: int) -> bool:
        """Nowhere: torchao's tensor is no DTensor's local tensor."""
        return False

    def encode(self, *columns: Sequence[TiledShard] | None) -> None:
        """Multiply by the scales, saturate, and round to the format.

        Effects: one kernel for all weights; where Triton does not run, multi-tensor calls and a temporary fp32 copy of
            the shards.
        """
        (cuts,) = columns
        encode_cuts(cuts or (), self.largest, multiplies=True)

    def rescale(self, amaxes: torch.Tensor, scales: torch.Tensor, past: torch.Tensor) -> None:
        """Compute the scales of all weights of some groups from amaxes of whole weights.

        Args:
            amaxes: (n,), fp32.
            scales: (n,), fp32, written.
            past: (0, n).

        Effects: a few kernels on the current stream, no host sync.
        """
        # In fp64, as torchao: its epsilon has another value in fp32.
        scales.copy_(self.largest / amaxes.double().clamp_min(_EPSILON))

    def decode(  # type: ignore[override]  # not a `QuantizedWeight`: torchao's layers ask for their own class
        self, payloads: Sequence[torch.Tensor], shape: torch.Size, scales: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A `Float8TrainingTensor` over data and scale."""
        assert scales is not None
        (payload,) = payloads
        make: Any = self.kind
        maker = make(payload, self.linear_mm_config, self.dtype)
        gathered, _ = maker.fsdp_post_all_gather((payload,), (scales.view(()),), self.compute_dtype)
        decoded: torch.Tensor = gathered
        return decoded

    def dequantize(
        self, payloads: Sequence[torch.Tensor], scales: torch.Tensor | None, shape: torch.Size, direction: Direction
    ) -> torch.Tensor:
        """Data over the scale, in `compute_dtype`, as torchao reads it."""
        (payload,) = payloads
        assert scales is not None
        return payload.to(self.compute_dtype) / scales.view(()).to(self.compute_dtype)
