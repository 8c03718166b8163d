"""megatron-core's own driver, gradient finalization and optimizers over sharded models, on CPU ranks."""

from __future__ import annotations

import copy
import math
import re
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from matrix import CASES, STAGES
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import DDP
from lamella_testing import run_ranks
from lamella_testing.megatron import (
    LENGTH,
    VOCAB_SIZE,
    ddp_config,
    seed_random_states,
    tiny_config,
    tiny_gpt,
    token_losses,
)
from lamella_testing.megatron_parity import (
    BATCH,
    LEARNING_RATE,
    Layout,
    Steps,
    assert_trains_as_on_one_rank,
    make_model,
)

NUM_MICROBATCHES, ROWS, CLIP = 3, 4, 0.5
BATCHES = torch.randint(VOCAB_SIZE, (3, NUM_MICROBATCHES, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
TORCHS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    "adam": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0, eps=1e-3),  # A small eps makes signs of rounding.
}
STRATEGY_OF = dict(zip(STAGES, ("optim", "optim_grads", "optim_grads_params", "optim_grads_params"), strict=True))
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def _model(*, tp: int = 1, **changes: Any) -> tuple[Any, nn.Module]:
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    seed_random_states(0)
    config = tiny_config(tensor_model_parallel_size=tp, **changes)
    return config, tiny_gpt(config)


def _step(model: Any, config: Any, batches: torch.Tensor, *, forward_only: bool = False) -> torch.Tensor:
    """One step of the driver over this rank's rows of each microbatch; the mean loss of all ranks, 0 before the last
    pipeline stage.
    """
    chunks = model if isinstance(model, list) else [model]
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    num, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    place = {"cp_rank": parallel_state.get_context_parallel_rank(), "cp_size": config.context_parallel_size}

    def loss_of(losses: torch.Tensor) -> tuple[Any, ...]:
        if config.calculate_per_token_loss:
            return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {"loss": losses.detach().mean()}
        # The driver multiplies by the number of context-parallel ranks: a script's loss is a sum over all of them.
        return losses.mean() / config.context_parallel_size, {"loss": losses.detach().mean()}

    def forward(iterator: Iterator[torch.Tensor], module: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        return token_losses(module, next(iterator).chunk(num)[rank], **place), loss_of

    config.finalize_model_grads_func = finalize_model_grads
    stored = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(batches),
        seq_length=LENGTH,
        micro_batch_size=len(batches[0]) // num,
        forward_only=forward_only,
    )
    mean = torch.stack([record["loss"] for record in stored] or [torch.zeros(())]).mean()
    dist.all_reduce(mean, group=everyone)
    return mean.div(everyone.size())


def _optimizer_config(**fields: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    defaults = {"optimizer": "sgd", "lr": 0.5, "weight_decay": 0.0, "clip_grad": CLIP, "log_num_zeros_in_grad": True}
    return OptimizerConfig(**{**defaults, "sgd_momentum": 0.9, "adam_eps": 1e-3, **fields})


Trained = tuple[list[float], list[float], list[float], dict[str, torch.Tensor]]


def _train(
    strategy: str = "optim_grads_params",
    *,
    ddp: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    make: Callable[..., Any] | None = None,
    **model: Any,
) -> Trained:
    """Three steps of a sharded model; losses, gradient norms, numbers of zeros, and the whole weights afterwards."""
    from lamella_megatron.training import ShardedModel, sharded_optimizer

    config, module = _model(**model)
    sharded = ShardedModel(config, ddp_config(data_parallel_sharding_strategy=strategy, **(ddp or {})), module)
    optimizer: Any = (make or sharded_optimizer)(_optimizer_config(**(optim or {})), [sharded])
    config.grad_scale_func = optimizer.scale_loss if (optim or {}).get("loss_scale") else None
    losses, norms, zeros = [], [], []
    for batches in BATCHES:
        optimizer.zero_grad()
        losses.append(_step(sharded, config, batches).item())
        success, norm, num_zeros = optimizer.step()
        assert success
        norms.append(float(norm))
        zeros.append(num_zeros)
    return losses, norms, zeros, {name: _whole(p) for name, p in module.named_parameters()}


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    """The weights of all ranks, tensor-parallel ones too."""
    from megatron.core import parallel_state

    assert isinstance(parameter, DTensor)
    full_tensor = parameter.full_tensor()
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return full_tensor
    parts = [torch.empty_like(full_tensor) for _ in range(group.size())]
    dist.all_gather(parts, full_tensor, group=group)
    return torch.cat(parts, dim=parameter.partition_dim)  # type: ignore[attr-defined]


@cache
def _reference(optimizer: str = "sgd") -> Trained:
    """The same steps of a model without a wrapper, by torch alone, on one rank."""

    def on_one_rank() -> Trained:
        _, module = _model()
        steps = TORCHS[optimizer](module.parameters())
        losses, norms, zeros = [], [], []
        for batches in BATCHES:
            steps.zero_grad()
            rows = batches.flatten(0, 1)
            loss = token_losses(module, rows).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP)))
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            zeros.append(float(sum(grad.numel() - int(torch.count_nonzero(grad)) for grad in grads)))
            steps.step()
        return losses, norms, zeros, {name: p.detach() for name, p in module.named_parameters()}

    [trained] = run_ranks(on_one_rank, 1)
    return trained


