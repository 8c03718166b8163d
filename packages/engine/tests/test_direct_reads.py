"""Parameters that are read without a call of their module: declared, they are the reader's unit's in every way.

The first ten tests are the ten cases that any such declaration has to cover, in the words of their list.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from engine_models import (
    Net,
    assert_at_rest,
    assert_gradients_equal,
    assert_trains_alike,
    case,
    descend,
    inputs,
    mean_square,
    record,
    rows_of_this_rank,
    twins,
    unit,
    units,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from lamella_engine import (
    DDP,
    HFSDP,
    HSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    declare_reads,
    describe,
    fully_shard,
    fully_shard_model,
    plan_units,
    register_fsdp_forward_method,
)
from lamella_engine._attached import find_state
from lamella_engine._state import Residency
from lamella_testing import run_ranks

X = inputs()
LOSS = mean_square(lambda model: model(X))


class _Kernel(torch.autograd.Function):
    """A fused kernel: takes the weights themselves, and looks at them again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        assert not isinstance(weight, DTensor)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        assert weight.untyped_storage().nbytes() > 0, "the weight is not there in backward"
        return gradient @ weight, gradient.T @ x, gradient.sum(0)


class Mixer(nn.Module):
    """Reads the weights of its convolution (of width one) and never calls it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1d = nn.Linear(dim, dim)
        self.gate = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = _Kernel.apply(x, self.conv1d.weight, self.conv1d.bias)  # type: ignore[no-untyped-call]
        return self.gate * mixed


class CallingMixer(Mixer):
    """Reads the weights, and calls the convolution too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) + self.conv1d(x)
        return out


