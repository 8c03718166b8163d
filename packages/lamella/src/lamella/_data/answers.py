"""The ranges of a conversation's answers in its rendered text, for any chat template.

Note [Renderings of prefixes]
    An answer begins at the end of the conversation before the answer, rendered with the prompt to generate, and ends at
    the end of the conversation up to the answer. Both are prefixes of the rendered conversation, unless the template
    writes earlier turns in another way than the last turn (without thoughts, as Qwen3's does). A model sees a turn as
    the last when it writes the turn. The turn therefore becomes a document: the conversation up to the turn, with the
    loss on the last answer alone.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

Messages = Sequence[Mapping[str, object]]


class Render(Protocol):
    """Renders messages by a chat template."""

    def __call__(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """Return the text."""
        ...


class AnswerSpan(NamedTuple):
    """Characters of a text."""

    start: int
    stop: int


class RenderedChat(NamedTuple):
    """A text of a chat template, and the ranges of the answers under the loss."""

    text: str
    answers: tuple[AnswerSpan, ...]


def rendered_chats(messages: Messages, render: Render, num_prompt_messages: int = 0) -> list[RenderedChat]:
    """Return a conversation in one text, or in several texts if the template rewrites earlier turns.

    See Note [Renderings of prefixes].

    Args:
        messages: The conversation.
        render: Raises any exception where the template refuses messages.
        num_prompt_messages: Messages at the start whose answers are not under the loss.
    """
    text = render(messages)
    answers: list[AnswerSpan] = []
    chats: list[RenderedChat] = []
    answered = enumerate(messages, 1)
    stops = [stop for stop, message in answered if message["role"] == "assistant" and has_loss(message)]
    for stop in reversed([stop for stop in stops if stop > num_prompt_messages]):
        up_to_answer = text if stop == len(messages) else render(messages[:stop])
        if not text.startswith(up_to_answer):
            if answers:
                chats.append(RenderedChat(text, tuple(reversed(answers))))
            text, answers = up_to_answer, []
        start = _answer_start(messages[:stop], up_to_answer, render)
        # No model has to predict the line's end of a template after the end of a turn.
        answers.append(AnswerSpan(start, max(start, len(up_to_answer.rstrip("\n")))))
    if answers or not chats:
        chats.append(RenderedChat(text, tuple(reversed(answers))))
    return chats[::-1]


def has_loss(message: Mapping[str, object]) -> bool:
    """Return False for an answer that its record takes out of the loss, by a weight of 0 or `"train": false`."""
    return message["role"] != "assistant" or all(message.get(name) in (None, 1) for name in ("weight", "train"))


def num_equal(first: Sequence[object], second: Sequence[object]) -> int:
    """Count the elements at the start in common to two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _answer_start(messages: Messages, text: str, render: Render) -> int:
    """Return the offset of the last message's answer in the text of the messages."""
    before, answer = messages[:-1], messages[-1]
    with suppress(Exception):  # Templates are code and may raise any exception.
        prompt, without_prompt = render(before, add_generation_prompt=True), render(before)
        if text.startswith(without_prompt) and text.startswith(prompt):
            return len(prompt)
    # The template refuses the messages before, rewrites them, or begins a thought in the prompt alone, whose first
    # letters may be the answer's too: the answer begins where two answers first differ.
    first, second = (render([*before, {"role": answer["role"], "content": content}]) for content in ("A", "B"))
    return min(num_equal(first, second), num_equal(first, text))
