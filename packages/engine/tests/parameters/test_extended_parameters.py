"""Parameters whose class defines the gather train as in FSDP2, by the same two methods."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from engine_models import Residual, case, fsdp, inputs, mesh_of, rows_of_this_rank
from extended_models import Halves, Quantised, QuantisedUneven, Wrapper, give
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lamella_engine import DDP, ZERO1, ZERO2, MixedPrecisionPolicy, ShardingOptions, Whole, describe, fully_shard
from lamella_engine._api.candidates import move_to
from lamella_engine._common.errors import MisuseError
from lamella_engine._parameters.extended_form import ExtendedForm
from lamella_engine._parameters.group import ParameterGroup
from lamella_engine.testing import assert_at_rest, named_units, record
from lamella_precision import Direction
from lamella_testing import run_ranks

X = inputs()


class Rows(nn.Module):
    """Blocks of `hidden` rows."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.stem = nn.Linear(3, dim)
        self.layers = nn.ModuleList(Residual(dim, hidden) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


def _model(kind: type[Wrapper] | None, dim: int = 7, hidden: int = 13) -> Rows:
    torch.manual_seed(0)
    model = Rows(dim, hidden)
    for module in model.modules() if kind is not None else ():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind.encode(module.weight.detach()))  # type: ignore[union-attr]
    return model


def _shard(model: Rows, api: Any = fully_shard, **options: Any) -> Rows:
    for layer in model.layers:
        api(layer, **options)
    api(model, **options)
    return model


