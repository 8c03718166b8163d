"""A list of modules is one unit: gathered before the first module runs, freed after the last, reduced once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import (
    Net,
    Residual,
    assert_gradients_equal,
    assert_trains_alike,
    case,
    descend,
    fsdp,
    inputs,
    mean_square,
    twins,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lamella_engine import FSDPModule, MixedPrecisionPolicy, fully_shard
from lamella_engine.extending import unit_of
from lamella_engine.testing import Residency, assert_at_rest, named_units, record, require_unit
from lamella_testing import run_ranks

X = inputs()


class Normed(Net):
    """A norm before the head. With `runs_head` off, the caller runs the head."""

    runs_head = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x) if self.runs_head else x


class Chunked(Normed):
    """Computes the loss on chunks of rows, inside forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return torch.stack([self.head(chunk).square().mean() for chunk in x.chunk(3)]).mean()


class TiedUnit(Net):
    """The first and the last module to run are one unit, because of a common weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(11, 7)  # type: ignore[assignment]
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.stem.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.arange(12).view(3, 4) % 11)


class ParallelEnds(Net):
    """Neither of a unit's two modules sees the output of the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        first, second = self.layers[0](x), self.layers[1](x)
        head: torch.Tensor = self.head(self.layers[2](first) * second)
        return head


class RecomputedEnd(Normed):
    """Norm and head run again inside backward."""

    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = checkpoint(lambda x: self.head(self.norm(x)), x, use_reentrant=self.use_reentrant)
        return out


class EndRecomputedByReentry(RecomputedEnd):
    use_reentrant = True


def _last_two(model: Any, **options: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard([model.norm, model.head], **options)
    return fully_shard(model, **options)


def _ends(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard((model.stem, model.head))
    return fully_shard(model)


def _branches(model: Any) -> Any:
    fully_shard(list(model.layers[:2]))
    fully_shard(model.layers[2])
    return fully_shard(model)


def test_training_equals_the_unsharded_model() -> None:
    options = {"reshard_after_forward": False}
    cases = [
        *((Normed, _last_two), (Normed, lambda model: _last_two(model, **options))),
        *((Chunked, _last_two), (Chunked, lambda model: _last_two(model, **options))),
        *(
            (TiedUnit, _ends),
            (ParallelEnds, _branches),
            (RecomputedEnd, _last_two),
            (EndRecomputedByReentry, _last_two),
        ),
        (Normed, lambda model: fully_shard([model.stem, *model.layers, model.norm, model.head])),
    ]

    def check() -> None:
        for i, (make, apply) in enumerate(cases):
            with case((i, make)):
                assert_trains_alike(*twins(make, apply), mean_square(lambda model: model(X)), num_steps=3)

    run_ranks(check, 2)


def test_every_module_becomes_a_unit_of_the_same_state_and_the_list_comes_back() -> None:
    def check() -> None:
        model = Normed()
        modules = [model.norm, model.head]
        assert fully_shard(modules) is modules
        assert [type(module).__name__ for module in modules] == ["FSDPLayerNorm", "FSDPLinear"]
        assert all(isinstance(module, FSDPModule) for module in modules)
        assert unit_of(model.norm) is unit_of(model.head) is not None
        assert all(isinstance(parameter, DTensor) for module in modules for parameter in module.parameters())
        pair = (model.layers[0], model.layers[1])
        assert fully_shard(pair) is pair
        fully_shard(model)
        assert [unit.parameters.name for _, unit in named_units(model)] == [
            "",
            *2 * ["layers.0, layers.1"],
            *2 * ["head, norm"],
        ]

    run_ranks(check, 1)


def test_a_list_of_modules_is_gathered_once_a_pass_and_reduced_once() -> None:
    def check() -> None:
        model = _last_two(Normed())
        log = record(model)
        for _ in range(2):
            log.clear()
            model(X).mean().backward()
        # Both modules have one state, named in the log after a single module.
        events = [event for event in log.order if event.endswith(("norm", "head"))]
        assert events == ["gather norm", "compute norm", "compute head", "gather norm", "reduce norm"]

    run_ranks(check, 2)


def test_a_list_of_modules_stays_unsharded_until_its_last_module_has_run() -> None:
    def check() -> None:
        model = _last_two(Normed())
        unit = require_unit(model.head)
        seen = []
        model.norm.register_forward_hook(lambda *_: seen.append(unit.weights.residency))
        model.head.register_forward_hook(lambda *_: seen.append(unit.weights.residency))
        model(X)
        assert seen == [Residency.UNSHARDED, Residency.SHARDED]

    run_ranks(check, 2)


def test_a_list_of_modules_is_resharded_though_a_forward_leaves_modules_out() -> None:
    def check() -> None:
        reference, sharded = twins(Normed, _last_two)
        reference.runs_head = sharded.runs_head = False  # type: ignore[assignment]
        out: Any = sharded(X)
        unit = require_unit(sharded.norm)
        assert unit.weights.residency is Residency.SHARDED
        out.square().mean().backward()
        expected: Any = reference(X)
        expected.square().mean().backward()
        assert_gradients_equal(reference, sharded)
        assert_at_rest(sharded)

    run_ranks(check, 2)


@pytest.mark.parametrize("in_chunks", ["one backward", "a backward a chunk", "a backward a chunk, then the rest"])
def test_the_last_module_may_be_called_on_chunks_after_the_forward(in_chunks: str) -> None:
    def train(model: Any) -> None:
        hidden = model(X)
        detached = hidden.detach().requires_grad_()
        chunks = (hidden if in_chunks == "one backward" else detached).chunk(3)
        if in_chunks == "one backward":
            total: Any = torch.stack([model.head(chunk).square().mean() for chunk in chunks]).sum()
            total.backward()
            return
        for chunk in chunks:
            model.head(chunk).square().mean().backward()
        if in_chunks.endswith("rest"):
            hidden.backward(detached.grad)

    def check() -> None:
        reference, sharded = twins(Normed, _last_two)
        reference.runs_head = sharded.runs_head = False  # type: ignore[assignment]
        for _ in range(3):
            for model in (reference, sharded):
                train(model)
            assert_gradients_equal(reference, sharded)
            if in_chunks != "a backward a chunk":
                assert_at_rest(sharded)
            for model in (reference, sharded):
                descend(model)

    run_ranks(check, 2)


def test_chunks_outside_a_forward_gather_once_before_their_backward() -> None:
    def check() -> None:
        model = _last_two(Normed())
        model.runs_head = False
        hidden = model(X).detach().requires_grad_()
        log = record(model)
        losses = [model.head(chunk).mean() for chunk in hidden.chunk(3)]
        assert len(log.units_of("gather")) == 1
        total: Any = torch.stack(losses).sum()
        total.backward()
        assert len(log.units_of("reduce")) == 1, "autograd sums what the calls of one graph leave on a weight"
        assert_at_rest(model)
        with torch.no_grad():
            model.head(hidden)
        assert_at_rest(model)

    run_ranks(check, 2)


def test_an_exception_between_the_modules_is_forgotten() -> None:
    def check() -> None:
        reference, sharded = twins(Normed, _last_two)
        hook = sharded.get_submodule("head").register_forward_pre_hook(lambda *_: 1 / 0)
        for recovers in (True, False):
            with pytest.raises(ZeroDivisionError):
                sharded(X)
            if recovers:
                fsdp(sharded).reset_iter_state()
                assert_at_rest(sharded)
        hook.remove()
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(X)))

    run_ranks(check, 2)


