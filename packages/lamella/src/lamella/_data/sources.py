"""The text of a run and the tokenizer for it, read before any token is made."""

from dataclasses import dataclass
from pathlib import Path

from lamella._data.documents import first_chat
from lamella._data.text import Corpus, collect
from lamella._data.tokenizer import RunTokenizer, read_tokenizer
from lamella._data.tokens import fingerprint
from lamella._settings.config import DataConfig
from lamella._settings.options import ConfigError


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The text of a run, split, and its tokenizer.

    Attributes:
        corpus: The text.
        tokenizer: The tokenizer of the model; or the vocabulary size of one to train.
        fingerprint: A hash of text and tokenizer.
    """

    corpus: Corpus
    tokenizer: RunTokenizer | int
    fingerprint: str


def read_text(config: DataConfig, pretrained: Path | None, vocab_size: int, *, without: Path) -> TextSource:
    """Find the text, and read the tokenizer.

    Args:
        config: The settings of the data.
        pretrained: The folder of a model whose tokenizer makes the tokens; None to train a tokenizer.
        vocab_size: The number of tokens of the model.
        without: The run's folder, whose files are no text.

    Raises:
        ConfigError: The folder has no readable tokenizer, or a path has no text; names the path.

    Effects: reads every file once.
    """
    tokenizer = vocab_size if pretrained is None else read_tokenizer(pretrained, vocab_size)
    corpus = collect(config.paths, config.validation_fraction, without=without)
    return TextSource(corpus=corpus, tokenizer=tokenizer, fingerprint=fingerprint(corpus, tokenizer))


def loss_lines(source: TextSource) -> list[str]:
    """Return the lines to print on the tokens in the loss, and on the unit of validations.

    Raises:
        ConfigError: A line holds no document, or there are conversations and no chat template.

    Effects: reads all files of JSON lines.
    """
    tokenizer = source.tokenizer if isinstance(source.tokenizer, RunTokenizer) else None
    return [*_lines_on_chats(source.corpus, tokenizer), *_lines_on_units(tokenizer)]


def _lines_on_chats(corpus: Corpus, tokenizer: RunTokenizer | None) -> tuple[str, ...]:
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


def _lines_on_units(tokenizer: RunTokenizer | None) -> tuple[str, ...]:
    if tokenizer is None or tokenizer.unit == "byte":
        return ()
    return ("validation: in nats a token, since the tokenizer does not tell a token's bytes",)
