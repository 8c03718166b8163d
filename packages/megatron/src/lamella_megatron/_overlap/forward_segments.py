"""A model's own forward, cut at the decoder and at the first layer of multi-token prediction.

Note [The model's own forward, cut]
    A schedule needs the layers one by one, with embeddings before and loss after. Both come from the model's own
    `forward`, which runs once for each part. Up to the decoder: a stand-in keeps the decoder's arguments and leaves.
    From the final norm to the first layer of multi-token prediction: a stand-in does the same. From there on: stand-ins
    return hidden states of the schedule. So position embeddings, tied weights, the order of predictions' hidden states
    and the loss are megatron-core's, whatever the model's options.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn


class _ForwardEndedError(Exception):
    """Ends a model's forward at a stand-in."""


def arguments_of_decoder(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a model's forward gives to the decoder."""
    arguments: dict[str, Any] = {}
    with _in_front_of(model.decoder, forward=_ArgumentsRecorder(arguments)), contextlib.suppress(_ForwardEndedError):
        model.forward(**batch)
    return arguments


def arguments_of_prediction(
    model: Any, batch: Mapping[str, Any], hidden: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor]:
    """The arguments that a model's forward gives to the first layer of multi-token prediction.

    Args:
        model: A model with layers of multi-token prediction.
        batch: The arguments of the model's forward.
        hidden: (length, batch, width), hidden states of the decoder's last layer.

    Returns:
        The arguments, and the decoder's output.
    """
    normed, arguments = _final_norm(model.decoder, hidden), dict[str, Any]()
    stand_ins = [_ArgumentsRecorder(arguments)] * len(model.mtp.layers)
    with _in_front_of(model.mtp, layers=stand_ins), contextlib.suppress(_ForwardEndedError):
        _forward_past_decoder(model, batch, normed)
    return arguments, normed


def forward_after_decoder(model: Any, batch: Mapping[str, Any], hidden: torch.Tensor) -> torch.Tensor:
    """The model's output, from the hidden states of the decoder's last layer on."""
    return _forward_past_decoder(model, batch, _final_norm(model.decoder, hidden))


def forward_after_prediction(
    model: Any, batch: Mapping[str, Any], normed: torch.Tensor, predicted: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The model's output, from the hidden states of each depth of multi-token prediction on.

    Args:
        model: A model with layers of multi-token prediction.
        batch: The arguments of the model's forward.
        normed: (length, batch, width), the decoder's output.
        predicted: Hidden states of each depth, (length, batch, width).
    """
    with _in_front_of(model.mtp, layers=[_HiddenStates(hidden) for hidden in predicted]):
        return _forward_past_decoder(model, batch, normed)


def _forward_past_decoder(model: Any, batch: Mapping[str, Any], normed: torch.Tensor) -> torch.Tensor:
    with _in_front_of(model.decoder, forward=lambda **_: normed):
        # Given hidden states, the model looks up no embeddings for the decoder.
        output: torch.Tensor = model.forward(**{**batch, "decoder_input": normed})
    return output


def _final_norm(decoder: Any, hidden: torch.Tensor) -> torch.Tensor:
    norm = getattr(decoder, "final_layernorm", None) or getattr(decoder, "final_norm", None)
    normed: torch.Tensor = hidden if norm is None else norm(hidden)
    return normed


class _ArgumentsRecorder:
    """Stands in for a module: keeps the arguments, and ends the model's forward."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments

    def __call__(self, **call_arguments: Any) -> None:
        self._arguments.update(call_arguments)
        raise _ForwardEndedError


class _HiddenStates:
    """Stands in for a layer of multi-token prediction: returns hidden states, and the tokens as they came."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden

    def __call__(self, *, input_ids: Any, position_ids: Any, padding_mask: Any, **_: Any) -> tuple[Any, ...]:
        return self._hidden, input_ids, position_ids, padding_mask


@contextlib.contextmanager
def _in_front_of(module: nn.Module, **attributes: object) -> Iterator[None]:
    """Put attributes in front of a module's own, past `nn.Module.__setattr__`."""
    vars(module).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(module)[name]
