"""The sources of a run, read before anything is written: text, tokenizer, weights, and the checkpoint to go on from."""

from dataclasses import dataclass

from torch import nn

from lamella._data.documents import first_chat
from lamella._data.text import Corpus, collect
from lamella._data.tokenizer import RunTokenizer, read_tokenizer
from lamella._data.tokens import fingerprint
from lamella._model.weights import check_weights, told_of_weights
from lamella._record.profiling import NUM_WARMUP_STEPS
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._training.checks import CheckedRun
from lamella._training.resume import check_resumable, check_same_model, check_same_weights
from lamella_transformers import ModelSpec


@dataclass(frozen=True, kw_only=True)
class RunSources:
    """The sources of a run.

    Attributes:
        corpus: The text.
        tokenizer: The tokenizer of the model; or the vocabulary size of one to train.
        untrained: The names of pretrained tensors that the model has no modules for.
        first_step: Steps completed by the checkpoint to go on from; 0 for a new run.
    """

    corpus: Corpus
    tokenizer: RunTokenizer | int
    untrained: tuple[str, ...]
    first_step: int


def read(config: Config, run: CheckedRun, lines: list[str]) -> RunSources:
    """Read the sources of a run, and check that they fit the settings and each other.

    Args:
        config: The run's settings.
        run: The run, checked.
        lines: The lines to print at the start; those on data, model and weights are added.

    Raises:
        ConfigError: The text, the weights or the checkpoint does not fit.

    Effects: reads all text once, and the heads of the weights; writes nothing.
    """
    tokenizer = None if run.pretrained is None else read_tokenizer(run.pretrained, run.spec.vocab_size)
    corpus = collect(config.data.paths, config.data.validation_fraction, without=run.directory.root)
    text = fingerprint(corpus, tokenizer or run.spec.vocab_size)
    lines += _summary(corpus, run.outline, run.spec)
    lines += _told_of_chats(corpus, tokenizer)
    lines += _told_of_units(tokenizer)
    untrained: tuple[str, ...] = ()
    if run.pretrained is not None and run.checkpoint is None:
        untrained = check_weights(run.pretrained, run.outline, run.spec)
        lines.append(told_of_weights(run.pretrained, untrained))
    first_step = 0
    if run.checkpoint is not None:
        first_step = check_resumable(run.checkpoint, run.outline, config, text)
        check_same_model(run.spec, run.directory)
        if run.pretrained is not None:
            check_same_weights(run.pretrained, run.directory)
    if first_step < config.optim.steps:
        _check_profile(config, first_step)
    return RunSources(
        corpus=corpus, tokenizer=tokenizer or run.spec.vocab_size, untrained=untrained, first_step=first_step
    )


def _summary(corpus: Corpus, model: nn.Module, spec: ModelSpec) -> tuple[str, ...]:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"data: {corpus.describe()}", f"model: {num_parameters:,} parameters, {spec.vocab_size:,} tokens"


def _told_of_chats(corpus: Corpus, tokenizer: RunTokenizer | None) -> tuple[str, ...]:
    """Describe the tokens in the loss of conversations; refuse conversations without a chat template."""
    chat = first_chat((*corpus.train, *corpus.validation))
    if chat is None:
        return ()
    if tokenizer is None:
        raise ConfigError(
            f"Expected a model whose tokenizer has a chat template for the conversation in {chat.place}, got one "
            "without a tokenizer. Pass the folder of a chat model as --model, or JSON lines with a 'text'."
        )
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"Expected a tokenizer with a chat template for the conversation in {chat.place}, got none. Put a "
            "chat_template.jinja into the model's folder, or pass JSON lines with a 'text'."
        )
    if tokenizer.marks_the_assistant:
        return ("conversations: the loss is on what the assistant says",)
    return ("conversations: the loss is on all tokens; the chat template does not mark the assistant's",)


def _told_of_units(tokenizer: RunTokenizer | None) -> tuple[str, ...]:
    if tokenizer is None or tokenizer.unit == "byte":
        return ()
    return ("validation: in nats a token, since the tokenizer does not tell a token's bytes",)


def _check_profile(config: Config, first_step: int) -> None:
    """Refuse to profile more steps than remain."""
    needed = 0 if config.run.profile is None else NUM_WARMUP_STEPS + config.run.profile
    if needed > config.optim.steps - first_step:
        raise ConfigError(
            f"Expected at least {needed} steps to go for --profile {config.run.profile}, which begins after "
            f"{NUM_WARMUP_STEPS}, got {config.optim.steps - first_step}. Pass a larger --steps, or a smaller --profile."
        )
