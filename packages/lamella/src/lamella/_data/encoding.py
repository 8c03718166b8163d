"""The tokens of documents, and the marks of tokens outside the loss.

Note [A complement is read and not predicted]
    A token outside the loss, for example of a user's message, is stored as its complement `~token`, a negative
    number. As an input the complement stands for the token, as a target for `IGNORED`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from lamella._data.answers import AnswerSpan, Messages, RenderedChat, has_loss, num_equal, rendered_chats
from lamella._data.documents import Chat, EndOfText, Instruction, Part, PromptCompletion, RecordPosition, length_of
from lamella._data.tokenizer import RunTokenizer
from lamella._settings.options import ConfigError, in_short

_BATCH_LENGTH: Final = 1 << 21
"""Characters to tokenize in one call, which bounds memory: the tokenizer holds about a hundred bytes per token."""


class EncodedDocuments(NamedTuple):
    """Documents, or parts of them, of bounded length.

    Attributes:
        tokens: The tokens; see Note [A complement is read and not predicted].
        stops: Offsets into `tokens` at which documents end.
    """

    tokens: list[int]
    stops: list[int]


@dataclass(kw_only=True)
class Encoder:
    """Turns documents into tokens.

    Attributes:
        tokenizer: The tokenizer of the run.
        loss_is_on_all: No token is complemented for being no answer.
        keeps_documents_apart: Documents are not read one after another in a stream: no `end` is added to what a chat
            template rendered, and the first token of each document is a complement.
        num_rewritten: Conversations so far with several texts by the chat template.
        num_unanswered: Conversations so far without a token of an answer in the loss.
    """

    tokenizer: RunTokenizer
    loss_is_on_all: bool = False
    keeps_documents_apart: bool = False
    num_rewritten: int = 0
    num_unanswered: int = 0

    def encode(self, documents: Iterable[Part], *, begins_document: bool = True) -> Iterator[EncodedDocuments]:
        """Yield the tokens of documents, in order: of a text behind the tokenizer's `begin`, and with its `end`.

        Args:
            documents: The parts of the documents.
            begins_document: The first part begins a document; otherwise it goes on with a text.

        Raises:
            ConfigError: A record of a file holds no document, or a conversation cannot be rendered. Names the record.
        """
        is_start = begins_document
        for batch in _batches(documents):
            texts = iter(self._encode_texts([part for part in batch if isinstance(part, str)]))
            encoded = EncodedDocuments([], [])
            for part in batch:
                if not isinstance(part, str | EndOfText):
                    self._add(encoded, part)
                    continue
                is_end = isinstance(part, EndOfText)
                ids = [self.tokenizer.end] if is_end else next(texts)
                if is_start:
                    ids = self._with_begin(ids)
                encoded.tokens.extend(ids)
                if is_end:
                    encoded.stops.append(len(encoded.tokens))
                is_start = is_end or (is_start and not ids)
            yield encoded

    def _with_begin(self, ids: list[int]) -> list[int]:
        """Return the first tokens of a text behind those that begin a text; for a row of its own, or in a stream."""
        ids = [*self.tokenizer.begin, *ids]
        return _without_first_target(ids) if self.keeps_documents_apart else ids

    def _add(self, documents: EncodedDocuments, part: Chat | PromptCompletion | Instruction) -> None:
        if isinstance(part, Instruction):
            part = part.as_text() if self.tokenizer.chat_template is None else part.as_chat()
        encoded = [self._encode_completion(part)] if isinstance(part, PromptCompletion) else self._encode_chat(part)
        self.num_rewritten += len(encoded) > 1
        self.num_unanswered += not self.loss_is_on_all and all(token < 0 for ids in encoded for token in ids)
        for ids in encoded:
            documents.tokens.extend(self._ended(ids))
            documents.stops.append(len(documents.tokens))

    def _ended(self, ids: list[int]) -> list[int]:
        """Return a document for a row of its own, or with `end` in a stream."""
        if self.keeps_documents_apart:
            return _without_first_target(ids)
        # Many templates end with `end` already. Otherwise append `end`: outside the loss, since no message holds it.
        end = self.tokenizer.end
        is_ended = bool(ids) and ids[-1] in (end, ~end)
        return ids if is_ended else [*ids, end if self.loss_is_on_all else ~end]

    def _encode_texts(self, texts: Sequence[str]) -> Iterator[list[int]]:
        backend = self.tokenizer.backend
        if backend is None:
            return iter(self.tokenizer.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else [])
        return (encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False))

    def _encode_completion(self, pair: PromptCompletion) -> list[int]:
        end = self.tokenizer.tokenizer.eos_token or self.tokenizer.tokenizer.convert_ids_to_tokens(self.tokenizer.end)
        text = pair.prompt + pair.completion  # Tokens that merge over the prompt's end count as the completion's.
        ids = _ids(self.tokenizer, text if text.endswith(str(end)) else f"{text}{end}", add_special_tokens=True)
        prompt = [] if self.loss_is_on_all else _ids(self.tokenizer, pair.prompt, add_special_tokens=True)
        return _complemented(ids, range(num_equal(prompt, ids), len(ids)))

    def _encode_chat(self, chat: Chat) -> list[list[int]]:
        """Return the token lists of a conversation: one list, or more if the template rewrites earlier turns."""
        try:
            if self.loss_is_on_all:
                return [_ids(self.tokenizer, self._render(chat, chat.messages))]
            # A completion as a whole, and a template's marks of answers, would be in the loss with every answer.
            if (
                all(map(has_loss, chat.messages[chat.num_prompt_messages or 0 :]))
                and (ids := self._encode_in_one(chat)) is not None
            ):
                return [ids]
            rendered = rendered_chats(
                chat.messages,
                lambda messages, **options: self._render(chat, messages, **options),
                chat.num_prompt_messages or 0,
            )
        except ConfigError:
            raise
        except Exception as error:  # Templates are code and may raise any exception, jinja2's among them.
            raise _unrendered(chat.position, error) from error
        return [self._encode_rendered(text) for text in rendered]

    def _encode_in_one(self, chat: Chat) -> list[int] | None:
        """Return the tokens of a completion, or of a conversation whose template marks answers; None for others."""
        if chat.num_prompt_messages is None:
            return self._encode_marked(chat) if self.tokenizer.marks_the_assistant(chat.tools) else None
        text, prompt = self._render(chat, chat.messages), chat.messages[: chat.num_prompt_messages]
        before = self._render(chat, prompt, add_generation_prompt=True) if prompt else ""
        # Else later turns changed how the template renders the prompt: its tokens would count as completion.
        is_prefix = text.startswith(before) or text.startswith(self._render(chat, prompt))  # noqa: PIE810  one may do
        return self._encode_chat_completion(text, before) if is_prefix else None

    def _render(self, chat: Chat, messages: Messages, **options: Any) -> str:
        render = cast("Callable[..., str]", self.tokenizer.tokenizer.apply_chat_template)
        return render(messages, tools=chat.tools, tokenize=False, **chat.template_options, **options)

    def _encode_chat_completion(self, text: str, prompt: str) -> list[int]:
        ids = _ids(self.tokenizer, text)
        return _complemented(ids, range(num_equal(_ids(self.tokenizer, prompt), ids), len(ids)))

    def _encode_marked(self, chat: Chat) -> list[int]:
        render = cast("Callable[..., Mapping[str, list[int]]]", self.tokenizer.tokenizer.apply_chat_template)
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        encoded = render(chat.messages, tools=chat.tools, **options, **chat.template_options)
        masks = enumerate(encoded["assistant_masks"])
        return _complemented(encoded["input_ids"], [position for position, is_answer in masks if is_answer])

    def _encode_rendered(self, chat: RenderedChat) -> list[int]:
        backend = self.tokenizer.backend
        if backend is None:
            ids = _ids(self.tokenizer, chat.text)
            bounds = [[num_equal(_ids(self.tokenizer, chat.text[:at]), ids) for at in span] for span in chat.answers]
            return _complemented(ids, [position for bound in bounds for position in range(*bound)])
        encoding = backend.encode(chat.text, add_special_tokens=False)
        spans = [_token_range(encoding, span) for span in chat.answers]
        return _complemented(encoding.ids, [position for span in spans for position in span])


def _unrendered(position: RecordPosition, error: Exception) -> ConfigError:
    return ConfigError(
        f"Expected a conversation that the chat template can render in {position}, got: {in_short(error)}"
    )


def _ids(tokenizer: RunTokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    return list(cast("Any", tokenizer.tokenizer)(text, add_special_tokens=add_special_tokens)["input_ids"])


def _without_first_target(ids: list[int]) -> list[int]:
    """Return a document's tokens for a row of its own: no token of the document predicts the first."""
    return [~ids[0] if ids[0] >= 0 else ids[0], *ids[1:]] if ids else []


def _complemented(ids: Sequence[int], answers: Iterable[int]) -> list[int]:
    """Return the tokens, with complements outside the positions `answers`."""
    complements = [~token for token in ids]
    for position in answers:
        complements[position] = ids[position]
    return complements


def _token_range(encoding: Any, span: AnswerSpan) -> range:
    """Return the tokens with characters of a span. Bytes of one character are tokens with one range of characters."""
    if span.start == span.stop:
        return range(0)
    starts, stops = zip(*encoding.offsets, strict=True) if encoding.offsets else ((), ())
    return range(bisect_right(stops, span.start), bisect_left(starts, span.stop))


def _batches(documents: Iterable[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    length = 0
    for part in documents:
        batch.append(part)
        length += length_of(part)
        if length >= _BATCH_LENGTH:
            yield batch
            batch, length = [], 0
    yield batch
