"""Layers that Transformer Engine built with quantised weights train sharded as on one rank, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from engine_models import assert_shard_equals, fsdp, mesh_of, record_third_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from lamella_engine import (
    HFSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardingOptions,
    fully_shard,
    plan_units,
)
from lamella_engine.testing import named_units, record
from lamella_precision import Float8Recipe
from lamella_precision.te import replace_quantized_weights
from lamella_testing import run_ranks
from lamella_testing import te_weights as te

pytestmark = pytest.mark.usefixtures("steps_on_shards")

QUANTIZERS: dict[str, Any] = {
    "current": te.Float8CurrentScalingQuantizer(),
    "squares": te.Float8BlockQuantizer(power_of_two=True),
}
MXFP8: dict[str, Any] = {"mxfp8": te.MXFP8Quantizer()}
NUM_STEPS = 3
WAY_OUT = r"'(up|0).weight' .* of transformer_engine, .*te\.replace_quantized_weights\(model\)"


class TeBlock(nn.Module):
    def __init__(self, width: int, hidden: int, quantizer: Any, *, recomputes: bool, up: type[te.Linear]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = up(width, hidden, quantizer), te.Linear(hidden, width, quantizer)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor, *, is_first_microbatch: bool | None) -> torch.Tensor:
        if self.recomputes:
            return x + cast(torch.Tensor, checkpoint(self._run, x, is_first_microbatch, use_reentrant=False))
        return x + self._run(x, is_first_microbatch)

    def _run(self, x: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
        hidden = self.up(self.norm(x), is_first_microbatch=is_first_microbatch)
        return cast(torch.Tensor, self.down(hidden.relu(), is_first_microbatch=is_first_microbatch))


class TeModel(nn.Module):
    def __init__(
        self,
        quantizer: Any,
        *,
        recomputes: bool = False,
        width: int = 20,
        hidden: int = 37,
        up: type[te.Linear] = te.Linear,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TeBlock(width, hidden, quantizer, recomputes=recomputes, up=up) for _ in range(2))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, *, is_first_microbatch: bool | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, is_first_microbatch=is_first_microbatch)
        return cast(torch.Tensor, self.head(x))


def _model(name: str, **options: Any) -> TeModel:
    torch.manual_seed(0)
    if name in MXFP8:
        return TeModel(MXFP8[name], width=128, hidden=256, **options)
    return TeModel(QUANTIZERS[name], **options)


def _sharded(model: TeModel, *, layers: bool = False, **options: Any) -> TeModel:
    policy = MixedPrecisionPolicy(recipe=replace_quantized_weights(model, compute_dtype=torch.float32))
    for block in model.blocks:
        if layers:
            fully_shard(cast(TeBlock, block).up, mp_policy=policy, **options)
        fully_shard(block, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, **options)
    for _, unit in named_units(model):
        for group in unit.parameters.groups:
            group.divisor = 1.0  # a sum, where all ranks but the first have gradients of zero
    return model


def _losses(model: TeModel, step: int) -> Iterator[torch.Tensor]:
    """The losses of two microbatches."""
    for i in range(2):
        x = torch.randn(6, model.head.in_features, generator=torch.Generator().manual_seed(10 * step + i))
        yield model(x, is_first_microbatch=i == 0).square().mean()


def _train(model: TeModel) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in range(NUM_STEPS):
        for loss in _losses(model, step):
            ((0.0 if dist.get_rank() else 1.0) * loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _train_whole(model: TeModel) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The layers alone, with main weights beside, quantised anew after each step. Returns losses and main weights."""
    main, quantizers = {}, {}
    for name, parameter in model.named_parameters():
        weight: Any = parameter
        is_quantised = hasattr(weight, "get_high_precision_init_val")
        values = weight.get_high_precision_init_val() if is_quantised else parameter.detach()
        main[name] = nn.Parameter(values.clone())
        quantizers[name] = weight._quantizer if is_quantised else torch.clone
    optimizer = torch.optim.AdamW(main.values(), 1e-2)
    losses = []
    for step in range(NUM_STEPS):
        for loss in _losses(model, step):
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        for name, parameter in model.named_parameters():
            main[name].grad, parameter.grad = parameter.grad, None
        optimizer.step()
        with torch.no_grad():
            for name, values in main.items():
                path, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(path), attribute, nn.Parameter(quantizers[name](values.detach())))
    return losses, {name: values.detach() for name, values in main.items()}


