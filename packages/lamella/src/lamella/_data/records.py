"""The documents of files, one after another, and a survey of their kinds."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lamella._data.columns import document
from lamella._data.documents import Chat, EndOfText, Instruction, Part, PromptCompletion, RecordPosition
from lamella._data.tables import SourceFile


def parts(files: Iterable[SourceFile]) -> Iterator[Part]:
    """Yield the documents of all files, in order, in parts: text in bounded pieces, other documents whole.

    Raises:
        ConfigError: A record holds no document. Names the file, the record and the record's keys.
    """
    for file in files:
        if file.form == "text":
            yield from file.pieces()
            yield EndOfText()
            continue
        for number, record in enumerate(file.records(), start=1):
            if record.strip():
                yield from document(record, RecordPosition(file, number))


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The kinds of documents in files.

    Attributes:
        has_text: Some document is plain text.
        has_completions: Some document is a prompt with a completion in plain text.
        first_chat: The first conversation.
        first_instruction: The first of Alpaca's records.
    """

    has_text: bool = False
    has_completions: bool = False
    first_chat: Chat | None = None
    first_instruction: Instruction | None = None

    @property
    def has_answers(self) -> bool:
        """True when some document has answers, which the loss can be on."""
        return self.has_completions or self.first_chat is not None or self.first_instruction is not None


def survey(files: Sequence[SourceFile]) -> Survey:
    """Return the kinds of documents in files.

    Raises:
        ConfigError: A record of a file holds no document. Parsing every record here finds damaged records before hours
            of tokenization.

    Effects: reads all files of JSON records.
    """
    has_text = any(file.form == "text" for file in files)
    return survey_parts(parts(file for file in files if file.form != "text"), Survey(has_text=has_text))


def survey_parts(documents: Iterable[Part], kinds: Survey) -> Survey:
    """Return the kinds of documents, beside kinds that are there already."""
    for part in documents:
        if isinstance(part, Chat):
            kinds = kinds if kinds.first_chat else replace(kinds, first_chat=part)
        elif isinstance(part, Instruction):
            kinds = kinds if kinds.first_instruction else replace(kinds, first_instruction=part)
        elif isinstance(part, PromptCompletion):
            kinds = kinds if kinds.has_completions else replace(kinds, has_completions=True)
        elif not kinds.has_text:
            kinds = replace(kinds, has_text=True)
    return kinds
