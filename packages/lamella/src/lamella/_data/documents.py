"""The kinds of documents: text, conversations, prompts with completions, and instructions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lamella._data.json_files import Form


class RecordFile(Protocol):
    """A file of records, or a part of one that begins at a record."""

    @property
    def path(self) -> Path | str:
        """The file, or the data set's name with `hf:`."""
        ...

    @property
    def form(self) -> Form:
        """How documents lie in the file."""
        ...

    def num_records_before(self) -> int:
        """Return the number of records before the part. Effects: may read the file up to the part."""
        ...


class RecordPosition(NamedTuple):
    """A JSON record of a file, in words by `str`.

    Attributes:
        file: The file or its part.
        number: Number of the record in the file or its part, from 1 on.
    """

    file: RecordFile
    number: int

    def __str__(self) -> str:
        noun = "row" if self.file.form in ("array", "table") else "line"
        return f"{noun} {self.file.num_records_before() + self.number} of {str(self.file.path)!r}"


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation in the form of chat templates.

    Attributes:
        messages: Each with "role" and "content".
        tools: The conversation's tools; None for none.
        template_options: Further variables for the chat template.
        num_prompt_messages: The messages before a completion, whose messages the loss is on; None for a conversation
            with the loss on each of the assistant's messages.
        position: The record, for error messages.
    """

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[object] | None = None
    template_options: Mapping[str, object] = field(default_factory=dict)
    num_prompt_messages: int | None = None
    position: RecordPosition

    @property
    def length(self) -> int:
        """The approximate number of characters."""
        return sum(len(str(message.get("content"))) for message in self.messages)


class PromptCompletion(NamedTuple):
    """A prompt and its completion as plain text."""

    prompt: str
    completion: str

    @property
    def length(self) -> int:
        """The number of characters."""
        return len(self.prompt) + len(self.completion)


class Instruction(NamedTuple):
    """A record of Alpaca's: a conversation of two messages, or for a model without a chat template Alpaca's prompt."""

    instruction: str
    context: str
    output: str
    system: str
    position: RecordPosition

    @property
    def length(self) -> int:
        """The approximate number of characters."""
        return len(self.instruction) + len(self.context) + len(self.output)

    def as_chat(self) -> Chat:
        """Return the record as a conversation."""
        question = f"{self.instruction}\n{self.context}" if self.context else self.instruction
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": self.output}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return Chat(messages=messages, position=self.position)

    def as_text(self) -> PromptCompletion:
        """Return the record in the words that Alpaca was trained on."""
        further = ", paired with an input that provides further context" if self.context else ""
        lines = self.system or (
            f"Below is an instruction that describes a task{further}. Write a response that appropriately completes "
            "the request."
        )
        context = f"### Input:\n{self.context}\n\n" if self.context else ""
        prompt = f"{lines}\n\n### Instruction:\n{self.instruction}\n\n{context}### Response:\n"
        return PromptCompletion(prompt, self.output)


class EndOfText(NamedTuple):
    """Marks the end of a document's text."""

    length: int = 0


Part = str | EndOfText | Chat | PromptCompletion | Instruction
"""A piece of a document's text, the end of a document's text, or a whole document of another kind."""


def text_of(part: Part) -> str:
    """Return a part's text as a tokenizer without a chat template reads it; empty for a conversation."""
    if isinstance(part, str):
        return part
    if isinstance(part, Instruction):
        part = part.as_text()
    return part.prompt + part.completion if isinstance(part, PromptCompletion) else ""


def length_of(part: Part) -> int:
    """Return the approximate number of characters of a part."""
    return len(part) if isinstance(part, str) else part.length


FilePosition = Mapping[str, Any]
"""A place between two documents of a file, from which the file's reader goes on: plain data, for checkpoints."""


class PositionedParts(NamedTuple):
    """A document, or a piece of its text, with the place behind it.

    Attributes:
        parts: The parts.
        after: The place to go on from.
    """

    parts: tuple[Part, ...]
    after: FilePosition

    @property
    def ends_document(self) -> bool:
        """True at the end of a document."""
        return not (self.parts and isinstance(self.parts[-1], str))