def _assert_equal(got: Trained, expected: Trained) -> None:
    torch.testing.assert_close(got[:2], expected[:2], rtol=1e-5, atol=1e-6)
    assert got[2] == expected[2]
    assert got[3].keys() == expected[3].keys()
    for name, weight in expected[3].items():
        torch.testing.assert_close(got[3][name], weight, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_driver_trains_as_torch_does_in_every_strategy(strategy: str) -> None:
    for got in run_ranks(partial(_train, strategy), 2):
        _assert_equal(got, _reference())


@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        pytest.param(2, {"tp": 2}, id="tensor parallel"),
        pytest.param(4, {"tp": 2}, id="tensor and data parallel"),
        pytest.param(4, {"tp": 2, "sequence_parallel": True}, id="sequence parallel"),
        pytest.param(2, {"calculate_per_token_loss": True}, id="divided by the number of tokens"),
        pytest.param(2, {"optim": {"loss_scale": 8.0}}, id="loss scale"),
    ],
)
def test_the_driver_trains_as_torch_does(num_ranks: int, changes: dict[str, Any]) -> None:
    for got in run_ranks(partial(_train, **changes), num_ranks):
        _assert_equal(got, _reference())


@pytest.mark.parametrize(
    ("kind", "layout", "strategy"),
    [
        ("moe", Layout(ep=2), "optim_grads_params"),
        ("moe", Layout(tp=2, ep=2, expert_tp=1), "optim_grads"),
        pytest.param("moe", Layout(ep=2), "no_shard", marks=pytest.mark.slow),
        ("moe", Layout(ep=2, instances=2), "optim_grads_params"),
        ("tied", Layout(tp=2, instances=2), "optim"),
        pytest.param("mtp", Layout(tp=2), "optim", marks=pytest.mark.slow),
        pytest.param("*E*E", Layout(ep=2), "optim", marks=pytest.mark.slow),
        ("MEME", Layout(cp=2, ep=2), "optim_grads_params"),
        ("gpt", Layout(instances=2), "optim_grads_params over optim"),
        ("moe", Layout(ep=2), "optim_grads_params, replicated experts"),
        *(
            pytest.param(kind, layout, STRATEGY_OF[stage], marks=pytest.mark.slow)
            for kind, layout, stage in chain(*CASES.values())
        ),
    ],
    ids=str,
)
def test_the_driver_trains_every_layout_as_one_rank_does(kind: str, layout: Layout, strategy: str) -> None:
    strategy, _, replicated = strategy.partition(", replicated ")
    strategy, _, outer = strategy.partition(" over ")
    expert_stage = DDP if replicated == "experts" else None

    def train(module: Any, rows: torch.Tensor, num_steps: int) -> Steps:
        from lamella_megatron.training import ShardedModel, sharded_optimizer

        ddp = {"data_parallel_sharding_strategy": strategy, "outer_dp_sharding_strategy": outer or "no_shard"}
        instances = {"num_distributed_optimizer_instances": layout.instances}
        model = ShardedModel(module.config, ddp_config(**ddp, **instances), module, expert_stage=expert_stage)
        optim = {"lr": LEARNING_RATE, "sgd_momentum": 0.0, "clip_grad": 1e9}
        optimizer: Any = sharded_optimizer(_optimizer_config(**optim), [model])
        losses, norms, zeros = [], [], []
        for _ in range(num_steps):
            optimizer.zero_grad()
            losses.append(_step(model, module.config, BATCH[None]).item())
            _, norm, num_zeros = optimizer.step()
            norms.append(float(norm))
            zeros.append(int(num_zeros))
        return losses, norms, zeros

    assert_trains_as_on_one_rank(kind, layout, lambda _: None, train=train)


