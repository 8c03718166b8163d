"""megatron-core's own Mamba mixer on several tensor- or context-parallel ranks, in steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from resuming import World, make
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_checkpoint.testing import MemorySource, read_all
from lamella_convert import from_megatron_model, translate
from lamella_engine import fully_shard
from lamella_mamba import Split, annotate, bind_live_parameters, merge, split
from lamella_testing import run_ranks
from lamella_testing.megatron import seed_random_states, tiny_config

WIDTH, HEADS, HEAD, STATE = 32, 8, 8, 4
BATCH = torch.randn(
    8, 3, WIDTH, generator=torch.Generator().manual_seed(1)
)  # (length, rows, width), as megatron-core's
OF_HELPER = ("A_log", "D", "dt_bias", "conv1d_weight", "conv1d_bias")
Tensors = dict[str, torch.Tensor]
Splits = dict[str, Split | None]


class _MixerBlock(nn.Module):
    def __init__(self, num_groups: int, **parallel: int) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        sizes = {"mamba_state_dim": STATE, "mamba_head_dim": HEAD, "mamba_num_heads": HEADS}
        self.mixer = MambaMixer(
            tiny_config(mamba_num_groups=num_groups, init_method_std=0.2, **sizes, **parallel),
            MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
            d_model=WIDTH,
            rmsnorm=False,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mixer(x)[0]
        return out


def _make(num_groups: int, num_blocks: int = 1, **parallel: int) -> nn.Sequential:
    """Blocks with large steps of time, whose gradients count; keywords are megatron-core's parallel sizes."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**parallel)
    seed_random_states(dist.get_rank())  # ranks of a part need not agree with other parts
    model = nn.Sequential(*(_MixerBlock(num_groups, **parallel) for _ in range(num_blocks)))
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.data.uniform_(-1, 1)
    return model


# -- tensor parallelism ---------------------------------------------------------------------------------------------


def _on_tensor_parallel_ranks(num_ranks: int, full_tensors: Tensors | None) -> tuple[Splits, Tensors, Tensors]:
    """A model on tensor-parallel ranks, given whole weights: the splits, the merged weights, output and gradients."""

    def run() -> tuple[Splits, Tensors, Tensors]:
        model = _make(4, tensor_model_parallel_size=num_ranks)
        splits = annotate(model)
        if full_tensors is not None:
            for name, parameter in model.named_parameters():
                how = splits[name]
                assert how is not None
                parameter.data.copy_(split(full_tensors[name], how.whole(num_ranks), dist.get_rank(), num_ranks))
        merged = {name: _merged(p.detach(), splits[name], num_ranks) for name, p in model.named_parameters()}
        output = model(BATCH)
        output.square().mean().backward()
        results = {name: _merged(p.grad, splits[name], num_ranks) for name, p in model.named_parameters()}
        return splits, merged, {**results, "output": output.detach()}

    return run_ranks(run, num_ranks)[0]


def _merged(part: Any, how: Split | None, num_ranks: int) -> torch.Tensor:
    assert how is not None
    parts = [torch.empty_like(part) for _ in range(num_ranks)]
    dist.all_gather(parts, part.contiguous())
    return merge(parts, how.whole(num_ranks))


def test_a_model_of_two_tensor_parallel_ranks_goes_on_with_one_and_with_four() -> None:
    splits, full_tensors, outputs = _on_tensor_parallel_ranks(2, None)
    for num_ranks in (1, 4):
        later, merged, unchanged = _on_tensor_parallel_ranks(num_ranks, full_tensors)
        assert all(merged[name].equal(full_tensors[name]) for name in full_tensors)
        for name, how in splits.items():
            other = later[name]
            assert how is not None and other is not None
            assert how.whole(2) == other.whole(num_ranks)
        torch.testing.assert_close(unchanged, outputs, rtol=1e-4, atol=1e-6)


