"""Several documents in one sequence: the arguments of a model's forward, and models with documents kept apart.

Note [Positions that begin anew]
    Without an attention mask and a cache, transformers builds its masks from `position_ids`: a position out of sequence
    begins a document, and no token attends to another document. Flash attention finds documents in a batch of one row
    alone, so rows are joined into one row for it. A state along a sequence (of Mamba, of linear attention, of a
    convolution) knows no positions and crosses from one document into the next.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, cast

import torch
from torch import nn

from lamella_transformers._document_attention import DOCUMENT_ATTENTION, document_starts, start_arguments

_ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "attention")
"""Types of layers, as configs of transformers name them, that carry no state along a sequence."""


def document_arguments(
    model: nn.Module, inputs: torch.Tensor, positions: torch.Tensor | None, starts: torch.Tensor | None = None
) -> dict[str, Any]:
    """Return the tokens and their documents as arguments of a model's forward; see Note [Positions that begin anew].

    Args:
        model: A causal language model of transformers.
        inputs: (num_sequences, sequence_length) int64 tokens.
        positions: (num_sequences, sequence_length) int64, from 0 on in each document; None for a document a sequence.
        starts: The positions' `document_starts`, for a model with attention "documents"; None to find them here.

    Effects: a host sync for a model with attention "documents", and positions on a GPU without starts.
    """
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    arguments: dict[str, Any] = {}
    if implementation == DOCUMENT_ATTENTION:
        if starts is None and positions is not None:
            starts = document_starts(positions)
        arguments = start_arguments(inputs, starts)
    if positions is None:
        return {"input_ids": inputs, **arguments}
    if "flash" in str(implementation):
        inputs, positions = inputs.reshape(1, -1), positions.reshape(1, -1)
    return {"input_ids": inputs, "position_ids": positions, **arguments}


@contextmanager
def known_documents(positions: torch.Tensor | None) -> Iterator[None]:
    """Let models look for several documents in a sequence in the block only where there may be several.

    Args:
        positions: The positions of a batch, for `document_arguments`.

    Effects: replaces a function of transformers in the whole process for the time of the block.
    """
    with one_document_a_sequence() if positions is None else nullcontext():
        yield


def separates_documents(outline: nn.Module) -> bool:
    """True for models with documents kept apart inside a sequence.

    Args:
        outline: The model on the meta device. The forward runs up to the first mask.
    """
    if "position_ids" not in inspect.signature(outline.forward).parameters or _carries_a_state(outline):
        return False
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    # Other forwards may fail on the meta device: experts are chosen by numbers.
    with _mask_requests() as requests, without_padding(outline), torch.no_grad(), suppress(Exception):
        outline(input_ids=tokens, position_ids=tokens, use_cache=False)
    return bool(requests)


@contextmanager
def one_document_a_sequence() -> Iterator[None]:
    """Let models take every sequence for one document in the block, without a look at the positions.

    The look is a host sync in each forward on a GPU. Positions of fake tensors, and positions in the capture of a CUDA
    graph, have no values: transformers would build a mask for several documents, which the fastest kernels do not take.
    In a capture transformers 5.17 builds a mask even without padding: layers compiled in the eager steps, without a
    mask, would be compiled anew in the capture, which CUDA refuses.
    """
    from transformers import masking_utils

    is_tracing = vars(masking_utils)["is_tracing"]
    with _mask_functions(
        find_packed_sequence_indices=lambda *args, **options: None,
        is_tracing=lambda padding=None: padding is not None and is_tracing(padding),
    ):
        yield


@contextmanager
def _mask_functions(**replacements: Callable[..., object]) -> Iterator[None]:
    """Replace functions of transformers' masks in the block, by name."""
    from transformers import masking_utils

    functions = vars(masking_utils)
    originals = {name: functions[name] for name in replacements}
    functions.update(replacements)
    try:
        yield
    finally:
        functions.update(originals)


@contextmanager
def without_padding(model: nn.Module) -> Iterator[None]:
    """Set no padding token in the block: some forwards look for the token in the inputs before they build masks."""
    values = vars(cast(Any, model).config)  # Strict configs refuse None as a padding token that is set.
    former = values.get("pad_token_id")
    values["pad_token_id"] = None
    try:
        yield
    finally:
        values["pad_token_id"] = former


def _carries_a_state(model: nn.Module) -> bool:
    config = cast(Any, getattr(model, "config", None))
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return bool(getattr(model, "_is_stateful", False)) or any(
        layer_type not in _ATTENTION_TYPES for layer_type in layer_types
    )


@contextmanager
def _mask_requests() -> Iterator[list[torch.Tensor]]:
    """Collect the positions behind transformers' masks in the block; the first ends the forward."""
    positions: list[torch.Tensor] = []

    def request(position_ids: torch.Tensor) -> None:
        positions.append(position_ids)
        raise StopIteration

    with _mask_functions(find_packed_sequence_indices=request):
        yield positions