def test_adam_trains_as_torch_does() -> None:
    for got in run_ranks(partial(_train, optim={"optimizer": "adam", "lr": 0.01}), 2):
        _assert_equal(got, _reference("adam"))


def test_adam_takes_one_kernel_for_all_parameters() -> None:
    def on_the_rank() -> list[bool]:
        _, _, optimizer = _sharded(optimizer="adam")
        return [group["fused"] for group in optimizer.param_groups]

    assert all(run_ranks(on_the_rank, 1)[0])


def test_megatron_cores_optimizer_steps_as_ours_to_the_bit() -> None:
    # Its own clipping asks for CUDA tensors.
    optim = {"optimizer": "adam", "lr": 0.01, "clip_grad": 0.0, "use_distributed_optimizer": True, "bf16": True}

    def on_each_rank() -> list[Trained]:
        return [_train(optim=optim, make=make, tp=2) for make in (_theirs, _ours_by_the_same_kernels)]

    for one, other in run_ranks(on_each_rank, 4):
        assert one[0] == other[0]
        for name, weight in one[3].items():
            torch.testing.assert_close(weight, other[3][name], rtol=0, atol=0, msg=name)


def test_groups_of_the_wrapper_are_the_optimizers() -> None:
    def on_each_rank() -> tuple[float, float]:
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

        from lamella_megatron.training import ShardedModel, sharded_optimizer

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        seed_random_states(0)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        config = tiny_config(tensor_model_parallel_size=2)
        model = ShardedModel(config, ddp_config(), tiny_gpt(config, pg_collection=groups), pg_collection=groups)
        token_losses(model, BATCHES[0, 0]).mean().backward()  # type: ignore[no-untyped-call]
        model.finish_grad_sync()
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel()  # the layout of another model
        ours, explicit = (
            sharded_optimizer(_optimizer_config(optimizer="adam"), [model], **arguments)
            for arguments in ({}, {"pg_collection": groups})
        )
        return float(ours.get_grad_norm()), float(explicit.get_grad_norm())

    for ours, explicit in run_ranks(on_each_rank, 2):
        assert ours == explicit > 0


@pytest.mark.parametrize("missing", ["tp", "intra_dist_opt", "mp"])
def test_collections_without_a_group_of_norms_are_refused(missing: str) -> None:
    def on_the_rank() -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        from lamella_megatron.training import ShardedModel, sharded_optimizer

        config, module = _model()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        setattr(groups, missing, None)

        def wrap() -> None:
            model = ShardedModel(config, ddp_config(check_for_nan_in_grad=True), module, pg_collection=groups)
            sharded_optimizer(_optimizer_config(), [model])

        with pytest.raises(ValueError, match=f"Expected `pg_collection` with the process group `{missing}`"):
            wrap()

    run_ranks(on_the_rank, 1)


def test_parameter_norms_cover_all_tensor_parallel_parts() -> None:
    def on_each_rank(tp: int) -> dict[str, float]:
        from lamella_megatron.training import ShardedModel

        config, module = _model(tp=tp)
        model = ShardedModel(config, ddp_config(), module)
        _step(model, config, BATCHES[0])
        return model.parameter_norms()

    [expected] = run_ranks(partial(on_each_rank, 1), 1)
    for norms in run_ranks(partial(on_each_rank, 2), 4):
        assert norms == pytest.approx(expected, rel=1e-4)


