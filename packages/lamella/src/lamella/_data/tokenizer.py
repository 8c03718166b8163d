"""The tokenizer of a run, trained on the text or taken from a model."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lamella._data.documents import text_of
from lamella._data.records import parts
from lamella._data.tables import SourceFile
from lamella._settings.options import ConfigError, in_short

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT: Final = "<|endoftext|>"

Unit = Literal["byte", "token"]
"""Denominator of losses on held-out text."""

VOCABULARY_LENGTH: Final = 16 << 20
"""Limit on the characters to train a vocabulary on: more text changes few merges, and costs time in proportion."""

_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""A chat template's mark around the assistant's messages."""


@dataclass(frozen=True, kw_only=True)
class RunTokenizer:
    """A tokenizer of transformers with the values a run needs.

    Attributes:
        tokenizer: The tokenizer of transformers.
        end: The token at the end of a document.
        num_tokens: One more than the largest token.
        unit: "byte" for byte-level tokenizers, whose tokens have a known number of bytes; else "token".
    """

    tokenizer: "PreTrainedTokenizerBase"
    end: int
    num_tokens: int
    unit: Unit

    @property
    def backend(self) -> Tokenizer | None:
        """The tokenizers library's object; None for tokenizers of other libraries."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return backend if isinstance(backend, Tokenizer) else None

    @cached_property
    def begin(self) -> list[int]:
        """The token of the tokenizer's own that it puts before a text; empty for tokenizers that put none there."""
        first = list(cast("list[int]", self.tokenizer("")["input_ids"]))[:1]
        return first if first == [self.tokenizer.bos_token_id] else []

    @property
    def chat_template(self) -> str | None:
        """The template to render conversations with; None for tokenizers without a template."""
        try:
            return str(self.tokenizer.get_chat_template())
        except ValueError:
            return None

    def marks_the_assistant(self, tools: Sequence[object] | None = None) -> bool:
        """Return True if the chat template for conversations with these tools marks the assistant's tokens."""
        if self.backend is None or self.chat_template is None:
            return False
        template = self.tokenizer.get_chat_template(tools=cast("list[dict[str, object]] | None", tools))
        return _GENERATION.search(str(template)) is not None

    def prompt_tokens(self, prompt: str) -> list[int]:
        """Return the tokens of a text to go on from.

        A text without tokens begins as a document does: behind the end of another.
        """
        return [int(token) for token in cast("list[int]", self.tokenizer(prompt)["input_ids"])] or [self.end]

    def text_after(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text of tokens behind others, without special tokens.

        SentencePiece's decoders strip the first space of a text: decoded alone, the tokens would lose theirs.
        """
        before, text = (
            str(self.tokenizer.decode([*sequence], skip_special_tokens=True))
            for sequence in (context, (*context, *tokens))
        )
        return text[len(before) :]

    def identity(self) -> str:
        """Return a text that differs between tokenizers with different tokens for a text."""
        backend = self.backend
        vocabulary = sorted(self.tokenizer.get_vocab().items()) if backend is None else backend.to_str()
        return json.dumps([vocabulary, self.end, self.tokenizer.chat_template], sort_keys=True)

    def units(self) -> list[int]:
        """Return the length of each token in `unit`: bytes of text, 0 for `end` and special tokens; or 1 per token.

        In the byte-level alphabet a byte is one character, so a token's name has one character per byte. The name of
        an added token is plain text.
        """
        if self.unit == "token" or self.backend is None:
            return [1] * self.num_tokens
        added = {
            index: 0 if token.special else len(token.content.encode())
            for index, token in self.backend.get_added_tokens_decoder().items()
        }
        nbytes = [0] * self.num_tokens
        for name, index in self.backend.get_vocab().items():
            nbytes[index] = 0 if index == self.end else added.get(index, len(name))
        return nbytes


def train_tokenizer(files: Iterable[SourceFile], vocab_size: int) -> RunTokenizer:
    """Train a byte-level byte-pair tokenizer of up to `vocab_size` tokens: 256 bytes, the end of a text, and merges.

    A short text yields fewer tokens. For a long text, training uses evenly spread pieces.
    """
    return train_on_texts(_sample(tuple(files)), vocab_size)


def train_on_texts(texts: Iterator[str], vocab_size: int) -> RunTokenizer:
    """Train a tokenizer as `train_tokenizer` does, on texts."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrap = cast("Callable[..., PreTrainedTokenizerBase]", PreTrainedTokenizerFast)
    return _checked(wrap(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT), END_OF_TEXT)


def _sample(files: Sequence[SourceFile]) -> Iterator[str]:
    """Yield evenly spread pieces of about `VOCABULARY_LENGTH` characters together; all of a shorter text."""
    share = min(1.0, VOCABULARY_LENGTH / max(1, sum(file.nbytes for file in files)))
    due = 0.0
    for part in parts(files):
        if text := text_of(part):
            due += share * len(text)
            if due > 0:
                yield text
                due -= len(text)


def read_tokenizer(directory: Path, vocab_size: int) -> RunTokenizer:
    """Read the tokenizer in a model's directory with transformers.

    Raises:
        ConfigError: The directory has no tokenizer, a library to read the tokenizer is missing, or the tokenizer has
            no end-of-text token, or more tokens than the model.
    """
    tokenizer = _read(directory)
    run_tokenizer = _checked(tokenizer, _end_of_text(tokenizer, directory))
    if run_tokenizer.num_tokens > vocab_size:
        raise ConfigError(
            f"Expected at most the model's {vocab_size} tokens in the tokenizer of {str(directory)!r}, got "
            f"{run_tokenizer.num_tokens}."
        )
    return run_tokenizer


def _read(directory: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    is_whole = (directory / "tokenizer.json").is_file()
    if not is_whole:
        _check_libraries(directory)
    # A tokenizer.json is complete. The classes of model types would replace parts of it by their own defaults.
    cls = PreTrainedTokenizerFast if is_whole else AutoTokenizer
    try:
        tokenizer = cls.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # The tokenizers library raises Exception itself.
        raise ConfigError(
            f"Expected a tokenizer that transformers can read in {str(directory)!r}, got: {in_short(error)}"
        ) from error
    if tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():
        # For some model types without tokenizer files, transformers makes a tokenizer of the special tokens alone.
        raise ConfigError(
            f"Expected a tokenizer that transformers can read in {str(directory)!r}, got one without a vocabulary. Put "
            "the model's tokenizer.json there."
        )
    if isinstance(backend := getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        # A tokenizer.json keeps the limits of its last call: texts would be cut to them, and pad tokens be targets.
        backend.no_truncation()
        backend.no_padding()
    tokenizer.model_max_length = int(1e30)  # No length warnings: documents are cut into sequences after tokenization.
    return tokenizer


def _check_libraries(directory: Path) -> None:
    """Refuse SentencePiece files without the libraries to read them; transformers would blame another file format."""
    from transformers.utils.import_utils import is_protobuf_available, is_sentencepiece_available

    availability = {"sentencepiece": is_sentencepiece_available(), "protobuf": is_protobuf_available()}
    missing = [name for name, is_available in availability.items() if not is_available]
    if missing and (files := sorted(directory.glob("*.model"))):
        raise ConfigError(
            f"Expected {' and '.join(missing)} to be installed to read {str(files[0])!r}, got no such package. Install "
            f"from the package index: {' '.join(missing)}"
        )


def _end_of_text(tokenizer: "PreTrainedTokenizerBase", directory: Path) -> str:
    if END_OF_TEXT in tokenizer.get_vocab():
        return END_OF_TEXT
    end = tokenizer.eos_token
    if end is None or end not in tokenizer.get_vocab():
        raise ConfigError(
            f"Expected {END_OF_TEXT!r} in the tokenizer of {str(directory)!r}, or a token of the tokenizer "
            f"as eos_token in its tokenizer_config.json, got {end!r}."
        )
    return str(end)


def _checked(tokenizer: "PreTrainedTokenizerBase", end: str) -> RunTokenizer:
    vocabulary = tokenizer.get_vocab()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if isinstance(backend, Tokenizer) else None
    return RunTokenizer(
        tokenizer=tokenizer,
        end=vocabulary[end],
        num_tokens=1 + max(vocabulary.values()),
        unit="byte" if '"ByteLevel"' in json.dumps(decoder) else "token",
    )
