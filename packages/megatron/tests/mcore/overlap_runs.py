"""Steps of megatron-core's models on CPU ranks, overlapped and one microbatch after the other, to be compared."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from lamella_engine import ZERO1, ZERO3, ShardingOptions
from lamella_megatron._model.patterns import parse_pattern
from lamella_testing import run_ranks
from lamella_testing.megatron import LENGTH, VOCAB_SIZE, scale_auxiliary_losses
from lamella_testing.megatron_parity import Layout, has_experts, make_model

NUM_STEPS, NUM_MICROBATCHES, NUM_ROWS = 3, 4, 4
DATA = torch.randint(
    VOCAB_SIZE, (NUM_STEPS, NUM_MICROBATCHES, NUM_ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1)
)
Trained = tuple[list[list[float]], dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its ranks, and how its step is taken.

    Attributes:
        kind: The kind of model that `make_model` builds.
        groups: `layer_groups`.
        num_ranks: With two expert-parallel ranks where there are experts.
        tp: Tensor-parallel ranks, with sequence parallelism.
        shares: Whether layers have a shared expert.
        stage: "ZeRO-1" or "ZeRO-3".
        expert_stage: The stage of experts, if not `stage`; "" for `stage`.
        delays: Whether linears leave weight gradients to `backward_dw`.
        early: `early_release`.
        recomputes: The part of layers that is recomputed in backward; "" for none.
        option: A field of the `TransformerConfig` to set; "" for none.
        pads: Whether the last tokens of a row are padding, which no expert sees.
        balances: Whether routers have an auxiliary loss.
        nests: Whether the groups are stacks of their own, and no `layer_groups`.
    """

    kind: str
    groups: str | None = None
    num_ranks: int = 2
    tp: int = 1
    shares: bool = False
    stage: str = "ZeRO-3"
    expert_stage: str = ""
    delays: bool = False
    early: bool = False
    recomputes: str = ""
    option: str = ""
    pads: bool = False
    balances: bool = False
    nests: bool = False

    def __str__(self) -> str:
        names = ("shares", "delays", "early", "pads", "balances", "nests")
        flags = [name for name in names if getattr(self, name)]
        options = [f"recomputes {self.recomputes}"] if self.recomputes else []
        options += [self.option] if self.option else []
        options += [f"experts {self.expert_stage}"] if self.expert_stage else []
        return "-".join([self.groups or self.kind, f"{self.num_ranks} ranks", self.stage, *flags, *options])

    @property
    def layer_groups(self) -> str | None:
        """The argument of that name."""
        return None if self.nests else self.groups

    @property
    def layout(self) -> Layout:
        """The ranks."""
        has_two = has_experts(self.kind) and self.num_ranks > 1
        return Layout(num_ranks=self.num_ranks, tp=self.tp, ep=2 if has_two else 1)


def all_cases(kinds: Sequence[tuple[str, str | None]], nums_ranks: Sequence[int], *, nests: bool = False) -> list[Case]:
    return [
        Case(
            kind=kind,
            groups=groups,
            num_ranks=num_ranks,
            shares=shares,
            stage=stage,
            delays=delays,
            early=early,
            recomputes=recomputes,
            nests=nests,
        )
        for (kind, groups), num_ranks, stage in itertools.product(kinds, nums_ranks, ("ZeRO-1", "ZeRO-3"))
        for shares, delays, early in itertools.product((False, True), repeat=3)
        for recomputes in ("", "layernorm")
        if has_experts(kind) or not (shares or recomputes)
    ]


def recomputing(part: str) -> dict[str, Any]:
    """Fields of a `TransformerConfig` that recomputes a part of layers."""
    return {"recompute_granularity": "selective", "recompute_modules": [part]}


def inputs_of(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "input_ids": rows[:, :-1],
        "position_ids": torch.arange(LENGTH).expand(len(rows), -1),
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
        "labels": rows[:, 1:],
    }


def model_of(case: Case) -> Any:
    from lamella_megatron import fully_shard_model

    shared = {"moe_shared_expert_intermediate_size": 16} if case.shares else {}
    option = {case.option: True} if case.option else {}
    balance = {"moe_aux_loss_coeff": 0.1} if case.balances else {}
    again = recomputing(case.recomputes) if case.recomputes else {}
    model = make_model(case.kind, case.layout, **shared, **option, **balance, **again)
    if case.nests:
        assert case.groups is not None
        nest(model, case.groups)
    if case.delays:
        delay_weight_gradients(model)
    stages = {"ZeRO-1": ZERO1, "ZeRO-3": ZERO3}
    return fully_shard_model(
        model,
        options=ShardingOptions(placements=stages[case.stage]),
        layer_groups=case.layer_groups,
        expert_stage=stages.get(case.expert_stage),
    )


def nest(model: Any, groups: str) -> None:
    """Put a HybridModel's groups into stacks of their own, as a branch of megatron-core (PR 4943) builds them."""
    stack = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
    decoder, items = model.decoder, []
    for item in parse_pattern(groups).groups:
        layers = decoder.layers[item.first : item.layers.stop]
        if not item.is_group:
            items.append(layers[0])
            continue
        inner = stack.HybridStack(
            model.config,
            stack.HybridStackSubmodules(),
            layer_type_list=[],
            post_process=False,
            pg_collection=decoder.pg_collection,
        )
        inner.layers, inner.layer_type_list = nn.ModuleList(layers), list(item.symbols)
        inner.is_layer_group_stack = True
        inner.layer_number = item.first + 1  # for the outer stack of a release, which takes the group for a layer
        items.append(inner)
    decoder.layers = nn.ModuleList(items)
    decoder.layer_type_list = [getattr(layer, "layer_type_list", "") for layer in items]


