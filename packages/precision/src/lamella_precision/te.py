"""Transformer Engine's quantised weights, with main weights in higher precision: gathers in 1 byte an element.

                 the data that travels    the copy for backward (Hopper: the transpose)
    gather       written                  -
    forward      read                     -
    backward     read                     made from the data by the layer, or just before it
    reshard      no bytes                 dropped

MXFP8 has no such copy: data by rows travels for forward, data by columns for backward.

The classes come from the parameters themselves: nothing here imports Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from lamella_precision._choice.foreign import is_quantized, replace_weights
from lamella_precision._protocol import Direction, PayloadFormat, Recipe, WeightRows
from lamella_precision._recipes.float8 import Float8Recipe
from lamella_precision._recipes.te_mxfp8 import MULTIPLE, MXFP8Weights
from lamella_precision._scales.encoding import encode_cuts
from lamella_precision._scales.scales import times_scales, write_scales
from lamella_precision._scales.tiles import Block, TiledShard, grid_of
from lamella_precision._vendor_versions import VendorVersions

TRANSFORMER_ENGINE = VendorVersions(
    distribution="transformer-engine", floor="2.11", ceiling="2.12", extra="lamella-precision[te]"
)
_DTYPES = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
_SQUARES: Block = (128, 128)
_MATRIX: Block = (None, None)
_GRID_COLUMNS = 4  # cuBLAS reads rows of scales padded to a multiple
# Attributes of a quantised parameter that keep its initial values alive, and itself.
_INITIAL = ("_high_precision_init_val", "get_high_precision_init_val", "clear_high_precision_init_val")

# Its backward reads copies that forward left, and forward's go when the unit reshards.
_MAKES_NO_COPY = "LayerNormMLP"
_NO_GRAPH_TASK = -1


def replace_quantized_weights(
    model: nn.Module, *, compute_dtype: torch.dtype = torch.bfloat16
) -> Callable[[nn.Parameter], Recipe | None]:
    """Replace a model's quantised weights by plain ones, and return their recipes, as `MixedPrecisionPolicy.recipe`.

    For a model of Transformer Engine's layers built under `quantized_model_init` (`fp8_model_init`), before
    `fully_shard` and before an optimizer. Layers then find the quantised class again in each pass: encoded
    with Transformer Engine's scales, and gathered in 1 byte an element.

    Args:
        model: Changed in place. The new parameters have the values before quantisation, on the CPU, if the model was
            built with `preserve_high_precision_init_val=True`; else the dequantised values, on the device.
        compute_dtype: Dtype that the gathered weights stand for, and of their gradients: the policy's `param_dtype`.

    Returns:
        A function of a parameter: the recipe of a replaced weight, else None. The function keeps no parameter alive.

    Raises:
        ImportError: Transformer Engine is older than the tested versions.
        ValueError: The model has no quantised weight, or has weights on the meta device.
        NotImplementedError: A weight has a format without a recipe, as NVFP4, or is an MXFP8Tensor with sizes that are
            no multiples of 128.

    Warns:
        UserWarning: Transformer Engine is newer than the tested versions.

    Source: Transformer Engine 2.11, `pytorch/tensor` and `pytorch/quantization.py`.
    """
    TRANSFORMER_ENGINE.check()

    def recipe_of(name: str, module: nn.Module, parameter: nn.Parameter) -> Recipe | None:
        if parameter.is_meta and getattr(module, "primary_weights_in_fp8", False):
            raise ValueError(
                f"Expected {name!r} on a device, as its layer quantises it there, got meta. Build the model "
                "without `device='meta'`."
            )
        return _recipe_of(name, module, parameter, compute_dtype) if is_quantized(parameter) else None

    choose = replace_weights(model, recipe_of, _values_of, dropped=_INITIAL)
    if choose is None:
        raise ValueError(
            "Expected a model with quantised weights of Transformer Engine, got none. Build its layers under "
            "`transformer_engine.pytorch.quantized_model_init(enabled=True)`, and call this before fully_shard."
        )
    for module in model.modules():
        if type(module).__name__ == _MAKES_NO_COPY:
            for own_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if choose(parameter) is not None:
                    module.register_forward_pre_hook(partial(_copy_before_recomputation, own_name))
                    module.register_forward_hook(partial(_copy_before_backward, own_name))
    return choose


@dataclass(frozen=True)
class ScaledWeights:
    """The recipe of `Float8Tensor` (a scale a tensor) and `Float8BlockwiseQTensor` (a scale for 128 x 128).

    The amaxes are of all ranks' rows, and the arithmetic is Transformer Engine's: the gathered bytes are those of its
    own quantisation of the whole weight (for 128 x 128: if scales are powers of two, its default).

    Args:
        kind: The class of the weight.
        metadata: Arguments of the class, but shape, dtype and tensors. Not compared.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block: Rows and columns with a common scale.
        power_of_two: Round the factor down to a power of two.
        epsilon: The smallest amax.
        num_past_amaxes: 0 for current scaling; else the number of earlier amaxes whose largest gives the scale.
        margin: Halve the factor this many times.
        compute_dtype: Dtype that the weight stands for, and of its gradient.
    """

    kind: type[torch.Tensor]
    metadata: Mapping[str, Any] = field(compare=False, repr=False)
    dtype: torch.dtype
    block: Block
    power_of_two: bool
    epsilon: float
    num_past_amaxes: int
    margin: int
    compute_dtype: torch.dtype

    @property
    def block_rows(self) -> int:
        """Cuts are allowed after any row: amaxes are of all ranks."""
        return 1

    @cached_property
    def _tiling(self) -> Float8Recipe:
        """Finds the blocks of shards, and their amaxes."""
        return Float8Recipe(self.block, self.dtype)

    @property
    def _is_whole(self) -> bool:
        return self.block == _MATRIX

    def payloads(self, shape: Sequence[int], main_dtype: torch.dtype) -> tuple[PayloadFormat, ...]:
        """The data, for both directions.

        Raises:
            ValueError: The weight is no matrix.
        """
        if len(shape) != 2:
            raise ValueError(f"Expected a matrix for {self.kind.__name__}, got shape {tuple(shape)}.")
        return self._tiling.payloads(shape, main_dtype)

    def columns(
        self,
        shards: Sequence[torch.Tensor],
        payloads: Sequence[Sequence[torch.Tensor] | None],
        weight_rows: Sequence[WeightRows],
    ) -> tuple[Sequence[TiledShard] | None]:
        """For each weight the views of equal blocks: sources, destinations and scales."""
        adapted_rows = [rows._replace(scales=self._factor_cells(rows.scales, rows.shape)) for rows in weight_rows]
        if adapted_rows and adapted_rows[0].amaxes is not None:
            adapted_rows = [rows._replace(amaxes=self._amax_cells(rows.amaxes, rows.shape)) for rows in adapted_rows]
        return self._tiling.columns(shards, payloads, adapted_rows)

    def encode(self, *columns: Sequence[TiledShard] | None) -> None:
        """Scale, saturate, and round to the format.

        Effects: one kernel for all weights; where Triton does not run, multi-tensor calls and a temporary fp32 copy of
            the shards.
        """
        (cuts,) = columns
        encode_cuts(cuts or (), self._tiling.largest, multiplies=self._is_whole)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """(2,) for a matrix: the reciprocal of the factor, and the factor. For squares: reciprocals, rows padded."""
        if self._is_whole:
            return (2,)
        num_rows, num_columns = grid_of(shape, self.block)
        return num_rows, -(-num_columns // _GRID_COLUMNS) * _GRID_COLUMNS

    @property
    def num_past(self) -> int:
        """Number of the latest measurements behind scales."""
        return self.num_past_amaxes

    def measure_columns(
        self, shards: Sequence[torch.Tensor], weight_rows: Sequence[WeightRows]
    ) -> tuple[Sequence[TiledShard]]:
        """For each weight the views of equal blocks, and of their amaxes."""
        adapted_rows = [rows._replace(scales=self._amax_cells(rows.scales, rows.shape)) for rows in weight_rows]
        return self._tiling.measure_columns(shards, adapted_rows)

    def measure(self, *columns: Sequence[TiledShard]) -> None:
        """Raise amaxes to the largest magnitude of each block's part on this rank.

        Effects: one kernel for all weights; where Triton does not run, multi-tensor calls.
        """
        self._tiling.measure(*columns)

    def rescale(self, amaxes: torch.Tensor, scales: torch.Tensor, past: torch.Tensor) -> None:
        """Compute the scales of all weights of some groups from amaxes of whole blocks, and note the amaxes.

        Args:
            amaxes: (n,), fp32.
            scales: (n,), fp32, written.
            past: (num_past, n), fp32, the latest amaxes first; negative where nothing was measured, 0 for a weight that
                had zeros alone.

        Effects: a few kernels on the current stream, no host sync.
        """
        if not self._is_whole:
            scales.copy_(self._factor(amaxes).reciprocal())
            return
        reciprocals, factors = scales[::2], scales[1::2]
        write_scales(factors, amaxes[::2], past[:, ::2], self._factor)
        reciprocals.copy_(factors.reciprocal())

    def _factor(self, amaxes: torch.Tensor) -> torch.Tensor:
        """The factors of weights; 1 for a block of zeros."""
        # A tensor as dividend: a number over a tensor is multiplied by a rounded reciprocal.
        factors = torch.full_like(amaxes, self._tiling.largest) / amaxes.clamp_min(self.epsilon)
        factors = factors.clamp_max(torch.finfo(torch.float32).max) / 2**self.margin
        if self.power_of_two:
            factors = (factors.view(torch.int32) & 0x7F800000).view(torch.float32)
        return torch.where(torch.isfinite(amaxes) & (amaxes.clamp_min(self.epsilon) > 0), factors, 1.0)

    def _factor_cells(self, grid: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
        """The encoding's scales alone."""
        assert grid is not None
        return grid[1:] if self._is_whole else self._squares(grid, shape)

    def _amax_cells(self, grid: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
        """The raised amaxes alone."""
        assert grid is not None
        return grid[:1] if self._is_whole else self._squares(grid, shape)

    def _squares(self, grid: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return grid[:, : grid_of(shape, self.block)[1]]

    def decode(
        self, payloads: Sequence[torch.Tensor], shape: torch.Size, scales: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A tensor of `kind` over data and scales."""
        assert scales is not None
        payload = payloads[0].view(torch.uint8)
        if self._is_whole:
            tensors = {"data": payload, "fp8_scale_inv": scales[:1], "data_transpose": None}
        else:
            tensors = {"rowwise_data": payload, "rowwise_scale_inv": scales}
            tensors |= {"columnwise_data": None, "columnwise_scale_inv": None}
        make: Any = self.kind
        options = {"shape": shape, "dtype": self.compute_dtype, "device": payload.device, "requires_grad": False}
        weight: torch.Tensor = make(**options, **{**self.metadata, **tensors})
        return weight

    def dequantize(
        self, payloads: Sequence[torch.Tensor], scales: torch.Tensor | None, shape: torch.Size, direction: Direction
    ) -> torch.Tensor:
        """Data times the factors' reciprocals, multiplied in fp32 and rounded to `compute_dtype`."""
        (payload,) = payloads
        assert scales is not None
        cells = scales[:1].view(1, 1) if self._is_whole else self._squares(scales, shape)
        return times_scales(payload, cells, shape, self.block, self.compute_dtype)

    def cached_nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of the transpose, and of the squares' scales."""
        rows, columns = shape
        return rows * columns + (0 if self._is_whole else 4 * prod(self.scale_shape((columns, rows))))

    def drop_caches(self, weights: Sequence[torch.Tensor]) -> None:
        """Drop transposed data, as for backward on Hopper."""
        for weight in weights:
            attributes = vars(weight)
            if self._is_whole:
                attributes["_transpose"], attributes["_transpose_invalid"] = None, True
            else:
                attributes["_columnwise_data"] = attributes["_columnwise_scale_inv"] = None


class _DelayedScaling(NamedTuple):
    """Options of delayed scaling."""

    num_past_amaxes: int = 0
    margin: int = 0


def _recipe_of(name: str, module: nn.Module, parameter: nn.Parameter, compute_dtype: torch.dtype) -> Recipe:
    weight: Any = parameter
    metadata = {key: value for key, value in weight.get_metadata().items() if not isinstance(value, torch.Tensor)}
    kind, quantizer = type(parameter), metadata["quantizer"].copy()
    if kind.__name__ == "MXFP8Tensor":
        return _mxfp8(name, parameter, metadata, compute_dtype)
    # Not the copy for backward: the layer makes it in backward, and forward would keep it for nothing.
    quantizer.set_usage(rowwise=True, columnwise=False)
    metadata["quantizer"] = quantizer
    formats = kind.__name__, type(quantizer).__name__
    match formats:
        case "Float8Tensor", "Float8CurrentScalingQuantizer":
            block, delayed = _MATRIX, _DelayedScaling()
            power_of_two, epsilon = quantizer.force_pow_2_scales, quantizer.amax_epsilon
        case "Float8Tensor", "Float8Quantizer":
            block, delayed = _MATRIX, _delayed(name, module)
            power_of_two, epsilon = False, 0.0
        case "Float8BlockwiseQTensor", "Float8BlockQuantizer" if quantizer.block_scaling_dim == 2:
            block, delayed = _SQUARES, _DelayedScaling()
            power_of_two, epsilon = quantizer.force_pow_2_scales, quantizer.amax_epsilon
        case _:
            raise NotImplementedError(
                f"Expected {name!r} as a Float8Tensor (current or delayed scaling), a Float8BlockwiseQTensor with "
                f"squares of 128 x 128, or an MXFP8Tensor, got {formats[0]} of {formats[1]}. Build its layer under "
                "`quantized_model_init` with another recipe, or in bf16 and choose MXFP8Recipe for gathers."
            )
    dtype = _DTYPES[metadata["fp8_dtype"].name]
    return ScaledWeights(kind, metadata, dtype, block, power_of_two, epsilon, *delayed, compute_dtype)


def _mxfp8(name: str, parameter: nn.Parameter, metadata: Mapping[str, Any], compute_dtype: torch.dtype) -> MXFP8Weights:
    is_aligned = parameter.ndim == 2 and not any(size % MULTIPLE for size in parameter.shape)
    if not is_aligned or _DTYPES[metadata["fp8_dtype"].name] != torch.float8_e4m3fn:
        raise NotImplementedError(
            f"Expected {name!r} as an MXFP8Tensor in e4m3 with two sizes that are multiples of {MULTIPLE}, without "
            f"padded scales, got {tuple(parameter.shape)} in {metadata['fp8_dtype']}. Build its layer in bf16 and "
            "choose MXFP8Recipe for gathers."
        )
    return MXFP8Weights(type(parameter), metadata, compute_dtype)


def _delayed(name: str, module: nn.Module) -> _DelayedScaling:
    """Options of the recipe that a layer was built with.

    Raises:
        NotImplementedError: The recipe computes scales by a function.
    """
    recipe: Any = getattr(module, "fp8_meta", {}).get("recipe")
    lengths = {"max": getattr(recipe, "amax_history_len", 0), "most_recent": 1}
    algorithm = getattr(recipe, "amax_compute_algo", None)
    if algorithm not in lengths or recipe.scaling_factor_compute_algo is not None:
        raise NotImplementedError(
            f"Expected DelayedScaling of {name!r} with amax_compute_algo 'max' or 'most_recent' and no "
            f"scaling_factor_compute_algo, got {recipe}. Use Float8CurrentScaling."
        )
    return _DelayedScaling(lengths[algorithm], recipe.margin)


def _copy_before_backward(name: str, module: nn.Module, _: object, output: object) -> None:
    """After forward: let a weight of `_MAKES_NO_COPY` make its copy once backward has the unit's bytes."""
    weight: Any = getattr(module, name)
    for tensor in output if isinstance(output, tuple) else (output,):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            # Not a hook of the tensor: a tensor's hooks run in the order of registration, and a later hook waits for
            # the unit's gather. A node's own hooks run after the hooks of the node's tensors.
            tensor.grad_fn.register_prehook(lambda _: weight.update_usage(columnwise_usage=True))


def _copy_before_recomputation(name: str, module: nn.Module, _: object) -> None:
    """Before a forward that activation checkpointing repeats: its backward saves the weight with the copy."""
    if torch._C._current_graph_task_id() != _NO_GRAPH_TASK:
        weight: Any = getattr(module, name)
        weight.update_usage(columnwise_usage=True)


def _values_of(parameter: nn.Parameter) -> torch.Tensor:
    """The values before quantisation, or dequantised."""
    weight: Any = parameter
    with torch.no_grad():
        values: torch.Tensor | None = getattr(weight, "get_high_precision_init_val", lambda: None)()
        return weight.dequantize() if values is None else values