def _assert_trains_as_whole(
    name: str, *, recomputes: bool = False, up: type[te.Linear] = te.Linear, **options: Any
) -> TeModel:
    expected_losses, expected = _train_whole(_model(name, recomputes=recomputes, up=up))
    model = _sharded(_model(name, recomputes=recomputes, up=up), **options)
    assert _train(model) == expected_losses
    for parameter_name, parameter in model.named_parameters():
        assert_shard_equals(parameter, expected[parameter_name], parameter_name, rtol=0.0, atol=0.0)
    return model


def _weights(model: TeModel) -> Iterator[Any]:
    """The gathered forms of quantised weights."""
    for _, unit in named_units(model):
        for group in unit.parameters.groups:
            yield from (p.unsharded for p in group.parameters if hasattr(p.unsharded, "get_metadata"))


def _copies(model: TeModel) -> int:
    """The weights with a copy for backward."""
    names = ("data_transpose", "columnwise_data")
    return sum(any(weight.get_metadata().get(name) is not None for name in names) for weight in _weights(model))


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_layers_train_to_the_bit_as_with_quantised_weights_of_their_own(name: str, num_ranks: int) -> None:
    def check() -> None:
        model = _assert_trains_as_whole(name)
        assert len(list(_weights(model))) == 4
        assert _copies(model) == 0

    run_ranks(check, num_ranks)


