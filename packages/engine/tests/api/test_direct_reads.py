"""Parameters read without a call of their module: after a declaration, part of the reader's unit in every way.

Each test shows a property of declared reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_models import (
    Net,
    assert_gradients_equal,
    assert_trains_alike,
    case,
    descend,
    fsdp,
    rows_of_this_rank,
    twins,
    whole,
)
from reading_models import (
    LOSS,
    OWN_UNITS,
    Mixer,
    MixerBlock,
    MixerNet,
    MixersRecomputedByReentry,
    RecomputedInside,
    RecomputedMixers,
    X,
    convs_of,
    mixers_of,
    record_by_name,
    shard_declared,
    units_by_name,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lamella_engine import declare_reads, fully_shard
from lamella_engine.extending import unit_of
from lamella_engine.testing import Residency, assert_at_rest, require_unit
from lamella_testing import run_ranks


def test_declared_parameters_are_gathered_before_forward_with_the_owner() -> None:
    def check() -> None:
        reference, sharded = twins(MixerNet, shard_declared)
        log = record_by_name(sharded)
        seen: list[bool] = []
        for mixer in mixers_of(sharded):
            mixer.register_forward_pre_hook(lambda mixer, _: seen.append(type(mixer.conv1d.weight) is nn.Parameter))
        torch.testing.assert_close(sharded(X), reference(X))
        assert seen == [True] * 3
        assert log.units_of("gather") == OWN_UNITS, "one gather a unit, and none for a convolution by itself"

    run_ranks(check, 2)


def test_declared_parameters_are_gathered_before_backward() -> None:
    def check() -> None:
        reference, sharded = twins(MixerNet, shard_declared)
        loss = LOSS(sharded)
        assert all(isinstance(conv.weight, DTensor) for conv in convs_of(sharded)), "freed in between"
        log = record_by_name(sharded)
        loss.backward()  # `_Kernel` asserts the weight's storage
        assert log.units_of("gather") == ["layers.2", "layers.1", "layers.0"]
        LOSS(reference).backward()
        assert_gradients_equal(reference, sharded)

    run_ranks(check, 2)


@pytest.mark.parametrize("make", [RecomputedMixers, MixersRecomputedByReentry, RecomputedInside])
def test_declared_parameters_are_freed_after_forward_and_after_backward_and_kept_while_the_forward_is_recomputed(
    make: Callable[[], nn.Module],
) -> None:
    def check() -> None:
        reference, sharded = twins(make, shard_declared)
        first, *_ = convs_of(sharded)
        unit = require_unit(first)
        flats = [group.unsharded_weight.flat for group in unit.parameters.groups]

        def is_free() -> bool:
            return all(flat.untyped_storage().nbytes() == 0 for flat in flats)

        freed: list[bool] = []
        sharded.get_submodule("layers.2").register_forward_pre_hook(lambda *_: freed.append(is_free()))
        assert_trains_alike(reference, sharded, LOSS, num_steps=3)
        assert freed[0], "free while later units run"
        assert is_free()
        assert unit.weights.residency is Residency.SHARDED

    run_ranks(check, 2)


def test_gradients_of_declared_parameters_are_counted_to_the_owners_unit() -> None:
    def check() -> None:
        reference, sharded = twins(MixerNet, shard_declared)
        log = record_by_name(sharded)
        for model, rows in ((reference, X), (sharded, rows_of_this_rank(X))):
            model(rows).square().mean().backward()
        assert log.units_of("reduce") == ["layers.2", "layers.1", "layers.0", "root"], "each unit once"
        assert_gradients_equal(reference, sharded)
        assert all(isinstance(conv.weight.grad, DTensor) for conv in convs_of(sharded))
        log.clear()
        fsdp(sharded).set_requires_gradient_sync(False)
        LOSS(sharded).backward()
        assert log.units_of("reduce") == []
        parameters = [
            p for unit in units_by_name(sharded).values() for group in unit.parameters.groups for p in group.parameters
        ]
        assert all(parameter.unsharded.grad is not None for parameter in parameters)

    run_ranks(check, 2)


def test_declared_parameters_are_gathered_ahead_and_in_one_call_with_the_owners() -> None:
    def check() -> None:
        _, sharded = twins(MixerNet, shard_declared)
        log = record_by_name(sharded)
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


def test_a_declared_parameter_in_another_unit_is_taken_over_or_refused() -> None:
    def check() -> None:
        # Taken over: the reader is two units above.
        def apply(model: Any) -> None:
            declare_reads(model.layers[0], "mixer.conv1d.*")
            declare_reads(model.layers[1].mixer, "conv1d.*")
            declare_reads(model.layers[2].mixer, "conv1d.*")
            for mixer in mixers_of(model):
                fully_shard(mixer.conv1d)
                fully_shard(mixer)
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)

        reference, sharded = twins(MixerNet, apply)
        assert_trains_alike(reference, sharded, LOSS)
        first, second, _ = convs_of(sharded)
        assert unit_of(first) is unit_of(sharded.get_submodule("layers.0"))
        assert unit_of(second) is unit_of(sharded.get_submodule("layers.1.mixer"))

        # Refused: a unit gathered with a module elsewhere.
        model = MixerNet()
        first, second, _ = convs_of(model)
        declare_reads(model.layers[0].get_submodule("mixer"), "conv1d.*")
        fully_shard([first, second])
        with pytest.raises(
            ValueError, match=r"'mixer\.conv1d\.\w+', which Mixer reads .* gathered with modules elsewh"
        ):
            fully_shard(model.layers[0])
        assert unit_of(model.layers[0]) is None
        assert not isinstance(model.layers[0].get_parameter("up.weight"), DTensor)

        # Refused: a unit already read by another unit.
        model = MixerNet()
        owner, reader, _ = mixers_of(model)
        reader.conv1d = owner.conv1d
        for mixer in (owner, reader):
            declare_reads(mixer, "conv1d.*")
        fully_shard(owner.conv1d)
        fully_shard(model.layers[0])
        with pytest.raises(ValueError, match=r"'mixer\.conv1d\.weight'.*on a module around all that use it"):
            fully_shard(model.layers[1])

    run_ranks(check, 2)


def test_shared_and_tied_parameters_that_are_declared_train_as_unsharded() -> None:
    class SharedModule(MixerNet):
        def __init__(self) -> None:
            super().__init__()
            one, two, three = mixers_of(self)
            two.conv1d = three.conv1d = one.conv1d

    class TiedWeight(MixerNet):
        def __init__(self) -> None:
            super().__init__()
            one, two, three = convs_of(self)
            two.weight = three.weight = one.weight

    def around(model: Any) -> None:
        """Readers of one parameter are in one unit: the model's."""
        for mixer in mixers_of(model):
            declare_reads(mixer, "conv1d.weight", "conv1d.bias")
        fully_shard(list(dict.fromkeys(convs_of(model))))
        for layer in model.layers:
            fully_shard(layer.up)
        fully_shard(model)

    class TiedHead(MixerNet):
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
        shard_declared(model)

    def check() -> None:
        for make, apply in ((SharedModule, around), (TiedWeight, around), (TiedHead, with_head)):
            with case(make.__name__):
                reference, sharded = twins(make, apply)
                assert_trains_alike(reference, sharded, LOSS, num_steps=3)

    run_ranks(check, 2)


