"""Samples during training: continuations of prompts by the sharded model."""

import random
from collections.abc import Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from lamella._data.tokenizer import read_tokenizer
from lamella._model.spec import generation_config
from lamella._processes.placement import DataShare, Rank
from lamella._record.metrics import SampleRecord
from lamella._record.run_directory import RunDirectory
from lamella._settings.options import ConfigError, shown
from lamella._settings.sections import RunConfig
from lamella_transformers import ModelSpec, document_arguments, num_positions

_PADDED_TO: Final = 64
"""Inputs are padded to a multiple of this, so that few shapes come up; no token sees the padding behind it."""


def check_prompts(prompts: Iterable[str]) -> None:
    """Refuse prompts unreadable to any tokenizer.

    Raises:
        ConfigError: Names the prompt.
    """
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"Expected --sample to be texts in UTF-8, got {shown(prompt)}.") from None


class Samples:
    """The prompts of a run, continued a share each at a time: the gathers of one forward serve all ranks.

    Every token takes a forward over the text before, without a cache: the forward of training, known for any model.
    Random choices have generators of their own: training draws the same numbers with samples and without.

    Args:
        run: The settings of the run.
        directory: The run's files, with the tokenizer.
        spec: The config of the model.
        rank: This process among the workers.
        share: The share of the prompts of this rank, and of neighbours in the same forwards.

    Raises:
        ConfigError: A prompt has no room for a token among the positions of the model, or the folder's settings of
            generation cannot be read.
    """

    def __init__(self, run: RunConfig, directory: RunDirectory, spec: ModelSpec, rank: Rank, share: DataShare) -> None:
        self._run, self._rank, self._share = run, rank, share
        self._tokenizer = read_tokenizer(directory.model, spec.vocab_size)
        ends = generation_config(directory.model, spec).eos_token_id
        self._ends = {self._tokenizer.end, *(ends if isinstance(ends, list) else [ends])}
        self._prompts = [self._tokenizer.prompt_tokens(prompt) for prompt in run.sample]
        self._num_positions = num_positions(spec)
        for prompt, tokens in zip(run.sample, self._prompts, strict=True):
            if self._num_positions is not None and len(tokens) >= self._num_positions:
                raise ConfigError(
                    f"Expected --sample of fewer than {self._num_positions:,} tokens, the positions of the model, got "
                    f"{len(tokens):,} in {shown(prompt)}. Pass a shorter prompt."
                )

    @torch.no_grad()
    def records(self, model: nn.Module, step: int) -> list[SampleRecord]:
        """Return each prompt with the continuation after `step` steps, the same on every rank.

        Effects: collective over all ranks, a forward and a small all-reduce a token; waits for the device; leaves the
            model in training mode.
        """
        model.eval()
        # A compiled layer would compile anew for samples' shapes, and then compute for any shape in training too.
        with torch.compiler.set_stance("force_eager"):
            starts = range(0, len(self._prompts), self._share.num_shares)
            texts = [text for start in starts for text in self._texts(model, step, start)]
        model.train()
        return [
            SampleRecord(step=step, number=number, prompt=prompt, text=text)
            for number, (prompt, text) in enumerate(zip(self._run.sample, texts, strict=True), 1)
        ]

    def _texts(self, model: nn.Module, step: int, start: int) -> list[str]:
        """Return the continuations of a prompt for each share, from `start` on."""
        # Every rank runs the same number of forwards, or their all-gathers would hang: padding repeats a prompt.
        index = start + self._share.number if start + self._share.number < len(self._prompts) else start
        seed = random.Random(f"{self._run.seed} sample {step} {index}").getrandbits(63)
        prompt = self._prompts[index]
        tokens = self._continuation(model, prompt, torch.Generator().manual_seed(seed))
        texts = [""] * self._rank.num_ranks
        dist.all_gather_object(texts, self._tokenizer.text_after(prompt, tokens))
        return texts[:: self._rank.num_ranks // self._share.num_shares][: len(self._prompts) - start]

    def _continuation(self, model: nn.Module, prompt: Sequence[int], generator: torch.Generator) -> list[int]:
        """Return the tokens after a prompt, up to the end of the text or turn, or of the longest rank's."""
        tokens, has_ended = [*prompt], False
        for _ in range(self._run.sample_tokens):
            token = self._next(model, tokens, generator)
            if not has_ended:
                tokens.append(token)
                has_ended = token in self._ends or len(tokens) == self._num_positions
            if self._all_ended(has_ended):
                break
        return tokens[len(prompt) :]

    def _next(self, model: nn.Module, tokens: Sequence[int], generator: torch.Generator) -> int:
        """Return the next token. Effects: a forward; waits for the device."""
        length = -(-len(tokens) // _PADDED_TO) * _PADDED_TO
        padding = [self._tokenizer.end] * (min(length, self._num_positions or length) - len(tokens))
        inputs = torch.tensor([[*tokens, *padding]], device=self._rank.device)
        output = model(**document_arguments(model, inputs, None), use_cache=False)
        logits = output.logits[0, len(tokens) - 1, : self._tokenizer.num_tokens]
        if not self._run.sample_temperature:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.double().cpu() / self._run.sample_temperature, 0)
        return int(torch.multinomial(probabilities, 1, generator=generator))

    def _all_ended(self, has_ended: bool) -> bool:
        goes_on = torch.tensor(int(not has_ended), device=self._rank.device)
        dist.all_reduce(goes_on, op=dist.ReduceOp.MAX)
        return not goes_on.item()
