"""The token files of a run: made from its text and mapped into memory.

Documents lie one after another. Where they are kept apart, files of offsets say where each begins, and which are in
each row; where only some tokens are targets, a file counts those of each sequence: a step needs those of all ranks.
"""

import hashlib
import io
import shutil
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch

from lamella._data.batches import PADDING, DocumentRows, JoinedSequences, Sequences, StreamSequences, num_sequences
from lamella._data.encoding import EncodedDocuments, Encoder
from lamella._data.records import parts
from lamella._data.rows import document_rows, num_targets_before
from lamella._data.stream_samples import sample_stream
from lamella._data.tables import SourceFile
from lamella._data.text import Corpus, by_source
from lamella._data.tokenizer import VOCABULARY_LENGTH, RunTokenizer, Unit, train_on_texts, train_tokenizer
from lamella._settings.options import ConfigError
from lamella._settings.sections import LossOn, Packing

_INDEX: Final = "index.pt"

Split = Literal["train", "validation"]
_ONE: Final = ("",)


_TARGETS: Final = "second-token-on, marked-answers"
"""The rules of targets. Tokens of an earlier lamella, which had others, are made anew."""


class TokenForm(NamedTuple):
    """How the documents of a run become sequences of tokens.

    Attributes:
        packing: "documents" or "none" for rows of whole documents, "stream" for sequences cut from one stream.
        loss_on: "answers" or "all".
        sequence_length: The tokens of a sequence.
        has_answers: Some document has answers: without, every token is a target.
        pads_stream: A stream ends in padding that fills its last sequence: without, training leaves a shorter rest out.
    """

    packing: Packing
    loss_on: LossOn
    sequence_length: int
    has_answers: bool
    pads_stream: bool = False

    def identity(self) -> str:
        """Return a text that differs between forms whose files differ."""
        if self.packing == "stream" and not self.has_answers and not self.pads_stream:
            return "stream"
        padding = "-padded" if self.pads_stream else ""
        return f"{self.packing}-{self.loss_on}-{self.sequence_length}-{_TARGETS}{padding}"


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """The tokens of a run, and the length of each token.

    Attributes:
        folder: The folder of the token files.
        packing: How tokens become sequences.
        units: (vocab_size,) int32: length of each token in `unit`.
        unit: "byte" or "token"; in tokens every length is 1.
        num_rewritten: The conversations that the chat template renders in several texts.
        num_unanswered: The conversations without a token of an answer in the loss.
        fingerprint: Hash of the text, its split, the tokenizer and the form.
        sources: The names of the training sources; one empty name without names, none where they are streamed.
        validation_sets: The names of the validation sets; one empty name without names.
    """

    folder: Path
    packing: Packing
    units: torch.Tensor
    unit: Unit
    num_rewritten: int
    fingerprint: str
    num_unanswered: int = 0
    sources: Sequence[str] = _ONE
    validation_sets: Sequence[str] = _ONE

    @property
    def train(self) -> torch.Tensor:
        """(num_tokens,) int32, memory-mapped, without names; see Note [A complement is read and not predicted]."""
        return _mapped(_RowFiles(self.folder, "train").tokens)

    @property
    def validation(self) -> torch.Tensor:
        """The held-out text, in the same form."""
        return _mapped(_RowFiles(self.folder, "validation").tokens)

    def sequences(self, split: Split, sequence_length: int, source: str = "") -> Sequences:
        """Return the sequences of a named source or set of a split, mapped into memory; without a name, of all."""
        names = self.sources if split == "train" else self.validation_sets
        if not source and "" not in names:
            return JoinedSequences(tuple(self.sequences(split, sequence_length, name) for name in names))
        files = _RowFiles(self.folder, split, source)
        tokens = _mapped(files.tokens)
        counts = _mapped(files.target_counts) if files.target_counts.exists() else None
        if counts is None or self.packing == "stream":
            return StreamSequences(tokens=tokens, sequence_length=sequence_length, target_counts=counts)
        return DocumentRows(
            tokens=tokens,
            document_starts=_mapped(files.document_starts, torch.int64),
            documents=_mapped(files.documents, torch.int64),
            row_starts=_mapped(files.row_starts, torch.int64),
            target_counts=counts,
            sequence_length=sequence_length,
            is_packed=self.packing == "documents",
        )

    def has_one_length(self, sequence_length: int) -> bool:
        """Return whether all batches have as many tokens a sequence: none is cut after its last target.

        False where the text is streamed, whose targets are not known yet.
        """
        if self.packing != "stream":
            return self.packing == "documents"
        sources = [self.sequences("train", sequence_length, name) for name in self.sources]
        sets = [self.sequences("validation", sequence_length, name) for name in self.validation_sets]
        return bool(sources) and all(sequences.target_counts is None for sequences in (*sources, *sets))

    def lines(self, sequence_length: int) -> list[str]:
        """Return the lines to print on rows of documents, and on conversations in several documents."""
        lines: list[str] = []
        for source in self.sources:
            rows = self.sequences("train", sequence_length, source)
            lines += (
                row_lines(rows, f"packing of {source}" if source else "packing")
                if isinstance(rows, DocumentRows)
                else []
            )
        if self.num_rewritten:
            lines.append(
                f"answers: {self.num_rewritten:,} conversations become several documents, since the chat template "
                "rewrites earlier turns"
            )
        if self.num_unanswered:
            lines.append(
                f"answers: {self.num_unanswered:,} conversations have none in the loss: no message of the role "
                "'assistant', or none with a weight"
            )
        return lines

    def num_units(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the length of each sequence of targets in `unit`, (num_sequences,) int64, without ignored targets."""
        return torch.where(targets < 0, 0, self.units[targets.clamp(min=0)]).sum(1)


def row_lines(rows: DocumentRows, topic: str) -> list[str]:
    """Return the lines to print on rows of documents: how full they are, and how many documents are truncated.

    Args:
        rows: The rows.
        topic: The beginning of each line.
    """
    lengths, bound = rows.document_starts.diff(), rows.sequence_length
    share = rows.tokens_a_sequence / bound
    if rows.is_packed:
        lines = [f"{topic}: {len(rows.documents):,} documents in {len(rows):,} sequences, {share:.1%} full"]
    else:
        lines = [f"{topic}: a document a sequence, {share:.1%} of {bound:,} tokens on average"]
    if num_longer := int((lengths > bound).sum()):
        num_tokens, num_lost = int(lengths.sum()), int((lengths - bound).clamp(min=0).sum())
        lines.append(
            f"{topic}: {num_longer:,} documents are truncated to {bound:,} tokens, {num_lost / num_tokens:.1%} of all "
            f"tokens are left out; --sequence-length {int(lengths.max())} keeps all"
        )
    is_unanswered = lengths > bound
    is_unanswered[rows.documents] = False
    if num_unanswered := int(is_unanswered.sum()):
        lines.append(f"{topic}: {num_unanswered:,} documents have no answer within --sequence-length, and are left out")
    return lines


class _RowFiles(NamedTuple):
    folder: Path
    split: Split
    source: str = ""

    @property
    def tokens(self) -> Path:
        return self.folder / f"{self._stem}.bin"

    @property
    def document_starts(self) -> Path:
        return self.folder / f"{self._stem}.document_starts.bin"

    @property
    def documents(self) -> Path:
        return self.folder / f"{self._stem}.documents.bin"

    @property
    def row_starts(self) -> Path:
        return self.folder / f"{self._stem}.row_starts.bin"

    @property
    def target_counts(self) -> Path:
        return self.folder / f"{self._stem}.target_counts.bin"

    @property
    def _stem(self) -> str:
        return f"{self.split}-{self.source}" if self.source else self.split


def load_tokens(folder: Path) -> TokenData:
    """Return the tokens in `folder`, without reading them.

    Raises:
        ConfigError: A file of the folder is damaged or cut, or one beside the index is absent. Names the file.
        OSError: The index cannot be read.
    """
    try:
        index = torch.load(folder / _INDEX, weights_only=True)
        recorded = index.pop("nbytes", None)
        tokens = TokenData(folder=folder, **index)
    except OSError:
        raise
    except Exception:  # noqa: BLE001  torch raises errors of many types on a damaged file.
        raise _damaged(folder / _INDEX, "a list of token files", "other bytes") from None
    nbytes = _nbytes(folder)
    # An index of an earlier lamella has no sizes.
    for name, expected in (recorded or {}).items():
        if nbytes.get(name) != expected:
            got = f"{nbytes[name]:,}" if name in nbytes else "no such file"
            raise _damaged(folder / name, f"{expected:,} bytes of tokens", got)
    return tokens


def _damaged(file: Path, expected: str, got: str) -> ConfigError:
    return ConfigError(
        f"Expected {expected} in {str(file)!r}, got {got}. Copy the file again; the run's own command makes it anew, "
        "and `lamella eval` takes the text as --data."
    )


def _mapped(file: Path, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    count = file.stat().st_size // dtype.itemsize
    # An empty file cannot be mapped.
    return torch.from_file(str(file), size=count, dtype=dtype) if count else torch.empty(0, dtype=dtype)


def fingerprint(corpus: Corpus, tokenizer: RunTokenizer | int, form: TokenForm) -> str:
    """Return a hash of the tokens' sources: the text, the tokenizer or the size of one to train, and the form."""
    if isinstance(tokenizer, int):
        return f"{corpus.fingerprint()}-{tokenizer}-{form.identity()}"
    # Streams of an earlier lamella are without the token that begins a text.
    begin = "-begin" if form.packing == "stream" and tokenizer.begin else ""
    digest = hashlib.sha256(tokenizer.identity().encode()).hexdigest()
    return f"{corpus.fingerprint()}-{digest}-{form.identity()}{begin}"


def prepare_tokens(
    corpus: Corpus, tokenizer: RunTokenizer | int, form: TokenForm, tokens: Path, model: Path
) -> TokenData:
    """Return the tokens of `corpus`, from the folder `tokens` if complete and of its fingerprint, else newly made.

    Args:
        corpus: The text.
        tokenizer: A model's tokenizer; or the vocabulary size of a tokenizer to train on the text and save in `model`.
        form: How documents become sequences.
        tokens: Folder of the token files.
        model: Folder for a trained tokenizer.

    Raises:
        ConfigError: A document is damaged or cannot be rendered.

    Effects: may train a tokenizer; replaces the folder `tokens` once the new folder is complete.
    """
    expected = fingerprint(corpus, tokenizer, form)
    if _fingerprint_in(tokens) != expected:
        if isinstance(tokenizer, int):
            tokenizer = _trained(corpus, tokenizer)
            tokenizer.tokenizer.save_pretrained(model)
        _write_tokens(corpus, tokenizer, form, expected, tokens)
    return load_tokens(tokens)


def _trained(corpus: Corpus, vocab_size: int) -> RunTokenizer:
    if corpus.streamed:
        return train_on_texts(sample_stream(corpus.streamed, VOCABULARY_LENGTH), vocab_size)
    return train_tokenizer(corpus.train, vocab_size)


def _fingerprint_in(folder: Path) -> object:
    """Return the fingerprint of the token files in `folder`; None without files, or with damaged ones."""
    try:
        index = torch.load(folder / _INDEX, weights_only=True)
    except Exception:  # noqa: BLE001  torch raises errors of many types on a damaged file.
        return None
    return index.get("fingerprint") if index.get("nbytes") == _nbytes(folder) else None


def _nbytes(folder: Path) -> dict[str, int]:
    """Return the size of each token file by its name."""
    return {file.name: file.stat().st_size for file in folder.glob("*.bin")}


def _write_tokens(
    corpus: Corpus, tokenizer: RunTokenizer, form: TokenForm, token_fingerprint: str, folder: Path
) -> None:
    """Write the tokens of a corpus, batch by batch, to a second folder; then replace the old folder.

    A run killed during tokenization leaves the old folder as it was; one killed while the folder is replaced leaves no
    index, and the next run makes the tokens anew.
    """
    staged = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        _write_staged(corpus, tokenizer, form, token_fingerprint, staged)
    except OSError:  # On a full disk the files would leave no room for the next try.
        shutil.rmtree(staged, ignore_errors=True)
        raise
    (folder / _INDEX).unlink(missing_ok=True)  # first: an index beside token files that are gone would be trusted
    shutil.rmtree(folder, ignore_errors=True)
    staged.rename(folder)


def _write_staged(
    corpus: Corpus, tokenizer: RunTokenizer, form: TokenForm, token_fingerprint: str, staged: Path
) -> None:
    """Write the token files of a corpus, and their index."""
    encoder = Encoder(
        tokenizer=tokenizer,
        loss_is_on_all=form.loss_on == "all",
        keeps_documents_apart=form.packing != "stream",
    )
    splits: Mapping[Split, Mapping[str, Sequence[SourceFile]]] = {
        "train": {} if corpus.streamed else by_source(corpus.train) or {"": ()},
        "validation": by_source(corpus.validation) or {"": ()},
    }
    for split, sources in splits.items():
        for source, files in sources.items():
            _write_split(encoder, files, form, _RowFiles(staged, split, source))
    index = {
        "packing": form.packing,
        "units": torch.tensor(tokenizer.units(), dtype=torch.int32),
        "unit": tokenizer.unit,
        "num_rewritten": encoder.num_rewritten,
        "num_unanswered": encoder.num_unanswered,
        "fingerprint": token_fingerprint,
        "sources": list(splits["train"]),
        "validation_sets": list(splits["validation"]),
        "nbytes": _nbytes(staged),
    }
    buffer = io.BytesIO()  # On a full disk torch raises RuntimeError, and a write OSError.
    torch.save(index, buffer)
    (staged / _INDEX).write_bytes(buffer.getvalue())


def _write_split(encoder: Encoder, files: Iterable[SourceFile], form: TokenForm, row_files: _RowFiles) -> None:
    _write(encoder.encode(parts(files)), row_files.tokens, row_files.document_starts)
    if form.packing == "stream" and form.pads_stream:
        _pad(row_files.tokens, form.sequence_length)
    tokens = _mapped(row_files.tokens)
    if form.packing != "stream":
        starts = _mapped(row_files.document_starts, torch.int64)
        rows = document_rows(tokens, starts, form.packing, form.sequence_length)
        _save(rows.documents, row_files.documents, torch.int64)
        _save(rows.row_starts, row_files.row_starts, torch.int64)
        _save(rows.target_counts, row_files.target_counts)
    elif form.has_answers or form.pads_stream:
        stops = torch.arange(num_sequences(tokens, form.sequence_length) + 1) * form.sequence_length + 1
        _save(num_targets_before(tokens, stops).diff(), row_files.target_counts)


def _pad(file: Path, sequence_length: int) -> None:
    """Fill the last sequence of a stream of tokens, if some token in it is predicted."""
    if num_tokens := len(_mapped(file)):
        with file.open("ab") as opened:
            array("i", [PADDING] * (-(num_tokens - 1) % sequence_length)).tofile(opened)


def _save(numbers: torch.Tensor, file: Path, dtype: torch.dtype = torch.int32) -> None:
    numbers.to(dtype).numpy().tofile(file)


def _write(batches: Iterable[EncodedDocuments], file: Path, starts_file: Path) -> None:
    """Write int32 tokens, and the int64 offsets at which documents begin, with the end of the last."""
    num_tokens = 0
    with file.open("wb") as opened, starts_file.open("wb") as opened_starts:
        array("q", [0]).tofile(opened_starts)
        for batch in batches:
            array("i", batch.tokens).tofile(opened)
            array("q", [num_tokens + stop for stop in batch.stops]).tofile(opened_starts)
            num_tokens += len(batch.tokens)
