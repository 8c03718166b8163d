"""Float8 over NCCL and on GPUs: gathered bytes equal the unsharded weight's, and float8 products train a model."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lamella_engine import MixedPrecisionPolicy, fully_shard, quantization_errors, scaling_state
from lamella_integration.tasks import TASKS
from lamella_precision import (
    Float8Recipe,
    MXFP8Recipe,
    QuantizedWeight,
    ScaledRecipe,
    WeightRows,
    matrices_of,
    use_float8_matmul,
)
from lamella_precision.testing import encode_into, measured
from lamella_testing import load_compiler, run_ranks

Device = Literal["cpu", "cuda"]
DEVICES = pytest.mark.parametrize(
    ("device", "num_ranks"),
    [
        ("cpu", 2),
        pytest.param("cuda", 1, marks=pytest.mark.gpu1),
        pytest.param("cuda", 2, marks=pytest.mark.gpu2),
        pytest.param("cuda", 4, marks=pytest.mark.gpu4),
    ],
)
TASK = TASKS["llama"]
RECIPES: dict[str, Float8Recipe | MXFP8Recipe] = {
    "tensor": Float8Recipe(),
    "delayed": Float8Recipe(num_past_amaxes=4),
    "row": Float8Recipe((1, None)),
    "block": Float8Recipe((128, 128)),
    "cut-block": Float8Recipe((8, 24)),
    "mxfp8": MXFP8Recipe(gathers_both=True),
}


class Float8Loop:
    """A sharded model and training steps, with the whole batch on each rank."""

    def __init__(
        self,
        device: Device,
        recipe: Float8Recipe | MXFP8Recipe | None,
        prepare: Callable[[nn.Module], object] = lambda block: None,
    ) -> None:
        self.device = device
        self.model: Any = TASK.model(device=device)
        blocks = list(self.model.units())
        for block in blocks:
            prepare(block)
        for block in blocks:
            policy = MixedPrecisionPolicy(torch.bfloat16, recipe=recipe and matrices_of(block, recipe))
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        self.blocks: list[Any] = blocks
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3)

    def train(self, num_steps: int) -> list[float]:
        losses = []
        for step in range(num_steps):
            tokens, labels = (tensor.to(self.device) for tensor in TASK.batch(step))
            loss = TASK.loss(self.model(tokens).float(), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def _encoded_whole(recipe: Float8Recipe | MXFP8Recipe, weight: torch.Tensor) -> list[torch.Tensor]:
    scales = None
    if isinstance(recipe, ScaledRecipe):
        amaxes = measured(recipe, [weight], weight.shape)
        scales = torch.empty_like(amaxes)
        recipe.rescale(amaxes, scales, torch.full((recipe.num_past, len(amaxes)), -1.0))
        scales = scales.view(recipe.scale_shape(weight.shape))
    payloads = [
        torch.empty(payload.shape, dtype=payload.dtype) for payload in recipe.payloads(weight.shape, weight.dtype)
    ]
    encode_into(recipe, weight, payloads, WeightRows(tuple(weight.shape), 0, scales))
    return payloads


@DEVICES
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
def test_gathered_bytes_equal_the_unsharded_weight_encoded_on_the_cpu(
    device: Device, num_ranks: int, name: str
) -> None:
    recipe = RECIPES[name]

    def compare() -> int:
        loop = Float8Loop(device, recipe)
        loop.train(2)
        num = 0
        for block in loop.blocks:
            wholes = {key: value.full_tensor().cpu() for key, value in block.state_dict().items()}
            block.unshard()
            for key, weight in block.named_parameters():
                if isinstance(weight, QuantizedWeight):
                    for got, expected in zip(weight.payloads, _encoded_whole(recipe, wholes[key]), strict=True):
                        assert torch.equal(got.cpu().view(torch.uint8), expected.view(torch.uint8)), key
                    num += 1
            block.reshard()
        return num

    assert min(run_ranks(compare, num_ranks, device=device)) > 0


@DEVICES
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_near_bf16(device: Device, num_ranks: int, name: str) -> None:
    def losses() -> tuple[list[float], list[float]]:
        return Float8Loop(device, RECIPES[name]).train(6), Float8Loop(device, None).train(6)

    for trained_losses, expected in run_ranks(losses, num_ranks, device=device):
        assert trained_losses[-1] < trained_losses[0]
        assert trained_losses == pytest.approx(expected, rel=0.03)


@DEVICES
@pytest.mark.parametrize("name", ["tensor", "row"])
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")  # both by Dynamo
def test_float8_products_of_gathered_weights_train(device: Device, num_ranks: int, name: str) -> None:
    recipe = RECIPES[name]
    assert isinstance(recipe, Float8Recipe)
    if device == "cpu":
        load_compiler()

    def prepare(is_compiled: bool) -> Callable[[nn.Module], object]:
        def on_block(block: nn.Module) -> None:
            use_float8_matmul(block, recipe)
            if is_compiled:
                block.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")

        return on_block

    def losses() -> list[list[float]]:
        float8_losses = [Float8Loop(device, recipe, prepare(is_compiled)).train(6) for is_compiled in (False, True)]
        return [*float8_losses, Float8Loop(device, None).train(6)]

    for eager, compiled, bf16 in run_ranks(losses, num_ranks, device=device):
        assert compiled == pytest.approx(eager, rel=0.03)
        assert eager == pytest.approx(bf16, rel=0.05)
        assert eager[-1] < eager[0]


class RecomputedBlock(nn.Module):
    """A block whose forward runs again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def _losses_of_blocks(device: Device, prepare: Callable[[nn.Module], nn.Module]) -> list[float]:
    """Five steps of a block, each rank with the whole batch."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(384, 256), nn.GELU()).to(device)
    model = prepare(block)
    x = torch.randn(24, 384, generator=torch.Generator().manual_seed(1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 5.0)
    losses = []
    for _ in range(5):
        loss = (model(x) - x[:, :256]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@DEVICES
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")  # both by Dynamo
def test_block_wise_products_train_as_on_one_rank_and_in_one_graph(device: Device, num_ranks: int) -> None:
    recipe = Float8Recipe((128, 128), compute_dtype=torch.float32)
    if device == "cpu":
        load_compiler()

    def multiplied(block: nn.Module) -> nn.Module:
        use_float8_matmul(block, recipe)
        return block

    def sharded(block: nn.Module) -> nn.Module:
        return fully_shard(block, mp_policy=MixedPrecisionPolicy(recipe=matrices_of(block, recipe)))

    def compiled(block: nn.Module) -> nn.Module:
        block.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
        return sharded(block)

    def losses() -> list[list[float]]:
        ways: list[Callable[[nn.Module], nn.Module]] = [
            lambda block: block,
            multiplied,
            lambda block: sharded(multiplied(block)),
            lambda block: compiled(RecomputedBlock(multiplied(block))),
        ]
        if device == "cuda":
            ways.append(lambda block: compiled(multiplied(block)))
        return [_losses_of_blocks(device, prepare) for prepare in ways]

    for exact, alone, eager, *in_graphs in run_ranks(losses, num_ranks, device=device):
        assert eager == alone != exact
        assert eager == pytest.approx(exact, rel=0.03)
        assert eager[-1] < 0.9 * eager[0]
        for graph_losses in in_graphs:
            assert graph_losses == pytest.approx(eager, rel=1e-2 if device == "cuda" else 1e-6)


@DEVICES
def test_a_gathered_weight_has_the_shards_of_a_plain_dtensor(device: Device, num_ranks: int) -> None:
    def check() -> None:
        model = nn.Sequential(nn.Linear(64, 64, bias=False)).to(device)
        policy = MixedPrecisionPolicy(torch.bfloat16, recipe=matrices_of(model, Float8Recipe((128, 128))))
        fully_shard(model, mp_policy=policy)
        (weight,) = model.parameters()
        assert isinstance(weight, DTensor)
        assert weight.to_local().shape == (64 // num_ranks, 64)  # a cut inside the square

    run_ranks(check, num_ranks, device=device)


@DEVICES
def test_delayed_scales_start_anew_where_a_state_dict_replaces_weights_that_were_just_measured(
    device: Device, num_ranks: int
) -> None:
    """The history is reset behind the measurement on the gather stream, and the next gather reads the history."""

    def overflows() -> dict[str, float]:
        loop = Float8Loop(device, RECIPES["delayed"])
        larger = {name: value * 100 for name, value in loop.model.state_dict().items()}
        loop.train(2)
        loop.model.load_state_dict(larger)
        errors = quantization_errors(loop.model)
        assert set(scaling_state(loop.model)) == set(errors)
        return {name: error.overflow for name, error in errors.items()}

    for losses_by_name in run_ranks(overflows, num_ranks, device=device):
        assert losses_by_name and set(losses_by_name.values()) == {0.0}
