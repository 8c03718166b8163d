"""megatron-core's interleaved driver with experts' exchanges overlapped: the bits of the driver without overlap."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from overlap_runs import delay_weight_gradients, inputs_of

from lamella_testing import run_ranks
from lamella_testing.megatron import (
    EXPERTS,
    LENGTH,
    VOCAB_SIZE,
    ddp_config,
    seed_random_states,
    tiny_config,
    tiny_gpt,
    tiny_hybrid,
)

NUM_RANKS, NUM_CHUNKS, NUM_MICROBATCHES, NUM_ROWS = 4, 2, 8, 2
DATA = torch.randint(
    VOCAB_SIZE, (3, NUM_MICROBATCHES, NUM_ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1)
)
PATTERN = "|".join(["*E"] * (NUM_RANKS * NUM_CHUNKS))
Trained = tuple[list[float], dict[str, torch.Tensor]]


def _module(kind: str, config: Any, chunk: int) -> Any:
    parallel = importlib.import_module("megatron.core.parallel_state")
    stage = {"ignore_virtual": False, "vp_stage": chunk}
    arguments = {
        "pre_process": parallel.is_pipeline_first_stage(**stage),
        "post_process": parallel.is_pipeline_last_stage(**stage),
        "vp_stage": chunk,
    }
    return tiny_gpt(config, **arguments) if kind == "moe" else tiny_hybrid(config, PATTERN, **arguments)


def _train(
    kind: str, strategy: str, ep: int, is_overlapped: bool, delays: bool, overlaps_messages: bool
) -> tuple[Trained, int]:
    """Three steps of a rank's stages: losses on the last stage, and the weights; and the number of pairs that ran."""
    from lamella_megatron._overlap.schedule_plan import SchedulePlan
    from lamella_megatron.training import ShardedModel, sharded_optimizer

    parallel = importlib.import_module("megatron.core.parallel_state")
    parallel.initialize_model_parallel(
        pipeline_model_parallel_size=NUM_RANKS,
        virtual_pipeline_model_parallel_size=NUM_CHUNKS,
        expert_model_parallel_size=ep,
    )
    config = tiny_config(
        num_layers=NUM_RANKS * NUM_CHUNKS * (1 if kind == "moe" else 2),
        pipeline_model_parallel_size=NUM_RANKS,
        virtual_pipeline_model_parallel_size=NUM_CHUNKS,
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=ep,
        overlap_p2p_comm=overlaps_messages,
        batch_p2p_comm=not overlaps_messages,
        **EXPERTS,
    )
    config.overlap_moe_expert_parallel_comm = is_overlapped  # the constructor asks for bf16
    models, modules = [], []
    for chunk in range(NUM_CHUNKS):
        seed_random_states(chunk)
        modules.append(_module(kind, config, chunk))
        if delays:
            delay_weight_gradients(modules[-1])
        models.append(ShardedModel(config, ddp_config(data_parallel_sharding_strategy=strategy), modules[-1]))
    optim = importlib.import_module("megatron.core.optimizer").OptimizerConfig(optimizer="sgd", lr=0.2)
    optimizer = sharded_optimizer(optim, models)
    config.finalize_model_grads_func = importlib.import_module("megatron.core.distributed").finalize_model_grads
    pairs: list[tuple[int, int]] = []
    plan_class: Any = SchedulePlan
    run = plan_class.run

    def noted(forward: Any, backward: Any, **more: Any) -> Any:
        if forward is not None and backward is not None:
            pairs.append((forward.stage, backward.stage))
        return run(forward, backward, **more)

    plan_class.run = staticmethod(noted)  # of this process, a rank of the test's own
    losses: list[float] = []
    for step in DATA:
        optimizer.zero_grad()
        stored = _step(models, step)
        assert optimizer.step()[0]
        losses += [record["loss"].item() for record in stored]
    weights = {
        f"{chunk}.{name}": parameter.detach().full_tensor()
        for chunk, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }
    assert not pairs or set(pairs) >= {(0, 1), (1, 0)}, "pairs of two stages"
    return (losses, weights), len(pairs)


def _step(models: list[Any], step: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    driver = importlib.import_module("megatron.core.pipeline_parallel").get_forward_backward_func()
    parallel = importlib.import_module("megatron.core.parallel_state")
    num, rank = parallel.get_data_parallel_world_size(), parallel.get_data_parallel_rank()
    batches = [inputs_of(rows.chunk(num)[rank]) for rows in step]

    def forward(batches: Any, chunk: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        call = chunk.build_schedule_plan if return_schedule_plan else chunk
        return call(**next(batches)), lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    stored: list[dict[str, torch.Tensor]] = driver(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in models],
        model=models,
        num_microbatches=NUM_MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=NUM_ROWS // num,
    )
    return stored


@pytest.mark.parametrize(
    ("kind", "strategy", "ep", "delays", "overlaps_messages"),
    [
        ("hybrid", "optim_grads_params", 1, False, True),
        pytest.param("moe", "optim", 1, True, False, marks=pytest.mark.slow),
        pytest.param("hybrid", "optim", 2, True, True, marks=pytest.mark.slow),
        pytest.param("moe", "optim_grads_params", 2, False, False, marks=pytest.mark.slow),
    ],
)
def test_interleaved_stages_overlap_and_train_as_without(
    kind: str, strategy: str, ep: int, delays: bool, overlaps_messages: bool
) -> None:
    take = partial(_train, kind, strategy, ep)
    # Without a schedule the driver calls no backward_dw.
    expected = run_ranks(partial(take, is_overlapped=False, delays=False, overlaps_messages=False), NUM_RANKS * ep)
    trained = run_ranks(
        partial(take, is_overlapped=True, delays=delays, overlaps_messages=overlaps_messages), NUM_RANKS * ep
    )
    assert all(num_pairs == 0 for _, num_pairs in expected)
    for ((losses, weights), _), ((other_losses, other_weights), num_pairs) in zip(expected, trained, strict=True):
        assert num_pairs > 0
        assert losses == other_losses
        assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())
    [losses] = [losses for (losses, _), _ in expected if losses][:1]
    assert losses[0] != losses[-1], "nothing was learned"