def _values(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return (local.decode() if isinstance(local, Wrapper) else local).detach()


def _descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            assert type(gradient) is torch.Tensor
            local.sub_(gradient, alpha=0.2)
            parameter.grad = None


def _assert_same_models(expected: nn.Module, got: nn.Module) -> None:
    for (name, a), (other, b) in zip(expected.named_parameters(), got.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(_values(b), _values(a), msg=f"{name} differs")


def _extended(model: nn.Module) -> dict[ParameterGroup, ExtendedForm]:
    groups = [group for _, unit in named_units(model) for group in unit.parameters.groups]
    return {group: group.form for group in groups if isinstance(group.form, ExtendedForm)}


def _assert_no_memory(model: nn.Module) -> None:
    assert_at_rest(model)
    for form in _extended(model).values():
        for extension in form.extensions:
            assert extension.tensors
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in extension.tensors)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_extended_parameter_trains_as_in_fsdp2(num_ranks: int) -> None:
    def on_each_rank() -> None:
        even = 2 * num_ranks
        for kind, dim, hidden in ((Halves, 7, 13), (Halves, even, 2 * even), (Quantised, even, 2 * even)):
            for options in ({}, {"reshard_after_forward": False}):
                with case((kind, dim, options)):
                    theirs = _shard(_model(kind, dim, hidden), fsdp2.fully_shard, **options)
                    ours = _shard(_model(kind, dim, hidden), **options)
                    assert len(_extended(ours)) == 3  # one a unit
                    for _ in range(3):
                        outputs = []
                        for model in (theirs, ours):
                            outputs.append(model(rows_of_this_rank(X)))
                            outputs[-1].square().mean().backward()
                            _descend(model)
                        torch.testing.assert_close(outputs[1], outputs[0])
                        _assert_same_models(theirs, ours)
                        _assert_no_memory(ours)
                    assert all(isinstance(p.shard, kind) for group in _extended(ours) for p in group.parameters)

    run_ranks(on_each_rank, num_ranks)


def test_methods_of_extended_parameters_get_the_arguments_that_fsdp2_passes() -> None:
    def on_each_rank() -> None:
        observations = []
        for api, policy in ((fsdp2.fully_shard, fsdp2.MixedPrecisionPolicy), (fully_shard, MixedPrecisionPolicy)):
            Halves.seen.clear()
            model = _shard(_model(Halves), api, mp_policy=policy(param_dtype=torch.bfloat16))
            output = model(X)
            output.sum().backward()
            names = [(*sizes, kind.__name__, dtype) for *sizes, kind, dtype in Halves.seen]
            observations.append((names, output.dtype, [p.grad.dtype for p in model.parameters() if p.grad is not None]))
        assert observations[0][0] and observations[0] == observations[1]

    run_ranks(on_each_rank, 2)


def test_rows_that_do_not_divide_may_have_scales() -> None:
    def on_each_rank() -> None:
        reference, sharded = _model(QuantisedUneven), _shard(_model(QuantisedUneven))
        with torch.no_grad():  # what the wire makes of the weights
            for module in reference.modules():
                if isinstance(module, nn.Linear):
                    weight: Any = module.weight
                    (data, scale), _ = Quantised.fsdp_pre_all_gather(weight, None)  # type: ignore[arg-type]
                    module.weight = nn.Parameter(data * scale)
        torch.testing.assert_close(sharded(X), reference(X))
        for model in (reference, sharded):
            model(X).square().mean().backward()
        for a, b in zip(reference.parameters(), sharded.parameters(), strict=True):
            assert isinstance(b.grad, DTensor)
            torch.testing.assert_close(b.grad.full_tensor(), a.grad)

    run_ranks(on_each_rank, 2)


def test_extended_parameters_travel_as_the_tensors_of_fsdp_pre_all_gather() -> None:
    def on_each_rank() -> None:
        sharded = _shard(_model(Quantised, 8, 16))
        log = record(sharded)
        with torch.no_grad():
            sharded(X)
        # A block: int8 weights with a scale a row; a bias and a gain of fp32, padded to 256 elements a slot or not.
        (block,) = {event.nbytes for event in log.events if event.kind == "gather" and event.unit == "layers.0"}
        assert block == (8 * 16 + 4 * 16) + (16 * 8 + 4 * 8) + 4 * 16 + 4 * 2
        assert [event.unit for event in log.events if event.kind == "gather"].count("layers.0") == 1

    run_ranks(on_each_rank, 2)


def test_extended_parameters_accumulate_and_are_reduced_over_replicas() -> None:
    def on_each_rank() -> None:
        mesh = mesh_of((2, 2))
        Halves.seen.clear()
        models = [_shard(_model(Halves), fsdp2.fully_shard, mesh=mesh), _shard(_model(Halves), mesh=mesh)]
        for model in models:
            model.set_requires_gradient_sync(False)  # type: ignore[operator]
            model(rows_of_this_rank(X)).sum().backward()
            model.set_requires_gradient_sync(True)  # type: ignore[operator]
            model(rows_of_this_rank(2 * X)).sum().backward()
            _descend(model)
        _assert_same_models(*models)
        assert {call[:2] for call in Halves.seen} == {(1, 2)}

    run_ranks(on_each_rank, 4)


def test_gradients_of_earlier_microbatches_outlive_a_conversion_of_extended_parameters() -> None:
    def on_each_rank() -> None:
        converted, expected = _shard(_model(Halves)), _shard(_model(Halves))
        for model in (converted, expected):
            for i in range(3):
                fsdp(model).set_requires_gradient_sync(i == 2)
                model((i + 1) * X).square().mean().backward()
                if model is converted and i < 2:
                    model.to("cpu")
                    model.load_state_dict(model.state_dict(), assign=True)
        for a, b in zip(expected.parameters(), converted.parameters(), strict=True):
            assert isinstance(a.grad, DTensor) and isinstance(b.grad, DTensor)
            torch.testing.assert_close(b.grad.to_local(), a.grad.to_local(), rtol=0, atol=0)
        assert_at_rest(converted)

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("stage", [ZERO1, ZERO2])
def test_a_copy_that_is_kept_is_made_once_a_gather(stage: Any) -> None:
    def on_each_rank() -> None:
        reference, sharded = _shard(_model(Halves)), _shard(_model(Halves), options=ShardingOptions(placements=stage))
        for _ in range(2):
            for microbatch in range(2):
                for model in (reference, sharded):
                    fsdp(model).set_is_last_backward(microbatch == 1)
                    if model is sharded:
                        Halves.seen.clear()
                    model(X * (microbatch + 1)).square().mean().backward()
                assert len(Halves.seen) == (0 if microbatch else 5)
            for model in (reference, sharded):
                _descend(model)
            _assert_same_models(reference, sharded)

    run_ranks(on_each_rank, 2)


def test_a_first_pass_in_inference_mode_leaves_parameters_that_train() -> None:
    def on_each_rank() -> None:
        reference, sharded = _shard(_model(Halves)), _shard(_model(Halves))
        with torch.inference_mode():
            sharded(X)
        for model in (reference, sharded):
            model(X).square().mean().backward()
            _descend(model)
        _assert_same_models(reference, sharded)

    run_ranks(on_each_rank, 2)


def test_an_unused_gather_of_extended_parameters_is_no_in_place_modification() -> None:
    def on_each_rank() -> None:
        reference, sharded = _shard(_model(Halves)), _shard(_model(Halves))
        losses = [model(X).square().mean() for model in (reference, sharded)]
        layer = fsdp(sharded.layers[0])
        handle = layer.unshard(async_op=True)
        assert handle is not None
        layer.reshard()
        for model, loss in zip((reference, sharded), losses, strict=True):
            loss.backward()
            _descend(model)
        _assert_same_models(reference, sharded)
        _assert_no_memory(sharded)

    run_ranks(on_each_rank, 2)


def test_loaded_shards_are_taken_over() -> None:
    def on_each_rank() -> None:
        source, sharded = _shard(_model(Halves)), _shard(_model(Halves))
        sharded(X).sum().backward()
        source(2 * X).square().mean().backward()
        _descend(source)
        before = list(sharded.parameters())
        sharded.zero_grad()
        for assign in (False, True):
            with case(assign):
                sharded.load_state_dict({k: v.detach().clone() for k, v in source.state_dict().items()}, assign=assign)
                _assert_same_models(source, sharded)
                with torch.no_grad():
                    torch.testing.assert_close(sharded(X), source(X))
        assert all(a is b for a, b in zip(before, sharded.parameters(), strict=True))

    run_ranks(on_each_rank, 2)


def test_extended_parameters_on_meta_are_made_by_to_empty() -> None:
    def on_each_rank() -> None:
        reference = _shard(_model(Halves))
        with torch.device("meta"):
            sharded = _model(None)
        for module in sharded.modules():
            if isinstance(module, nn.Linear):
                meta = torch.empty(module.weight.shape, dtype=torch.bfloat16, device="meta")
                module.weight = nn.Parameter(Halves.over(meta, meta.clone()))
        _shard(sharded)
        with pytest.raises(RuntimeError, match="still on meta device"):
            sharded(X)
        sharded.to_empty(device="cpu")
        with torch.no_grad():
            for a, b in zip(reference.parameters(), sharded.parameters(), strict=True):
                assert isinstance(a, DTensor) and isinstance(b, DTensor)
                b.to_local().copy_(a.to_local())
        torch.testing.assert_close(sharded(X), reference(X))

    run_ranks(on_each_rank, 2)


def test_a_deleted_model_of_extended_parameters_is_freed_at_once() -> None:
    def on_each_rank() -> None:
        gc.disable()
        sharded = _shard(_model(Halves))
        sharded(X).sum().backward()
        tensors = [t for form in _extended(sharded).values() for e in form.extensions for t in e.tensors]
        locals_: list[Any] = [p.shard for group in _extended(sharded) for p in group.parameters]
        shards = [part for local in locals_ for part in local.parts]
        refs = [weakref.ref(tensor) for tensor in (*tensors, *shards)]
        del sharded, tensors, shards, locals_
        assert refs and all(ref() is None for ref in refs)

    run_ranks(on_each_rank, 2)


def _attach(local: Any) -> None:
    """FSDP2 takes the methods of a plain local tensor too, as late as before the first forward."""

    def before(mesh: DeviceMesh) -> Any:
        return (local.bfloat16(),), None

    def after(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Any:
        return give(outputs[0].to(dtype), outputs, out)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before, after


def test_methods_may_come_after_sharding() -> None:
    def on_each_rank() -> None:
        models = [_shard(_model(None, 8, 16), api) for api in (fsdp2.fully_shard, fully_shard)]
        for model in models:
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    assert isinstance(parameter, DTensor)
                    _attach(parameter._local_tensor)
        before = list(models[1].parameters())
        with torch.inference_mode():
            models[1](X)
        for _ in range(2):
            for model in models:
                model(rows_of_this_rank(X)).square().mean().backward()
                _descend(model)
            _assert_same_models(*models)
        assert all(a is b for a, b in zip(before, models[1].parameters(), strict=True))
        assert len(_extended(models[1])) == 3
        # One storage each: the remaining group does not keep the removed shards alive.
        for group in _extended(models[1]):
            for member in group.parameters:
                assert member.shard.untyped_storage().nbytes() == member.shard.nbytes

    run_ranks(on_each_rank, 2)


def test_a_replacement_without_the_methods_is_refused() -> None:
    def on_each_rank() -> None:
        sharded = _shard(_model(Halves))
        plain = {name: value.detach().clone() for name, value in _shard(_model(None)).state_dict().items()}
        with pytest.raises(TypeError, match="to define fsdp_pre_all_gather as before, got Tensor"):
            sharded.load_state_dict(plain, assign=True)

    run_ranks(on_each_rank, 2)


class _OneMethod(Quantised):
    fsdp_post_all_gather = property()


class _OddSignature(Quantised):
    def fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size) -> Any:  # type: ignore[override]
        raise AssertionError("it must not be called")


def test_unsupported_options_and_methods_of_extended_parameters_are_refused() -> None:
    def on_each_rank() -> None:
        refusals: list[tuple[type[Wrapper], dict[str, Any], type[Exception], str]] = [
            (_OneMethod, {}, MisuseError, "fsdp_pre_all_gather and fsdp_post_all_gather should be defined"),
            (_OddSignature, {}, MisuseError, "Invalid fsdp_pre_all_gather"),
            (Halves, {"reshard_after_forward": 2}, NotImplementedError, "`reshard_after_forward`"),
            (Halves, {"options": ShardingOptions(placements=DDP)}, NotImplementedError, "`placements`"),
            (Halves, {"options": ShardingOptions(keep_together=Whole())}, NotImplementedError, "`keep_together`"),
            (Halves, {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}, NotImplementedError, "dim 0"),
            (
                Halves,
                {"mp_policy": MixedPrecisionPolicy(main_dtype=torch.float64)},
                NotImplementedError,
                "`main_dtype`",
            ),
        ]
        for kind, options, error, message in refusals:
            with case((kind, options)), pytest.raises(error, match=message):
                _shard(_model(kind, 8, 16), **options)

    run_ranks(on_each_rank, 4)


def test_a_rank_that_sends_too_few_rows_says_so() -> None:
    def on_each_rank() -> None:
        class ShortHalves(Halves):
            def fsdp_pre_all_gather(
                self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
            ) -> Any:
                return tuple(self.parts), len(self)

        layer = nn.Linear(3, 5, bias=False)
        layer.weight = nn.Parameter(ShortHalves.encode(layer.weight.detach()))
        (group,) = next(unit for _, unit in named_units(fully_shard(layer))).parameters.groups
        if dist.get_rank() == 1:  # two of the full class's three rows
            with pytest.raises(MisuseError, match="padded sharded size"):
                group.form.prepare_gather(group, Direction.BOTH)

    run_ranks(on_each_rank, 2)


def test_a_tensor_subclass_and_its_inner_tensors_move_to_the_meshs_device() -> None:
    module = nn.Linear(2, 3, bias=False)
    module.weight = nn.Parameter(Halves.encode(module.weight.detach()))
    before: Any = module.weight
    move_to([module], torch.device("meta"), torch.device("meta"), set())
    moved: Any = module.weight
    assert moved is before and type(moved).__name__ == "Halves" and moved._is_param
    assert moved.requires_grad and moved.device.type == "meta"
    assert all(part.device.type == "meta" for part in moved.parts)


def test_marks_of_a_subclass_do_not_keep_the_whole_parameter() -> None:
    def on_each_rank() -> None:
        layer = nn.Linear(3, 4, bias=False)
        layer.weight = nn.Parameter(Halves.encode(layer.weight.detach()))
        layer.weight.sequence_parallel = True  # type: ignore[attr-defined]
        fully_shard(layer)
        assert layer.weight.sequence_parallel  # type: ignore[attr-defined]
        assert not hasattr(layer.weight, "high")
        layer(torch.ones(1, 3))
        fsdp(layer).unshard()
        assert layer.weight.sequence_parallel  # type: ignore[attr-defined]

    run_ranks(on_each_rank, 2)


def test_extended_parameters_can_be_described() -> None:
    def on_each_rank() -> None:
        text = describe(_shard(_model(Halves)))
        assert "2 groups" in text and "up.weight" in text

    run_ranks(on_each_rank, 2)
