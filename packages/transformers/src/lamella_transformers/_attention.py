"""The implementation of attention that a model is constructed with."""

import copy
from typing import Any, Final, cast

import torch

from lamella_transformers._construction import ModelSpec, constructed
from lamella_transformers._document_attention import (
    DOCUMENT_ATTENTION,
    check_document_attention,
    register_document_attention,
)
from lamella_transformers._documents import without_padding
from lamella_transformers._errors import ModelError, in_short

_DOCUMENTS: Final = "documents"


def set_attention(spec: ModelSpec, attention: str) -> None:
    """Choose the attention of models constructed from a config.

    Args:
        spec: The config. Changed in place.
        attention: "auto" for transformers' choice; "documents" for torch's flash kernel within documents, whose
            forwards take the arguments of `document_arguments`; or a name of transformers', such as "sdpa".

    Effects: for "documents" registers a function with transformers, for the whole process, under a name of its own.
    """
    if attention == "auto":
        return
    if attention == _DOCUMENTS:
        register_document_attention()
        attention = DOCUMENT_ATTENTION
    cast(Any, spec)._attn_implementation = attention


def check_attention(spec: ModelSpec, attention: str) -> None:
    """Refuse an implementation of attention that a model does not take.

    Args:
        spec: The config. Stays.
        attention: "auto", "documents" or a name of transformers', for `set_attention`.

    Raises:
        ModelError: transformers refuses the implementation, or has another in its place, or "documents" would not be
            the model's own attention. Names the model type.

    Effects: as `set_attention`. The model is constructed without memory.
    """
    if attention == "auto":
        return
    spec = copy.deepcopy(spec)
    set_attention(spec, attention)
    name = cast(Any, spec)._attn_implementation
    expected = f"Expected attention by {attention!r} in a model of type {spec.model_type!r}"
    try:
        model, _ = constructed(spec, torch.device("meta"))
    except Exception as error:  # transformers raises errors of all its parts.
        raise ModelError(f"{expected}, got: {in_short(error)}") from error
    if (substitute := cast(Any, model).config._attn_implementation) != name:
        raise ModelError(f"{expected}, got {substitute!r}, which transformers takes in its place.")
    if attention == _DOCUMENTS:
        with without_padding(model):
            check_document_attention(model, spec.model_type)
