"""The reference decoder's rows of `bench_estimate`: one function shards, for estimate and real steps."""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lamella
import lamella_engine as engine
import lamella_optim as optim
from lamella.testing import RecordedWorks, record_module_works
from lamella_integration.llama import SIZES, Block, Llama, LlamaConfig, next_token_loss
from lamella_integration.reference import init_weights

_STAGES: Final = {1: engine.ZERO1, 2: engine.ZERO2, 3: engine.ZERO3}
_SIZES: Final = {"1b": SIZES["1b"], "5b": replace(SIZES["8b"], num_layers=18)}
_UNITS: Final = {"MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class DecoderRow:
    """A decoder with options."""

    config: LlamaConfig
    options: argparse.Namespace

    @classmethod
    def of(cls, row: str, *, is_tiny: bool) -> "DecoderRow":
        """Parse a row's name."""
        parser = argparse.ArgumentParser(prog="decoder", exit_on_error=False)
        parser.add_argument("size", choices=_SIZES)
        parser.add_argument("--layers", type=int)
        parser.add_argument("--tokens", type=int, default=4096)
        parser.add_argument("--stage", type=int, choices=_STAGES, default=3)
        parser.add_argument("--microbatches", type=int, default=1)
        parser.add_argument("--keep", default="0MiB", help="bytes, such as 4GiB")
        parser.add_argument("--recompute", action="store_true")
        parser.add_argument("--compile", action="store_true")
        options = parser.parse_args(shlex.split(row)[1:])
        config = _SIZES[options.size]
        if options.layers is not None:
            config = replace(config, num_layers=options.layers)
        if is_tiny:
            config, options.tokens = SIZES["tiny"], options.tokens // 32
        return cls(config, options)

    def model(self) -> Llama:
        """Return the decoder on meta."""
        with torch.device("meta"):
            model = Llama(self.config)
        for block in model.blocks:
            cast(Block, block).recomputes = self.options.recompute
        return model

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Shard the blocks and the root, in bf16 with bf16 reductions."""
        policy = engine.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        options = engine.ShardingOptions(placements=_STAGES[self.options.stage], keep_budget=_nbytes(self.options.keep))
        for unit in (*cast(Llama, model).units(), model):
            engine.fully_shard(unit, mesh=mesh, mp_policy=policy, options=options)

    def loss(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a sequence, (1, num_tokens), whose labels are the tokens."""
        num_microbatches: int = self.options.microbatches
        return next_token_loss(model(tokens), tokens) / num_microbatches


def estimate_decoder(row: str, num_ranks: int, rank: int, device: Any, *, is_tiny: bool) -> lamella.Estimate:
    """Return the estimate of a row on one rank."""
    decoder = DecoderRow.of(row, is_tiny=is_tiny)
    return lamella.estimate(decoder.model(), rank=rank, **_loop(decoder, num_ranks, device))


def decoder_works(row: str, num_ranks: int, device: Any, *, is_tiny: bool) -> RecordedWorks:
    """Return the works of a step of a row on rank 0."""
    decoder = DecoderRow.of(row, is_tiny=is_tiny)
    return record_module_works(decoder.model(), **_loop(decoder, num_ranks, device))


def _loop(decoder: DecoderRow, num_ranks: int, device: Any) -> dict[str, Any]:
    optim.install()
    return {
        "shard": decoder.shard,
        "loss": lambda model: decoder.loss(model, torch.zeros(1, decoder.options.tokens, dtype=torch.int64)),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        "mesh": (num_ranks,),
        "num_microbatches": decoder.options.microbatches,
        "vocab_size": decoder.config.vocab_size,
        "clip": lambda model: optim.clip_grad_norm_(model.parameters(), 1.0),
        "device": device,
    }


@contextmanager
def decoder_steps(
    row: str, num_ranks: int, device: torch.device, *, is_tiny: bool
) -> Iterator[tuple[nn.Module, Sequence[nn.Module], Any]]:
    """Yield the model of a row, the units, and the function for a step."""
    decoder = DecoderRow.of(row, is_tiny=is_tiny)
    optim.install()
    model = decoder.model()
    if decoder.options.compile:
        for block in model.blocks:
            block.compile()
    decoder.shard(model, init_device_mesh(device.type, (num_ranks,)))
    model.to_empty(device=device)
    init_weights(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    count = decoder.options.microbatches

    def step(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        shape = (count, 1, decoder.options.tokens)
        losses = []
        for index, tokens in enumerate(torch.randint(decoder.config.vocab_size, shape, generator=generator)):
            cast(engine.FSDPModule, model).set_requires_gradient_sync(index == count - 1)
            # From pageable memory the host would wait for all work, as no training loop should.
            tokens = tokens.pin_memory() if device.type == "cuda" else tokens
            loss = decoder.loss(model, tokens.to(device, non_blocking=True))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            del loss
        optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    yield model, model.units(), step


def _nbytes(text: str) -> int:
    return int(text[:-3]) * _UNITS[text[-3:]]
