"""Hugging Face's float8 weights with block scales: dequantised while reading, and quantised while writing.

A quantised `<name>` of dtype float8_e4m3fn comes with `<name>_scale_inv`, fp32, one entry for each block of the last
two dims (128 rows by 128 columns, smaller at the edges). The weight is their product. Stacked experts have
separate blocks.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from torch.nn import functional as F

from lamella_files import CheckpointDamaged, Over, Source, TensorInfo, Wanted, pieces, whole_box
from lamella_layout import Chunk, Range

BLOCK: Final = (128, 128)
"""Rows and columns with a common scale, in all publications so far."""

_SUFFIX: Final = "_scale_inv"
FLOAT8: Final = torch.float8_e4m3fn
_LARGEST: Final = torch.finfo(FLOAT8).max
PIECE_NUMEL: Final = 1 << 21  # Elements in memory at once, in fp32, twice or three times.
_LEFT_ALONE: Final = ("embed", "head", "norm", "router")


def is_quantised(source: Source) -> bool:
    """Whether a source has weights with block scales."""
    return any(name + _SUFFIX in source.tensors for name in source.tensors)


def is_scale(source: Source, name: str) -> bool:
    """Whether a tensor holds the scales of another tensor."""
    return name.endswith(_SUFFIX) and name.removesuffix(_SUFFIX) in source.tensors


def linear_weights(name: str, info: TensorInfo) -> bool:
    """The default selection for quantisation: matrices of whole blocks, of linear layers.

    Embeddings, heads, norms, gates and routers stay unquantised. Matrices with partial blocks at the edge do too:
    transformers infers a block's size from the number of scales on dequantisation, wrongly for such matrices.
    """
    *modules, last = name.split(".")
    is_stack = len(info.shape) == 3
    return (
        (last == "weight" or is_stack)
        and len(info.shape) >= 2
        and all(size and size % edge == 0 for size, edge in zip(info.shape[-2:], BLOCK, strict=True))
        and info.dtype.is_floating_point
        and info.dtype.itemsize > 1
        and not any(word.endswith("gate") or any(other in word for other in _LEFT_ALONE) for word in modules)
    )


class Dequantised(Over):
    """A `Source` over a `Source`: weights with scales are dequantised, and the scales dropped."""

    def __init__(self, source: Source, *, dtype: torch.dtype = torch.bfloat16, block: tuple[int, int] = BLOCK) -> None:
        """Pair weights with their scales.

        Args:
            source: With the published names.
            dtype: The reported dtype of the weights; computed in fp32 for any requested dtype.
            block: Rows and columns with a common scale, from the configuration's `weight_block_size`.

        Raises:
            CheckpointDamaged: A scale's weight is absent, not in float8, or of a different shape.
        """
        scaled = {name.removesuffix(_SUFFIX) for name in source.tensors if name.endswith(_SUFFIX)}
        tensors = {
            name: info._replace(dtype=dtype) if name in scaled else info
            for name, info in source.tensors.items()
            if not name.endswith(_SUFFIX)
        }
        super().__init__(source, tensors)
        self._scaled, self._block = scaled, block
        for name in sorted(scaled):
            self._check(name)

    def read(self, requests: Sequence[Wanted]) -> None:
        """As `Source.read`; one piece of a weight at a time in fp32, with the piece's scales."""
        self.source.read([request for request in requests if request.name not in self._scaled])
        for name, piece, into in _in_pieces(requests, self._scaled):
            blocks = blocks_of(piece, self._block)
            values = torch.empty(piece.sizes)
            scales = torch.empty(blocks.sizes)
            self.source.read([Wanted(name, piece, values), Wanted(scale_name(name), blocks, scales)])
            into.copy_(values.mul_(_spread(scales, piece, self._block)))

    def _check(self, name: str) -> None:
        tensors, scale = self.source.tensors, self.source.tensors[name + _SUFFIX]
        weight = tensors.get(name)
        if weight is None or weight.dtype != FLOAT8:
            stored_kind = "nothing" if weight is None else weight.dtype
            problem = f"expected a weight of {FLOAT8} with {name + _SUFFIX!r}, got {stored_kind}"
            raise CheckpointDamaged(str(self.path), problem)
        expected = num_blocks(weight.shape, self._block)
        if scale.shape != expected:
            raise CheckpointDamaged(
                str(self.path),
                f"expected {name + _SUFFIX!r} of shape {expected}, a scale for each {self._block[0]} by "
                f"{self._block[1]} of {weight.shape}, got {scale.shape}",
            )