def test_the_marks_of_a_mixer_are_found_and_keep_groups_whole() -> None:
    splits, _, _ = _on_tensor_parallel_ranks(2, None)
    names = {"in_proj.weight", "out_proj.weight", *OF_HELPER}
    assert {name.removeprefix("0.mixer."): how.kind for name, how in splits.items() if how} == {
        name: "row" if name == "out_proj.weight" else "column" for name in names
    }
    inner, groups = HEADS * HEAD // 2, 4 * STATE // 2
    fused = splits["0.mixer.in_proj.weight"]
    assert fused == Split(dim=0, sizes=(inner, inner, groups, groups, HEADS // 2), blocks=(HEAD, HEAD, STATE, STATE, 1))
    with pytest.raises(ValueError, match="divides the 4 blocks"):
        fused.whole(2).part(8)


def test_checkpoints_are_converted_by_the_same_sections() -> None:
    """lamella-convert maps stored boxes by the sizes of a config, lamella-mamba cuts tensors by a live mixer's marks.
    Neither may import the other, and both must cut alike."""
    splits, full_tensors, _ = _on_tensor_parallel_ranks(2, None)
    sizes = {"tp": 2, "d_inner": HEADS * HEAD, "d_state": 4 * STATE, "nheads": HEADS}
    for own_name in ("in_proj.weight", "conv1d_weight", "conv1d_bias"):
        how, tensor = splits[f"0.mixer.{own_name}"], full_tensors[f"0.mixer.{own_name}"]
        assert how is not None
        by_rank = torch.cat([split(tensor, how.whole(2), rank, 2) for rank in range(2)])
        name = f"decoder.layers.0.mixer.{own_name}"
        rules = from_megatron_model({name: tuple(tensor.shape)}, sizes=sizes)
        sections = read_all(translate(MemorySource({f"model.{name}": by_rank}), rules, to="left"))
        by_part = {key.rpartition(".")[2]: section for key, section in sections.items()}
        joined = [by_part[part] for part in ("z", "x", "B", "C", "dt") if part in by_part]
        assert len(joined) == len(how.sizes) and torch.cat(joined).equal(tensor)


def test_a_gated_delta_net_has_the_sections_that_its_marks_leave_out() -> None:
    """megatron-core marks the dim alone: rows taken for one section would be in another order on other ranks."""

    def run() -> tuple[Splits, tuple[int, ...]]:
        model: Any = make(World(2, tp=2), "hybrid")
        net = model.decoder.layers[3].self_attention
        return annotate(net), tuple(net.in_proj_split_sections)

    splits, sections = run_ranks(run, 2)[0]
    projected, convolved = splits["in_proj.weight"], splits["conv1d.weight"]
    assert projected is not None and convolved is not None
    assert projected.sizes == sections and convolved.sizes == sections[:3]
    assert {name for name, how in splits.items() if how == Split(dim=None)} == {"out_norm.weight", "out_norm.bias"}
    with pytest.raises(ValueError, match="divides the 4 blocks"):
        projected.whole(2).part(8)


# -- context parallelism --------------------------------------------------------------------------------------------


def _train(model: nn.Module, tokens: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _own_tokens(num_ranks: int, rank: int) -> torch.Tensor:
    """A chunk from the front and one from the back, as context-parallel attention balances its load."""
    chunks = BATCH.chunk(2 * num_ranks)
    return BATCH if num_ranks == 1 else torch.cat([chunks[rank], chunks[2 * num_ranks - 1 - rank]])


@pytest.mark.parametrize("num_groups", [2, 1])
@pytest.mark.parametrize("num_context", [1, 2])
def test_slices_of_context_parallel_ranks_train_as_the_unsharded_mixer_does(num_context: int, num_groups: int) -> None:
    """With one group on two ranks, both use the same rows of B and C."""

    def unsharded() -> tuple[Tensors, Tensors]:
        model = _make(num_groups, 2)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        _train(model, BATCH)
        return before, {name: p.detach() for name, p in model.named_parameters()}

    [(before, after)] = run_ranks(unsharded, 1)
    steps = {name: (after[name] - before[name]).abs().max() for name in before}
    assert min(steps.values()) > 1e-5  # of SGD: AdamW would hide a gradient that is too large by a factor

    def sharded() -> Tensors:
        model = _make(num_groups, 2, context_parallel_size=num_context)
        model.load_state_dict(before)
        assert len(bind_live_parameters(model)) == 2 * len(OF_HELPER)
        for block in model:
            fully_shard(block)
        fully_shard(model)
        _train(model, _own_tokens(num_context, dist.get_rank()))
        trained = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            trained[name] = parameter.full_tensor().detach()
        return trained

    for trained in run_ranks(sharded, 2):
        for name, step in steps.items():
            torch.testing.assert_close(trained[name], after[name], rtol=0, atol=step.item() / 100, msg=name)
