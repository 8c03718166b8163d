"""Attention within documents by torch's flash kernel for sequences of many lengths.

Note [Documents by their starts]
    A mask that keeps documents apart has as many entries as a sequence has pairs of tokens, and no flash kernel of
    `scaled_dot_product_attention` takes masks. `varlen_attn` takes the offsets at which documents begin, and computes
    no pair of tokens of two documents. Forwards of transformers pass arguments that they do not know on to their
    attention: the offsets have the names that transformers' own flash attention gives them. transformers builds no mask
    for an attention function that it has no mask function for, and then looks at no positions on the host either.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from lamella_transformers._errors import ModelError, in_short

DOCUMENT_ATTENTION: Final = "lamella_documents"
"""The name of the attention function in transformers' registry."""

_WIDEST_HEAD: Final = 256  # Of the kernel's, which takes multiples of 8.
_FULL: Final = ("full_attention", "attention")
_SLIDING: Final = "sliding_attention"
_SCORE_ARGUMENTS: Final = ("softcap", "s_aux", "position_bias")
"""Arguments of models' attention that change scores, which torch's kernels cannot."""


class _AttentionFunction(Protocol):
    """An attention function of transformers'."""

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        /,
        *args: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]: ...


def document_starts(positions: torch.Tensor) -> torch.Tensor:
    """Return the offsets at which documents begin in flat rows.

    Args:
        positions: (num_sequences, sequence_length) int64, from 0 on in each document. Each row begins a document.

    Returns:
        (num_documents + 1,) int32, ascending: the starts, then the number of tokens.

    Effects: a host sync for positions on a GPU.
    """
    is_start = positions == 0
    is_start[:, 0] = True
    starts = is_start.flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)


def start_arguments(inputs: torch.Tensor, starts: torch.Tensor | None) -> dict[str, Any]:
    """Return the documents of a batch as arguments of a model's forward.

    Args:
        inputs: (num_sequences, sequence_length) int64 tokens.
        starts: The offsets that `document_starts` returns, on the device of the inputs; None for a document a sequence.

    Effects: marks the starts, so that compiled layers are compiled once for all numbers of documents.
    """
    num_sequences, length = inputs.shape
    if starts is None:
        starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=inputs.device) * length
    # Nearly every batch has another number of documents; without the mark each would compile layers anew.
    torch._dynamo.maybe_mark_dynamic(starts, 0)
    # The longest document sizes the kernel's grid alone; a length that differs by batch would compile layers anew.
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": length, "max_length_k": length}


def register_document_attention() -> None:
    """Make the attention function known to transformers as `DOCUMENT_ATTENTION`, for the whole process."""
    _register(_document_attention())


def check_document_attention(model: nn.Module, model_type: str) -> None:
    """Refuse a model whose attention within documents would not be the model's own.

    Args:
        model: On the meta device, constructed with `DOCUMENT_ATTENTION`. The forward runs at least to its attention.
        model_type: The type of the model's config, for the message.

    Raises:
        ModelError: The forward does not pass the starts of documents on, or attention is more than causal scores in a
            window, or its heads have a width that the kernel does not take. Names the model type.

    Effects: replaces the attention function in the whole process in passing.
    """
    try:
        _check_layer_types(model)
        _try_forward(model)
    except ModelError as error:
        raise ModelError(f"{str(error).rstrip('.')}, in a model of type {model_type!r}.") from error


def _check_layer_types(model: nn.Module) -> None:
    """Refuse layers whose mask is more than the documents, the order of tokens and a window."""
    for kind in getattr(model.config, "layer_types", None) or ():
        if kind not in (*_FULL, _SLIDING):
            raise ModelError(
                f"Expected layers of full or sliding attention for attention within documents, got {kind!r}."
            )


def _try_forward(model: nn.Module) -> None:
    calls: list[nn.Module] = []
    refusals: list[ModelError] = []
    attention = _document_attention()

    def counted(module: nn.Module, *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
        calls.append(module)
        try:
            _check_window(module, model, has_window=options.get("sliding_window") is not None)
            return attention(module, *args, **options)
        except ModelError as error:
            refusals.append(error)
            raise

    tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    reason = "attention of its own."
    _register(counted)
    try:
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False, **start_arguments(tokens, None))
    except Exception as error:  # noqa: BLE001  Behind attention too: experts are chosen by numbers.
        reason = in_short(error)
    finally:
        _register(attention)
    if refusals:
        raise refusals[0]
    if not calls:
        raise ModelError(f"Expected a forward that reaches an attention function of transformers, got {reason}")


def _check_window(module: nn.Module, model: nn.Module, *, has_window: bool) -> None:
    """Refuse a layer whose mask has a window that its attention is not told of, or the reverse."""
    config: Any = model.config
    layer_types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if layer_types and index is not None:
        is_sliding = layer_types[index] == _SLIDING
    else:
        is_sliding = getattr(config, "sliding_window", None) is not None
    if is_sliding != has_window:
        raise ModelError(
            "Expected attention that is passed the window of its mask as `sliding_window`, got a mask alone."
        )


def _register(attention: _AttentionFunction) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(DOCUMENT_ATTENTION, attention)


def _document_attention() -> _AttentionFunction:
    from torch.nn.attention import varlen

    kernel: Callable[..., Any] = varlen.varlen_attn
    takes_groups = "enable_gqa" in inspect.signature(kernel).parameters

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return (num_sequences, sequence_length, num_heads, width) from heads as transformers passes them."""
        if cu_seq_lens_q is None or max_length_q is None:
            raise ModelError("Expected a forward that passes the starts of documents on to its attention, got none.")
        _check_scores(module, attention_mask, dropout, options)
        _check_widths(query, value)
        num_sequences, num_heads, length, _ = query.shape
        groups = {}
        if num_heads != key.shape[1]:
            if takes_groups:
                groups["enable_gqa"] = True
            else:  # torch 2.11's kernel refuses fewer heads of keys than of queries.
                key, value = (part.repeat_interleave(num_heads // part.shape[1], 1) for part in (key, value))
        # A window counts the token itself, and the kernel's the tokens before it.
        num_earlier = -1 if sliding_window is None or sliding_window >= max_length_q else sliding_window - 1
        output = kernel(
            *(part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)),
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(num_earlier, 0),
            **groups,
        )
        return output.unflatten(0, (num_sequences, length)), None

    return attention


def _check_scores(
    module: nn.Module, attention_mask: torch.Tensor | None, dropout: float, options: dict[str, Any]
) -> None:
    if attention_mask is not None:
        raise ModelError("Expected attention within documents without a mask, got one.")
    if dropout:
        raise ModelError(f"Expected attention within documents without dropout, got a rate of {dropout}.")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError("Expected causal attention within documents, got attention to later tokens.")
    refuse_changed_scores(options, "within documents")


def refuse_changed_scores(options: Mapping[str, Any], place: str) -> None:
    """Refuse arguments of a model's attention that change scores: soft caps, sinks, biases.

    Args:
        options: The arguments, by name.
        place: Follows "attention" in the error.

    Raises:
        ModelError: An argument changes scores.
    """
    for name in _SCORE_ARGUMENTS:
        if options.get(name) is not None:
            raise ModelError(f"Expected attention {place} by scaled products alone, got {name!r}.")


def _check_widths(query: torch.Tensor, value: torch.Tensor) -> None:
    width = query.shape[-1]
    if width % 8 or width > _WIDEST_HEAD or value.shape[-1] != width:
        raise ModelError(
            f"Expected heads of a width that is a multiple of 8 and at most {_WIDEST_HEAD}, values' too, got {width} "
            f"and {value.shape[-1]}."
        )
