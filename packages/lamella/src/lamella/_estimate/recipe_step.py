"""The step of `lamella train` by a configuration, on tensors without memory."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import bias
from torch.utils._python_dispatch import _disable_current_modes

import lamella_optim
from lamella._data.batches import LossArguments, TokenBatch
from lamella._estimate.compiled_layers import compile_layers, is_estimated_compiled
from lamella._estimate.fake_ranks import FusedSteps, fake_ranks, no_memory
from lamella._estimate.gpu_operators import gpu_operators
from lamella._estimate.kinds import HOST_ACTIVATIONS
from lamella._estimate.liger_operators import liger_operators
from lamella._estimate.live_bytes import LiveBytes
from lamella._estimate.recorded_step import RecordedStep, TrainingStep, Watch, record, unwatched
from lamella._model.checks import check_neighbours
from lamella._model.lora import add_adapters
from lamella._model.matrices import matrices_for
from lamella._model.published_dtype import published_dtype
from lamella._model.sharding import shard
from lamella._model.spec import load_spec, refused_models
from lamella._model.trained_parameters import freeze, narrow_frozen, trained_patterns
from lamella._model.weights import pretrained_directory
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._training.narrow_states import check_states
from lamella._training.optimizer import make_optimizer
from lamella_transformers import (
    LossFunction,
    ModelSpec,
    SequencePieces,
    assumed_loss,
    balance_coefficient,
    build_without_parameters,
    check_attention,
    materialise,
    one_document_a_sequence,
    set_attention,
    target_losses,
)

_CPU = torch.device("cpu")
_MOST_MICROBATCHES = 3  # The first makes the sums, the second adds, the last reduces.


def record_recipe(config: Config, rank: int = 0, watch: Watch = unwatched, *, validates: bool = True) -> RecordedStep:
    """Record the live bytes of a step on one rank of a run.

    Args:
        config: The run's settings, with ranks, device and precision.
        rank: The rank.
        watch: Entered around the steps.
        validates: Run a validation between the steps, which gathers weights that the step would gather.

    Raises:
        ConfigError: The settings cannot be met, or the process has a process group.

    Effects: allocates no memory for weights or activations; the default process group is fake meanwhile.
    """
    assert config.parallel.ranks is not None
    check_states(config.optim)
    _check_experts(config)
    _check_attention(config)
    live = LiveBytes()
    try:
        with (
            fake_ranks(config.parallel.ranks, rank, config.parallel.device),
            gpu_operators(config.parallel.device),
            training_step(config, live, no_memory()) as step,
            watch(step, live),
            FusedSteps(),
        ):
            return record(step if validates else replace(step, validate=None), live)
    except RuntimeError as error:
        raise ConfigError(_refusal(config, error)) from error


def _refusal(config: Config, error: RuntimeError) -> str:
    reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    return (
        f"Expected layers of {config.model.name} that run in {config.parallel.precision} on tensors without memory, "
        f"for an estimate, got: {reason}. Experts run there in bf16 alone: pass --precision bf16. Layers whose shapes "
        "depend on values have no estimate."
    )


def _check_experts(config: Config) -> None:
    """Refuse an estimate with spread experts: a rank's tokens are as many as routers send, in a run alone."""
    if config.parallel.experts > 1:
        raise ConfigError(
            f"Expected an estimate without --experts, since a run alone knows the tokens that routers send to a rank, "
            f"got {config.parallel.experts}. Leave --experts out: the estimate then counts gathers of all experts."
        )


def _check_attention(config: Config) -> None:
    """Refuse an estimate of attention whose kernels keep tensors for backward that the estimate does not know."""
    if config.model.attention not in ("auto", "eager", "sdpa"):
        raise ConfigError(
            f"Expected an estimate with --attention auto, eager or sdpa, got {config.model.attention!r}, whose kernels "
            "have no estimate. Pass --attention auto."
        )