def microbatches(step: torch.Tensor, case: Case | None = None) -> list[dict[str, torch.Tensor]]:
    from megatron.core import parallel_state

    num, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    batches = [inputs_of(rows.chunk(num)[rank]) for rows in step]
    for i, batch in enumerate(batches if case is not None and case.pads else ()):
        batch["padding_mask"] = torch.arange(LENGTH).expand(len(batch["labels"]), -1) >= LENGTH - 4 + i
    return batches


def share(losses: torch.Tensor) -> torch.Tensor:
    return losses.mean() / NUM_MICROBATCHES


def overlapped(model: Any, step: torch.Tensor, case: Case) -> list[torch.Tensor]:
    from lamella_megatron.training import forward_backward_overlapped

    return forward_backward_overlapped(model, microbatches(step, case), share, early_release=case.early)


def overlapped_batches(model: Any, batches: list[dict[str, Any]]) -> None:
    from lamella_megatron.training import forward_backward_overlapped

    forward_backward_overlapped(model, batches, share)


def one_after_the_other(model: Any, step: torch.Tensor, case: Case) -> list[torch.Tensor]:
    scale_auxiliary_losses(NUM_MICROBATCHES)
    losses = []
    for i, batch in enumerate(microbatches(step, case)):
        model.set_is_last_backward(i == NUM_MICROBATCHES - 1)
        loss = share(model(**batch))
        loss.backward()  # type: ignore[no-untyped-call]
        for module in reversed(list(model.modules())):
            if hasattr(module, "need_backward_dw"):
                module.backward_dw()
        losses.append(loss.detach())
    return losses


def by_driver(model: Any, step: torch.Tensor, num_rows: int = NUM_ROWS // 2) -> list[dict[str, torch.Tensor]]:
    """A step of megatron-core's own driver, with the loss of `share`."""
    driver = importlib.import_module("megatron.core.pipeline_parallel").get_forward_backward_func()

    def forward(batches: Any, chunk: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        call = chunk.build_schedule_plan if return_schedule_plan else chunk
        return call(**next(batches)), lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    stored: list[dict[str, torch.Tensor]] = driver(
        forward_step_func=forward,
        data_iterator=iter(microbatches(step)),
        model=[model],
        num_microbatches=NUM_MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=num_rows,
    )
    return stored


def train(case: Case, take_step: Callable[[Any, torch.Tensor, Case], list[torch.Tensor]]) -> Trained:
    model = model_of(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in DATA:
        losses.append([loss.item() for loss in take_step(model, step, case)])
        model.wait_for_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}


@contextmanager
def copied_recomputations() -> Iterator[None]:
    """Let megatron-core copy recomputed outputs where its C++ extension shares storages: to compile it takes 30 s."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    with mock.patch.object(random, "_get_share_storage", return_value=_copy_storage):
        yield


def _copy_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Fill the freed storage of an output; as with the extension, the tensor's version stays."""
    storage, source = output.untyped_storage(), recomputed.untyped_storage()
    storage.resize_(source.nbytes())
    storage.copy_(source)


def assert_equal_bits(case: Case) -> None:
    def on_each_rank() -> None:
        from megatron.core import parallel_state

        # First, so that the overlapped steps find nothing that plain steps have set.
        losses, weights = train(case, overlapped)
        parallel_state.destroy_model_parallel()
        expected_losses, expected_weights = train(case, one_after_the_other)
        assert losses == expected_losses
        assert losses[0] != losses[1], "nothing was learned"
        for name, weight in weights.items():
            assert torch.equal(weight, expected_weights[name]), name

    with copied_recomputations():
        run_ranks(on_each_rank, case.num_ranks)


# -- weight gradients after the backward -------------------------------------------------------------------------------


def delay_weight_gradients(model: nn.Module) -> None:
    """Let megatron-core's linears in layers delay weight gradients, by the protocol of Transformer Engine's."""
    output_layer = getattr(model, "output_layer", None)  # of the last pipeline stage alone
    for layer in model.modules():
        if type(layer).__name__ in ("ColumnParallelLinear", "RowParallelLinear") and layer is not output_layer:
            _Delay(layer)


class _Delay:
    """The weight gradients that one linear owes."""

    def __init__(self, layer: Any) -> None:
        self.owed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.hooks: list[Callable[[], None]] = []
        layer.weight.skip_backward_post_hook = True
        layer._forward_impl = self.forward
        layer.need_backward_dw = lambda: True
        layer.register_wgrad_accumulation_and_reduce_hooks = self.hooks.append
        layer.backward_dw = self.compute

    def forward(self, *, input: torch.Tensor, weight: torch.Tensor, bias: Any, **_: Any) -> torch.Tensor:  # noqa: A002
        output: torch.Tensor = _WithoutWeight.apply(self, input, weight)  # type: ignore[no-untyped-call]
        return output if bias is None else output + bias

    def compute(self) -> None:
        x, gradient, weight = self.owed.pop(0)
        weight.grad = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        for hook in self.hooks:
            hook()


class _WithoutWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delay: _Delay, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.delay, ctx.weight = delay, weight
        ctx.save_for_backward(x)
        return x @ weight.detach().T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.delay.owed.append((x, gradient, ctx.weight))
        return None, gradient @ ctx.weight, None
