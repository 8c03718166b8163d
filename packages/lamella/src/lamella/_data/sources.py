"""The text of a run and the tokenizer for it, read before any token is made."""

from dataclasses import dataclass
from pathlib import Path

from lamella._data.records import Survey, survey
from lamella._data.stream_samples import survey_stream
from lamella._data.text import Corpus, collect
from lamella._data.tokenizer import RunTokenizer, read_tokenizer
from lamella._data.tokens import TokenForm, fingerprint
from lamella._settings.options import ConfigError
from lamella._settings.sections import DataConfig, Packing


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The text of a run, split, and its tokenizer.

    Attributes:
        corpus: The text.
        tokenizer: The tokenizer of the model; or the vocabulary size of one to train.
        kinds: The kinds of documents in the text.
        form: How the documents become sequences of tokens.
        separates_documents: The model can keep documents of one sequence apart.
        fingerprint: A hash of text, tokenizer and form.
    """

    corpus: Corpus
    tokenizer: RunTokenizer | int
    kinds: Survey
    form: TokenForm
    separates_documents: bool
    fingerprint: str


def read_text(
    config: DataConfig, pretrained: Path | None, vocab_size: int, *, separates_documents: bool, without: Path
) -> TextSource:
    """Find the text, and read the tokenizer.

    Args:
        config: The settings of the data.
        pretrained: The folder of a model whose tokenizer makes the tokens; None to train a tokenizer.
        vocab_size: The number of tokens of the model.
        separates_documents: The model can read several documents in a sequence without one seeing another.
        without: The run's folder, whose files are no text.

    Raises:
        ConfigError: The folder has no readable tokenizer, a path has no text or a record no document, or there are
            conversations and no chat template; names the path.

    Effects: reads every file once, and files of JSON records twice; of files to stream the beginning.
    """
    tokenizer = vocab_size if pretrained is None else read_tokenizer(pretrained, vocab_size)
    corpus = collect(
        config.paths,
        config.validation_fraction,
        validation_paths=config.validation_paths,
        without=without,
        streaming=config.streaming,
    )
    return text_source(corpus, tokenizer, config, separates_documents=separates_documents)


def text_source(
    corpus: Corpus, tokenizer: RunTokenizer | int, config: DataConfig, *, separates_documents: bool
) -> TextSource:
    """Choose the form in which the documents of a text become sequences.

    Args:
        corpus: The text.
        tokenizer: The tokenizer of the model; or the vocabulary size of one to train.
        config: The settings of the data.
        separates_documents: The model can read several documents in a sequence without one seeing another.

    Raises:
        ConfigError: A record holds no document, or there are conversations and no chat template.

    Effects: reads files of JSON records once; of files to stream 256 documents.
    """
    kinds = survey_stream(corpus.streamed, survey((*corpus.train, *corpus.validation)))
    _check_template(kinds, tokenizer)
    form = TokenForm(
        packing=_packing(config, kinds, separates_documents),
        loss_on=config.loss_on,
        sequence_length=config.sequence_length,
        has_answers=kinds.has_answers,
    )
    return TextSource(
        corpus=corpus,
        tokenizer=tokenizer,
        kinds=kinds,
        form=form,
        separates_documents=separates_documents,
        fingerprint=fingerprint(corpus, tokenizer, form),
    )


def _packing(config: DataConfig, kinds: Survey, separates_documents: bool) -> Packing:
    if config.packing == "documents" and not separates_documents:
        raise ConfigError(
            "Expected a model that can keep documents of one sequence apart for --packing documents, got one whose "
            "state crosses them. Pass --packing none."
        )
    if config.packing != "auto":
        return config.packing
    if not kinds.has_answers:
        return "stream"
    return "documents" if separates_documents else "none"


def _check_template(kinds: Survey, tokenizer: RunTokenizer | int) -> None:
    """Refuse conversations without a chat template."""
    if kinds.first_chat is None:
        return
    position = kinds.first_chat.position
    if not isinstance(tokenizer, RunTokenizer):
        raise ConfigError(
            f"Expected a model whose tokenizer has a chat template for the conversation in {position}, "
            "got one without a tokenizer. Pass the folder of a chat model as --model, or JSON lines with a 'text'."
        )
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"Expected a tokenizer with a chat template for the conversation in {position}, got none. "
            "Put a chat_template.jinja into the model's folder, or pass JSON lines with a 'text'."
        )


def data_lines(source: TextSource) -> list[str]:
    """Return the lines to print on the tokens in the loss, on packing, and on the unit of validations."""
    tokenizer = source.tokenizer if isinstance(source.tokenizer, RunTokenizer) else None
    return [*_loss_lines(source, tokenizer), *_packing_lines(source), *_unit_lines(tokenizer)]


def _loss_lines(source: TextSource, tokenizer: RunTokenizer | None) -> list[str]:
    kinds = source.kinds
    if not kinds.has_answers:
        return []
    if source.form.loss_on == "all":
        return ["answers: the loss is on all tokens, those of prompts too"]
    is_template = tokenizer is not None and tokenizer.chat_template is not None
    has_chats = kinds.first_chat is not None or (kinds.first_instruction is not None and is_template)
    how = ""
    if has_chats and tokenizer is not None:
        is_marked = tokenizer.marks_the_assistant()
        how = ", as the chat template marks them" if is_marked else ", found by rendering conversations up to each"
    return [f"answers: the loss is on them alone{how}"]


def _packing_lines(source: TextSource) -> list[str]:
    if not source.kinds.has_answers:
        return []
    if source.form.packing == "stream":
        return ["packing: a stream cut anywhere: answers may be without their prompt, and documents see each other"]
    if source.form.packing == "none" and not source.separates_documents:
        return ["packing: none, since documents of one sequence would see each other in this model"]
    return []


def _unit_lines(tokenizer: RunTokenizer | None) -> list[str]:
    if tokenizer is None or tokenizer.unit == "byte":
        return []
    return ["validation: in nats a token, since the tokenizer does not tell a token's bytes"]