def test_norms_cover_the_softmax_offsets_of_all_tensor_parallel_ranks() -> None:
    """The offsets have no mark of megatron-core, and one rank's alone would count."""

    def on_each_rank(tp: int) -> tuple[float, float, dict[str, float]]:
        from lamella_megatron.training import ShardedModel, sharded_optimizer

        config, module = _model(tp=tp, softmax_type="learnable")
        model = ShardedModel(config, ddp_config(), module)
        optimizer: Any = sharded_optimizer(_optimizer_config(), [model])
        for name, parameter in module.named_parameters():
            parameter.grad = (torch.ones_like if "softmax_offset" in name else torch.zeros_like)(parameter)
        norms = {name: norm for name, norm in model.parameter_norms().items() if "softmax_offset" in name}
        _, norm, num_zeros = optimizer.step()
        return float(norm), float(num_zeros), norms

    [expected] = run_ranks(partial(on_each_rank, 1), 1)
    assert expected[2].keys() >= {"decoder.layers.0.self_attention.core_attention.softmax_offset"}
    for got in run_ranks(partial(on_each_rank, 2), 4):
        assert got[:2] == pytest.approx(expected[:2])
        assert got[2] == pytest.approx(expected[2])


def test_in_fp16_steps_are_skipped_until_the_loss_scale_fits_and_the_scheduler_goes_on() -> None:
    def on_each_rank() -> list[tuple[bool, float, float]]:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer.module import Float16Module

        from lamella_megatron.training import ShardedModel, sharded_optimizer

        config, module = _model(fp16=True, params_dtype=torch.float16)
        model = ShardedModel(config, ddp_config(), Float16Module(config, module))
        scale = {"initial_loss_scale": 2.0**24, "loss_scale_window": 2, "hysteresis": 1}
        optim = _optimizer_config(optimizer="adam", lr=0.01, min_lr=0.0, fp16=True, **scale)
        optimizer: Any = sharded_optimizer(optim, [model])
        decay = {"max_lr": 0.01, "min_lr": 0.0, "lr_warmup_steps": 2, "lr_decay_steps": 20, "lr_decay_style": "cosine"}
        no_decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 0, "wd_incr_style": "constant"}
        scheduler = OptimizerParamScheduler(optimizer, init_lr=0.0, **decay, **no_decay)
        config.grad_scale_func = optimizer.scale_loss
        records = []
        for step in range(14):
            optimizer.zero_grad()
            _step(model, config, BATCHES[step % 3])
            success, _, _ = optimizer.step()
            if success:
                scheduler.step(1)
            records.append((success, float(optimizer.get_loss_scale()), optimizer.param_groups[0]["lr"]))
        return records

    first, second = run_ranks(on_each_rank, 2)
    assert first == second, "ranks agree on skipped steps"
    scales = [2.0**24, *(scale for _, scale, _ in first)]
    successes = [success for success, _, _ in first]
    assert not successes[0]
    assert any(successes)
    for success, before, after in zip(successes, scales, scales[1:], strict=False):
        assert after >= before if success else after == before / 2
    assert any(after == 2 * before for before, after in pairwise(scales)), "it grows again"
    rates = [rate for success, _, rate in first if success]
    assert rates[:2] == pytest.approx([0.005, 0.01])


def test_sharded_state_dict_of_a_sharded_model_is_refused() -> None:
    def on_the_rank() -> None:
        from lamella_megatron.training import ShardedModel

        config, module = _model()
        described: tuple[Any, ...] = (ShardedModel(config, ddp_config(), module), module)
        for description in described:
            with pytest.raises(NotImplementedError, match="ranks would write their shards over each other"):
                description.sharded_state_dict()

    run_ranks(on_the_rank, 1)


