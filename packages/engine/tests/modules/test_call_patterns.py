"""Gradients are the unsharded model's for any way to call a forward, and for any output."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import pytest
import torch
from engine_models import (
    Net,
    Residual,
    assert_gradients_equal,
    assert_trains_alike,
    case,
    inputs,
    mean_square,
    shard,
    shard_on,
    twins,
)
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lamella_engine import DDP, ZERO2, MixedPrecisionPolicy, ShardingOptions, fully_shard
from lamella_engine.extending import map_tensors, tensors_in
from lamella_engine.testing import assert_at_rest, record
from lamella_testing import run_ranks

X = inputs()


def _check(make: Callable[[], nn.Module], forward: Callable[[Any], torch.Tensor], apply: Any = shard) -> None:
    """Two steps: the second replays the order of the first."""

    def on_each_rank() -> None:
        assert_trains_alike(*twins(make, apply), mean_square(forward))

    run_ranks(on_each_rank, 2)


# -- calls ----------------------------------------------------------------------------------------------------------


def test_a_unit_may_run_twice_in_one_forward() -> None:
    class RepeatedLayers(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for i in (0, 1, 1, 2, 0):
                x = self.layers[i](x)
            head: torch.Tensor = self.head(x)
            return head

    _check(RepeatedLayers, lambda model: model(X))


def test_a_unit_may_run_on_two_branches_of_one_forward() -> None:
    class Branches(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            first, second = self.layers[0](x), self.layers[0](-x)
            first, second = self.layers[1](first), self.layers[2](second)
            head: torch.Tensor = self.head(first * second)
            return head

    _check(Branches, lambda model: model(X))


class _Recursive(Residual):
    """Calls itself, with its parameters read before and after the inner call."""

    error: type[BaseException] | None = None

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x)
        if depth == 0 and self.error is not None:
            raise self.error
        if depth:
            try:
                x = x + self.call_inside(x, depth - 1)
            except ArithmeticError:
                x = -x
        return super().forward(x)

    def call_inside(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        out: torch.Tensor = self(x, depth)
        return out


class _RecursiveNet(Net):
    """Blocks that call themselves."""

    error: type[BaseException] | None = None

    def make_layer(self, dim: int) -> nn.Module:
        layer = _Recursive(dim)
        layer.error = self.error
        return layer


class _CaughtNet(_RecursiveNet):
    error = ArithmeticError


class _CheckpointedNet(_RecursiveNet):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        head: torch.Tensor = self.head(x)
        return head


class _RecursiveRoot(Net):
    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        head = super().forward(x)
        return head if depth == 0 else head + self.call_inside(self.stem(x)[:, :3], depth - 1) + self.head.bias

    def call_inside(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        out: torch.Tensor = self(x, depth)
        return out


class _RecomputingItself:
    """Lets a model that calls itself recompute the inner calls inside of the outer call's backward."""

    def call_inside(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        call = cast(Callable[..., torch.Tensor], self)
        # Where the first run of an outer checkpoint records no graph, a checkpoint would warn.
        return checkpoint(call, x, depth, use_reentrant=True) if torch.is_grad_enabled() else call(x, depth)


class _RecomputingBlock(_RecomputingItself, _Recursive):
    pass


class _RecomputingNet(Net):
    def make_layer(self, dim: int) -> nn.Module:
        return _RecomputingBlock(dim)


class _RecomputingRoot(_RecomputingItself, _RecursiveRoot):
    pass


class _MutualNet(Net):
    """The first block calls the second, which calls the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (layer.get_submodule("up") for layer in self.layers[:2])
        handles = [
            first.register_forward_hook(lambda _, args, output: output + self.layers[1](args[0]).sum()),
            second.register_forward_hook(
                lambda _, args, output: (
                    output + (self.layers[0](args[0] / 2).sum() if args[0].abs().max() > 1e-2 else 0)
                )
            ),
        ]
        output = super().forward(x)
        for handle in handles:
            handle.remove()
        return output


@pytest.mark.parametrize(
    "make",
    [_RecursiveNet, _CaughtNet, _CheckpointedNet, _RecursiveRoot, _MutualNet, _RecomputingNet, _RecomputingRoot],
)
@pytest.mark.parametrize("is_resharded", [True, False])
def test_a_unit_may_be_called_inside_its_own_forward(make: type[Net], is_resharded: bool) -> None:
    _check(make, lambda model: model(X), shard_on(reshard_after_forward=is_resharded))


def test_a_forward_after_an_interrupt_inside_a_units_own_forward_is_a_new_forward() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins(_RecursiveNet)
        layer: Any = sharded.get_submodule("layers.1")
        layer.error = KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            sharded(X)
        layer.error = None
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(X)))

    run_ranks(on_each_rank, 2)


def test_the_root_may_run_twice_before_one_backward() -> None:
    _check(Net, lambda model: model(X) + model(2 * X))


@pytest.mark.parametrize("first", [0, 1])
def test_two_forwards_may_be_followed_by_their_backwards_in_either_order(first: int) -> None:
    def on_each_rank() -> None:
        pair = twins()
        for _ in range(2):
            for model in pair:
                model.zero_grad()
                losses = [model(X).square().mean(), model(-X).mean()]
                losses[first].backward()
                losses[1 - first].backward()
            assert_gradients_equal(*pair)
        assert_at_rest(pair[1])

    run_ranks(on_each_rank, 2)


def test_a_graph_that_is_kept_can_be_walked_twice() -> None:
    def on_each_rank() -> None:
        pair = twins()
        for model in pair:
            loss = model(X).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        assert_gradients_equal(*pair)
        assert_at_rest(pair[1])

    run_ranks(on_each_rank, 2)


def test_a_unit_may_be_called_without_its_root() -> None:
    def forward(model: Net) -> Any:
        return model(X).mean() + model.layers[1](torch.ones(2, 7)).mean()

    _check(Net, forward)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_may_come_anywhere(mode: Callable[[], Any]) -> None:
    def on_each_rank() -> None:
        reference, sharded = twins()

        def loss_of(model: nn.Module) -> torch.Tensor:
            with mode():
                before = model(X)
            loss = model(X).square().mean()
            with mode():
                assert torch.equal(model(X), before)
            return loss  # type: ignore[no-any-return]

        assert_trains_alike(reference, sharded, loss_of)

    run_ranks(on_each_rank, 2)


def test_gradients_of_inputs_alone_can_be_asked_for() -> None:
    def on_each_rank() -> None:
        pair = twins()
        gradients: list[torch.Tensor] = []
        for model in pair:
            x = X.clone().requires_grad_()
            gradients += torch.autograd.grad(model(x).square().mean(), x)
        torch.testing.assert_close(*gradients)
        assert_at_rest(pair[1])

    run_ranks(on_each_rank, 2)


def test_a_validation_may_run_inside_a_backward() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins()

        def validate(_: torch.Tensor) -> None:
            with torch.no_grad():
                sharded(X)
                sharded.get_submodule("layers.1")(torch.ones(1, 7))

        for _ in range(2):
            reference(X).square().mean().backward()
            out = sharded(X)
            out.register_hook(validate)
            out.square().mean().backward()
            assert_gradients_equal(reference, sharded)
            assert_at_rest(sharded)

    run_ranks(on_each_rank, 2)


def test_backward_works_with_saved_tensors_hooks_and_in_another_thread() -> None:
    def forward(model: nn.Module) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return model(X)

    def on_each_rank() -> None:
        pair = twins()
        for model in pair:
            thread = threading.Thread(target=forward(model).square().mean().backward)
            thread.start()
            thread.join()
        assert_gradients_equal(*pair)
        assert_at_rest(pair[1])

    run_ranks(on_each_rank, 2)


def test_a_forward_with_unused_output_leaves_the_next_step_right() -> None:
    def forward(model: Net) -> torch.Tensor:
        model(X * 3)
        out: torch.Tensor = model(X)
        return out

    _check(Net, forward)


def test_part_of_the_outputs_may_be_detached() -> None:
    class Stop(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](self.stem(x))
            x = self.layers[1](x.detach())
            head: torch.Tensor = self.head(self.layers[2](x))
            return head

    _check(Stop, lambda model: model(X))


# -- inputs and outputs ---------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class _ModelOutput(OrderedDict[str, Any]):
    """An ordered dict with attributes, as in model libraries' outputs."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class _Batch(dict[str, Any]):
    """A dict unknown to pytree."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class _Scored(dict[str, Any]):
    """A dict with a tensor as attribute: opaque."""

    def __init__(self, score: torch.Tensor, **entries: Any) -> None:
        super().__init__(entries)
        self.score = score


@dataclass
class _RecordDict(dict[str, Any]):
    """A dataclass that is a dict without entries."""

    hidden: torch.Tensor


class _Stack(list[torch.Tensor]):
    """A list unknown to pytree."""


pytree.register_pytree_node(
    _ModelOutput,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, keys: _ModelOutput(zip(keys, values, strict=True)),
)


class _Structured(Residual):
    """Takes an input by keyword in a nest of containers, and returns another nest."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]

    def forward(self, flag: bool, *, nest: dict[str, list[torch.Tensor | None]]) -> Any:  # type: ignore[override]
        (x, nothing), ids = nest["x"], nest["ids"][0]
        assert flag and nothing is None
        assert x is not None and ids is not None and ids.dtype == torch.int64
        return type(self).pack(super().forward(x))


def _structured(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> type[Net]:
    block = type("Structured", (_Structured,), {"pack": staticmethod(pack), "unpack": staticmethod(unpack)})

    class StructuredNet(Net):
        def make_layer(self, dim: int) -> nn.Module:
            layer: nn.Module = block(dim)
            return layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = unpack(layer(True, nest={"x": [x, None], "ids": [torch.arange(3)]}))
            head: torch.Tensor = self.head(x)
            return head

    return StructuredNet


@dataclass(frozen=True)
class _Record:
    """A dataclass unknown to pytree."""

    number: int
    hidden: torch.Tensor | list[torch.Tensor]
    tables: dict[str, object] | None = None


class _Opaque:
    """Hides a tensor from pytree and the engine."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


PACKINGS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda x: (1, x, None), lambda out: out[1]),
    "dict": (lambda x: {"hidden": {"last": [x]}, "cache": None}, lambda out: out["hidden"]["last"][0]),
    "named tuple": (lambda x: _Pair(x * 2, x), lambda out: out.second),
    "model output": (lambda x: _ModelOutput(logits=x, states=(x + 1,)), lambda out: out.states[0]),
    "dict unknown to pytree": (lambda x: _Batch(x=(x, None)), lambda out: out.x[0]),
    "dict with an attribute": (lambda x: _Scored(x, x=1), lambda out: out.score),
    "dataclass and dict": (lambda x: _RecordDict(hidden=x), lambda out: out.hidden),
    "list unknown to pytree": (lambda x: _Stack([x / 2, x]), lambda out: out[0] + out[1]),
    "set": (lambda x: {x}, lambda out: next(iter(out))),
    "dataclass": (lambda x: _Record(1, x), lambda out: out.hidden),
    "nested dataclass": (
        lambda x: [_Record(1, [x / 2], {"inner": _Record(2, x / 2)})],
        lambda out: out[0].hidden[0] + out[0].tables["inner"].hidden,
    ),
    "object": (_Opaque, lambda out: out.hidden),
    "object beside a tensor": (lambda x: (x, _Opaque(x * 2)), lambda out: out[1].hidden),
    "same tensor twice": (lambda x: [x, x], lambda out: out[0] + out[1]),
    "a view": (lambda x: x.t(), lambda out: out.t()),
}


def test_tensors_are_found_in_nested_inputs_and_outputs() -> None:
    def on_each_rank() -> None:
        for name, packing in PACKINGS.items():
            with case(name):
                assert_trains_alike(*twins(_structured(*packing)), mean_square(lambda model: model(X)))

    run_ranks(on_each_rank, 2)


def test_tensors_in_dataclass_inputs_get_gradients_and_inputs_stay_unchanged() -> None:
    class RecordBlock(Residual):
        def forward(self, record: _Record) -> torch.Tensor:  # type: ignore[override]
            assert isinstance(record.hidden, torch.Tensor)
            return super().forward(record.hidden)

    class RecordNet(Net):
        def make_layer(self, dim: int) -> nn.Module:
            return RecordBlock(dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for layer in self.layers:
                record = _Record(1, x)
                x = layer(record)
                assert record.hidden is not x
            head: torch.Tensor = self.head(x)
            return head

    _check(RecordNet, lambda model: model(X))


CONTAINERS: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": lambda: {"inner": []},
    "ordered dict": OrderedDict,
    "registered class": _ModelOutput,
    "dict unknown to pytree": _Batch,
    "set": set,
    "dataclass": lambda: _Record(1, [torch.arange(3)], {}),
}


def test_a_container_without_tensors_that_change_is_passed_on_itself() -> None:
    """What forward writes into a copy would be lost."""

    class Returning(nn.Linear):
        def forward(self, given: list[Any], *, by_keyword: Any) -> tuple[torch.Tensor, Any, Any]:  # type: ignore[override]
            return super().forward(given[0]), given[1], by_keyword

    def check() -> None:
        layer = Returning(3, 5)
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        x = X.clone().requires_grad_()
        for name, make in CONTAINERS.items():
            with case(name):
                container = make()
                _, first, second = layer([x, container], by_keyword=container)
                assert first is container and second is container

    run_ranks(check, 2)


@dataclass
class _Node:
    hidden: torch.Tensor
    parent: Any = None
    result: torch.Tensor = field(init=False)


def _node_inside_itself() -> _Node:
    node = _Node(X)
    node.parent = [node]
    return node


def _dict_inside_itself() -> dict[str, Any]:
    nest: dict[str, Any] = {"x": X}
    nest["nest"] = nest
    return nest


def test_containers_that_hold_themselves_are_refused_by_class() -> None:
    class Passing(nn.Linear):
        def forward(self, given: Any) -> Any:
            return given.hidden if isinstance(given, _Opaque) else super().forward(X)

    def check() -> None:
        layer = Passing(3, 5)
        fully_shard(layer)
        for nest, name in ((_node_inside_itself(), "_Node"), (_dict_inside_itself(), "dict")):
            for given in (nest, _Opaque(cast(torch.Tensor, nest))):  # an argument, and an output
                with (
                    case(name),
                    pytest.raises(RuntimeError, match=rf"without cycles, got a {name} that holds itself\."),
                ):
                    layer(given)

    run_ranks(check, 2)


def test_a_dataclass_with_an_unset_field_is_an_argument_and_an_output() -> None:
    class NodeBlock(Residual):
        def forward(self, node: _Node) -> _Node:  # type: ignore[override]
            node.result = super().forward(node.hidden)
            return _Node(node.result)

    class NodeNet(Net):
        def make_layer(self, dim: int) -> nn.Module:
            return NodeBlock(dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            node = _Node(self.stem(x))
            for layer in self.layers:
                out = layer(node)
                node = _Node(out.hidden + node.result)
            head: torch.Tensor = self.head(node.hidden)
            return head

    _check(NodeNet, lambda model: model(X))


class _Cache:
    """Registered below, with a new list each time that it is asked for its tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)

    def append(self, tensor: torch.Tensor) -> None:
        self.tensors.append(tensor)


pytree.register_pytree_node(
    _Cache, lambda cache: ([cache.tensors[:]], None), lambda children, _: _Cache(*next(iter(children)))
)


@dataclass
class _Features:
    hidden: torch.Tensor
    noted: list[torch.Tensor]


class _RegisteredFeatures(_Features):
    """In pytree's registry."""


pytree.register_pytree_node(
    _RegisteredFeatures,
    lambda features: ([features.hidden, features.noted], None),
    lambda children, _: _RegisteredFeatures(*children),
)


class _Writing(Residual):
    """Writes into what it is given, and returns nothing."""

    write: Callable[[Any, torch.Tensor], None]
    read: Callable[[Any], torch.Tensor]

    def __init__(self, dim: int = 7) -> None:
        super().__init__(dim)
        self.side = Residual(dim)

    def forward(self, nest: Any) -> None:  # type: ignore[override]
        x = type(self).read(nest)
        type(self).write(nest, self.side(super().forward(x)))


def _replace(features: _Features, x: torch.Tensor) -> None:
    features.noted.append(features.hidden)
    features.hidden = x


def _move_on(queue: list[torch.Tensor], x: torch.Tensor) -> None:
    queue.append(queue.pop(0) * x)


Writes = tuple[Callable[[torch.Tensor], Any], Callable[[Any, torch.Tensor], None], Callable[[Any], torch.Tensor]]


def _in_order(tensors: set[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a set by their sums: the order of a set is another in each process, and so is a sum's rounding."""
    return sorted(tensors, key=lambda tensor: float(tensor.detach().sum()))


WRITES: dict[str, Writes] = {
    "list": (lambda x: [x], list.append, lambda nest: nest[-1]),
    "list with an item removed": (lambda x: [x / 2, x], _move_on, lambda nest: nest[-1]),
    "list in a tuple": (lambda x: (0, [x]), lambda nest, x: nest[1].append(x), lambda nest: nest[1][-1]),
    "list in a named tuple": (
        lambda x: _Pair(x, cast(Any, [x])),
        lambda nest, x: nest[1].append(x),
        lambda nest: nest[1][-1],
    ),
    "dict": (lambda x: {"x": x}, lambda nest, x: nest.update(x=x, old=nest["x"]), lambda nest: nest["x"]),
    "dict unknown to pytree": (lambda x: _Batch(x=x), lambda nest, x: nest.update(x=x), lambda nest: nest.x),
    "ordered dict of lists": (
        lambda x: OrderedDict(x=[x]),
        lambda nest, x: nest["x"].append(x),
        lambda nest: nest["x"][-1],
    ),
    "default dict": (
        lambda x: defaultdict(list, {"x": [x]}),
        lambda nest, x: nest["x"].append(x),
        lambda nest: nest["x"][-1],
    ),
    "deque": (lambda x: deque([x]), lambda nest, x: nest.append(x), lambda nest: nest[-1]),
    "set": (lambda x: {x}, lambda nest, x: nest.add(x), lambda nest: torch.stack(_in_order(nest)).sum(0)),
    "dataclass": (lambda x: _Features(x, []), _replace, lambda nest: nest.hidden + sum(nest.noted)),
    "registered dataclass": (
        lambda x: _RegisteredFeatures(x, []),
        _replace,
        lambda nest: nest.hidden + sum(nest.noted),
    ),
    "registered class": (lambda x: _Cache(x), lambda nest, x: nest.append(x), lambda nest: nest.tensors[-1]),
    "registered dict": (lambda x: _ModelOutput(x=x), lambda nest, x: nest.update(x=x), lambda nest: nest.x),
}


def _writing(make: Callable[[torch.Tensor], Any], write: Any, read: Any) -> type[Net]:
    block = type("Writing", (_Writing,), {"write": staticmethod(write), "read": staticmethod(read)})

    class WritingNet(Net):
        def make_layer(self, dim: int) -> nn.Module:
            layer: nn.Module = block(dim)
            return layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nest = make(self.stem(x))
            for layer in self.layers:
                layer(nest)
            head: torch.Tensor = self.head(read(nest))
            return head

    return WritingNet


@pytest.mark.parametrize(
    "container", [lambda x: _ModelOutput(x=x), lambda x: {"x": x}, lambda x: deque([x]), lambda x: _Cache(x)]
)
def test_no_tensor_of_a_container_waits_for_the_garbage_collector(container: Callable[..., Any]) -> None:
    gc.disable()
    try:
        tensor = torch.ones(2)
        alive = weakref.ref(tensor)
        nest = container(tensor)
        tensors_in(nest)
        map_tensors(torch.neg, nest, [])
        del tensor, nest
        assert alive() is None
    finally:
        gc.enable()


def test_a_container_that_a_unit_writes_into_gets_what_was_written() -> None:
    """The unit's backward begins with the gradients of what it wrote."""

    def on_each_rank() -> None:
        for name, writes in WRITES.items():
            with case(name):
                assert_trains_alike(*twins(_writing(*writes)), mean_square(lambda model: model(X)))

    run_ranks(on_each_rank, 2)


def test_what_a_recomputed_unit_writes_into_a_list_is_what_it_writes_without_sharding() -> None:
    class CheckpointedNet(Net):
        def make_layer(self, dim: int) -> nn.Module:
            return _Appending(dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            noted = [x]
            for layer in self.layers:
                x = checkpoint(layer, x, noted, use_reentrant=False)
            head: torch.Tensor = self.head(x + torch.stack(noted).sum(0))
            return head

    _check(CheckpointedNet, lambda model: model(X))


class _Appending(Residual):
    def forward(self, x: torch.Tensor, noted: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        noted.append(super().forward(x))
        return noted[-1]


def test_items_that_forward_leaves_alone_stay_the_callers_own() -> None:
    class Failing(nn.Linear):
        error: Exception | None = None

        def forward(self, given: dict[str, Any]) -> None:  # type: ignore[override]
            assert given["x"].dtype == given["inner"][0].dtype == torch.bfloat16
            given["inner"].append(super().forward(given.pop("x")))
            if self.error is not None:
                raise self.error

    def check() -> None:
        layer = Failing(3, 5)
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        kept, inner = X + 1, [X]
        given = {"x": X, "kept": kept, "inner": inner}
        layer.error = ValueError("stop")
        with pytest.raises(ValueError, match="stop"):
            layer(given)
        assert list(given) == ["x", "kept", "inner"] and len(inner) == 1  # an exception leaves all as it was
        layer.error = None
        layer(given)
        assert list(given) == ["kept", "inner"] and given["kept"] is kept and given["inner"] is inner
        assert inner[0] is X and inner[1].dtype == torch.bfloat16 and inner[1].requires_grad

    run_ranks(check, 2)


def test_an_elementwise_weight_behind_an_opaque_output_is_unsharded_in_backward() -> None:
    """A read from freed storage would end the process."""

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 7))

        def forward(self, x: torch.Tensor) -> _Opaque:
            return _Opaque(x * self.weight)

    class OpaqueNet(Net):
        def make_layer(self, dim: int) -> nn.Module:
            return Gain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x).hidden
            head: torch.Tensor = self.head(x)
            return head

    _check(OpaqueNet, lambda model: model(X))


def test_outputs_may_be_written_in_place() -> None:
    class InPlace(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
                x.mul_(2).tanh_()
            head: torch.Tensor = self.head(x)
            return head

    _check(InPlace, lambda model: model(X))


def test_an_input_that_a_unit_changes_in_place_is_refused_by_autograd() -> None:
    class InPlace(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.relu_())

    class InPlaceNet(Net):
        def make_layer(self, dim: int) -> nn.Module:
            return InPlace(dim)

    def check() -> None:
        model = InPlaceNet()
        shard(model)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            model(X)

    run_ranks(check, 2)


def test_inputs_may_be_integers() -> None:
    class Tokens(Net):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Embedding(11, 7)  # type: ignore[assignment]

    def apply(model: Tokens) -> None:
        fully_shard(model.stem)
        shard(model)

    _check(Tokens, lambda model: model(torch.arange(12).view(3, 4) % 11), apply)


def test_a_unit_may_return_one_of_its_parameters() -> None:
    class NetAndWeight(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.head.weight

    def forward(model: NetAndWeight) -> torch.Tensor:
        out, weight = model(X)
        mixed: torch.Tensor = out @ weight
        return mixed

    _check(NetAndWeight, forward)


def test_an_lstm_that_keeps_its_weights_in_a_list_trains_as_unsharded() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 5)
            self.head = nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            head: torch.Tensor = self.head(self.lstm(x)[0])
            return head

    _check(Recurrent, lambda model: model(X), fully_shard)


def test_attention_that_reads_its_childrens_weights_works_inside_a_unit() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
            return out

    _check(Attention, lambda model: model(torch.ones(5, 2, 4).cumsum(0).sin()), fully_shard)


class _Notes:
    """A list for tensors, given to every block."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []


class _Noting(Residual):
    """Leaves a tensor computed from its output in the notes."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__(dim)
        self.side = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, notes: _Notes) -> torch.Tensor:  # type: ignore[override]
        x = super().forward(x)
        notes.tensors.append(self.side_of(x))
        return x

    def side_of(self, x: torch.Tensor) -> torch.Tensor:
        side: torch.Tensor = self.side(x)
        return side


class _NotingTwice(_Noting):
    """The noted tensor's weight is used in the output too: its gradient is not there when the first part is made."""

    def side_of(self, x: torch.Tensor) -> torch.Tensor:
        side: torch.Tensor = super().side_of(x) + self.up(x).sum()
        return side


class _Product(torch.autograd.Function):
    """A product that keeps its weight past autograd's saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient @ ctx.weight.t(), ctx.x.t() @ gradient


class _NotingProduct(_Noting):
    def side_of(self, x: torch.Tensor) -> torch.Tensor:
        side: torch.Tensor = _Product.apply(x, self.side.weight)  # type: ignore[no-untyped-call]
        return side


class _Observing(Residual):
    """Leaves a tensor computed from its input last, by a weight of the output, in an attribute and in the notes."""

    def forward(self, x: torch.Tensor, notes: _Notes) -> torch.Tensor:  # type: ignore[override]
        out = super().forward(x)
        self.loss = self.up(x).square().mean(0)
        notes.tensors.append(self.loss[:7])
        return out


class _NotingNet(Net):
    block: type[nn.Module] = _Noting

    def make_layer(self, dim: int) -> nn.Module:
        layer: nn.Module = self.block(dim)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        notes = _Notes()
        for layer in self.layers:
            x = layer(x, notes)
        head: torch.Tensor = self.head(x + torch.stack(notes.tensors).sum(0))
        return head


def test_a_tensor_that_a_unit_computes_last_may_reach_the_loss_past_its_outputs() -> None:
    """Autograd would run the tensor's node before the output's, for which the unit's parameters are gathered."""

    class ObservingNet(_NotingNet):
        block = _Observing

    def check() -> None:
        assert_trains_alike(*twins(ObservingNet), mean_square(lambda model: model(X)))

    run_ranks(check, 2)


def test_a_tensor_computed_from_a_units_output_past_it_makes_no_wrong_gradients() -> None:
    """The noted tensor's backward runs before the unit's: after a gather, parameters are allocated and unfilled."""

    class NotingTwiceNet(_NotingNet):
        block = _NotingTwice

    class NotingProductNet(_NotingNet):
        block = _NotingProduct

    def with_frozen_sides() -> _NotingNet:
        model = _NotingNet()
        for layer in model.layers:
            layer.side.requires_grad_(False)
        return model

    def check() -> None:
        for make, message in (
            (_NotingNet, "modified by an inplace operation"),
            (NotingTwiceNet, "modified by an inplace operation"),
            (with_frozen_sides, "modified by an inplace operation"),
            (NotingProductNet, "before its backward begins"),
        ):
            with case(f"{make.__name__}, {message}"):
                _, model = twins(make)
                with pytest.raises(RuntimeError, match=message):
                    model(X).square().mean().backward()
                pair = twins(make, shard_on(reshard_after_forward=False))
                assert_trains_alike(*pair, mean_square(lambda model: model(X)))

    run_ranks(check, 2)


class _HandingOver(Residual):
    """Leaves its result in an attribute, and returns the result's values alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.result = super().forward(x)
        return self.result.detach()


class _HandingOverAlone(_HandingOver):
    """Returns nothing."""

    def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
        super().forward(x)


class _HandingOverNet(Net):
    block: type[nn.Module] = _HandingOver

    def make_layer(self, dim: int) -> nn.Module:
        layer: nn.Module = self.block(dim)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            layer(x)
            x = layer.result  # type: ignore[assignment]
        head: torch.Tensor = self.head(x)
        return head


def test_a_backward_that_runs_beside_its_prefetched_gather_is_refused() -> None:
    """No hook waits for the gather: parameters are allocated, and unfilled where another rank is late."""

    def check() -> None:
        _, model = twins(_HandingOverNet)
        root: Any = model
        root.set_modules_to_backward_prefetch([root.layers[2]])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(X).square().mean().backward()
        pair = twins(_HandingOverNet, shard_on(reshard_after_forward=False))
        assert_trains_alike(*pair, mean_square(lambda model: model(X)))

    run_ranks(check, 2)


def test_a_unit_may_return_nothing_and_leave_its_result_in_an_attribute() -> None:
    class HandingOverAloneNet(_HandingOverNet):
        block = _HandingOverAlone

    def check() -> None:
        assert_trains_alike(*twins(HandingOverAloneNet), mean_square(lambda model: model(X)))

    run_ranks(check, 2)


class _Predicting(Residual):
    """Leaves a prediction from its input in an attribute, and returns the input as it came."""

    def forward(self, x: Any) -> Any:
        self.prediction = super().forward(x["x"])
        return x


class _PredictingNet(Net):
    def make_layer(self, dim: int) -> nn.Module:
        return _Predicting(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer({"x": x})["x"]
        predictions: list[Any] = [layer.prediction for layer in self.layers]
        head: torch.Tensor = self.head(x + torch.stack(predictions).sum(0).mean())
        return head


def test_a_unit_may_return_its_input_and_leave_a_prediction_in_an_attribute() -> None:
    """The input's gradient is complete behind the unit's backward: the hook on an output needs a node of its own."""

    def check() -> None:
        plain, model = twins(_PredictingNet)
        log = record(model)
        assert_trains_alike(plain, model, mean_square(lambda model: model(X)))
        log.clear()
        model(X).square().mean().backward()
        assert log.units_of("gather").count("layers.1") == 2  # resharded between forward and backward

    run_ranks(check, 2)


class _Viewing(Residual):
    """Returns views: of a tensor of its forward, and of its input."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).view(-1), x.view(-1)


class _ViewingNet(Net):
    def make_layer(self, dim: int) -> nn.Module:
        return _Viewing(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            out, view_of_input = layer(x)
            x = (out.mul_(0.5) + view_of_input).view(x.shape)
        head: torch.Tensor = self.head(x)
        return head


def test_a_unit_may_return_views_that_the_caller_changes_in_place() -> None:
    """A changed view has another node of the graph, without its hook."""

    def check() -> None:
        plain, model = twins(_ViewingNet)
        log = record(model)
        assert_trains_alike(plain, model, mean_square(lambda model: model(X)))
        log.clear()
        model(X).square().mean().backward()
        # A hook on the base of a view of an input would begin the backward again, behind its end, and gather once more.
        assert log.units_of("gather").count("layers.1") == 2

    run_ranks(check, 2)


@pytest.mark.parametrize(
    "arguments", [{}, {"reshard_after_forward": False}, {"options": ShardingOptions(placements=ZERO2)}]
)
def test_a_forward_in_autograds_context_that_clones_saved_tensors_is_refused(arguments: Any) -> None:
    """The context clones saved weights before a gather writes them: from freed memory, a segmentation fault."""

    def check() -> None:
        plain, model = twins(Net, shard_on(**arguments))
        refused = r"the outermost unit outside of torch.*got it inside.*Leave the context out, and clone\(\)"
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            with pytest.raises(NotImplementedError, match=refused):
                model(X)
            with torch.no_grad():
                assert torch.equal(model(X), plain(X))
        assert_trains_alike(plain, model, mean_square(lambda model: model(X)))

    run_ranks(check, 2)


def test_autograds_context_that_clones_saved_tensors_serves_units_without_copies() -> None:
    """With `DDP` in one dtype autograd saves the main weights, which nothing frees."""

    def write_in_place(model: nn.Module) -> torch.Tensor:
        output: torch.Tensor = model(X)
        loss = output.square().mean()
        output.mul_(2.0)
        return loss

    def check() -> None:
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            options = ShardingOptions(placements=DDP)
            assert_trains_alike(*twins(Net, shard_on(options=options)), write_in_place)

    run_ranks(check, 2)
