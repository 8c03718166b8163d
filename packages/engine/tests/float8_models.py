"""A tiny Llama and a tiny mixture of experts, and their oracles: whole weights quantised at each use, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lamella_engine import FSDPModule, MixedPrecisionPolicy, fully_shard
from lamella_engine.testing import named_units
from lamella_precision import Direction, Float8Recipe, MXFP8Recipe, matrices_of

FP32 = torch.float32
AnyRecipe = Float8Recipe | MXFP8Recipe
RECIPES: dict[str, AnyRecipe] = {
    "tensor": Float8Recipe(compute_dtype=torch.float32),
    "e5m2": Float8Recipe(dtype=torch.float8_e5m2, compute_dtype=torch.float32),
    "row": Float8Recipe((1, None), compute_dtype=torch.float32),
    "block": Float8Recipe((128, 128), compute_dtype=torch.float32),
    "cut-block": Float8Recipe((8, 8), power_of_two=True, compute_dtype=torch.float32),
    "mxfp8": MXFP8Recipe(compute_dtype=torch.float32),
}


def fake_quantised(weight: torch.Tensor, recipe: AnyRecipe, direction: Direction) -> torch.Tensor:
    """The values of a whole weight after its recipe, in the recipe's compute dtype: by padded blocks."""
    if isinstance(recipe, MXFP8Recipe):
        block, dtype, power_of_two = (
            ((32, 1) if direction is Direction.BACKWARD else (1, 32)),
            torch.float8_e4m3fn,
            True,
        )
    else:
        dtype, power_of_two = recipe.dtype, recipe.power_of_two
        block = (recipe.block[0] or weight.shape[-2], recipe.block[1] or weight.shape[-1])
    (rows, columns), (height, width) = weight.shape[-2:], block
    padded = F.pad(weight.detach().float(), (0, -columns % width, 0, -rows % height))
    tall, wide = padded.shape[-2] // height, padded.shape[-1] // width
    blocks = padded.view(*weight.shape[:-2], tall, height, wide, width)
    largest = torch.finfo(dtype).max
    scales = (blocks.abs().amax((-3, -1), keepdim=True) / largest).clamp_min(2.0**-126)
    if power_of_two:
        scales = torch.exp2(torch.log2(scales.double()).ceil()).float()
    values = (blocks / scales).clamp(-largest, largest).to(dtype).float() * scales
    matrix: torch.Tensor = values.flatten(-2).flatten(-3, -2)[..., :rows, :columns]
    return matrix.to(recipe.compute_dtype)


class _FakeLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: AnyRecipe) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return F.linear(x, fake_quantised(weight, recipe, Direction.FORWARD))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight_gradient = gradients[0].flatten(0, -2).t() @ x.flatten(0, -2)
        return gradients[0] @ fake_quantised(weight, ctx.recipe, Direction.BACKWARD), weight_gradient, None


class _Straight(torch.autograd.Function):
    """Quantised values, and the gradient of the weight itself."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, recipe: AnyRecipe) -> torch.Tensor:
        return fake_quantised(weight, recipe, Direction.FORWARD)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None


def quantised_straight(weight: torch.Tensor, recipe: AnyRecipe) -> torch.Tensor:
    """The values of forward, and the gradient of the weight itself."""
    return cast(torch.Tensor, _Straight.apply(weight, recipe))  # type: ignore[no-untyped-call]


class Linear(nn.Linear):
    """Without bias; with a `recipe`, an oracle."""

    recipe: AnyRecipe | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recipe is None:
            return F.linear(x, self.weight)
        return cast(torch.Tensor, _FakeLinear.apply(x, self.weight, self.recipe))  # type: ignore[no-untyped-call]


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(width, hidden, bias=False)
        self.up = Linear(width, hidden, bias=False)
        self.down = Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class Float8Experts(nn.Module):
    """Two of four experts for each token; the weights of all experts in two stacks."""

    recipe: AnyRecipe | None = None

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.router = Linear(width, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(4, hidden, width) / hidden**0.5)

    def _values(self, weight: torch.Tensor) -> torch.Tensor:
        if self.recipe is None or isinstance(self.recipe, MXFP8Recipe):
            return weight
        return quantised_straight(weight, self.recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances, chosen = self.router(x).softmax(-1).topk(2)
        shares = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype).scatter(-1, chosen, chances).flatten(0, -2)
        tokens = x.flatten(0, -2).expand(4, -1, -1)
        outputs = torch.bmm(F.silu(torch.bmm(tokens, self._values(self.up))), self._values(self.down))
        return (outputs * shares.t()[:, :, None]).sum(0).view(x.shape)


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int, *, is_moe: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False)
        self.mlp: nn.Module = Float8Experts(width, hidden) if is_moe else Mlp(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection.view(*x.shape[:2], 2, -1).transpose(1, 2) for projection in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = ((q @ k.mT) / q.shape[-1] ** 0.5).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + cast(torch.Tensor, self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    def __init__(self, width: int, hidden: int, *, is_moe: bool, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, width)
        self.layers = nn.ModuleList(Layer(width, hidden, is_moe=is_moe) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 23, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return cast(torch.Tensor, self.head(self.norm(x)))


def decoder(width: int = 20, hidden: int = 36, *, is_moe: bool = False, num_layers: int = 2) -> Decoder:
    """A decoder from seed 0."""
    torch.manual_seed(0)
    return Decoder(width, hidden, is_moe=is_moe, num_layers=num_layers)


def as_oracle(model: Decoder, recipe: AnyRecipe) -> Decoder:
    """Let the matrices of a model's layers be quantised at each use, but routers."""
    for name, module in model.layers.named_modules():
        if isinstance(module, (Linear, Float8Experts)) and not name.endswith("router"):
            module.recipe = recipe
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    """The loss of a batch that is the same on every rank, and in every step."""
    tokens = torch.randint(23, (3, 6), generator=torch.Generator().manual_seed(1))
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(
    model: nn.Module,
    num_steps: int = 3,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> list[float]:
    """Take steps. Returns the losses."""
    stepper = (optimizer or (lambda parameters: torch.optim.AdamW(parameters, 1e-2)))(model.parameters())
    losses = []
    for _ in range(num_steps):
        loss = loss_of(model)
        # The sum over the ranks is the gradient of rank 0, to the bit: a mean of three would round.
        share = 0.0 if isinstance(model, FSDPModule) and dist.get_rank() else 1.0
        (share * loss).backward()  # type: ignore[no-untyped-call]
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(model: Decoder, recipe: AnyRecipe, **options: Any) -> Decoder:
    policy = MixedPrecisionPolicy(
        None if recipe.compute_dtype == FP32 else recipe.compute_dtype, recipe=matrices_of(model.layers, recipe)
    )
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, **options)
    fully_shard(model, mp_policy=replace(policy, recipe=None), **options)
    for _, unit in named_units(model):
        for group in unit.parameters.groups:
            group.divisor = 1.0  # a sum: `train` gives all ranks but the first gradients of zero
    return model


def delayed_linear(weights: torch.Tensor, **options: Any) -> Any:
    """A layer with delayed scales, after a pass."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    with torch.no_grad():
        model.get_parameter("0.weight").copy_(weights)
    recipe = matrices_of(model, Float8Recipe(num_past_amaxes=4))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, recipe=recipe), **options)
    run_forward(model)
    return model


@torch.no_grad()
def run_forward(model: nn.Module) -> None:
    model(torch.ones(3, 16))
