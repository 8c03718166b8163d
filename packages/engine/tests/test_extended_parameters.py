"""Parameters whose class says what is gathered train as in FSDP2, which calls the same two methods."""

from __future__ import annotations

import gc
import operator
import weakref
from typing import Any, ClassVar, Self

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
import torch.utils._pytree as pytree
from engine_models import Residual, assert_at_rest, case, inputs, record, rows_of_this_rank, unit, units
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lamella_engine import MixedPrecisionPolicy, Whole, describe, fully_shard
from lamella_engine._candidates import move_to
from lamella_engine._errors import MisuseError
from lamella_engine._extended_group import ExtendedGroup
from lamella_engine._placements import DDP, ZERO1, ZERO2
from lamella_testing import run_ranks

X = inputs()
aten = torch.ops.aten


class _Wrapper(torch.Tensor):
    """An fp32 tensor kept in tensors of other dtypes. Every operator runs on the fp32 values."""

    names: ClassVar[list[str]]

    @classmethod
    def encode(cls, values: torch.Tensor) -> Self:
        raise NotImplementedError

    def decode(self) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def over(cls, *parts: torch.Tensor) -> Self:
        shape, device = parts[0].shape, parts[0].device
        made = torch.Tensor._make_wrapper_subclass(cls, shape, parts[0].stride(), dtype=torch.float32, device=device)
        vars(made).update(zip(cls.names, parts, strict=True))
        return made

    @property
    def parts(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.names]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BY_PART:  # views, and what has no values: on each part, so that views stay views
            return cls._by_part(func, args, kwargs)
        plain_args, plain_kwargs = pytree.tree_map_only(cls, lambda t: t.decode(), (args, kwargs))
        if func._schema.name.endswith("_") or func is aten.copy_.default:
            # The first argument is written: its decoded values, and then its parts.
            result = func(*plain_args, **plain_kwargs)
            if not isinstance(args[0], cls):
                return args[0]
            for part, new in zip(args[0].parts, cls.encode(result).parts, strict=True):
                part.copy_(new)
            return args[0]
        result = func(*plain_args, **plain_kwargs)
        return pytree.tree_map_only(torch.Tensor, cls.encode, result) if func in _KEEP else result

    @classmethod
    def _by_part(cls, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
        of_each = [pytree.tree_map_only(cls, operator.attrgetter(name), args) for name in cls.names]
        results = [func(*of_one, **kwargs) for of_one in of_each]
        if isinstance(results[0], torch.Tensor):
            return cls.over(*results)
        return [cls.over(*parts) for parts in zip(*results, strict=True)]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return self.names, None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: object) -> Self:
        return cls.over(*(inner[name] for name in cls.names))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({[tuple(part.shape) for part in self.parts]})"


_BY_PART = {
    *(aten.detach.default, aten.alias.default, aten.view.default, aten.slice.Tensor, aten.split.Tensor),
    *(aten.new_zeros.default, aten.empty_like.default, aten._to_copy.default, aten.clone.default),
}
_KEEP = {aten.mul.Tensor, aten.add.Tensor}


