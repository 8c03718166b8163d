"""The tokenizer of a run: trained on its text, or a model's own; and what documents are in its tokens."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lamella._documents import Chat, Part, length_of, parts
from lamella._options import ConfigError, in_short
from lamella._text import TextFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT: Final = "<|endoftext|>"

Unit = Literal["byte", "token"]
"""In which losses on held-out text are told."""

_VOCABULARY_LENGTH: Final = 16 << 20
"""Characters that a vocabulary is trained on, at most: more text changes few merges, and costs time in proportion."""

_BATCH_LENGTH: Final = 1 << 21
"""Characters that are tokenized in one call. The tokenizer holds a hundred bytes or so for each of their tokens."""

_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""How a chat template marks what the assistant says."""


@dataclass(frozen=True, kw_only=True)
class RunTokenizer:
    """A tokenizer, as transformers has it, and how a run uses it.

    Attributes:
        tokenizer: Of transformers.
        end: The token that ends a document.
        num_tokens: One more than the largest token.
        unit: "byte" where the bytes of text that a token stands for are known, which byte-level tokenizers alone show.
    """

    tokenizer: "PreTrainedTokenizerBase"
    end: int
    num_tokens: int
    unit: Unit

    @property
    def backend(self) -> Tokenizer | None:
        """The tokenizers library's object; None for a tokenizer that is not one of that library's."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return backend if isinstance(backend, Tokenizer) else None

    @property
    def chat_template(self) -> str | None:
        """What conversations are rendered by; None where there is none."""
        try:
            return str(self.tokenizer.get_chat_template())
        except ValueError:
            return None

    @property
    def marks_the_assistant(self) -> bool:
        """Whether the chat template tells the assistant's tokens from the others."""
        return self.backend is not None and _GENERATION.search(self.chat_template or "") is not None

    def identity(self) -> str:
        """Text that differs between tokenizers that make other tokens of a text."""
        backend = self.backend
        vocabulary = sorted(self.tokenizer.get_vocab().items()) if backend is None else backend.to_str()
        return json.dumps([vocabulary, self.end, self.chat_template])

    def encode(self, files: Iterable[TextFile]) -> Iterator[list[int]]:
        """The tokens of all documents, each followed by the end of a text, in lists of bounded length.

        A token that no loss is to be counted on is given as its complement `~token`: in conversations what others say
        than the assistant, where the chat template tells them apart.

        Raises:
            ConfigError: A line of a file holds no document, or a conversation cannot be rendered; the line is named.
        """
        for batch in _batches(parts(files)):
            texts = iter(self._encode_texts([part for part in batch if isinstance(part, str)]))
            ids: list[int] = []
            for part in batch:
                if isinstance(part, str):
                    ids += next(texts)
                else:
                    ids += self._encode_chat(part) if isinstance(part, Chat) else [self.end]
            yield ids

    def _encode_texts(self, texts: Sequence[str]) -> Iterator[list[int]]:
        if self.backend is None:
            return iter(self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else [])
        return (encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False))

    def _encode_chat(self, chat: Chat) -> list[int]:
        render = cast("Callable[..., Mapping[str, list[int]]]", self.tokenizer.apply_chat_template)
        is_marked = self.marks_the_assistant
        try:
            encoded = render(chat.messages, tools=chat.tools, return_dict=True, return_assistant_tokens_mask=is_marked)
        except Exception as error:  # Templates raise what they like, and jinja2's errors are not transformers'.
            raise ConfigError(
                f"Expected a conversation that the chat template can render in {chat.place}, got: {in_short(error)}"
            ) from error
        ids = encoded["input_ids"]
        if is_marked:
            ids = [token if said else ~token for token, said in zip(ids, encoded["assistant_masks"], strict=True)]
        # The template's last token may be what ends a document; if not, nobody said that token.
        is_ended = bool(ids) and ids[-1] in (self.end, ~self.end)
        return ids if is_ended else [*ids, ~self.end if is_marked else self.end]

    def units(self) -> list[int]:
        """By token, how many of `unit` it stands for: bytes of text, none for the end of a text; or one.

        In the byte-level alphabet a byte is one character, so these are the lengths of the tokens' names. Added tokens
        are named by their text.
        """
        if self.unit == "token" or self.backend is None:
            return [1] * self.num_tokens
        added = {index: len(token.content.encode()) for index, token in self.backend.get_added_tokens_decoder().items()}
        nbytes = [0] * self.num_tokens
        for name, index in self.backend.get_vocab().items():
            nbytes[index] = 0 if index == self.end else added.get(index, len(name))
        return nbytes