def _theirs(config: Any, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer

    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def _ours_by_the_same_kernels(config: Any, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import Adam

    from lamella_megatron.training import sharded_optimizer

    betas = config.adam_beta1, config.adam_beta2
    options = {"lr": config.lr, "weight_decay": config.weight_decay, "betas": betas, "eps": config.adam_eps}
    return sharded_optimizer(config, chunks, make=lambda groups: Adam(groups, foreach=True, **options))


def _sharded(**optim: Any) -> tuple[Any, Any, Any]:
    from lamella_megatron.training import ShardedModel, sharded_optimizer

    config, module = _model()
    model = ShardedModel(config, ddp_config(), module)
    return config, model, sharded_optimizer(_optimizer_config(**optim), [model])


def test_megatron_cores_optimizer_has_the_norm_of_all_shards_of_a_plain_configuration() -> None:
    """`DistributedDataParallelConfig(use_distributed_optimizer=True)` names no strategy."""

    def on_each_rank() -> list[float]:
        from megatron.core.optimizer import get_megatron_optimizer

        from lamella_megatron.training import ShardedModel, sharded_optimizer

        config, module = _model()
        plain = {"use_megatron_fsdp": False, "data_parallel_sharding_strategy": "no_shard"}
        model = ShardedModel(config, ddp_config(use_distributed_optimizer=True, **plain), module)
        optim = _optimizer_config(optimizer="adam", lr=0.01, bf16=True, use_distributed_optimizer=True)
        theirs = get_megatron_optimizer(optim, [model], use_gloo_process_groups=False)
        ours: Any = sharded_optimizer(_optimizer_config(), [model])
        _step(model, config, BATCHES[0])
        return [float(theirs.get_grad_norm()), float(ours.get_grad_norm())]

    for theirs, ours in run_ranks(on_each_rank, 2):
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=0)


def test_validation_changes_nothing_and_has_the_loss_of_training() -> None:
    def on_each_rank() -> None:
        config, model, _ = _sharded()
        with torch.no_grad():
            validated = _step(model, config, BATCHES[0], forward_only=True)
        assert all(p.grad is None for p in model.parameters())
        torch.testing.assert_close(_step(model, config, BATCHES[0]), validated)

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_step_is_skipped_on_all_ranks_if_a_scaled_gradient_is_not_finite(number: float) -> None:
    def on_each_rank() -> None:
        config, model, optimizer = _sharded(loss_scale=8.0)
        before = [p.full_tensor() for p in model.parameters()]
        _step(model, config, BATCHES[0])
        if dist.get_rank() == 1:
            next(model.parameters()).grad.to_local().view(-1)[0] = number
        assert optimizer.step() == (False, None, None)
        for parameter, weight in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.full_tensor(), weight)

    run_ranks(on_each_rank, 2)


def test_parameters_of_a_norm_group_are_clipped_by_their_own_norm() -> None:
    def on_each_rank() -> None:
        config, model, optimizer = _sharded()
        apart = [p for name, p in model.named_parameters() if ".layers.1." in name]
        for parameter in apart:
            parameter.grad_norm_group = "mtp"
        _step(model, config, BATCHES[0])
        other_parameters = [p for p in model.parameters() if not hasattr(p, "grad_norm_group")]
        norms = [
            torch.cat([p.grad.full_tensor().flatten() for p in group]).norm() for group in (other_parameters, apart)
        ]
        torch.testing.assert_close(optimizer.get_grad_norm().float(), norms[0])
        clip = float(min(norms)) / 2
        torch.testing.assert_close(optimizer.clip_grad_norm(clip).float(), norms[0])
        torch.testing.assert_close(optimizer.grad_norms_by_group["mtp"].float(), norms[1])
        for group in (other_parameters, apart):
            after = torch.cat([p.grad.full_tensor().flatten() for p in group]).norm()
            torch.testing.assert_close(after, torch.tensor(clip), rtol=1e-4, atol=0)

    run_ranks(on_each_rank, 2)


