"""From text files to token tensors: what is read, how it is split, and the byte-pair vocabulary trained on it.

Everything here follows from the files' names and contents and from the configuration, on any machine, so that a resumed
run finds the same tokens. `Corpus.fingerprint` says which they are.
"""

import hashlib
import itertools
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lamella._options import ConfigError

END_OF_TEXT = "<|endoftext|>"

# A piece this long bounds the memory of one call to the tokenizer; at its ends at most two tokens are cut.
_PIECE_LENGTH = 1 << 20
_PIECES_A_CALL = 128


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """One document. `name` is relative to the folder it was found in, so that it does not depend on the machine."""

    name: str
    text: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents in a fixed order, split into those to train on and those held out."""

    source: str
    train: tuple[TextFile, ...]
    validation: tuple[TextFile, ...]
    num_skipped: int

    def fingerprint(self) -> str:
        """Hash of the names, contents and split."""
        digest = hashlib.sha256()
        for file in (*self.train, None, *self.validation):
            digest.update(b"\0split\0" if file is None else f"\0{file.name}\0{file.nbytes}\0{file.text}".encode())
        return digest.hexdigest()

    def describe(self) -> str:
        """What was read, in one line."""
        files = (*self.train, *self.validation)
        nbytes = sum(file.nbytes for file in files)
        skipped = f"; skipped {self.num_skipped} that are not text" if self.num_skipped else ""
        return f"{len(files):,} files, {nbytes:,} bytes of {self.source} ({len(self.validation):,} held out){skipped}"


def collect(paths: Sequence[str], validation_fraction: float) -> Corpus:
    """Read the text files under `paths`, or the standard library's sources if there are none, and split them.

    Files that are not UTF-8 text are skipped in folders and refused when named.

    Raises:
        ConfigError: A path does not exist or is not text, or nothing with a byte in it was found.
    """
    found = (file for path in paths for file in _find(Path(path))) if paths else _standard_library()
    files = list(found)
    texts = [file for file in files if file is not None and file.nbytes]
    if not texts:
        raise ConfigError(f"Expected text in {_names(paths)}, got {len(files)} files with no text in them.")
    train, validation = _split(sorted(texts, key=lambda file: file.name), validation_fraction)
    return Corpus(source=_names(paths), train=tuple(train), validation=tuple(validation), num_skipped=files.count(None))


def _names(paths: Sequence[str]) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return ", ".join(paths) if paths else f"the Python {version} standard library"


def _find(path: Path) -> Iterator[TextFile | None]:
    if path.is_dir():
        yield from _walk(path)
        return
    if not path.exists():
        raise ConfigError(f"Expected a text file or a folder as --data, got {str(path)!r}, which does not exist.")
    file = _read(path.name, path)
    if file is None:
        raise ConfigError(f"Expected UTF-8 text in {str(path)!r}, got other bytes.")
    yield file


def _standard_library() -> Iterator[TextFile | None]:
    # Tests hold generated tables, and some distributions leave them out; site-packages is not the library.
    skip = ("site-packages", "dist-packages", "test", "tests", "idle_test")
    return _walk(Path(sysconfig.get_path("stdlib")), suffix=".py", skip=skip)


def _walk(root: Path, *, suffix: str = "", skip: Sequence[str] = ()) -> Iterator[TextFile | None]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in skip and not name.startswith("."))
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(suffix)):
            if path.is_file():  # Not a pipe: reading one waits for its writer.
                yield _read(path.relative_to(root).as_posix(), path)


def _read(name: str, path: Path) -> TextFile | None:
    try:
        content = path.read_bytes()
        return None if b"\0" in content else TextFile(name=name, text=content.decode(), nbytes=len(content))
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise ConfigError(f"Expected to read {str(path)!r}, got {error.strerror}.") from error


def _split(files: list[TextFile], fraction: float) -> tuple[list[TextFile], list[TextFile]]:
    """Whole files, in the order of their names' hashes, until the fraction is held out; one file alone is cut."""
    if len(files) == 1:
        return _cut(files[0], fraction)
    total = sum(file.nbytes for file in files)
    held_out: set[int] = set()
    nbytes = 0
    for index in sorted(range(len(files)), key=lambda index: _hash(files[index].name)):
        # A file with more than half of all bytes is what the run is about: it is trained on.
        if nbytes < fraction * total and 2 * files[index].nbytes <= total:
            held_out.add(index)
            nbytes += files[index].nbytes
    train = [file for index, file in enumerate(files) if index not in held_out]
    return train, [files[index] for index in sorted(held_out)]


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _cut(file: TextFile, fraction: float) -> tuple[list[TextFile], list[TextFile]]:
    at = file.text.rfind("\n", 0, round(len(file.text) * (1 - fraction))) + 1
    at = at or round(len(file.text) * (1 - fraction))
    parts = (file.text[:at], file.text[at:])
    train, validation = (TextFile(name=file.name, text=part, nbytes=len(part.encode())) for part in parts)
    return [train], [validation]


