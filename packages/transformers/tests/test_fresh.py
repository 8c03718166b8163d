"""Fresh weights are drawn a parameter at a time: from transformers' distributions, equal on any number of ranks."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from tiny_models import make_spec
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from lamella_checkpoint import fill
from lamella_engine import fully_shard
from lamella_testing import run_ranks
from lamella_transformers import (
    FreshWeights,
    ModelError,
    build_model,
    build_without_parameters,
    materialise,
    sharding_units,
)

CPU = torch.device("cpu")
# Weights written by a block around their module (mamba2, gpt2), by constructors alone (openai-gpt, apertus), through a
# function that leaves meta tensors alone (modernbert-decoder), and beside others (rwkv); tied ones; stacks of experts.
MODEL_TYPES = ["apertus", "bert", "gpt2", "mamba2", "mixtral", "modernbert-decoder", "openai-gpt", "rwkv"]


def sharded(spec: Any, seed: int) -> nn.Module:
    """A model with fresh weights, as a rank of a run makes it."""
    model = without_weights(spec)
    fill(dict(model.named_parameters()), FreshWeights(spec, CPU, seed))
    return model


def without_weights(spec: Any) -> nn.Module:
    model = build_without_parameters(spec, CPU)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [*sharding_units(model), model]:
        fully_shard(module, mesh=mesh)
    materialise(model, CPU)
    return model


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_shards_have_the_weights_of_an_unsharded_model(num_ranks: int) -> None:
    specs = [make_spec(model_type) for model_type in MODEL_TYPES]
    expected = [build_model(spec, CPU, seed=3).state_dict() for spec in specs]

    def compare() -> None:
        for spec, weights in zip(specs, expected, strict=True):
            for name, parameter in sharded(spec, seed=3).named_parameters():
                assert torch.equal(parameter.full_tensor(), weights[name]), (spec.model_type, name)  # type: ignore[attr-defined]

    run_ranks(compare, num_ranks)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_weights_have_the_distributions_of_transformers(model_type: str) -> None:
    spec = make_spec(model_type)
    torch.manual_seed(0)
    expected = dict(AutoModelForCausalLM.from_config(spec).named_parameters())  # type: ignore[no-untyped-call]
    drawn = dict(build_model(spec, CPU, seed=0).named_parameters())
    assert drawn.keys() == expected.keys()
    for name, parameter in drawn.items():
        a, b = parameter.detach(), expected[name].detach()
        spread = b.std(correction=0).item()
        tolerance = 6 * spread / b.numel() ** 0.5 + 1e-6
        assert abs(a.std(correction=0).item() - spread) <= tolerance, name
        assert abs((a.mean() - b.mean()).item()) <= 2 * tolerance, name


def test_a_seed_gives_other_weights_to_each_parameter() -> None:
    first, other = (build_model(make_spec("llama"), CPU, seed).state_dict() for seed in (3, 4))
    name = "model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(first[name.format(0)], first[name.format(1)])
    assert not torch.equal(first[name.format(0)], other[name.format(0)])


def test_drawing_leaves_the_random_state_and_transformers_alone() -> None:
    spec = make_spec("openai-gpt")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    build_model(spec, CPU, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    expected = AutoModelForCausalLM.from_config(spec).state_dict()  # type: ignore[no-untyped-call]
    assert all(tensor.std() > 0 for name, tensor in expected.items() if name.endswith("c_fc.weight"))


def test_a_model_that_is_initialised_by_its_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

    def initialise(self: nn.Module, module: nn.Module) -> None:
        _ = [parameter.item() for parameter in module.parameters()]

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", initialise)
    with pytest.raises(ModelError, match="that transformers draws a parameter at a time, got for Embedding: "):
        FreshWeights(make_spec("llama"), CPU, seed=0)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Weighs the memory that operations allocated, after each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._storages: dict[int, ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, list | tuple) else [output]:
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = ref(storage)
        self.peak = max(self.peak, self.now)
        return output

    @property
    def now(self) -> int:
        storages = [storage for reference in self._storages.values() if (storage := reference()) is not None]
        nbytes = stop = 0
        for start, size in sorted((storage.data_ptr(), storage.nbytes()) for storage in storages):
            nbytes += max(0, start + size - max(start, stop))  # A storage may be a slice of another.
            stop = max(stop, start + size)
        return nbytes


@contextmanager
def rank_0_of(num_ranks: int) -> Iterator[None]:
    """Be the first of many ranks, of which no other exists."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_rank_allocates_its_shards_and_one_parameter() -> None:
    spec = make_spec("mixtral", hidden_size=64, intermediate_size=128, num_hidden_layers=6)
    unsharded = build_without_parameters(spec, CPU)
    sizes = [parameter.nbytes for parameter in unsharded.parameters()]
    layer = sum(parameter.nbytes for parameter in sharding_units(unsharded)[0].parameters())
    aligned_shards = sum(sizes) / 4 + 2**14
    with rank_0_of(4), _LiveBytes() as live:
        model = without_weights(spec)
        assert live.peak < aligned_shards + layer  # `fully_shard` makes the views of a unit's gathered weights.
        live.peak = 0
        fill(dict(model.named_parameters()), FreshWeights(spec, CPU, seed=0))
        assert live.peak < aligned_shards + max(sizes)
        assert live.now < aligned_shards
    assert 5 * max(layer, max(sizes)) < sum(sizes)  # All weights would be more.
    assert all(parameter.isfinite().all() for parameter in map(_local, model.parameters()))


def test_a_rank_of_many_draws_a_model_in_a_small_part_of_its_memory() -> None:
    spec = make_spec("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=32)
    nbytes = sum(parameter.nbytes for parameter in build_without_parameters(spec, CPU).parameters())

    def build_sharded() -> None:
        with rank_0_of(64):
            sharded(spec, seed=0)

    assert _resident_nbytes(lambda: build_model(spec, CPU, seed=0)) > nbytes
    assert _resident_nbytes(build_sharded) < nbytes / 5


def _resident_nbytes(function: Callable[[], object]) -> int:
    """Run a function in a process of its own; return the largest number of resident bytes beyond those before."""

    def run(sender: Connection) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # The high-water mark begins anew.
        before = _high_water_nbytes()
        function()
        sender.send(_high_water_nbytes() - before)

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(sender,))
    process.start()
    nbytes: int = receiver.recv()
    process.join()
    return nbytes


def _high_water_nbytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