def test_reloaded_model_and_optimizer_states_take_equal_steps() -> None:
    def on_each_rank() -> None:
        config, model, optimizer = _sharded(optimizer="adam", lr=0.01, loss_scale=8.0)
        _step(model, config, BATCHES[0])
        optimizer.step()
        weights, state = {k: v.clone() for k, v in model.state_dict().items() if v is not None}, optimizer.state_dict()
        state = copy.deepcopy(state)
        after = []
        for _ in range(2):
            optimizer.zero_grad()
            _step(model, config, BATCHES[1])
            optimizer.step()
            after.append([p.full_tensor() for p in model.parameters()])
            model.load_state_dict(weights, strict=False)
            optimizer.load_state_dict(state)
            optimizer.reload_model_params()
        assert all(torch.equal(*pair) for pair in zip(*after, strict=True))

    run_ranks(on_each_rank, 2)


def test_a_run_that_is_resumed_goes_on_as_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    def on_each_rank() -> None:
        from lamella_megatron import load_checkpoint, save_checkpoint

        config, model, optimizer = _sharded(optimizer="adam", lr=0.01)
        _step(model, config, BATCHES[0])
        optimizer.step()
        save_checkpoint(tmp_path / "a", model=model, optimizer=optimizer.optimizer, iteration=1)

        def go_on(config: Any, model: Any, optimizer: Any) -> list[torch.Tensor]:
            optimizer.zero_grad()
            _step(model, config, BATCHES[1])
            optimizer.step()
            return [p.full_tensor() for p in model.parameters()]

        expected = go_on(config, model, optimizer)
        config, model, optimizer = _sharded(optimizer="adam", lr=0.01)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        assert load_checkpoint(tmp_path / "a", model=model, optimizer=optimizer.optimizer)["iteration"] == 1
        assert all(torch.equal(*pair) for pair in zip(go_on(config, model, optimizer), expected, strict=True))

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("format", ["fsdp_dtensor", pytest.param("torch_dist", marks=pytest.mark.slow)])
def test_a_tensor_and_expert_parallel_run_resumes_on_other_layouts(
    tmp_path: Path,
    format: Literal["fsdp_dtensor", "torch_dist"],  # noqa: A002
) -> None:
    def on_each_rank(layout: Layout, *, is_first: bool) -> list[tuple[float, float]]:
        from lamella_megatron import load_checkpoint, save_checkpoint
        from lamella_megatron.training import ShardedModel, sharded_optimizer

        module: Any = make_model("moe", layout)
        model = ShardedModel(module.config, ddp_config(data_parallel_sharding_strategy="optim_grads_params"), module)
        optimizer: Any = sharded_optimizer(_optimizer_config(optimizer="adam", lr=0.01), [model])

        def steps() -> list[tuple[float, float]]:
            losses = []
            for batches in BATCHES[:2]:
                optimizer.zero_grad()
                loss = _step(model, module.config, batches[:1])
                losses.append((float(loss), float(optimizer.step()[1])))
            return losses

        if is_first:
            steps()
            save_checkpoint(tmp_path / "a", model=model, optimizer=optimizer.optimizer, iteration=2, format=format)
        else:
            load_checkpoint(tmp_path / "a", model=model, optimizer=optimizer.optimizer)
        return steps()

    expected, *_ = run_ranks(partial(on_each_rank, Layout(tp=2, ep=2), is_first=True), 4)
    for layout in (Layout(num_ranks=2), Layout(ep=4)):
        for losses in run_ranks(partial(on_each_rank, layout, is_first=False), layout.num_ranks):
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def test_make_builds_an_unknown_optimizer_from_its_parameter_groups() -> None:
    def on_each_rank() -> None:
        from lamella_megatron.training import sharded_optimizer

        _, model, _ = _sharded()
        config = _optimizer_config(optimizer="soap")
        with pytest.raises(ValueError, match="'adam', 'muon' or 'sgd', got 'soap'. Pass `make`"):
            sharded_optimizer(config, [model])
        built = sharded_optimizer(config, [model], make=lambda groups: torch.optim.Adagrad(groups, lr=0.1))
        assert isinstance(built.optimizer, torch.optim.Adagrad)
        assert {"max_lr", "wd_mult", "is_expert_parallel"} <= built.param_groups[0].keys()

    run_ranks(on_each_rank, 2)


