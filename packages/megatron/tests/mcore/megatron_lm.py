"""Programs of `megatron.training` on CPU ranks: the command line parsed, the model built, and steps run by megatron."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import shlex
import sys
import typing
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import typing_extensions

LENGTH = 8
COMMON = shlex.split(
    "--hidden-size 32 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 0.01 --min-lr 0.001 --lr-decay-style cosine "
    "--lr-warmup-iters 2 --clip-grad 0 --adam-eps 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 62 "
    "--make-vocab-size-divisible-by 2 --transformer-impl local --no-persist-layer-norm --use-cpu-initialization "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --distributed-backend gloo"
)
SHARDED = shlex.split(
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params"
)


@contextlib.contextmanager
def programs_on_cpu() -> Iterator[None]:
    """Import `megatron.training`, and let it run on CPU ranks while the context lasts; inside `megatron_on_cpu`.

    `typing.override`, of Python 3.12, is typing_extensions'. A rank has a GPU by number alone, of an older
    architecture. The C++ index of datasets is not compiled.

    Tokenizers, whose transformers takes each rank seconds to import, are imported here. The help of options is read
    from the sources here, once a process.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(typing, "override", typing_extensions.override, create=True))
        importlib.import_module("megatron.training.training")
        importlib.import_module("megatron.core.tokenizers.text")
        initialize = importlib.import_module("megatron.training.initialize")

        def put(owner: object, **attributes: object) -> None:
            for name, value in attributes.items():
                stack.enter_context(patch.object(owner, name, value))

        put(torch.cuda, device_count=lambda: 1, get_rng_state=lambda *_: torch.zeros(1, dtype=torch.uint8))
        put(torch.cuda, set_rng_state=lambda *_, **__: None, get_device_capability=lambda *_: (8, 0))
        put(torch.cuda, get_device_properties=lambda *_: SimpleNamespace(major=8, minor=0))
        put(initialize, _compile_dependencies=lambda: None)
        options = importlib.import_module("megatron.training.argument_utils").ArgumentGroupFactory
        help_of_class = functools.partial(_help_of_options, options._get_field_docstrings)
        put(options, _get_field_docstrings=lambda _, options_class: help_of_class(options_class))
        importlib.import_module("megatron.training.arguments").add_megatron_arguments(argparse.ArgumentParser())
        yield


@functools.cache
def _help_of_options(read: Callable[..., dict[str, str]], options_class: type) -> dict[str, str]:
    """The help by option. To read it, megatron parses the sources of its configurations: a third of a command line."""
    return read(SimpleNamespace(_get_field_docstrings=functools.partial(_help_of_options, read)), options_class)


@contextlib.contextmanager
def launched(script: str, *arguments: str) -> Iterator[None]:
    """The command line and the environment of a rank of torchrun."""
    rank, num_ranks = 0, 1
    if torch.distributed.is_initialized():
        rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    environment = {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    with patch.object(sys, "argv", [script, *arguments]), patch.dict(os.environ, environment):
        yield


def parsed(*arguments: str) -> Any:
    """The arguments of a GPT's command line, by megatron's own parser and checks."""
    parser = importlib.import_module("megatron.training.arguments")
    with launched("pretrain_gpt.py", *COMMON, "--num-layers", "2", *arguments):
        args = parser.parse_args()
        parser.validate_args(args)
    return args


def begin(*arguments: str) -> Any:
    """The arguments of this rank, after all that `pretrain` does before it builds a model."""
    args = parsed(*arguments)
    importlib.import_module("megatron.training.global_vars").set_global_variables(args)
    importlib.import_module("megatron.training.initialize").initialize_megatron(allow_no_cuda=True)
    return args


def build(*arguments: str) -> tuple[Any, list[Any], Any, Any]:
    """Arguments, and model, optimizer and schedule as `setup_model_and_optimizer` makes or resumes them."""
    args = begin(*arguments)
    return args, *set_up()


def set_up() -> tuple[list[Any], Any, Any]:
    """Model, optimizer and schedule by the arguments of `begin`."""
    training = importlib.import_module("megatron.training.training")
    kind = importlib.import_module("megatron.core.enums").ModelType.encoder_or_decoder
    state: tuple[list[Any], Any, Any] = training.setup_model_and_optimizer(kind, provide_gpt)
    return state


def provide_gpt(pre_process: bool, post_process: bool, config: Any = None, **_: object) -> Any:
    """A GPTModel of torch's own operators, by the arguments."""
    args = importlib.import_module("megatron.training").get_args()
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    configs = importlib.import_module("megatron.training.arguments")
    gpt = importlib.import_module("megatron.core.models.gpt").GPTModel
    config = config or configs.core_transformer_config_from_args(args)
    return gpt(
        config,
        specs.get_gpt_layer_local_spec(num_experts=args.num_experts),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


def batches(args: Any, *, first_step: int) -> Iterator[torch.Tensor]:
    """This rank's rows of each microbatch; a step's rows are the same on any number of ranks."""
    state = importlib.import_module("megatron.core.parallel_state")
    rank, num = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    num_microbatches = args.global_batch_size // (args.micro_batch_size * num)
    for step in range(first_step, args.train_iters):
        rows = torch.randint(
            args.padded_vocab_size, (args.global_batch_size, LENGTH + 1), generator=torch.Generator().manual_seed(step)
        )
        for microbatch in rows.chunk(num_microbatches):
            yield microbatch.chunk(num)[rank]


def forward_step(iterator: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """The losses of a microbatch, as a script's."""
    rows = next(iterator)
    positions = torch.arange(LENGTH).expand(len(rows), -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    losses = model(rows[:, :-1], positions, mask, labels=rows[:, 1:])

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        num_tokens = torch.tensor(losses.numel(), dtype=torch.int)
        return losses.sum(), num_tokens, {"lm loss": torch.stack([losses.detach().sum(), num_tokens.float()])}

    return losses, loss_of


def train(
    args: Any,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    *,
    num_steps: int,
    forward: Callable[..., Any] = forward_step,
    data: Any = None,
) -> list[tuple[float, float]]:
    """Steps of `train_step`, prepared as `train` does; the loss and the norm of gradients of each.

    The last pipeline stage has the loss, others NaN.
    """
    training = importlib.import_module("megatron.training.training")
    config = importlib.import_module("megatron.core.utils").get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    if isinstance(model[0], (training.megatron_FSDP, training.DDP)) and args.overlap_grad_reduce:
        assert config.no_sync_func is None
        config.no_sync_func = model[0].no_sync
    config.finalize_model_grads_func = training.finalize_model_grads
    driver = importlib.import_module("megatron.core.pipeline_parallel").get_forward_backward_func()
    wrap = importlib.import_module("megatron.core.rerun_state_machine").RerunDataIterator
    iterator, history = data or wrap(batches(args, first_step=args.iteration)), []
    for _ in range(num_steps):
        losses, skipped, _, _, _, norm, *_ = training.train_step(
            forward, iterator, model, optimizer, scheduler, config, driver, iteration=args.iteration
        )
        assert not skipped
        args.iteration += 1
        args.consumed_train_samples += args.global_batch_size
        history.append((float(losses.get("lm loss", "nan")), float(norm)))
    return history