class Quantised(Over):
    """A `Source` over a `Source`: chosen weights are float8, with added scales.

    A block's scale is the block's largest magnitude divided by float8's (448), or 1 for a block of zeros. So the error
    of an element is at most 1/16 of the element, or 2**-10 of the block's scale if larger.
    """

    def __init__(
        self,
        source: Source,
        *,
        is_chosen: Callable[[str, TensorInfo], bool] = linear_weights,
        block: tuple[int, int] = BLOCK,
    ) -> None:
        """Choose weights by name and shape; reads no value.

        Args:
            source: With the names to publish.
            is_chosen: Whether to quantise a tensor.
            block: Rows and columns with a common scale.

        Raises:
            ValueError: A chosen tensor is no floating-point matrix.
        """
        tensors: dict[str, TensorInfo] = {}
        self._weights: dict[str, str] = {}  # by the name of the scales
        for name, info in source.tensors.items():
            tensors[name] = info
            if is_chosen(name, info):
                check_quantisable(name, info.shape, info.dtype)
                scales = num_blocks(info.shape, block)
                tensors[name] = info._replace(dtype=FLOAT8)
                tensors[scale_name(name)] = TensorInfo(scales, torch.float32, (whole_box(scales),))
                self._weights[scale_name(name)] = name
        super().__init__(source, tensors)
        self._block = block

    @property
    def left_alone(self) -> tuple[str, ...]:
        """Modules with unquantised matrices, for the configuration."""
        shapes = {name: info.shape for name, info in self.source.tensors.items()}
        return left_alone(shapes, set(self._weights.values()))

    def read(self, requests: Sequence[Wanted]) -> None:
        """As `Source.read`; whole blocks at a time, in fp32. Reading scales costs as much as reading the weights.

        Raises:
            ValueError: A weight to quantise holds infinities or NaNs.
        """
        weights = set(self._weights.values())
        self.source.read(
            [request for request in requests if request.name not in weights and request.name not in self._weights]
        )
        for name, piece, into in _in_pieces(requests, weights):
            blocks = blocks_of(piece, self._block)
            box, values = self._values(name, blocks)
            quantised = quantise(values, scales_of(name, largest(values, box, self._block)), box, self._block)
            into.copy_(quantised[_slices(piece.relative_to(box))])
        for scale, piece, into in _in_pieces(requests, set(self._weights), PIECE_NUMEL // prod(self._block)):
            name = self._weights[scale]
            box, values = self._values(name, piece)
            into.copy_(scales_of(name, largest(values, box, self._block)))

    def _values(self, name: str, blocks: Chunk) -> tuple[Chunk, torch.Tensor]:
        """The box of a weight covered by some blocks, and the values."""
        box = box_of_blocks(blocks, self._block, self.source.tensors[name].shape)
        values = torch.empty(box.sizes)
        self.source.read([Wanted(name, box, values)])
        return box, values


def check_quantisable(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a tensor without blocks.

    Raises:
        ValueError: The tensor is no floating-point matrix.
    """
    if len(shape) < 2 or not dtype.is_floating_point:
        raise ValueError(
            f"Expected floating-point matrices to quantise, got {name!r} of shape {tuple(shape)} and {dtype}. "
            f"Leave it out with `which`."
        )


def scale_name(name: str) -> str:
    """The name of a weight's scales."""
    return name + _SUFFIX


def left_alone(shapes: Mapping[str, Sequence[int]], chosen: Container[str]) -> tuple[str, ...]:
    """Modules with unquantised matrices, for the configuration."""
    candidates = (name for name, shape in shapes.items() if name not in chosen and len(shape) > 1)
    return tuple(dict.fromkeys(name.removesuffix(".weight") for name in candidates))


def largest(values: torch.Tensor, box: Chunk, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude in each block touching a box of a weight, over the elements in the box."""
    above, before = (box.offsets[dim] % edge for dim, edge in ((-2, block[0]), (-1, block[1])))
    below, behind = -(above + box.sizes[-2]) % block[0], -(before + box.sizes[-1]) % block[1]
    padded = F.pad(values.abs(), (before, behind, above, below))
    num_rows, num_columns = padded.shape[-2] // block[0], padded.shape[-1] // block[1]
    return padded.reshape(*padded.shape[:-2], num_rows, block[0], num_columns, block[1]).amax((-1, -3))


def scales_of(name: str, maxima: torch.Tensor) -> torch.Tensor:
    """A scale for each block, from the block's largest magnitude.

    Raises:
        ValueError: A magnitude is infinite or NaN; the error names the weight.
    """
    if not maxima.isfinite().all():
        raise ValueError(f"Expected finite values to quantise, got others in {name!r}. Leave it out with `which`.")
    smallest = torch.finfo(torch.float32).tiny  # A scale of 0 would turn tiny numbers into NaNs.
    return torch.where(maxima > 0, (maxima / _LARGEST).clamp(min=smallest), 1.0)


def quantise(values: torch.Tensor, scales: torch.Tensor, box: Chunk, block: tuple[int, int]) -> torch.Tensor:
    """A box of a weight in float8, given the touched blocks' scales. `values` (fp32) is overwritten."""
    return values.div_(_spread(scales, box, block)).clamp_(-_LARGEST, _LARGEST).to(FLOAT8)


def quantised_config(
    config: Mapping[str, Any], left_alone: Iterable[str], block: tuple[int, int] = BLOCK
) -> dict[str, Any]:
    """A model's configuration with an entry on the quantisation of its weights."""
    quantisation = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": list(left_alone),
    }
    return {**config, "quantization_config": quantisation}


def quantised_otherwise(source: Source, config: Mapping[str, Any] | None) -> str | None:
    """The method of quantised weights without block scales (integers, float8 with other scales); None without any."""
    quantization = (config or {}).get("quantization_config")
    if not quantization or is_quantised(source):
        return None
    infos = (info for name, info in source.tensors.items() if not name.startswith("optimizer."))
    dtypes = {info.dtype for info in infos if len(info.shape) > 1}
    if all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        return None
    return str(quantization.get("quant_method") if isinstance(quantization, dict) else quantization)


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's configuration for unquantised weights."""
    return {key: value for key, value in config.items() if key != "quantization_config"}


def block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns with a common scale, from a model's configuration; the usual numbers by default.

    Raises:
        NotImplementedError: The weights are quantised by another method.
    """
    quantisation = config.get("quantization_config") or {"quant_method": "fp8"}
    method: object = None
    block: Any = None
    if isinstance(quantisation, dict):
        method, block = quantisation.get("quant_method"), quantisation.get("weight_block_size", BLOCK)
    are_sizes = isinstance(block, list | tuple) and all(type(size) is int and size > 0 for size in block)
    if method != "fp8" or not are_sizes or len(block) != 2:
        raise NotImplementedError(
            f"Expected weights quantised as fp8 with a weight_block_size of two numbers, got {quantisation!r}."
        )
    return block[0], block[1]


def _in_pieces(
    requests: Sequence[Wanted], names: set[str], max_numel: int = PIECE_NUMEL
) -> Iterator[tuple[str, Chunk, torch.Tensor]]:
    """Requests cut into bounded boxes, each with its view of the destination."""
    for request in requests:
        for piece in pieces(request.chunk, max_numel) if request.name in names else ():
            yield request.name, piece, request.into.detach()[_slices(piece.relative_to(request.chunk))]


def num_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The number of blocks of a weight, along each dim."""
    return (*shape[:-2], *(-(-size // edge) for size, edge in zip(shape[-2:], block, strict=True)))


def _edges(num_dims: int, block: tuple[int, int]) -> tuple[int, ...]:
    """A block's number of elements along each dim."""
    return (1,) * (num_dims - 2) + block


def blocks_of(box: Chunk, block: tuple[int, int]) -> Chunk:
    """The blocks touching a box of a weight."""
    edges = _edges(len(box.sizes), block)
    return Chunk.of(Range(at.start // edge, -(-at.stop // edge)) for at, edge in zip(box.ranges, edges, strict=True))


def box_of_blocks(blocks: Chunk, block: tuple[int, int], shape: tuple[int, ...]) -> Chunk:
    """The box of a weight covered by blocks."""
    edges = _edges(len(shape), block)
    return Chunk.of(
        Range(at.start * edge, min(at.stop * edge, size))
        for at, edge, size in zip(blocks.ranges, edges, shape, strict=True)
    )


def _spread(scales: torch.Tensor, box: Chunk, block: tuple[int, int]) -> torch.Tensor:
    """The scale of each element of a box, from the scales of the touched blocks."""
    for dim, edge in ((-2, block[0]), (-1, block[1])):
        skipped = box.offsets[dim] % edge
        scales = scales.repeat_interleave(edge, dim).narrow(dim, skipped, box.sizes[dim])
    return scales


def _slices(chunk: Chunk) -> tuple[slice, ...]:
    return tuple(slice(indices.start, indices.stop) for indices in chunk.ranges)
