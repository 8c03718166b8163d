"""Every family of transformers trains in the adapter's units, and in the smallest, as the unsharded model does."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import partial

import mamba_tiny
import plain_kernels
import pytest
from mamba_tiny import BATCH, CONFIGS, make_model, mean_loss
from torch import nn

from lamella_engine import fully_shard, fully_shard_model, plan_units
from lamella_mamba import declare_direct_reads, join_tied_blocks, sharding_units
from lamella_testing import assert_trains_as_unsharded, run_ranks

FAMILIES = pytest.mark.parametrize("family", CONFIGS)
KERNELS = {
    "mamba2_split_conv1d_scan_combined": plain_kernels.split_conv_scan,
    "mamba_inner_fn": plain_kernels.mamba_inner,
}


def _shard_blocks(model: nn.Module) -> None:
    join_tied_blocks(model)
    for unit in sharding_units(model):
        fully_shard(unit)
    fully_shard(model)


def _shard_leaves(model: nn.Module) -> None:
    join_tied_blocks(model)
    declare_direct_reads(model)
    fully_shard_model(model, units=1, verbose=False)


def _assert_trains(family: str, shard: Callable[[nn.Module], None]) -> None:
    assert_trains_as_unsharded(partial(make_model, family), shard, mean_loss, BATCH, num_steps=2, eps=1e-6)


@FAMILIES
def test_blocks_train_as_the_unsharded_model_does(family: str) -> None:
    _assert_trains(family, _shard_blocks)


@FAMILIES
def test_the_smallest_units_train_as_the_unsharded_model_does(family: str) -> None:
    _assert_trains(family, _shard_leaves)


@pytest.mark.parametrize(
    "family", ["mamba", "mamba2", "falcon_mamba", "nemotron_h", "bamba", "zamba2", "falcon_h1", "granitemoehybrid"]
)
def test_with_fused_kernels_the_smallest_units_train_as_the_unsharded_model_does(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain kernels stand where transformers calls the fused ones on GPUs: convolution, norm and projection of a
    mixer are never called. (Families left out have no fused kernel behind `in_proj`.)"""
    calls = []
    module = inspect.getmodule(type(make_model(family)))
    [name] = {name for name in KERNELS if hasattr(module, name)}

    def kernel(*args: object, **kwargs: object) -> object:
        calls.append(name)
        return KERNELS[name](*args, **kwargs)  # type: ignore[operator]

    monkeypatch.setattr(module, name, kernel)
    mean_loss(make_model(family), BATCH)
    assert calls
    _assert_trains(family, _shard_leaves)


@FAMILIES
def test_the_sources_read_no_parameter_that_is_not_declared(family: str) -> None:
    """Reads are looked up in transformers' source: a new one would need a row in the table."""
    model = make_model(family, tie_word_embeddings=False)
    join_tied_blocks(model)
    read_names = {f"{name}.{child}".lstrip(".") for name, module in model.named_modules() for child in _read_by(module)}
    assert any(name.endswith("conv1d") for name in read_names)
    declare_direct_reads(model)
    plan = plan_units(model, units=1)
    assert not read_names & {unit.name for unit in plan.units}
    notes = {note.split(" ")[0] for note in plan.notes if "without calling its module" in note}
    assert notes == read_names


def _read_by(module: nn.Module) -> set[str]:
    """The children of which the source of a module's class reads parameters, outside of initialization."""
    if "transformers.models" not in type(module).__module__:
        return set()
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(type(module)))).body
    methods = [definition for definition in ast.iter_child_nodes(tree) if isinstance(definition, ast.FunctionDef)]
    chains = [
        ast.unparse(node)
        for method in methods
        if "init" not in method.name
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
    ]
    parameters = {f"self.{name}": name for name, _ in module.named_parameters() if "." in name}
    return {parameters[chain].rpartition(".")[0] for chain in chains if chain in parameters}


@pytest.mark.parametrize(("family", "num_shared"), [("zamba", 1), ("zamba2", 2)])
def test_a_shared_block_is_one_unit_in_several_places(family: str, num_shared: int) -> None:
    model = make_model(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    joined = join_tied_blocks(model)
    assert joined and join_tied_blocks(model) == []
    assert {name.rpartition(".")[2] for name in joined} <= {"shared_transformer", "shared_transf"}
    shared = [unit for unit in sharding_units(model) if "AttentionDecoderLayer" in type(unit).__name__]
    assert len(shared) == num_shared and len(joined) == len(_hybrids(model)) - num_shared
    after = model.state_dict()
    assert list(after) == list(before) and all(after[name].equal(before[name]) for name in before)


def _hybrids(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("HybridLayer")]


@pytest.mark.parametrize("family", ["zamba", "zamba2"])
def test_copies_of_a_shared_block_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match=r"layers\.[34]\.shared_trans\w*' and .*, got two\. Call .*join_tied_blocks"):
        sharding_units(make_model(family))


def test_blocks_are_not_joined_in_a_sharded_model() -> None:
    def check() -> None:
        model = make_model("zamba2")
        fully_shard(model)
        with pytest.raises(ValueError, match=r"before fully_shard, got one with a unit at '' and copies of a block at"):
            join_tied_blocks(model)

    run_ranks(check, 1)


def test_sharding_units_are_ordered_inner_before_outer() -> None:
    model = make_model("zamba2")
    join_tied_blocks(model)
    order = {id(unit): place for place, unit in enumerate(sharding_units(model))}
    for unit in sharding_units(model):
        inner_positions = [order[id(module)] for module in unit.modules() if id(module) in order and module is not unit]
        assert all(place < order[id(unit)] for place in inner_positions)


def test_options_that_leave_a_read_module_out_need_no_declaration() -> None:
    model = make_model("falcon_h1", mamba_rms_norm=False)
    declare_direct_reads(model)
    assert "norm" not in {unit.name.rpartition(".")[2] for unit in plan_units(model, units=1).units}


def test_undeclared_reads_are_met_as_shards() -> None:
    """The declarations are needed: without them the smallest units fail."""

    def check() -> None:
        model = make_model("mamba2")
        fully_shard_model(model, units=1, verbose=False)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            mean_loss(model, BATCH)

    run_ranks(check, 2)


def test_every_family_is_tested() -> None:
    assert len(mamba_tiny.CONFIGS) == 11