@pytest.mark.parametrize(
    "options",
    [
        {"options": ShardingOptions(placements=ZERO1)},
        {"options": ShardingOptions(placements=ZERO2)},
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"recomputes": True},
    ],
    ids=["zero1", "zero2", "stay", "offload", "recompute"],
)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_stages_residence_and_recomputation_change_no_bit(name: str, options: dict[str, Any]) -> None:
    def check() -> None:
        _assert_trains_as_whole(name, **options)

    run_ranks(check, 2)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("layers", [False, True], ids=["blocks", "layers"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_layer_that_leaves_its_copy_to_forward_has_the_copy_in_backward(
    name: str, layers: bool, recomputes: bool
) -> None:
    def check() -> None:
        model = _assert_trains_as_whole(name, up=te.LayerNormMLP, layers=layers, recomputes=recomputes)
        assert _copies(model) == 0

    run_ranks(check, 2)


@pytest.mark.parametrize("recomputes", [False, True], ids=["", "recompute"])
def test_mxfp8_weights_gather_a_payload_a_pass_and_train_to_the_bit(recomputes: bool) -> None:
    def check() -> None:
        model = _assert_trains_as_whole("mxfp8", recomputes=recomputes, up=te.LayerNormMLP if recomputes else te.Linear)
        assert len(list(_weights(model))) == 4
        log = record(model)
        next(_losses(model, 0)).backward()  # type: ignore[no-untyped-call]
        gathers = [event.nbytes for event in log.events if event.unit == "blocks.0" and event.kind == "gather"]
        assert len(gathers) == 2
        # Recomputation in backward reads the rows again.
        num_elements, norm = 2 * 128 * 256, 4 * 2 * 128
        expected = [num_elements * 33 // 32 + norm, num_elements * 33 // 32 * (2 if recomputes else 1) + norm]
        assert gathers == expected

    run_ranks(check, 2)


@pytest.mark.parametrize("placements", [(HFSDP, ZERO3), None], ids=["hfsdp", "hsdp"])
def test_two_axes_quantise_whole_weights(placements: Any) -> None:
    def check() -> None:
        options: dict[str, Any] = {"mesh": mesh_of((2, 2)), "options": ShardingOptions(placements=placements)}
        _assert_trains_as_whole("current", **options)

    run_ranks(check, 4)


def test_copies_for_backward_are_made_in_backward_and_go_when_the_unit_is_resharded() -> None:
    def check() -> None:
        model = _sharded(_model("current"))
        copy_counts: list[int] = []

        def in_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
            output.register_hook(lambda _: copy_counts.append(_copies(model)))  # type: ignore[no-untyped-call]

        for module in model.modules():
            if isinstance(module, te.Linear):
                module.register_forward_hook(in_backward)
        loss = next(_losses(model, 0))
        assert _copies(model) == 0
        loss.backward()  # type: ignore[no-untyped-call]
        assert copy_counts == [0, 1, 0, 1]  # before each layer's backward: no copy of the other block is left
        assert _copies(model) == 0

    run_ranks(check, 2)


def test_no_step_runs_the_classes_python_for_attributes_of_gathered_weights() -> None:
    def check() -> None:
        called: list[object] = []

        def override(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
            called.append(func)
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

        def read(module: te.Linear, args: object) -> None:
            assert module.weight.requires_grad and module.weight.shape == module.weight.size()

        model = _sharded(_model("current"))
        for module in model.modules():
            if isinstance(module, te.Linear):
                module.register_forward_pre_hook(read)
        with patch.object(te.Float8Tensor, "__torch_function__", classmethod(override)):
            for loss in _losses(model, 0):
                loss.backward()  # type: ignore[no-untyped-call]
            assert not called
            block = cast(Any, model.blocks[0])
            block.unshard()
            assert type(block.up.weight) is te.Float8Tensor
            assert block.up.weight.detach().requires_grad is False and len(called) == 1  # the class's own does

    run_ranks(check, 2)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_copies_for_backward_count_in_budgets_and_plans(name: str) -> None:
    def check() -> None:
        model = _sharded(_model(name))
        block = cast(Any, model.blocks[1])
        unit = dict(named_units(model))["blocks.1"].parameters
        (group,) = [group for group in unit.groups if len(group.parameters) == 2 and group.scales]
        block.unshard()
        weights = [p.unsharded for p in group.parameters]
        before = [set(map(id, _tensors(weight))) for weight in weights]
        for weight in cast(Any, weights):
            weight.update_usage(columnwise_usage=True)
        pairs = zip(weights, before, strict=True)
        copies = sum(tensor.nbytes for weight, ids in pairs for tensor in _tensors(weight) if id(tensor) not in ids)
        assert copies >= 2 * 20 * 37
        buffers = sum(buffer.flat.nbytes for buffer in group.buffers)
        assert group.unsharded_nbytes == buffers + copies
        block.reshard()

        for short_of, is_kept in ((1, False), (0, True)):
            fsdp(model).set_options(keep_budget=unit.unsharded_nbytes - short_of)
            record_third_step(model, lambda _: next(_losses(model, 0)))
            loss = next(_losses(model, 0))
            assert dict(named_units(model))["blocks.1"].weights.is_unsharded == is_kept
            loss.backward()  # type: ignore[no-untyped-call]

        fresh = _model(name)
        policy = MixedPrecisionPolicy(recipe=replace_quantized_weights(fresh, compute_dtype=torch.float32))
        (planned,) = [
            p for p in plan_units(fresh, units=TeBlock, mp_policy=policy).units[0].parameters if "up" in p.name
        ]
        assert planned.unsharded_nbytes == 20 * 37 + copies // 2

    run_ranks(check, 2)


def _tensors(weight: Any) -> list[torch.Tensor]:
    return [tensor for tensor in weight.get_metadata().values() if isinstance(tensor, torch.Tensor)]


def test_a_byte_an_element_travels_and_one_reduction_a_pass() -> None:
    def check() -> None:
        model = _sharded(_model("current"))
        for _ in range(2):
            next(_losses(model, 0)).backward()  # type: ignore[no-untyped-call]
        log = record(model)
        next(_losses(model, 0)).backward()  # type: ignore[no-untyped-call]
        counted = [event for event in log.events if event.unit == "blocks.0"]
        gathers = [event for event in counted if event.kind == "gather"]
        assert len(gathers) == 2
        num_elements, num_norm = 2 * 20 * 37, 2 * 20
        assert gathers[0].nbytes >= num_elements + 4 * num_norm
        assert gathers[0].nbytes < 2 * num_elements
        assert [event.kind for event in log.events].count("all-reduce") == 1

    run_ranks(check, 2)


def test_a_quantised_weight_without_a_recipe_is_refused_with_its_name_and_the_way_out() -> None:
    def check() -> None:
        for name in QUANTIZERS:
            model = _model(name)
            with pytest.raises(TypeError, match=WAY_OUT):
                fully_shard(model.blocks[0])
            assert not [module for module in model.modules() if hasattr(module, "unshard")]

    run_ranks(check, 1)


class _Extended(te.Float8Tensor):
    """A class whose shards stay quantised, by FSDP2's two methods."""

    __module__ = te.Float8Tensor.__module__

    def fsdp_pre_all_gather(self, mesh: object) -> None:
        raise NotImplementedError

    def fsdp_post_all_gather(self, *args: object) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(main_dtype=torch.bfloat16),
        MixedPrecisionPolicy(recipe=Float8Recipe(compute_dtype=torch.float32)),
    ],
    ids=["main-dtype", "recipe"],
)
def test_a_quantised_weight_with_methods_of_its_own_has_no_main_weights_but_by_replacement(
    policy: MixedPrecisionPolicy,
) -> None:
    def check() -> None:
        layer: Any = te.Linear(20, 37, QUANTIZERS["current"])
        layer.weight = nn.Parameter(_Extended(shape=(37, 20), dtype=torch.float32, **layer.weight.get_metadata()))
        with pytest.raises(TypeError, match=WAY_OUT):
            fully_shard(nn.Sequential(layer), mp_policy=policy)

    run_ranks(check, 1)