def _batches(every: Iterable[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    length = 0
    for part in every:
        batch.append(part)
        length += length_of(part)
        if length >= _BATCH_LENGTH:
            yield batch
            batch, length = [], 0
    yield batch


def train_tokenizer(files: Iterable[TextFile], vocab_size: int) -> RunTokenizer:
    """Byte-level byte-pair tokenizer with up to `vocab_size` tokens: all 256 bytes, the end of a text, and merges.

    A short text yields fewer tokens. Of a long one, evenly spread pieces are taken.
    """
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
    tokenizer.train_from_iterator(_sample(tuple(files)), trainer)
    wrap = cast("Callable[..., PreTrainedTokenizerBase]", PreTrainedTokenizerFast)
    return _checked(wrap(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT), END_OF_TEXT)


def _sample(files: Sequence[TextFile]) -> Iterator[str]:
    """Pieces of the text, spread evenly, of `_VOCABULARY_LENGTH` characters or so; all of a shorter text."""
    share = min(1.0, _VOCABULARY_LENGTH / max(1, sum(file.nbytes for file in files)))
    due = 0.0
    for part in parts(files):
        if isinstance(part, str):
            due += share * len(part)
            if due > 0:
                yield part
                due -= len(part)


def read_tokenizer(directory: Path, vocab_size: int) -> RunTokenizer:
    """The tokenizer of a model's directory, read by transformers.

    Raises:
        ConfigError: There is none, a library is missing to read it, it does not say what ends a text, or has more
            tokens than the model.
    """
    tokenizer = _read(directory)
    found = _checked(tokenizer, _end_of_text(tokenizer, directory))
    if found.num_tokens > vocab_size:
        raise ConfigError(
            f"Expected at most the model's {vocab_size} tokens in the tokenizer of {str(directory)!r}, got "
            f"{found.num_tokens}."
        )
    return found


def _read(directory: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    is_whole = (directory / "tokenizer.json").is_file()
    if not is_whole:
        _check_libraries(directory)
    # A tokenizer.json is whole. Classes of model types would replace parts of it by those that the type once had.
    cls = PreTrainedTokenizerFast if is_whole else AutoTokenizer
    try:
        tokenizer = cls.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # The tokenizers library raises Exception itself.
        raise ConfigError(
            f"Expected a tokenizer that transformers can read in {str(directory)!r}, got: {in_short(error)}"
        ) from error
    if tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():
        # For some model types, transformers makes a tokenizer of the special tokens alone where there are no files.
        raise ConfigError(
            f"Expected a tokenizer that transformers can read in {str(directory)!r}, got one without a vocabulary. Put "
            "the model's tokenizer.json there."
        )
    tokenizer.model_max_length = int(1e30)  # Nothing is fed to the model as long as it is here.
    return tokenizer


def _check_libraries(directory: Path) -> None:
    """Refuse SentencePiece's files without what transformers reads them with; it would complain of another format."""
    from transformers.utils.import_utils import is_protobuf_available, is_sentencepiece_available

    is_there = {"sentencepiece": is_sentencepiece_available(), "protobuf": is_protobuf_available()}
    missing = [name for name, there in is_there.items() if not there]
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