class Block(nn.Module):
    def __init__(self, dim: int, mixer: Callable[[int], nn.Module] = Mixer) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.mixer = mixer(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mixer(torch.tanh(self.up(x)))
        return out


class Model(Net):
    def make_layer(self, dim: int) -> nn.Module:
        return Block(dim)


class CallingModel(Net):
    def make_layer(self, dim: int) -> nn.Module:
        return Block(dim, CallingMixer)


class Recomputed(Net):
    use_reentrant = False

    def make_layer(self, dim: int) -> nn.Module:
        return Block(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = cast(torch.Tensor, checkpoint(layer, x, use_reentrant=self.use_reentrant))
        head: torch.Tensor = self.head(x)
        return head


class RecomputedByReentry(Recomputed):
    use_reentrant = True


class RecomputedInside(Net):
    """What runs again is inside the unit."""

    def make_layer(self, dim: int) -> nn.Module:
        class Inside(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                mixed = checkpoint(self.mixer, torch.tanh(self.up(x)), use_reentrant=False)
                return x + cast(torch.Tensor, mixed)

        return Inside(dim)


def _mixers(model: nn.Module) -> Iterator[Mixer]:
    return (module for module in model.modules() if isinstance(module, Mixer))


def _convs(model: nn.Module) -> list[nn.Linear]:
    return [mixer.conv1d for mixer in _mixers(model)]


def _shard(model: Any, *, inner: dict[str, Any] | None = None, **options: Any) -> Any:
    """Every convolution a unit, every block, and the model; the mixers, which are none, say what they read."""
    for mixer in _mixers(model):
        declare_reads(mixer, "conv1d.*")
        fully_shard(mixer.conv1d, **(options if inner is None else inner))
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


OWN_UNITS = ["root", "layers.0", "layers.1", "layers.2"]


def _named_units(model: nn.Module) -> dict[str, Any]:
    """The states by the names of their own modules."""
    return {state.name or "root": state for _, state in units(model)}


def _record(model: nn.Module) -> Any:
    log = record(model)
    for name, state in _named_units(model).items():
        for group in state.groups:
            group.transport._name = name  # the last module of a unit named it, which is one that is read
    return log


# -- the ten cases --------------------------------------------------------------------------------------------------


def test_case_1_gathered_before_forward_with_the_owner() -> None:
    def check() -> None:
        reference, sharded = twins(Model, _shard)
        log = _record(sharded)
        seen: list[bool] = []
        for mixer in _mixers(sharded):
            mixer.register_forward_pre_hook(lambda mixer, _: seen.append(type(mixer.conv1d.weight) is nn.Parameter))
        torch.testing.assert_close(sharded(X), reference(X))
        assert seen == [True] * 3
        assert log.units_of("gather") == OWN_UNITS, "one gather a unit, and none for a convolution by itself"

    run_ranks(check, 2)


def test_case_2_gathered_before_backward() -> None:
    def check() -> None:
        reference, sharded = twins(Model, _shard)
        loss = LOSS(sharded)
        assert all(isinstance(conv.weight, DTensor) for conv in _convs(sharded)), "freed in between"
        log = _record(sharded)
        loss.backward()  # `_Kernel` asserts that the weight has its storage
        assert log.units_of("gather") == ["layers.2", "layers.1", "layers.0"]
        LOSS(reference).backward()
        assert_gradients_equal(reference, sharded)

    run_ranks(check, 2)


@pytest.mark.parametrize("make", [Recomputed, RecomputedByReentry, RecomputedInside])
def test_case_3_freed_after_forward_and_after_backward_and_kept_while_it_is_recomputed(
    make: Callable[[], nn.Module],
) -> None:
    def check() -> None:
        reference, sharded = twins(make, _shard)
        first, *_ = _convs(sharded)
        state = find_state(first)
        assert state is not None
        flats = [group.unsharded_weight.flat for group in state.groups]

        def is_free() -> bool:
            return all(flat.untyped_storage().nbytes() == 0 for flat in flats)

        freed: list[bool] = []
        sharded.get_submodule("layers.2").register_forward_pre_hook(lambda *_: freed.append(is_free()))
        assert_trains_alike(reference, sharded, LOSS, num_steps=3)
        assert freed[0], "free while later units run"
        assert is_free()
        assert state.residency is Residency.SHARDED

    run_ranks(check, 2)


def test_case_4_gradients_are_counted_to_the_owners_unit() -> None:
    def check() -> None:
        reference, sharded = twins(Model, _shard)
        log = _record(sharded)
        for model, rows in ((reference, X), (sharded, rows_of_this_rank(X))):
            model(rows).square().mean().backward()
        assert log.units_of("reduce") == ["layers.2", "layers.1", "layers.0", "root"], "each unit once"
        assert_gradients_equal(reference, sharded)
        assert all(isinstance(conv.weight.grad, DTensor) for conv in _convs(sharded))
        log.clear()
        unit(sharded).set_requires_gradient_sync(False)
        LOSS(sharded).backward()
        assert log.units_of("reduce") == []
        held = [p for state in _named_units(sharded).values() for group in state.groups for p in group.parameters]
        assert all(parameter.unsharded.grad is not None for parameter in held)

    run_ranks(check, 2)


def test_case_5_gathered_ahead_and_in_one_call_with_the_owners() -> None:
    def check() -> None:
        _, sharded = twins(Model, _shard)
        log = _record(sharded)
        for _ in range(2):
            log.clear()
            LOSS(sharded).backward()
            descend(sharded)
        expected = ["gather root", "compute root", "gather layers.0", "gather layers.1", "compute layers.0"]
        forward = [e for e in log.order if not e.startswith("reduce")]
        assert sorted(forward[:5]) == sorted(expected)
        assert forward.index("gather layers.1") < forward.index("compute layers.0")
        # Seven rows are sent as eight: chunks are equal on the wire.
        numel = sum(8 * parameter[0].numel() for parameter in sharded.get_submodule("layers.0").parameters())
        assert {e.nbytes for e in log.events if e.kind == "gather" and e.unit != "root"} == {4 * numel}

    run_ranks(check, 2)


def test_case_6_in_another_unit_it_is_taken_over_or_refused() -> None:
    def check() -> None:
        # Taken over: the reader is two units above.
        def apply(model: Any) -> None:
            declare_reads(model.layers[0], "mixer.conv1d.*")
            declare_reads(model.layers[1].mixer, "conv1d.*")
            declare_reads(model.layers[2].mixer, "conv1d.*")
            for mixer in _mixers(model):
                fully_shard(mixer.conv1d)
                fully_shard(mixer)
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)

        reference, sharded = twins(Model, apply)
        assert_trains_alike(reference, sharded, LOSS)
        first, second, _ = _convs(sharded)
        assert find_state(first) is find_state(sharded.get_submodule("layers.0"))
        assert find_state(second) is find_state(sharded.get_submodule("layers.1.mixer"))

        # Refused: a unit that is gathered with a module elsewhere.
        model = Model()
        first, second, _ = _convs(model)
        declare_reads(model.layers[0].get_submodule("mixer"), "conv1d.*")
        fully_shard([first, second])
        with pytest.raises(
            ValueError, match=r"'mixer\.conv1d\.\w+', which Mixer reads .* gathered with modules elsewh"
        ):
            fully_shard(model.layers[0])
        assert find_state(model.layers[0]) is None
        assert not isinstance(model.layers[0].get_parameter("up.weight"), DTensor)

        # Refused: one that another unit reads already.
        model = Model()
        left, right, _ = _mixers(model)
        right.conv1d = left.conv1d
        for mixer in (left, right):
            declare_reads(mixer, "conv1d.*")
        fully_shard(left.conv1d)
        fully_shard(model.layers[0])
        with pytest.raises(ValueError, match=r"'mixer\.conv1d\.weight'.*on a module around all that use it"):
            fully_shard(model.layers[1])

    run_ranks(check, 2)


def test_case_7_shared_and_tied_parameters() -> None:
    class SharedModule(Model):
        def __init__(self) -> None:
            super().__init__()
            one, two, three = _mixers(self)
            two.conv1d = three.conv1d = one.conv1d

    class TiedWeight(Model):
        def __init__(self) -> None:
            super().__init__()
            one, two, three = _convs(self)
            two.weight = three.weight = one.weight

    def around(model: Any) -> None:
        """Readers that share are in one unit: the model's."""
        for mixer in _mixers(model):
            declare_reads(mixer, "conv1d.weight", "conv1d.bias")
        fully_shard(list(dict.fromkeys(_convs(model))))
        for layer in model.layers:
            fully_shard(layer.up)
        fully_shard(model)

    class TiedHead(Model):
        """The model reads the embedding's weight in place of a head, and the embedding is called too."""

        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Embedding(11, 7)  # type: ignore[assignment]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(torch.arange(12) % 11)
            for layer in self.layers:
                x = layer(x)
            return F.linear(x, self.stem.weight)

    def with_head(model: Any) -> None:
        declare_reads(model, "stem.weight")
        fully_shard(model.stem)
        _shard(model)

    def check() -> None:
        for make, apply in ((SharedModule, around), (TiedWeight, around), (TiedHead, with_head)):
            with case(make.__name__):
                reference, sharded = twins(make, apply)
                assert_trains_alike(reference, sharded, LOSS, num_steps=3)

    run_ranks(check, 2)


def test_case_8_without_gradients_and_in_eval() -> None:
    def check() -> None:
        reference, sharded = twins(Model, _shard)
        for model in (reference, sharded):
            model.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(sharded(X), reference(X))
            assert_at_rest(sharded)
        for model in (reference, sharded):
            model.train()
        assert_trains_alike(reference, sharded, LOSS)
        with torch.no_grad():
            torch.testing.assert_close(sharded(X), reference(X))
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)


def test_case_9_checkpoint_names_are_unchanged() -> None:
    def check() -> None:
        reference, sharded = twins(Model, _shard)
        loss = LOSS(sharded)
        expected = reference.state_dict()
        of_one = _convs(sharded)[0].state_dict(prefix="layers.0.mixer.conv1d.")
        for state in (sharded.state_dict(), of_one):
            assert all(isinstance(value, DTensor) for value in state.values())
            assert all(torch.equal(whole(value), expected[name]) for name, value in state.items())
        assert list(sharded.state_dict()) == list(expected)
        assert [name for name, _ in sharded.named_parameters()] == [name for name, _ in reference.named_parameters()]
        loss.backward()
        unit(sharded).zero_grad()
        for assign in (False, True):
            loaded = {name: value.clone() * 2 for name, value in sharded.state_dict().items()}
            sharded.load_state_dict(loaded, assign=assign)
            reference.load_state_dict({name: value * 2 for name, value in reference.state_dict().items()})
            assert_trains_alike(reference, sharded, LOSS, num_steps=1)

    run_ranks(check, 2)


def test_case_10_tensor_parallel_annotations() -> None:
    def marked() -> nn.Module:
        model = Model(num_layers=1, dim=8)
        for conv in _convs(model):
            conv.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            conv.weight.partition_dim = 0  # type: ignore[attr-defined]
        return model

    def check() -> None:
        _, sharded = twins(marked, _shard)
        (conv,) = _convs(sharded)
        for is_unsharded in (False, True):
            if is_unsharded:
                unit(sharded.get_submodule("layers.0")).unshard()
            assert isinstance(conv.weight, DTensor) != is_unsharded
            assert vars(conv.weight).items() >= {("tensor_model_parallel", True), ("partition_dim", 0)}

    run_ranks(check, 2)

    class Parallel(Net):
        """Every parameter is a DTensor on the tensor axis; the convolution's is cut there."""

        def make_layer(self, dim: int) -> nn.Module:
            return Block(dim, ParallelMixer)

    class ParallelMixer(Mixer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.gate * F.linear(x, self.conv1d.weight, self.conv1d.bias)
            return out

    def check_dtensors() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        models = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            model = Parallel(num_layers=1, dim=8)
            for module in model.modules():
                placement = Shard(0) if module in _convs(model) else Replicate()
                for name, parameter in module.named_parameters(recurse=False):
                    part = distribute_tensor(parameter.data, mesh["tensor"], [placement])
                    module.register_parameter(name, nn.Parameter(part))
            if is_sharded:
                _shard(model, mesh=mesh["data"])
            models.append(model)
        x = distribute_tensor(X, mesh["tensor"], [Replicate()])
        for _ in range(2):
            for model in models:
                model(x).square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.sub_(parameter.grad, alpha=0.1)
                        parameter.grad = None
        for expected, got in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(whole(got), whole(expected))
        (conv,) = _convs(models[1])
        assert conv.weight.ndim == len(conv.weight.placements) == 2  # type: ignore[attr-defined]

    run_ranks(check_dtensors, 4)


# -- whatever the units are -----------------------------------------------------------------------------------------

STAGES: dict[str, tuple[tuple[int, ...], Any]] = {
    **{name: ((2,), stage) for name, stage in {"DDP": DDP, "ZERO1": ZERO1, "ZERO2": ZERO2, "ZERO3": ZERO3}.items()},
    "HSDP": ((2, 2), (HSDP, ZERO3)),
    "HFSDP": ((2, 2), (HFSDP, ZERO3)),
}


@pytest.mark.parametrize("stage", STAGES)
def test_every_zero_stage_trains_as_unsharded(stage: str) -> None:
    shape, placements = STAGES[stage]

    def apply(model: Any) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
        _shard(model, mesh=mesh, placements=placements)

    def check() -> None:
        reference, sharded = twins(partial(Model, dim=8), apply)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (reference, sharded)]
        for _ in range(2):
            for microbatch in range(2):
                unit(sharded).set_is_last_backward(microbatch == 1)
                reference(X * (microbatch + 1)).square().mean().backward()
                sharded(X * (microbatch + 1)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for expected, got in zip(reference.parameters(), sharded.parameters(), strict=True):
                torch.testing.assert_close(whole(got), expected.detach(), rtol=1e-4, atol=1e-6)

    run_ranks(check, torch.Size(shape).numel())


@pytest.mark.parametrize("flag", [True, False, None, 2])
def test_the_owners_flag_says_what_happens_between_forward_and_backward(flag: bool | int | None) -> None:
    def check() -> None:
        reference, sharded = twins(Model, partial(_shard, reshard_after_forward=flag))
        assert_trains_alike(reference, sharded, LOSS, num_steps=1)
        LOSS(sharded)
        state = find_state(_convs(sharded)[0])
        assert state is not None
        assert (state.residency is Residency.UNSHARDED) == (flag is False)
        if flag is False:
            return
        assert all((group.parts is not None) == (flag == 2) for group in state.groups)

    run_ranks(check, 4)


def test_a_module_that_is_read_and_called_trains_as_unsharded_too() -> None:
    def check() -> None:
        for flag in (True, False):
            reference, sharded = twins(CallingModel, partial(_shard, reshard_after_forward=flag))
            log = _record(sharded)
            for model in (reference, sharded):
                LOSS(model).backward()
            assert_gradients_equal(reference, sharded)
            assert log.units_of("reduce") == ["layers.2", "layers.1", "layers.0", "root"]
            assert log.units_of("gather")[:4] == OWN_UNITS

    run_ranks(check, 2)


def test_a_module_that_is_read_may_be_called_outside_of_the_reader() -> None:
    class Aside(Model):
        """Its last convolution runs again between the blocks, and after them."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            conv = _convs(self)[1]
            for layer in self.layers:
                x = layer(conv(x))
            head: torch.Tensor = self.head(conv(x))
            return head

    def check() -> None:
        for flag in (True, False):
            reference, sharded = twins(Aside, partial(_shard, reshard_after_forward=flag))
            for _ in range(3):
                for model in (reference, sharded):
                    LOSS(model).backward()
                assert_gradients_equal(reference, sharded)
                for model in (reference, sharded):
                    descend(model)
        alone = [_convs(model)[0] for model in (reference, sharded)]
        for conv in alone:  # outside any forward: a pass of its own
            conv(torch.ones(2, 7)).square().sum().backward()
        assert_gradients_equal(*alone)
        with torch.no_grad():
            torch.testing.assert_close(alone[1](torch.ones(2, 7)), alone[0](torch.ones(2, 7)))

    run_ranks(check, 2)


class _CallingRecomputed(RecomputedByReentry):
    def make_layer(self, dim: int) -> nn.Module:
        return Block(dim, CallingMixer)


def test_a_module_that_is_read_and_called_runs_again_after_an_optimizer_stepped() -> None:
    """What the unit gathered before that is still what its own backward needs: a call inside it begins nothing."""

    def check() -> None:
        reference, sharded = twins(_CallingRecomputed, partial(_shard, reshard_after_forward=False))
        other = fully_shard(nn.Linear(3, 3))
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        for model in (reference, sharded):
            loss = LOSS(model)
            optimizer.step()
            loss.backward()
        assert_gradients_equal(reference, sharded)
        assert_at_rest(sharded)

    run_ranks(check, 2)


def _shard_after(model: Any, tell: Callable[[nn.Linear], object]) -> list[Any]:
    """What is said to each convolution's unit, before the units around take it over, comes back."""
    answers = []
    for mixer in _mixers(model):
        declare_reads(mixer, "conv1d.*")
        answers.append(tell(fully_shard(mixer.conv1d)))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return answers


def test_a_gradient_that_was_said_to_come_late_before_is_waited_for() -> None:
    def check() -> None:
        reference, sharded = twins(Model, lambda model: None)
        came = _shard_after(sharded, lambda conv: unit(conv).delay_gradient(conv.get_parameter("weight")))
        shards = [conv.weight for conv in _convs(sharded)]
        for model in (reference, sharded):
            LOSS(model).backward()
        assert all(shard.grad is None for shard in shards)
        for call in came:
            call()
        assert_gradients_equal(reference, sharded)
        assert_at_rest(sharded)

    run_ranks(check, 2)


def test_a_buffer_for_gradients_that_was_asked_for_before_is_there() -> None:
    def check() -> None:
        sharded = Model()
        _shard_after(sharded, lambda conv: unit(conv).set_main_grads([conv.get_parameter("weight")]))
        for layer in sharded.layers:
            unit(layer).unshard()
        for conv in _convs(sharded):
            weight: Any = conv.weight
            assert weight.get_main_grad().shape == weight.shape

    run_ranks(check, 2)


def test_another_method_of_a_module_that_is_read_casts_as_the_module_does() -> None:
    class Convolution(nn.Linear):
        def encode(self, x: torch.Tensor) -> torch.dtype:
            return x.dtype

    def check() -> None:
        mixer = Mixer(7)
        mixer.conv1d = Convolution(7, 7)
        declare_reads(mixer, "conv1d.*")
        fully_shard(mixer.conv1d, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        register_fsdp_forward_method(mixer.conv1d, "encode")
        fully_shard(mixer)
        assert mixer.conv1d.encode(torch.ones(2, 7)) is torch.bfloat16

    run_ranks(check, 1)


def test_a_list_of_units_to_gather_ahead_may_name_one_that_was_taken_over() -> None:
    def check() -> None:
        sharded = Model()
        for mixer in _mixers(sharded):
            declare_reads(mixer, "conv1d.*")
            fully_shard(mixer.conv1d)
        unit(fully_shard(sharded.layers[0])).set_modules_to_forward_prefetch([unit(_convs(sharded)[1])])
        for module in (*sharded.layers[1:], sharded):
            fully_shard(module)
        log = _record(sharded)
        sharded(X)
        assert log.order.index("gather layers.1") < log.order.index("compute layers.0")

    run_ranks(check, 2)


@pytest.mark.parametrize("inner", [None, CPUOffloadPolicy(pin_memory=False)])
def test_shards_may_rest_on_the_cpu(inner: CPUOffloadPolicy | None) -> None:
    """The reader's and what it reads, or the latter alone."""
    everywhere: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    apply = partial(_shard, **everywhere) if inner is None else partial(_shard, inner={"offload_policy": inner})

    def check() -> None:
        assert_trains_alike(*twins(Model, apply), LOSS, num_steps=3)

    run_ranks(check, 2)


def test_a_unit_that_took_another_over_may_be_taken_over_with_it() -> None:
    class Reading(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x * self.layers[0].get_parameter("up.weight").sum()

    def apply(model: Any) -> None:
        declare_reads(model, "layers.0.up.weight")
        _shard(model)
        assert find_state(model) is find_state(model.layers[0]) is find_state(_convs(model)[0])

    def check() -> None:
        reference, sharded = twins(Reading, apply)
        assert_trains_alike(reference, sharded, LOSS, num_steps=3)
        state = find_state(sharded)
        assert state is not None
        names = {parameter.name for group in state.groups for parameter in group.parameters}
        assert names >= {"layers.0.up.weight", "layers.0.mixer.conv1d.weight", "stem.weight"}

    run_ranks(check, 2)


def test_several_forwards_before_their_backwards() -> None:
    def check() -> None:
        reference, sharded = twins(Model, _shard)
        for model in (reference, sharded):
            losses = [model(X * scale).square().mean() for scale in (1, 2)]
            losses[0].backward()
            losses[1].backward()
        assert_gradients_equal(reference, sharded)
        assert_at_rest(sharded)

    run_ranks(check, 2)


class _Anyhow(Net):
    """Blocks that read, call or both, and run again inside backward or not: drawn by a seed."""

    def __init__(self, choose: Random) -> None:
        self._choose = choose
        super().__init__(num_layers=4)
        self.recomputes = [choose.random() < 0.3 for _ in self.layers]

    def make_layer(self, dim: int) -> nn.Module:
        return Block(dim, self._choose.choice([Mixer, CallingMixer]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer, recomputes in zip(self.layers, self.recomputes, strict=True):
            x = cast(torch.Tensor, checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x))
        head: torch.Tensor = self.head(x)
        return head


def _cut_anyhow(choose: Random, model: Any) -> None:
    for layer in model.layers:
        declare_reads(choose.choice([layer, layer.mixer]), "*conv1d.*")
        for module in (layer.mixer.conv1d, layer.mixer, layer):
            if choose.random() < 0.6:
                fully_shard(module, reshard_after_forward=choose.choice([None, True, False]))
    fully_shard(model)


def test_units_that_are_cut_at_random_train_as_unsharded() -> None:
    def check() -> None:
        for seed in range(8):
            with case(f"seed {seed}"):
                make, apply = (lambda seed=seed: _Anyhow(Random(seed))), partial(_cut_anyhow, Random(100 + seed))
                reference, sharded = twins(make, apply)
                for scale in (1, 2, 3):
                    if Random(seed + scale).random() < 0.3:
                        with torch.no_grad():
                            torch.testing.assert_close(sharded(X), reference(X), rtol=1e-4, atol=1e-5)
                    for model in (reference, sharded):
                        one, two = (model(X * each).square().mean() for each in (scale, -scale))
                        (one + two).backward()
                    assert_gradients_equal(reference, sharded, rtol=1e-4, atol=1e-5)
                    for model in (reference, sharded):
                        descend(model)

    run_ranks(check, 2)


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    class Frozen(Model):
        def __init__(self) -> None:
            super().__init__()
            for conv in _convs(self):
                conv.requires_grad_(False)

    def check() -> None:
        reference, sharded = twins(Frozen, _shard)
        assert_trains_alike(reference, sharded, LOSS, num_steps=3)
        assert all(conv.weight.grad is None for conv in _convs(sharded))

    run_ranks(check, 2)


def test_a_convolution_may_keep_a_dtype_of_its_own() -> None:
    class Mixed(Model):
        def __init__(self) -> None:
            super().__init__()
            for mixer in _mixers(self):
                mixer.register_forward_pre_hook(lambda _, args: (args[0].float(),))
                mixer.register_forward_hook(lambda *args: args[-1].bfloat16())

    def check() -> None:
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        plain = MixedPrecisionPolicy()
        _, sharded = twins(Mixed, partial(_shard, inner={"mp_policy": plain}, mp_policy=bf16))
        dtypes: set[tuple[torch.dtype, torch.dtype]] = set()
        for mixer in _mixers(sharded):
            mixer.register_forward_pre_hook(lambda m, _: dtypes.add((m.conv1d.weight.dtype, m.gate.dtype)))
        LOSS(sharded).backward()
        assert dtypes == {(torch.float32, torch.bfloat16)}
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in sharded.parameters())
        assert_at_rest(sharded)

    run_ranks(check, 2)


def test_parameters_on_meta_are_materialised_with_the_others() -> None:
    def check() -> None:
        with torch.device("meta"):
            model = Model()
        _shard(model)
        with pytest.raises(RuntimeError, match=r"materialized.*mixer\.conv1d\.weight"):
            model.layers[0](torch.ones(2, 7))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        LOSS(model).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    run_ranks(check, 2)


def test_another_method_of_the_owner_may_read_them_too() -> None:
    class Stepping(Mixer):
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.conv1d.weight, self.conv1d.bias)

    def check() -> None:
        mixer = Stepping(7)
        expected = mixer.step(torch.ones(2, 7))
        declare_reads(mixer, "conv1d.*")
        fully_shard(mixer.conv1d)
        fully_shard(mixer)
        register_fsdp_forward_method(mixer, "step")
        with torch.no_grad():
            torch.testing.assert_close(mixer.step(torch.ones(2, 7)), expected)

    run_ranks(check, 2)


def test_the_verbs_of_a_module_that_is_read_are_those_of_the_unit() -> None:
    """A schedule that never calls `forward` drives the unit by hand."""

    def check() -> None:
        reference, sharded = twins(Model, _shard)
        conv, block = _convs(sharded)[0], sharded.get_submodule("layers.0")
        unit(conv).unshard()
        assert type(conv.weight) is type(block.get_parameter("up.weight")) is nn.Parameter
        x = torch.ones(2, 7)
        mixed = cast(Mixer, block.get_submodule("mixer"))(x)  # piecewise: the block's forward never runs
        assert torch.equal(conv(x), F.linear(x, conv.weight, conv.bias)), "it did not free what was gathered by hand"
        mixed.sum().backward()
        unit(block).reshard()
        unit(block).reduce_gradients()
        reference.get_submodule("layers.0.mixer")(x).sum().backward()
        expected, got = _convs(reference)[0].weight.grad, conv.weight.grad
        assert expected is not None
        assert got is not None
        torch.testing.assert_close(whole(got), expected)

    run_ranks(check, 2)


def test_a_deleted_model_is_freed_at_once() -> None:
    def check() -> None:
        model = _shard(Model())
        LOSS(model).backward()
        states = [weakref.ref(state) for _, state in units(model)]
        gc.collect()
        gc.disable()
        del model
        assert all(ref() is None for ref in states)
        gc.enable()

    run_ranks(check, 1)


def test_a_unit_that_was_taken_over_is_described_where_it_is_now() -> None:
    def check() -> None:
        model = _shard(Model())
        text = describe(model)
        assert "FSDPLinear" not in text
        assert "layers.0 ... layers.2: FSDPBlock, 2 groups" in text

    run_ranks(check, 1)


def test_torchs_attention_reads_its_projection_and_need_not_be_told() -> None:
    class Attending(Net):
        def make_layer(self, dim: int) -> nn.Module:
            return Attention()

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(7, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.attention(x, x, x, need_weights=False)[0]
            return out

    def apply(model: Any) -> None:
        for layer in model.layers:
            fully_shard(layer.attention.out_proj)
            fully_shard(layer)
        fully_shard(model)

    def check() -> None:
        reference, sharded = twins(Attending, apply)
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)


# -- plans, refusals, and what was not declared ---------------------------------------------------------------------


def test_a_plan_passes_over_what_is_read_from_outside_and_says_so() -> None:
    model = Model()
    for mixer in _mixers(model):
        declare_reads(mixer, "conv1d.*")
    plan = plan_units(model, units=nn.Linear)
    assert [each.name for each in plan.units] == ["stem", "layers.0.up", "layers.1.up", "layers.2.up", "head", ""]
    assert plan.notes[0] == (
        "layers.0.mixer.conv1d (Linear) is no unit: a Mixer around it reads layers.0.mixer.conv1d.weight without "
        "calling its module. It is left to that one's unit."
    )
    assert "layers.0.mixer.conv1d" not in {each.name for each in plan_units(model, units=1).units}


def test_every_budget_trains_a_model_that_declares_what_it_reads() -> None:
    def check() -> None:
        def apply(model: Any, budget: int) -> None:
            for mixer in _mixers(model):
                declare_reads(mixer, "conv1d.*")
            fully_shard_model(model, units=budget, verbose=False)

        for budget in (1, 300, 600, 10**6):
            with case(budget):
                assert_trains_alike(*twins(Model, partial(apply, budget=budget)), LOSS)

    run_ranks(check, 2)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (("conv1d.wieght",), ValueError, r"'conv1d\.wieght' to name a parameter.*of Mixer, got none.*'conv1d\.weight'"),
        (("conv1d",), ValueError, r"'conv1d' to name.*There are 'conv1d\.weight', 'conv1d\.bias'"),
        (("gate",), ValueError, r"'gate' to name a parameter below a child of Mixer"),
        (("conv1d.weight", "up.*"), ValueError, r"'up\.\*' to name"),
        ((), TypeError, r"`names` to be names of parameters below Mixer"),
        ((nn.Linear,), TypeError, r"`names` to be names"),
    ],
)
def test_names_that_match_nothing_are_refused_with_those_that_would(
    names: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    mixer = Mixer(7)
    with pytest.raises(error, match=message):
        declare_reads(mixer, *names)
    assert not [name for name in mixer.__dict__ if "reads" in name]


def test_a_name_that_went_away_is_refused_by_fully_shard_before_anything_changes() -> None:
    def check() -> None:
        mixer = Mixer(7)
        declare_reads(mixer, "conv1d.bias")
        mixer.conv1d.bias = None  # type: ignore[assignment]
        with pytest.raises(ValueError, match=r"'conv1d\.bias' to name a parameter"):
            fully_shard(mixer)
        assert not isinstance(mixer.gate, DTensor)

    run_ranks(check, 1)


def test_a_declaration_that_comes_too_late_is_refused() -> None:
    def check() -> None:
        model = Model()
        for layer in model.layers:
            fully_shard(layer)
        for reader in (model.layers[0], model.layers[0].get_submodule("mixer")):
            with pytest.raises(ValueError, match=r"in no unit yet, got one in a unit.*before fully_shard"):
                declare_reads(reader, "*conv1d.weight")
        with pytest.raises(TypeError, match=r"`reader` to be an nn\.Module, got str"):
            declare_reads("mixer", "conv1d.weight")  # type: ignore[arg-type]

    run_ranks(check, 1)


def test_a_unit_of_another_stage_is_not_taken_over() -> None:
    def check() -> None:
        cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"placements": ZERO1}, {"placements": ZERO2}),
            ({"placements": ZERO3}, {"placements": DDP}),
            ({"reshard_after_forward": 2}, {"reshard_after_forward": True}),
            ({"reshard_after_forward": True}, {"reshard_after_forward": 2}),
        ]
        for inner, outer in cases:
            mixer = Mixer(7)
            declare_reads(mixer, "conv1d.*")
            fully_shard(mixer.conv1d, **inner)
            with pytest.raises(ValueError, match=r"unit of 'conv1d\.\w+'.*`placements` and the number.*both calls"):
                fully_shard(mixer, **outer)
            assert not isinstance(mixer.gate, DTensor)

    run_ranks(check, 4)


def test_what_was_not_declared_is_named_when_it_is_met_as_a_shard() -> None:
    class Undeclared(Mixer):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.project = nn.Linear(dim, dim)  # in the block's unit, which is gathered

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.project(x), self.conv1d.weight, self.conv1d.bias)

    class Around(Net):
        def make_layer(self, dim: int) -> nn.Module:
            return Block(dim, Undeclared)

    def check() -> None:
        model = Around()
        for conv in _convs(model):
            fully_shard(conv)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor") as caught:
            model(X)
        (note,) = caught.value.__notes__
        assert "Undeclared's forward was running" in note
        assert "these parameters were sharded: conv1d.weight, conv1d.bias. They" in note
        assert "declare_reads(module, 'conv1d.weight')" in note

        def fail(*_: object) -> None:
            raise RuntimeError("something else")

        unit(model).reset_iter_state()
        model.stem.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="something else") as caught:
            model(X)
        assert not getattr(caught.value, "__notes__", [])

    run_ranks(check, 2)
