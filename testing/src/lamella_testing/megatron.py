"""megatron-core on CPU ranks: its GPU calls answered by the CPU, and a model small enough for a test."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

VOCAB_SIZE, LENGTH = 64, 16


class _NoStream:
    """A stream, or an event, of a device that does everything in order."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Import megatron-core, and run its models on CPU ranks while the context lasts: forks inherit it.

    Tensors asked for on CUDA are made on the CPU, streams do nothing, random states of devices are not kept apart, and
    an all-to-all takes sizes as tensors, as NCCL's does.
    """
    with warnings.catch_warnings():
        # It warns about each fused library that is not installed, and imports what torch has deprecated.
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        random = importlib.import_module("megatron.core.tensor_parallel.random")
    with contextlib.ExitStack() as stack:

        def put(owner: object, **attributes: object) -> None:
            for name, value in attributes.items():
                stack.enter_context(patch.object(owner, name, value))

        put(torch.cuda, Stream=_NoStream, Event=_NoStream, synchronize=lambda *_: None)
        put(torch.cuda, current_stream=lambda *_: _NoStream(), stream=lambda _: contextlib.nullcontext())
        put(torch.cuda, current_device=lambda: torch.device("cpu"))
        put(torch.Tensor, cuda=lambda self, *_, **__: self, record_stream=lambda *_: None)
        put(torch.nn.Module, cuda=lambda self, *_, **__: self)
        for name in ("zeros", "ones", "empty", "full", "tensor", "arange"):
            put(torch, **{name: _on_cpu(getattr(torch, name))})
        put(dist, all_to_all_single=_with_lists(dist.all_to_all_single))
        put(random.CudaRNGStatesTracker, fork=lambda *_, **__: contextlib.nullcontext())
        yield


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def _with_lists(exchange: Callable[..., Any]) -> Callable[..., Any]:
    def exchanged(
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        sizes = [each.tolist() if hasattr(each, "tolist") else each for each in (output_split_sizes, input_split_sizes)]
        return exchange(output, tensor.contiguous(), *sizes, **kwargs)

    return exchanged


def tiny_config(**changes: Any) -> Any:
    """A `TransformerConfig` of two small layers without dropout; keywords change or add fields."""
    config = importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    fields = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "add_bias_linear": False,
    }
    return config(**{**fields, **changes})


def tiny_gpt(config: Any, **changes: Any) -> torch.nn.Module:
    """A GPTModel of torch's own operators; keywords go to its constructor."""
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    model: Any = importlib.import_module("megatron.core.models.gpt").GPTModel
    spec = specs.get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    fields = {"transformer_layer_spec": spec, "vocab_size": VOCAB_SIZE, "max_sequence_length": LENGTH}
    made: torch.nn.Module = model(config=config, **{**fields, **changes})
    return made


def token_losses(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss of each next token: (batch, LENGTH) for a batch of (batch, LENGTH + 1) tokens."""
    positions = torch.arange(LENGTH).expand(len(batch), -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    losses: torch.Tensor = model(batch[:, :-1], positions, mask, labels=batch[:, 1:])
    return losses