@contextmanager
def training_step(
    config: Config, live: LiveBytes, memory: AbstractContextManager[object] | None = None
) -> Iterator[TrainingStep]:
    """Yield the step of a run, on the ranks of the default process group, in CPU memory.

    Args:
        config: The run's settings.
        live: Counts from the first shard on, in the block.
        memory: A mode that gives tensors no memory; None for memory with undefined contents.
    """
    spec = load_spec(config.model.name, config.data.vocab_size)
    with refused_models():
        check_attention(spec, config.model.attention)
    set_attention(spec, config.model.attention)
    model = build_without_parameters(spec, _CPU)
    check_neighbours(model, spec, config.parallel)
    add_adapters(model, config.model, config.run.seed)
    on_cpu = _with_device(config, "cpu")
    matrices = matrices_for(config.optim, model)
    if trained_patterns(config) and (pretrained := pretrained_directory(config.model.name)) is not None:
        narrow_frozen(model, config, published_dtype(pretrained))
    units, shared_rows, pieces = shard(model, on_cpu.parallel, matrices, host=_HostCopies(live))
    freeze(model, trained_patterns(config))
    kernels = liger_operators(model) if config.model.kernels != "none" else nullcontext()
    with memory or nullcontext(), one_document_a_sequence(), _masks_without_modes(), kernels, live:
        materialise(model, _CPU)
        if is_estimated_compiled(config):
            compile_layers(units, live)
        # Before the first forward: an optimizer would hold the parameters that some stages leave unsharded.
        optimizer = make_optimizer(model, config.optim, matrices)
        loss = assumed_loss(model, balance_coefficient(spec), shared_rows)
        yield TrainingStep(
            model=model,
            units=units,
            loss=lambda: _microbatch_loss(config, spec, model, loss, pieces),
            optimizer=optimizer,
            clip=lambda: lamella_optim.clip_grad_norm_(model.parameters(), config.optim.clip_norm),
            num_microbatches=min(config.optim.accumulation, _MOST_MICROBATCHES),
            vocab_size=spec.vocab_size,
            validate=lambda: target_losses(model, *_arguments(config, pieces)),
        )


@contextmanager
def _masks_without_modes() -> Iterator[None]:
    """Disable modes while torch makes masks of cut sequences in the block: under a count of bytes torch would fail."""
    original = bias.causal_lower_right

    def causal_lower_right(*sizes: int) -> bias.CausalBias:
        with _disable_current_modes():
            return original(*sizes)

    bias.causal_lower_right = causal_lower_right
    try:
        yield
    finally:
        bias.causal_lower_right = original


def _microbatch_loss(
    config: Config, spec: ModelSpec, model: torch.nn.Module, loss: LossFunction, pieces: SequencePieces | None
) -> torch.Tensor:
    inputs, targets, positions, starts = _arguments(config, pieces)
    objective, balance = loss(model, inputs, targets, float(inputs.numel()), positions, starts)
    if balance is None:
        return objective
    return objective + balance_coefficient(spec) / config.optim.accumulation * balance


def _arguments(config: Config, pieces: SequencePieces | None) -> LossArguments:
    """Return the tensors of a microbatch's loss, of as many sequences as in a batch of a validation."""
    num_sequences = config.optim.batch_size // (config.parallel.num_data_ranks * config.optim.accumulation)
    tokens = torch.zeros((num_sequences, config.data.sequence_length + 1), dtype=torch.int64)
    return TokenBatch(tokens).arguments(pieces)


def _with_device(config: Config, device: Literal["cpu", "cuda"]) -> Config:
    return replace(config, parallel=replace(config.parallel, device=device))


class _HostCopies(saved_tensors_hooks):
    """Copies saved tensors to the host's memory and back, where both are memory of no device."""

    def __init__(self, live: LiveBytes) -> None:
        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor]:  # A tensor would pass for one on the device.
            with live.births_are(HOST_ACTIVATIONS):
                return (tensor.clone(),)

        def unpack(packed: tuple[torch.Tensor]) -> torch.Tensor:
            return packed[0].clone()

        super().__init__(pack, unpack)