def test_chunks_and_options_that_shards_do_not_have_are_refused() -> None:
    def on_each_rank() -> None:
        from lamella_megatron.training import sharded_optimizer

        _, model, optimizer = _sharded()
        with pytest.raises(TypeError, match="model chunks to be ShardedModels, got FSDPGPTModel"):
            sharded_optimizer(_optimizer_config(), [model.module])
        with pytest.raises(ValueError, match="`config.optimizer_cpu_offload` to be False, got True. Shard with"):
            sharded_optimizer(_optimizer_config(optimizer_cpu_offload=True), [model])
        with pytest.raises(NotImplementedError, match=r"Call lamella_megatron\.save_checkpoint\("):
            optimizer.sharded_state_dict({})

    run_ranks(on_each_rank, 1)


def _train_stages(
    pp: int, chunks: int | None, *, is_tied: bool = False
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Three steps of pipeline stages; losses on the last stage, norms, and the weights of this rank's stages."""
    from megatron.core import parallel_state

    from lamella_megatron.training import ShardedModel, sharded_optimizer

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=chunks
    )
    seed_random_states(0)
    config = tiny_config(
        num_layers=8,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
    )
    models, weights = [], {}
    for chunk in range(chunks or 1):
        stage = {"vp_stage": chunk if chunks else None, "ignore_virtual": chunks is None}
        module = tiny_gpt(
            config,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            vp_stage=stage["vp_stage"],
            share_embeddings_and_output_weights=is_tied,
        )
        for name, parameter in module.named_parameters():
            weights[_name_in_the_whole(module, name)] = parameter
            torch.manual_seed(zlib.crc32(_name_in_the_whole(module, name).encode()))
            nn.init.normal_(parameter, std=0.1)
        models.append(ShardedModel(config, ddp_config(), module))
        weights.update({_name_in_the_whole(module, name): p for name, p in module.named_parameters()})
    optimizer: Any = sharded_optimizer(_optimizer_config(), models)
    losses, norms = [], []
    for batches in BATCHES[:, [0, 1, 2, 0]]:
        optimizer.zero_grad()
        losses.append(_step(models, config, batches))
        norms.append(float(optimizer.step()[1]))
    return [float(loss) for loss in losses], norms, {name: _whole(p) for name, p in weights.items()}


def _name_in_the_whole(module: Any, name: str) -> str:
    """A parameter's name in a model of one stage, which has one weight where stages have copies of the embedding."""
    if name == "output_layer.weight" and module.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return re.sub(
        r"layers\.(\d+)", lambda match: f"layers.{module.decoder.layers[int(match[1])].layer_number - 1}", name
    )


@cache
def _on_one_stage(is_tied: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    [trained] = run_ranks(partial(_train_stages, 1, None, is_tied=is_tied), 1)
    return trained


@pytest.mark.parametrize(
    ("num_ranks", "pp", "chunks", "is_tied"),
    [
        pytest.param(2, 2, None, False, id="1F1B"),
        pytest.param(4, 2, None, True, id="sharded, tied"),
        # On two stages gloo would mix up the messages to the next and to the last stage: both are the other rank.
        pytest.param(4, 4, 2, False, id="interleaved", marks=pytest.mark.slow),
        pytest.param(4, 4, 2, True, id="interleaved, tied"),
        pytest.param(2, 2, None, True, id="1F1B, tied", marks=pytest.mark.slow),
        pytest.param(4, 2, None, False, id="sharded", marks=pytest.mark.slow),
    ],
)
def test_pipeline_stages_train_as_one_stage(num_ranks: int, pp: int, chunks: int | None, is_tied: bool) -> None:
    losses, norms, weights = _on_one_stage(is_tied)
    got = run_ranks(partial(_train_stages, pp, chunks, is_tied=is_tied), num_ranks)
    torch.testing.assert_close(got[-1][0], losses, rtol=1e-5, atol=1e-6)
    for _, trained, stages in got:
        torch.testing.assert_close(trained, norms, rtol=1e-5, atol=1e-6)
        for name, weight in stages.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-6, msg=name)
    assert {name for _, _, stages in got for name in stages} == weights.keys()
