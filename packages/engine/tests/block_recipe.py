"""A recipe in 8 bits, in plain torch: quantised by row for forward, by blocks of a column for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map

from lamella_precision import Direction, PayloadFormat, WeightRows

BLOCK = 4
Columns = Sequence[torch.Tensor]


def quantised_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers and one scale a row: (rows, columns) and (rows, 1)."""
    scales = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return (weight / scales).round().to(torch.int8), scales


def quantised_columns(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers and one scale for the rows of a block in each column: (rows, columns) and (blocks, columns)."""
    num_blocks = -(-len(weight) // BLOCK)
    padded = torch.zeros(num_blocks * BLOCK, weight.shape[1])
    padded[: len(weight)] = weight
    blocks = padded.view(num_blocks, BLOCK, -1)
    scales = blocks.abs().amax(1).clamp_min(1e-12) / 127
    data = (blocks / scales[:, None]).round().to(torch.int8)
    return data.view(len(padded), -1)[: len(weight)], scales


def read_columns(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return data.float() * scales.repeat_interleave(BLOCK, 0)[: len(data)]


class RecipeProduct(torch.autograd.Function):
    """A matrix product whose weight differs by direction. It saves the weight's wrapper, whose bytes come and go."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, read: Callable[..., torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.read = weight, read
        return x @ read(weight, Direction.FORWARD).T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return gradient @ ctx.read(ctx.weight, Direction.BACKWARD), gradient.T @ x, None


def read_main(weight: torch.Tensor, direction: Direction) -> torch.Tensor:
    """The oracle: quantises a whole weight at each use."""
    with torch.no_grad():
        if direction is Direction.FORWARD:
            data, scales = quantised_rows(weight.detach())
            return data.float() * scales
        return read_columns(*quantised_columns(weight.detach()))


class BlockWeight(torch.Tensor):
    """A weight of which only the gathered payloads have bytes."""

    payloads: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(cls, payloads: Sequence[torch.Tensor], shape: Sequence[int]) -> Self:
        weight = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.float32)
        weight.payloads = tuple(payloads)
        return weight

    def read(self, direction: Direction) -> torch.Tensor:
        is_forward = direction is Direction.FORWARD
        data, scales = self.payloads[:2] if is_forward else self.payloads[2:]
        for payload in (data, scales):
            assert payload.untyped_storage().nbytes() > 0, f"no payload of {direction} was gathered"
        return data.float() * scales if is_forward else read_columns(data, scales)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return RecipeProduct.apply(args[0], args[1], BlockWeight.read)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].payloads, args[0].shape)
        plain = tree_map(
            lambda argument: argument.read(Direction.FORWARD) if isinstance(argument, cls) else argument, args
        )
        return func(*plain, **(kwargs or {}))


@dataclass(frozen=True)
class BlockRecipe:
    """Four payloads: integers and scales for forward, and others for backward."""

    block_rows: int = BLOCK
    compute_dtype: torch.dtype | None = None

    def payloads(self, shape: Sequence[int], main_dtype: torch.dtype) -> tuple[PayloadFormat, ...]:
        rows, columns = shape
        return (
            PayloadFormat(torch.int8, (rows, columns), Direction.FORWARD),
            PayloadFormat(torch.float32, (rows, 1), Direction.FORWARD),
            PayloadFormat(torch.int8, (rows, columns), Direction.BACKWARD),
            PayloadFormat(torch.float32, (-(-rows // BLOCK), columns), Direction.BACKWARD),
        )

    def columns(
        self, shards: Columns, payloads: Sequence[Columns | None], weight_rows: Sequence[WeightRows]
    ) -> tuple[Columns | None, ...]:
        return shards, *payloads

    def encode(self, shards: Columns, *payloads: Columns | None) -> None:
        for quantise, pair in ((quantised_rows, payloads[:2]), (quantised_columns, payloads[2:])):
            if pair[0] is None:
                continue
            for into, encodings in zip(pair, zip(*map(quantise, shards), strict=True), strict=True):
                assert into is not None
                torch._foreach_copy_(list(into), list(encodings))

    def decode(self, payloads: Columns, shape: torch.Size, scales: torch.Tensor | None) -> torch.Tensor:
        return BlockWeight(payloads, shape)


RECIPE = BlockRecipe()


def matrix_recipe(parameter: nn.Parameter) -> BlockRecipe | None:
    return RECIPE if parameter.ndim == 2 else None


class MatrixBlock(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, rows)  # the bias is no matrix, and travels unencoded
        self.down = nn.Linear(rows, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.layer_norm(self.down(torch.tanh(self.up(x))), x.shape[-1:])


class Blocks(nn.Module):
    """Blocks whose matrices a recipe may serve, and a head that none does."""

    def __init__(self, rows: int = 32, width: int = 16, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MatrixBlock(rows, width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return cast(torch.Tensor, self.head(x))


class _OracleLinear(nn.Linear):
    read = staticmethod(read_main)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = RecipeProduct.apply(x, self.weight, self.read)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias  # type: ignore[redundant-expr]


class _Biased(nn.Linear):
    """`nn.Linear` with its bias added apart, as the recipe's matrix product adds none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = nn.functional.linear(x, self.weight)
        return output if self.bias is None else output + self.bias  # type: ignore[redundant-expr]


def twins_in_8_bits(**sizes: int) -> tuple[Blocks, Blocks]:
    """A model to be sharded, and an oracle that quantises whole weights."""
    models = []
    for kind in (_Biased, _OracleLinear):
        torch.manual_seed(0)
        model = Blocks(**sizes)
        for block in model.blocks:
            block.up.__class__ = block.down.__class__ = kind
        models.append(model)
    return models[0], models[1]
