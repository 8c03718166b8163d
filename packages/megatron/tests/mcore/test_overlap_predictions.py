"""Multi-token prediction and auxiliary losses in an overlapped step: units, slots, graphs, weights and bookkeeping."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlap_runs import (
    DATA,
    NUM_MICROBATCHES,
    NUM_ROWS,
    Case,
    by_driver,
    inputs_of,
    microbatches,
    model_of,
    overlapped,
    overlapped_batches,
    share,
)
from torch import nn

from lamella_engine.testing import tree_of
from lamella_testing import run_ranks
from lamella_testing.megatron import (
    EXPERTS,
    LENGTH,
    scale_auxiliary_losses,
    seed_random_states,
    tiny_config,
    tiny_hybrid,
)
from lamella_testing.megatron_parity import Layout, make_model


def test_units_of_predictions_are_gathered_once_a_pass_and_reduced_once_a_microbatch() -> None:
    def on_each_rank() -> tuple[Counter[str], Counter[str]]:
        from lamella_megatron.training import overlapped_peak_nbytes

        case = Case(kind="*E/*E/*E", groups="[*E]")
        model = model_of(case)
        gathers, reductions, counted = Counter[str](), Counter[str](), list[int]()
        groups = [group for unit in tree_of(model).units for group in unit.parameters.groups]
        buffers = [group.unsharded_weight.flat for group in groups if not group.form.computes_with_main]

        def weigh() -> None:
            counted.append(sum(buffer.untyped_storage().nbytes() for buffer in buffers))

        for unit in tree_of(model).units:
            dense = unit.parameters.groups[0]
            dense.transports.shard = _Counting(dense.transports.shard, unit.parameters.name, gathers, reductions, weigh)
        overlapped(model, DATA[0], case)
        assert max(counted) == overlapped_peak_nbytes(model, NUM_MICROBATCHES)
        return gathers, reductions

    prediction_units = [f"mtp.layers.{depth}{inner}" for depth in (0, 1) for inner in ("", *INSIDE)]
    layers = ["decoder.layers.0, decoder.layers.1", *prediction_units]
    for gathers, reductions in run_ranks(on_each_rank, 2):
        assert reductions == dict.fromkeys(["", *layers], NUM_MICROBATCHES)
        # The forward and the backward beside it have the depth in the middle at once.
        num_shared = NUM_MICROBATCHES - 1
        for name in layers:
            is_shared = name.startswith("mtp.layers.0")
            assert gathers[name] == 2 * NUM_MICROBATCHES - is_shared * num_shared, name


INSIDE = (".mtp_model_layer.layers.0", ".mtp_model_layer.layers.1")


class _Counting:
    def __init__(
        self, inner: Any, name: str, gathers: Counter[str], reductions: Counter[str], weigh: Callable[[], None]
    ) -> None:
        self._inner, self._name, self._weigh = inner, name, weigh
        self._counters = {"all_gather": gathers, "reduce_scatter": reductions}

    def __getattr__(self, attribute: str) -> Any:
        if attribute in self._counters:
            self._counters[attribute][self._name] += 1
            self._weigh()  # the unsharded buffer is there
        return getattr(self._inner, attribute)


def test_every_mtp_layer_has_its_own_dispatch_and_combine_in_the_schedule() -> None:
    def on_one_rank() -> set[str]:
        model = make_model("*E/*E/*E", Layout(num_ranks=1))
        with torch.profiler.profile() as profiler:
            overlapped(model, DATA[0], Case(kind="*E/*E/*E"))
        return {event.name for event in profiler.events()}

    [names] = run_ranks(on_one_rank, 1)
    slots = [f"{slot} {phase}" for slot in ("dispatch", "combine") for phase in ("forward", "backward")]
    with_experts = {f"schedule::{slot} (layer {i})" for slot in slots for i in range(8)} & names
    assert with_experts == {f"schedule::{slot} (layer {i})" for slot in slots for i in (1, 2, 3)}


def test_no_graph_of_a_prediction_runs_twice() -> None:
    def on_one_rank() -> list[float]:
        model: Any = make_model("*E/*E/*E", Layout(num_ranks=1))
        for layer in model.mtp.layers:
            for name in ("enorm", "hnorm", "final_layernorm"):
                setattr(layer, name, nn.Sequential(getattr(layer, name), _Once()))
        return [float(loss) for loss in overlapped(model, DATA[0], Case(kind="*E/*E/*E"))]

    [losses] = run_ranks(on_one_rank, 1)
    assert len(losses) == NUM_MICROBATCHES


class _Once(nn.Module):
    """Passes gradients once a forward, as some fused norms do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed: torch.Tensor = _PassOnce.apply(x)  # type: ignore[no-untyped-call]
        return passed


class _PassOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.num_backwards = itertools.count()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert next(ctx.num_backwards) == 0
        return gradient


# -- the last pipeline stage -------------------------------------------------------------------------------------------


def _stage() -> Any:
    """A stage of `*E|/*E`, on two ranks: the last has no layer before the prediction, and a norm that matters."""
    from lamella_megatron import fully_shard_model

    is_first = importlib.import_module("megatron.core.parallel_state").is_pipeline_first_stage()
    config = tiny_config(
        mtp_num_layers=1,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=2,
        **EXPERTS,
    )
    seed_random_states(0)
    model: Any = tiny_hybrid(config, "*E|/*E", pre_process=is_first, post_process=not is_first)
    if not is_first:
        nn.init.normal_(model.decoder.final_norm.weight)
    return fully_shard_model(model)