def test_number_formats_hold_for_each_module() -> None:
    def check() -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
        norm, head = fully_shard([nn.LayerNorm(4), nn.Linear(4, 4)], mp_policy=policy)
        seen = []
        for module in (norm, head):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        assert norm(torch.ones(2, 4)).dtype == torch.float64
        assert head(norm(torch.ones(2, 4))).dtype == torch.float64
        assert set(seen) == {torch.bfloat16}

    run_ranks(check, 1)


def test_of_nested_modules_the_outer_one_counts() -> None:
    def check() -> None:
        model = Net()
        block = model.layers[0]
        assert isinstance(block, Residual)
        modules = [block.up, block, model.head]
        fully_shard(modules)
        assert type(block).__name__ == "FSDPResidual"
        assert type(block.up) is nn.Linear

    run_ranks(check, 1)


def test_lists_that_make_no_unit_are_refused() -> None:
    def check() -> None:
        model = Net()
        for modules, message in (
            ([], r"got an empty list"),
            ([model.head, model.head], r"one of them twice"),
            ([model.head, "stem"], r"or a list of them, got str"),
            ([model.head, model.layers], r"with a forward, got ModuleList"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                fully_shard(modules)  # type: ignore[type-var]
        assert type(model.head) is nn.Linear
        fully_shard(model.stem)
        with pytest.raises(ValueError, match=r"not a unit yet, got FSDPLinear"):
            fully_shard([model.stem, model.head])
        bad = nn.Linear(2, 2)
        bad.scale = nn.Parameter(torch.tensor(1.0))
        with pytest.raises(ValueError, match=r"'1\.scale'.*0-D"):
            fully_shard([model.head, bad])

    run_ranks(check, 1)