class Pair(_Wrapper):
    """Two bf16 tensors, whose sum is the value; both travel."""

    names: ClassVar[list[str]] = ["high", "low"]
    seen: ClassVar[list[tuple[Any, ...]]] = []  # of this process: ranks are processes

    @classmethod
    def encode(cls, values: torch.Tensor) -> Self:
        high = values.bfloat16()
        return cls.over(high, (values - high).bfloat16())

    def decode(self) -> torch.Tensor:
        high, low = self.parts
        return high.float() + low.float()

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        self.seen.append((mesh.ndim, mesh.size(), outer_size, outer_stride, type(module), mp_policy.param_dtype))
        return tuple(_padded(part, -(-outer_size[0] // mesh.size())) for part in self.parts), len(self)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        assert metadata == len(self)
        high, low = all_gather_outputs
        whole = high.to(param_dtype) + low.to(param_dtype)
        return _give(whole, all_gather_outputs, out)


class Quantised(_Wrapper):
    """fp32, which travels as int8 with a scale a row. The short signature, and rows that divide."""

    names: ClassVar[list[str]] = ["values"]

    @classmethod
    def encode(cls, values: torch.Tensor) -> Self:
        return cls.over(values)

    def decode(self) -> torch.Tensor:
        (values,) = self.parts
        return values

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        values = self.decode()
        scale = values.abs().amax(dim=1, keepdim=True).clamp(min=1e-9) / 127
        return ((values / scale).round().to(torch.int8), scale), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        data, scale = all_gather_outputs
        return _give((data * scale).to(param_dtype), all_gather_outputs, out)


class QuantisedUneven(Quantised):
    """The same with padding. FSDP2 refuses the scales, whose size is not the parameter's."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        (data, scale), metadata = super().fsdp_pre_all_gather(mesh)
        num_rows = -(-outer_size[0] // mesh.size())
        return (_padded(data, num_rows), _padded(scale, num_rows)), metadata


def _padded(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(num_rows - len(rows), *rows.shape[1:])])


def _give(whole: torch.Tensor, gathered: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> Any:
    if out is None:
        return whole, (*gathered, whole)
    with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter(out):
        out.copy_(whole[: len(out)])
    return None


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


def _model(kind: type[_Wrapper] | None, dim: int = 7, hidden: int = 13) -> Rows:
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
    return (local.decode() if isinstance(local, _Wrapper) else local).detach()


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


def _extended(model: nn.Module) -> list[ExtendedGroup]:
    return [group for _, state in units(model) for group in state.groups if isinstance(group, ExtendedGroup)]


def _assert_no_memory(model: nn.Module) -> None:
    assert_at_rest(model)
    for group in _extended(model):
        for extension in group._extensions:
            assert extension.tensors
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in extension.tensors)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_extended_parameter_trains_as_in_fsdp2(num_ranks: int) -> None:
    def on_each_rank() -> None:
        even = 2 * num_ranks
        for kind, dim, hidden in ((Pair, 7, 13), (Pair, even, 2 * even), (Quantised, even, 2 * even)):
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


def test_the_two_methods_are_told_what_fsdp2_tells_them() -> None:
    def on_each_rank() -> None:
        told = []
        for api, policy in ((fsdp2.fully_shard, fsdp2.MixedPrecisionPolicy), (fully_shard, MixedPrecisionPolicy)):
            Pair.seen.clear()
            model = _shard(_model(Pair), api, mp_policy=policy(param_dtype=torch.bfloat16))
            output = model(X)
            output.sum().backward()
            names = [(*rest, kind.__name__, dtype) for *rest, kind, dtype in Pair.seen]
            told.append((names, output.dtype, [p.grad.dtype for p in model.parameters() if p.grad is not None]))
        assert told[0][0] and told[0] == told[1]

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


def test_what_the_first_method_returns_is_all_that_travels() -> None:
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
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        Pair.seen.clear()
        models = [_shard(_model(Pair), fsdp2.fully_shard, mesh=mesh), _shard(_model(Pair), mesh=mesh)]
        for model in models:
            model.set_requires_gradient_sync(False)  # type: ignore[operator]
            model(rows_of_this_rank(X)).sum().backward()
            model.set_requires_gradient_sync(True)  # type: ignore[operator]
            model(rows_of_this_rank(2 * X)).sum().backward()
            _descend(model)
        _assert_same_models(*models)
        assert {told[:2] for told in Pair.seen} == {(1, 2)}

    run_ranks(on_each_rank, 4)


@pytest.mark.parametrize("stage", [ZERO1, ZERO2])
def test_a_copy_that_is_kept_is_made_once_a_gather(stage: Any) -> None:
    def on_each_rank() -> None:
        reference, sharded = _shard(_model(Pair)), _shard(_model(Pair), placements=stage)
        for _ in range(2):
            for microbatch in range(2):
                for model in (reference, sharded):
                    unit(model).set_is_last_backward(microbatch == 1)
                    if model is sharded:
                        Pair.seen.clear()
                    model(X * (microbatch + 1)).square().mean().backward()
                assert len(Pair.seen) == (0 if microbatch else 5)
            for model in (reference, sharded):
                _descend(model)
            _assert_same_models(reference, sharded)

    run_ranks(on_each_rank, 2)


def test_a_first_pass_in_inference_mode_leaves_parameters_that_train() -> None:
    def on_each_rank() -> None:
        reference, sharded = _shard(_model(Pair)), _shard(_model(Pair))
        with torch.inference_mode():
            sharded(X)
        for model in (reference, sharded):
            model(X).square().mean().backward()
            _descend(model)
        _assert_same_models(reference, sharded)

    run_ranks(on_each_rank, 2)


def test_a_gather_that_nobody_used_is_no_modification() -> None:
    def on_each_rank() -> None:
        reference, sharded = _shard(_model(Pair)), _shard(_model(Pair))
        losses = [model(X).square().mean() for model in (reference, sharded)]
        layer = unit(sharded.layers[0])
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
        source, sharded = _shard(_model(Pair)), _shard(_model(Pair))
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
        reference = _shard(_model(Pair))
        with torch.device("meta"):
            sharded = _model(None)
        for module in sharded.modules():
            if isinstance(module, nn.Linear):
                meta = torch.empty(module.weight.shape, dtype=torch.bfloat16, device="meta")
                module.weight = nn.Parameter(Pair.over(meta, meta.clone()))
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
        sharded = _shard(_model(Pair))
        sharded(X).sum().backward()
        tensors = [t for group in _extended(sharded) for e in group._extensions for t in e.tensors]
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
        return _give(outputs[0].to(dtype), outputs, out)

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
        # One storage each: what is left of the group does not keep theirs alive.
        for group in _extended(models[1]):
            for member in group.parameters:
                assert member.shard.untyped_storage().nbytes() == member.shard.nbytes

    run_ranks(on_each_rank, 2)


def test_a_replacement_without_the_methods_is_refused() -> None:
    def on_each_rank() -> None:
        sharded = _shard(_model(Pair))
        plain = {name: value.detach().clone() for name, value in _shard(_model(None)).state_dict().items()}
        with pytest.raises(TypeError, match="to define fsdp_pre_all_gather as before, got Tensor"):
            sharded.load_state_dict(plain, assign=True)

    run_ranks(on_each_rank, 2)


class _OneMethod(Quantised):
    fsdp_post_all_gather = property()


class _OddSignature(Quantised):
    def fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size) -> Any:  # type: ignore[override]
        raise AssertionError("it must not be called")


def test_what_an_extended_parameter_cannot_is_refused() -> None:
    def on_each_rank() -> None:
        refusals: list[tuple[type[_Wrapper], dict[str, Any], type[Exception], str]] = [
            (_OneMethod, {}, MisuseError, "fsdp_pre_all_gather and fsdp_post_all_gather should be defined"),
            (_OddSignature, {}, MisuseError, "Invalid fsdp_pre_all_gather"),
            (Pair, {"reshard_after_forward": 2}, NotImplementedError, "`reshard_after_forward`"),
            (Pair, {"placements": DDP}, NotImplementedError, "`placements`"),
            (Pair, {"keep": Whole()}, NotImplementedError, "`keep`"),
            (Pair, {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}, NotImplementedError, "dim 0"),
            (Pair, {"mp_policy": MixedPrecisionPolicy(main_dtype=torch.float64)}, NotImplementedError, "`main_dtype`"),
        ]
        for kind, options, error, message in refusals:
            with case((kind, options)), pytest.raises(error, match=message):
                _shard(_model(kind, 8, 16), **options)

    run_ranks(on_each_rank, 4)


def test_a_rank_that_sends_too_few_rows_says_so() -> None:
    def on_each_rank() -> None:
        class Short(Pair):
            def fsdp_pre_all_gather(
                self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
            ) -> Any:
                return tuple(self.parts), len(self)

        layer = nn.Linear(3, 5, bias=False)
        layer.weight = nn.Parameter(Short.encode(layer.weight.detach()))
        (group,) = next(state for _, state in units(fully_shard(layer))).groups
        if dist.get_rank() == 1:  # two of the three rows that the other has
            with pytest.raises(MisuseError, match="padded sharded size"):
                group.prepare_gather()

    run_ranks(on_each_rank, 2)


def test_a_subclass_is_moved_to_the_meshs_device_with_what_it_holds() -> None:
    module = nn.Linear(2, 3, bias=False)
    module.weight = nn.Parameter(Pair.encode(module.weight.detach()))
    before: Any = module.weight
    move_to([module], torch.device("meta"), torch.device("meta"), set())
    moved: Any = module.weight
    assert moved is before and type(moved).__name__ == "Pair" and moved._is_param
    assert moved.requires_grad and moved.device.type == "meta"
    assert all(part.device.type == "meta" for part in moved.parts)


def test_marks_of_a_subclass_do_not_keep_the_whole_parameter() -> None:
    def on_each_rank() -> None:
        layer = nn.Linear(3, 4, bias=False)
        layer.weight = nn.Parameter(Pair.encode(layer.weight.detach()))
        layer.weight.sequence_parallel = True  # type: ignore[attr-defined]
        fully_shard(layer)
        assert layer.weight.sequence_parallel  # type: ignore[attr-defined]
        assert not hasattr(layer.weight, "high")
        layer(torch.ones(1, 3))
        unit(layer).unshard()
        assert layer.weight.sequence_parallel  # type: ignore[attr-defined]

    run_ranks(on_each_rank, 2)


def test_extended_parameters_can_be_described() -> None:
    def on_each_rank() -> None:
        text = describe(_shard(_model(Pair)))
        assert "2 groups" in text and "up.weight" in text

    run_ranks(on_each_rank, 2)