def test_a_last_stage_without_layers_before_its_prediction_is_its_plain_forward() -> None:
    def on_each_rank() -> None:
        from lamella_megatron.training import forward_backward_overlapped

        parallel = importlib.import_module("megatron.core.parallel_state")
        parallel.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
        plain, model = _stage(), _stage()
        if not model.post_process:
            with pytest.raises(ValueError, match=r"the last pipeline stage .*got one with `post_process=False`"):
                forward_backward_overlapped(model, microbatches(DATA[0]), share)
            return
        batches, losses = microbatches(DATA[0]), []
        inputs = torch.randn(2, NUM_MICROBATCHES, LENGTH, NUM_ROWS // 2, 32, generator=torch.Generator().manual_seed(2))
        inputs[1] = inputs[0]
        expected, copied_inputs = ([tensor.clone().requires_grad_() for tensor in copies] for copies in inputs)
        scale_auxiliary_losses(NUM_MICROBATCHES)
        for batch, tensor in zip(batches, expected, strict=True):
            plain.set_input_tensor(tensor)
            loss = share(plain(**batch))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        normed: list[torch.Tensor] = []
        model.decoder.final_norm.register_forward_hook(lambda *arguments: normed.append(arguments[-1]))
        with pytest.raises(ValueError, match=r"`decoder_input`.*got none in microbatch 1"):
            forward_backward_overlapped(model, [{**batches[0], "decoder_input": copied_inputs[0]}, *batches[1:]], share)
        stage = [{**batch, "decoder_input": tensor} for batch, tensor in zip(batches, copied_inputs, strict=True)]
        assert forward_backward_overlapped(model, stage, share) == losses
        assert len(normed) == NUM_MICROBATCHES, "the norm of an empty decoder, once a microbatch"
        for one, other in zip(expected, copied_inputs, strict=True):
            assert one.grad is not None and other.grad is not None
            assert torch.equal(one.grad, other.grad)
        for (name, weight), other_weight in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(weight.grad.to_local(), other_weight.grad.to_local()), name

    run_ranks(on_each_rank, 4)


# -- auxiliary losses --------------------------------------------------------------------------------------------------


def test_samples_packed_in_one_row_are_balanced_one_by_one() -> None:
    def on_one_rank() -> None:
        packed = importlib.import_module("megatron.core.packed_seq_params").PackedSeqParams(qkv_format="thd")
        packed.tokens_per_sample = LENGTH // 2
        losses = {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "seq_aux_loss"}
        model: Any = make_model("EE", Layout(num_ranks=1), **losses)
        batches = [{**inputs_of(rows[:1]), "packed_seq_params": packed} for rows in DATA[0]]
        scale_auxiliary_losses(NUM_MICROBATCHES)
        for batch in batches:
            share(model(**batch)).backward()  # type: ignore[no-untyped-call]
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        overlapped_batches(model, batches)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), name

    run_ranks(on_one_rank, 1)


def test_losses_of_predictions_routers_are_booked_behind_the_decoder() -> None:
    def on_one_rank() -> list[int]:
        logging = importlib.import_module("megatron.core.transformer.moe.moe_logging")
        overlapped(make_model("*E/*E", Layout(num_ranks=1), moe_aux_loss_coeff=0.1), DATA[0], Case(kind="*E/*E"))
        [entry] = logging.get_moe_metrics_tracker()._metrics.values()
        assert len(set(entry.values.tolist())) == 3, entry.values
        return [place + 1 for place, value in enumerate(entry.values.tolist()) if value]

    assert run_ranks(on_one_rank, 1) == [[2, 3]]


def test_sharding_numbers_the_routers_of_predictions_for_steps_without_overlap() -> None:
    def on_one_rank() -> list[int]:
        from lamella_megatron import fully_shard_model

        model: Any = fully_shard_model(make_model("*E/*E", Layout(num_ranks=1)))
        return [module.layer_number for module in model.modules() if hasattr(module, "set_layer_number")]

    assert run_ranks(on_one_rank, 1) == [[2, 2, 3, 3]], "a layer of experts and its router, twice"


def test_auxiliary_losses_weigh_as_in_megatron_cores_driver() -> None:
    from lamella_testing.megatron import ddp_config

    def on_each_rank() -> None:
        from megatron.core.distributed import finalize_model_grads

        from lamella_megatron.training import ShardedModel

        module: Any = make_model("moe-mtp", Layout(num_ranks=2, ep=2), moe_aux_loss_coeff=0.1)
        model = ShardedModel(module.config, ddp_config(), module)
        module.config.finalize_model_grads_func = finalize_model_grads
        overlapped(model, DATA[0], Case(kind="moe-mtp"))  # first: the driver leaves its scales behind
        finalize_model_grads([model])
        gradients = {name: parameter.grad.to_local() for name, parameter in module.named_parameters()}
        module.zero_grad()
        by_driver(model, DATA[0])
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.grad.to_local(), gradients[name]), name

    run_ranks(on_each_rank, 2)