def train_tokenizer(files: Iterable[TextFile], vocab_size: int) -> Tokenizer:
    """Byte-level byte-pair tokenizer with up to `vocab_size` tokens: all 256 bytes, the end of a text, and merges.

    A short text yields fewer tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for file in files for piece in _pieces(file.text)), trainer)
    return tokenizer


def read_tokenizer(directory: Path, vocab_size: int) -> tuple[Tokenizer, str]:
    """The tokenizer of a model's directory, and the token that ends a text.

    Raises:
        ConfigError: There is none, it is not byte-level, does not say what ends a text, or has more tokens than the
            model.
    """
    file = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # What the tokenizers library raises is an Exception.
        raise ConfigError(f"Expected a tokenizer in {str(file)!r}, got: {error}") from error
    if '"ByteLevel"' not in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        raise ConfigError(f"Expected a byte-level tokenizer in {str(file)!r}, got another, which losses a byte need.")
    num_tokens = 1 + max(tokenizer.get_vocab().values())
    if num_tokens > vocab_size:
        raise ConfigError(f"Expected at most the model's {vocab_size} tokens in {str(file)!r}, got {num_tokens}.")
    return tokenizer, _end_of_text(tokenizer, directory)


def _end_of_text(tokenizer: Tokenizer, directory: Path) -> str:
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        return END_OF_TEXT
    file = directory / "tokenizer_config.json"
    try:
        end = json.loads(file.read_text(encoding="utf-8"))["eos_token"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"Expected {END_OF_TEXT!r} in the tokenizer, or an eos_token in {str(file)!r}.") from error
    end = end["content"] if isinstance(end, dict) else end
    if not isinstance(end, str) or tokenizer.token_to_id(end) is None:
        raise ConfigError(f"Expected a token of the tokenizer as eos_token in {str(file)!r}, got {end!r}.")
    return end


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + _PIECE_LENGTH] for start in range(0, len(text), _PIECE_LENGTH))


def encode(tokenizer: Tokenizer, files: Iterable[TextFile], end_of_text: str = END_OF_TEXT) -> torch.Tensor:
    """All documents as one stream of tokens, (num_tokens,) int32, each followed by the end-of-text token."""
    end = torch.tensor([tokenizer.token_to_id(end_of_text)], dtype=torch.int32)
    parts: list[torch.Tensor] = []
    # An empty piece closes a document: the tokenizer gives no tokens for it.
    pieces = (piece for file in files for piece in (*_pieces(file.text), ""))
    while batch := list(itertools.islice(pieces, _PIECES_A_CALL)):
        for piece, encoding in zip(batch, tokenizer.encode_batch_fast(batch, add_special_tokens=False), strict=True):
            parts.append(torch.tensor(encoding.ids, dtype=torch.int32) if piece else end)
    return torch.cat(parts)


def token_nbytes(tokenizer: Tokenizer, end_of_text: str = END_OF_TEXT) -> torch.Tensor:
    """Bytes of text that each token stands for, (num_tokens,) int32; none for the end of a text.

    In the byte-level alphabet a byte is one character, so these are the lengths of the tokens' names. Added tokens
    are named by their text.
    """
    added = {index: len(token.content.encode()) for index, token in tokenizer.get_added_tokens_decoder().items()}
    nbytes = torch.zeros(1 + max(tokenizer.get_vocab().values()), dtype=torch.int32)
    for name, index in tokenizer.get_vocab().items():
        nbytes[index] = 0 if name == end_of_text else added.get(index, len(name))
    return nbytes
