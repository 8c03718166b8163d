"""Steps of one model with experts, with and without overlap of all-to-alls, by lamella and by megatron-core.

A step is forward, backward and the reduction of gradients, without an optimizer: weights and losses stay the same.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from lamella_engine import ZERO1, ZERO2, ZERO3, MixedPrecisionPolicy, ShardingOptions
from lamella_engine.extending import local_of
from lamella_integration.megatron_models import VOCAB_SIZE, float16_model

STAGES: Final = {"1": ZERO1, "2": ZERO2, "3": ZERO3}
Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A way to step.

    Attributes:
        is_megatron: Under megatron-core's `DistributedDataParallel` and driver, instead of lamella's units.
        overlaps: All-to-alls of one microbatch run beside the compute of another.
        delays: Layers leave weight gradients until after the backward of activations.
        is_ideal: Without all-to-alls: experts compute as many rows of their own rank, where the rows are.
        plain: Name of the mode without overlap to compare with.
    """

    is_megatron: bool = False
    overlaps: bool = False
    delays: bool = False
    is_ideal: bool = False
    plain: str = "lamella"


MODES: Final = {
    "lamella": Mode(),
    "lamella, overlapped": Mode(overlaps=True),
    "lamella, overlapped, delayed": Mode(overlaps=True, delays=True),
    "ideal": Mode(is_ideal=True),
    "megatron-core": Mode(is_megatron=True, plain="megatron-core"),
    "megatron-core, its plan": Mode(is_megatron=True, overlaps=True, plain="megatron-core"),
    "megatron-core, its plan, delayed": Mode(is_megatron=True, overlaps=True, delays=True, plain="megatron-core"),
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and its microbatches.

    Attributes:
        hidden: Width.
        rows: Sequences a microbatch and rank.
        length: Tokens a sequence.
        layers: Layers of a GPTModel.
        experts: Experts a layer over all ranks.
        top_k: Experts a token.
        ffn: Inner width of an expert.
        balances: Routers send token after token to the next experts in turn: each expert has as many.
        num_microbatches: Number of microbatches in a step.
        pattern: A HybridModel's pattern, with brackets around its units, in place of a GPTModel.
        stage: ZeRO's stage of lamella.
        device: `cuda` or `cpu`.
    """

    hidden: int
    rows: int
    length: int
    layers: int
    experts: int
    top_k: int
    ffn: int
    balances: bool
    num_microbatches: int
    pattern: str | None
    stage: str
    device: str

    def batches(self) -> list[Batch]:
        """This rank's microbatches, the same in all modes and steps: arguments of the model's forward."""
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        positions = torch.arange(self.length, device=self.device).expand(self.rows, -1)
        square = 2 * (self.length,)
        # Transformer Engine's attention is causal without a mask.
        mask = None if self.device == "cuda" else torch.ones(1, 1, *square, dtype=torch.bool).triu(1)
        batches = []
        for _ in range(self.num_microbatches):
            tokens = torch.randint(VOCAB_SIZE, (self.rows, self.length + 1), generator=generator).to(self.device)
            inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            batches.append({"input_ids": inputs, "position_ids": positions, "attention_mask": mask, "labels": labels})
        return batches


class ModeSteps:
    """Take steps of a mode.

    Args:
        mode: The mode.
        size: Model and microbatches.

    Effects: builds the model on `size.device`; collective over all ranks.
    """

    def __init__(self, mode: Mode, size: Size) -> None:
        self.mode, self._size, self._batches = mode, size, size.batches()
        config, module = float16_model(
            device=size.device,
            layers=size.layers,
            hidden=size.hidden,
            length=size.length,
            experts=size.experts,
            top_k=size.top_k,
            ep=dist.get_world_size(),
            pattern=size.pattern and size.pattern.replace("[", "").replace("]", ""),
            ffn_hidden_size=size.ffn,
            # lamella's order needs no such option, but megatron-core allows delays only with it.
            overlap_moe_expert_parallel_comm=mode.overlaps and (mode.is_megatron or mode.delays),
            delay_wgrad_compute=mode.delays,
            moe_router_force_load_balancing=size.balances,
            high_priority_a2a_comm_stream=mode.is_megatron and size.device == "cuda",  # as lamella's always is
        )
        self._model: Any
        if mode.is_megatron:
            self._model, self._take = _megatron_core_step(config, module)
        else:
            self._model, self._take = _lamella_step(mode, size, module.module)

    def __call__(self) -> list[torch.Tensor]:
        """Take a step, and return the loss of each microbatch on this rank. Effects: collective over all ranks."""
        with self._exchange():
            return self._take(self._model, self._batches)

    def gradient_norm(self) -> float | None:
        """The norm of the last step's gradients over all ranks; None under megatron-core's wrapper.

        Effects: collective over all ranks.
        """
        if self.mode.is_megatron:
            return None
        gradients = [
            local_of(parameter.grad).float() for parameter in self._model.parameters() if parameter.grad is not None
        ]
        square = torch.stack([gradient.square().sum(dtype=torch.float64) for gradient in gradients]).sum()
        dist.all_reduce(square)
        return math.sqrt(square.item())

    def release(self) -> None:
        """Let the model be collected: Python cannot see cycles through autograd's nodes.

        Dispatchers keep tensors of the last forward, with its graph, whose hooks hold the wrapper and the model.
        """
        for dispatcher in filter(None, (getattr(module, "token_dispatcher", None) for module in self._model.modules())):
            tensor_names = [name for name, value in vars(dispatcher).items() if isinstance(value, torch.Tensor)]
            for name in tensor_names:
                setattr(dispatcher, name, None)
        if self.mode.is_megatron:
            self._model.grad_accs.clear()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        with (
            no_all_to_alls() if self.mode.is_ideal else nullcontext(),
            experts_in_turn(self._size.top_k) if self._size.balances else nullcontext(),
        ):
            yield


Take = Callable[[Any, list[Batch]], list[torch.Tensor]]


def _lamella_step(mode: Mode, size: Size, model: nn.Module) -> tuple[nn.Module, Take]:
    fully_shard_model = importlib.import_module("lamella_megatron").fully_shard_model
    half, single = torch.bfloat16, torch.float32
    groups = size.pattern if size.pattern and "[" in size.pattern else None
    fully_shard_model(
        model,
        mp_policy=MixedPrecisionPolicy(half, single, cast_forward_inputs=False, main_dtype=single),
        options=ShardingOptions(placements=STAGES[size.stage]),
        layer_groups=groups,
    )
    training = importlib.import_module("lamella_megatron.training")

    def overlapped(model: Any, batches: list[Batch]) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = training.forward_backward_overlapped(
            model, batches, lambda losses: losses.float().mean() / len(batches)
        )
        return losses

    run = overlapped if mode.overlaps else _one_after_the_other

    def take(model: Any, batches: list[Batch]) -> list[torch.Tensor]:
        model.zero_grad()
        losses = run(model, batches)
        model.wait_for_gradients()
        return [loss.detach() * len(batches) for loss in losses]

    return model, take


def _one_after_the_other(model: Any, batches: list[Batch]) -> list[torch.Tensor]:
    testing = importlib.import_module("lamella_testing.megatron")
    testing.scale_auxiliary_losses(len(batches), batches[0]["labels"].device.type)
    losses = []
    for i, batch in enumerate(batches):
        model.set_is_last_backward(i == len(batches) - 1)
        loss = model(**batch).float().mean() / len(batches)
        loss.backward()
        losses.append(loss.detach())
    return losses


def _megatron_core_step(config: Any, module: nn.Module) -> tuple[nn.Module, Take]:
    distributed = importlib.import_module("megatron.core.distributed")
    ddp_config = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        # Hooks of reductions that overlap expect gradients from backward itself, unless linears add into `main_grad`.
        overlap_grad_reduce=not config.delay_wgrad_compute,
        use_distributed_optimizer=True,
        # Without the field, the wrapper waits for delayed gradients in hooks of a backward that does not make them.
        delay_wgrad_compute=config.delay_wgrad_compute,
    )
    model = distributed.DistributedDataParallel(config=config, ddp_config=ddp_config, module=module)
    config.no_sync_func = model.no_sync
    config.finalize_model_grads_func = distributed.finalize_model_grads
    driver = importlib.import_module("megatron.core.pipeline_parallel").get_forward_backward_func()

    def take(model: Any, batches: list[Batch]) -> list[torch.Tensor]:
        model.zero_grad_buffer()
        stored = driver(
            forward_step_func=_forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=batches[0]["labels"].shape[1],
            micro_batch_size=len(batches[0]["labels"]),
        )
        return [losses["loss"] for losses in stored]

    return model, take


def _forward_step(batches: Iterator[Batch], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    # The driver of the plan gives the GPTModel itself, and asks for the forward's plan in place of its output.
    call = model.build_schedule_plan if return_schedule_plan else model

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = losses.float().mean()
        return mean, {"loss": mean.detach().clone()}  # the driver divides the mean in place

    return call(**next(batches)), loss_of


@contextmanager
def no_all_to_alls() -> Iterator[None]:
    """Leave out the all-to-alls of megatron-core's dispatcher while the context lasts.

    The output is the source, in the same memory. An output of another size is a copy, so that experts compute as many
    rows as after the all-to-all.
    """
    with patch.object(dist, "all_to_all_single", _stay):
        yield


def _stay(output: torch.Tensor, source: torch.Tensor, *_: object, **__: object) -> None:
    if output.shape == source.shape:
        output.data = source
    elif len(source):
        for rows in torch.split(output, len(source)):
            rows.copy_(source[: len(rows)])
    else:
        output.zero_()


@contextmanager
def experts_in_turn(top_k: int) -> Iterator[None]:
    """Let routers of `moe_router_force_load_balancing` choose in turn, where megatron-core's choose at random.

    Where tokens fill whole turns, ranks send as many rows as they receive.
    """
    with patch("megatron.core.transformer.moe.router.apply_random_logits", partial(logits_in_turn, top_k=top_k)):
        yield


def logits_in_turn(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Logits by which the first token goes to the first `top_k` experts, the second to the next, and so on.

    Args:
        logits: (..., experts). Their gradient is that of the result, as of megatron-core's random logits.
    """
    num_experts = logits.shape[-1]
    places = torch.arange(logits.numel(), device=logits.device)
    tokens, experts = places // num_experts, places % num_experts
    turns = (experts - top_k * tokens) % num_experts
    return logits - (logits + turns.view_as(logits)).detach()


def largest_distance(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest distance between losses of the same microbatches."""
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))
