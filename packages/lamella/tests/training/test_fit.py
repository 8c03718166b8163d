"""Options that fit a model into memory change no loss, and a run goes on across a change of them."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from trained_runs import Run, TrainOn

from lamella import Config, MixedPrecisionPolicy
from lamella._model import compilation
from lamella._model import sharding as _sharding
from lamella._model.activations import offload_activations, recompute
from lamella._model.compilation import compile_units
from lamella._model.float8 import in_float8
from lamella._model.spec import load_spec
from lamella._settings.sections import ParallelConfig
from lamella_engine import fully_shard
from lamella_testing import load_compiler, run_ranks
from lamella_transformers import build_model


def changed(config: Config, name: str, **parallel: Any) -> Config:
    root = Path(str(config.run.directory)).parent
    return replace(
        config,
        parallel=replace(config.parallel, **parallel),
        run=replace(config.run, directory=str(root / name)),
    )


@pytest.fixture(scope="module")
def plain(shared_config: Config, train: TrainOn) -> Run:
    """A run with a further checkpoint on the way."""
    return train(changed(replace(shared_config, run=replace(shared_config.run, checkpoint_interval=3)), "plain"), 2)


EXACT: dict[str, dict[str, Any]] = {
    "recompute-offload": {"recompute": "full", "offload_activations": True},
    "stage-2, selective": {"stage": 2, "recompute": "selective"},
    "stage-1, one layer": {"stage": 1, "recompute": "full", "recompute_layers": 1},
    "rest-keep": {"rest": "cpu", "keep_budget": "1MiB"},
}


@pytest.mark.parametrize("name", EXACT)
def test_memory_options_change_no_bit_of_the_losses(
    shared_config: Config, plain: Run, train: TrainOn, name: str
) -> None:
    run = train(changed(shared_config, name, **EXACT[name]), 2)
    assert run.losses == plain.losses
    assert run.validations == plain.validations


@pytest.mark.parametrize(("stage", "spread_states"), [(2, False), (3, True)])
def test_instances_and_microbatches_change_the_order_of_sums_alone(
    shared_config: Config, plain: Run, train: TrainOn, stage: int, spread_states: bool
) -> None:
    config = changed(shared_config, f"instances-{stage}", stage=stage, replicate=2, spread_states=spread_states)
    run = train(replace(config, optim=replace(config.optim, accumulation=2)), 4)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)


def test_a_run_goes_on_with_every_option_changed(shared_config: Config, plain: Run, train: TrainOn) -> None:
    root = plain.directory.root
    shutil.copytree(root, other := root.with_name("other"))
    shutil.rmtree(other / "checkpoints" / "step_00000006")
    options = {"stage": 2, "rest": "cpu", "recompute": "selective", "offload_activations": True}
    assert train(changed(shared_config, "other", **options), 2).losses == plain.losses


class Block(nn.Module):
    """A layer that counts its forwards."""

    def __init__(self, width: int = 8, inner_width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner_width), nn.Linear(inner_width, width)
        self.num_forwards = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        outputs: torch.Tensor = inputs + self.down(torch.nn.functional.gelu(self.up(inputs)))
        return outputs


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_sharded_unit_runs_its_forward_twice_in_training_and_once_in_validation(kind: Any) -> None:
    def on_rank() -> None:
        block = Block()
        recompute([block], kind)
        fully_shard(block)
        block(torch.randn(4, 8)).sum().backward()
        assert block.num_forwards == 2
        with torch.no_grad():
            block(torch.randn(4, 8))
        assert block.num_forwards == 3

    run_ranks(on_rank, 2)


def test_the_first_units_alone_run_their_forward_twice() -> None:
    def on_rank() -> None:
        blocks = [Block() for _ in range(3)]
        recompute(blocks, "full", 2)
        for block in blocks:
            fully_shard(block)
        nn.Sequential(*blocks)(torch.randn(4, 8)).sum().backward()
        assert [block.num_forwards for block in blocks] == [2, 2, 1]

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(
    ("width", "inner_width", "num_repeated"),
    [
        pytest.param(128, 128, 0, id="no large products"),
        pytest.param(16, 128, 1, id="those of a small inner size, which take bytes rather than time"),
    ],
)
def test_selective_recompute_repeats(width: int, inner_width: int, num_repeated: int) -> None:
    def num_flops(kind: Any) -> int:
        block = Block(width, inner_width)
        if kind != "no":
            recompute([block], kind)
        with FlopCounterMode(display=False) as counter:
            block(torch.randn(4, width, requires_grad=True)).sum().backward()
        return int(counter.get_total_flops())

    # Of a full recompute, torch stops after the last saved tensor: `up` is multiplied again, `down` is not.
    one_product = 2 * 4 * width * inner_width
    assert num_flops("full") - num_flops("no") == one_product
    assert num_flops("selective") - num_flops("no") == num_repeated * one_product


def test_saved_activations_go_to_the_host_and_weights_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[tuple[int, ...]] = []

    class Recording(torch.autograd.graph.save_on_cpu):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.to_host = self.pack_hook
            self.pack_hook = self.record

        def record(self, tensor: torch.Tensor) -> Any:
            packed.append(tuple(tensor.shape))
            return self.to_host(tensor)

    monkeypatch.setattr("lamella._model.activations.save_on_cpu", Recording)
    block = Block()
    offload_activations([block])
    block(torch.randn(4, 8)).sum().backward()
    assert sorted(packed) == [(4, 8), (4, 16), (4, 16)]
    packed.clear()
    recomputed = Block()
    recompute([recomputed], "full")
    offload_activations([recomputed])
    recomputed(torch.randn(4, 8)).sum().backward()
    assert packed.count((4, 8)) == 1 and (16, 8) not in packed


@pytest.mark.parametrize(("reduce", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_gradients_cross_hosts_in_the_dtype_that_is_asked_for(
    shared_config: Config, reduce: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_rank() -> None:
        policies: list[MixedPrecisionPolicy] = []

        def recording(*units: Any, mp_policy: MixedPrecisionPolicy, **options: Any) -> None:
            policies.append(mp_policy)
            fully_shard(*units, mp_policy=mp_policy, **options)

        monkeypatch.setattr(_sharding, "fully_shard", recording)
        model = build_model(load_spec(shared_config.model.name, 300), torch.device("cpu"), seed=0)
        _sharding.shard(model, replace(shared_config.parallel, precision="bf16", reduce=reduce))
        assert {policy.reduce_dtype for policy in policies} == {dtype}

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "selective"])
def test_recomputed_units_compile(kind: Any) -> None:
    load_compiler()

    def gradient_of_weight(*, is_compiled: bool) -> torch.Tensor:
        torch.manual_seed(0)
        unit = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        recompute([unit], kind)
        fully_shard(unit)
        if is_compiled:
            unit.compile(backend="aot_eager")
        unit(torch.ones(4, 8)).square().sum().backward()
        weight: Any = unit[0].weight
        gradient: torch.Tensor = weight.grad.full_tensor()
        return gradient

    def on_rank() -> None:
        assert torch.equal(gradient_of_weight(is_compiled=True), gradient_of_weight(is_compiled=False))

    run_ranks(on_rank, 2)


@pytest.mark.filterwarnings("default")  # Dynamo makes an autograd function, which warns.
@pytest.mark.parametrize(
    "recomputes_autograd_functions", [True, False], ids=["by the compiler", "by an eager checkpoint"]
)
def test_compiled_units_in_float8_save_their_inputs_alone(
    recomputes_autograd_functions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recomputes_autograd_functions and not compilation._RECOMPUTES_AUTOGRAD_FUNCTIONS:
        pytest.skip("torch 2.11 saves the outputs of autograd functions in a compiled checkpoint")
    monkeypatch.setattr(compilation, "_RECOMPUTES_AUTOGRAD_FUNCTIONS", recomputes_autograd_functions)
    load_compiler()

    def trained(*, is_compiled: bool) -> tuple[list[int], torch.Tensor]:
        torch.manual_seed(0)
        unit = nn.Sequential(nn.Linear(16, 64, bias=False), nn.GELU(), nn.Linear(64, 16, bias=False))
        recompute([unit], "full")
        policy = in_float8([unit], MixedPrecisionPolicy(torch.bfloat16), ParallelConfig(float8="tensor"))
        fully_shard(unit, mp_policy=policy)
        if is_compiled:
            compile_units([unit], has_fixed_shapes=True, has_autograd_functions=True)
        saved: list[int] = []
        inputs = torch.randn(48, 16, dtype=torch.bfloat16)

        def record(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            outputs = unit(inputs)
        outputs.square().sum().backward()
        weight: Any = unit[0].weight
        return saved, weight.grad.full_tensor()

    def on_rank() -> None:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
        (_, expected), (saved, gradient) = trained(is_compiled=False), trained(is_compiled=True)
        assert 48 * 16 in saved and 48 * 64 not in saved  # the inputs, and no product
        assert torch.allclose(gradient, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))

    run_ranks(on_rank, 1)