def test_declared_parameters_compute_as_unsharded_without_gradients_and_in_eval() -> None:
    def check() -> None:
        reference, sharded = twins(MixerNet, shard_declared)
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


def test_checkpoint_names_of_declared_parameters_are_unchanged() -> None:
    def check() -> None:
        reference, sharded = twins(MixerNet, shard_declared)
        loss = LOSS(sharded)
        expected = reference.state_dict()
        conv_state = convs_of(sharded)[0].state_dict(prefix="layers.0.mixer.conv1d.")
        for state in (sharded.state_dict(), conv_state):
            assert all(isinstance(value, DTensor) for value in state.values())
            assert all(torch.equal(whole(value), expected[name]) for name, value in state.items())
        assert list(sharded.state_dict()) == list(expected)
        assert [name for name, _ in sharded.named_parameters()] == [name for name, _ in reference.named_parameters()]
        loss.backward()
        fsdp(sharded).zero_grad()
        for assign in (False, True):
            loaded = {name: value.clone() * 2 for name, value in sharded.state_dict().items()}
            sharded.load_state_dict(loaded, assign=assign)
            reference.load_state_dict({name: value * 2 for name, value in reference.state_dict().items()})
            assert_trains_alike(reference, sharded, LOSS, num_steps=1)

    run_ranks(check, 2)


def test_declared_parameters_keep_their_tensor_parallel_annotations() -> None:
    def marked() -> nn.Module:
        model = MixerNet(num_layers=1, dim=8)
        for conv in convs_of(model):
            conv.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            conv.weight.partition_dim = 0  # type: ignore[attr-defined]
        return model

    def check() -> None:
        _, sharded = twins(marked, shard_declared)
        (conv,) = convs_of(sharded)
        for is_unsharded in (False, True):
            if is_unsharded:
                fsdp(sharded.get_submodule("layers.0")).unshard()
            assert isinstance(conv.weight, DTensor) != is_unsharded
            assert vars(conv.weight).items() >= {("tensor_model_parallel", True), ("partition_dim", 0)}

    run_ranks(check, 2)

    class ParallelMixers(Net):
        """Every parameter is a DTensor on the tensor axis; the axis cuts the convolution's."""

        def make_layer(self, dim: int) -> nn.Module:
            return MixerBlock(dim, ParallelMixer)

    class ParallelMixer(Mixer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.gate * F.linear(x, self.conv1d.weight, self.conv1d.bias)
            return out

    def check_dtensors() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        models = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            model = ParallelMixers(num_layers=1, dim=8)
            for module in model.modules():
                placement = Shard(0) if module in convs_of(model) else Replicate()
                for name, parameter in module.named_parameters(recurse=False):
                    part = distribute_tensor(parameter.data, mesh["tensor"], [placement])
                    module.register_parameter(name, nn.Parameter(part))
            if is_sharded:
                shard_declared(model, mesh=mesh["data"])
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
        (conv,) = convs_of(models[1])
        assert conv.weight.ndim == len(conv.weight.placements) == 2  # type: ignore[attr-defined]

    run_ranks(check_dtensors, 4)
