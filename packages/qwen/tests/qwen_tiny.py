"""Checkpoints of tiny models of the family, as dicts of tensors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from lamella_checkpoint import Source, TensorInfo, Wanted
from lamella_convert import Rules, Translated, parameter_shapes, translate
from lamella_layout import Chunk
from lamella_testing.qwen import Kind, make_config, make_model, make_mtp


def config_of(kind: Kind) -> dict[str, Any]:
    """The contents of `config.json`."""
    config: dict[str, Any] = make_config(kind).to_dict()
    return config


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """A model's tensors by name, a tied tensor once, in bf16 values, like a published checkpoint."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    persistent = model.state_dict()
    return {name: tensor.detach().bfloat16().float() for name, tensor in named.items() if name in persistent}


def mtp_of(kind: Kind, *, packed: bool) -> dict[str, torch.Tensor]:
    """Weights of the layer that predicts further tokens, for a model of a kind."""
    mtp = make_mtp(weights_of(make_model(kind)))
    return mtp if packed else one_by_one(mtp)


def one_by_one(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts in the form of `save_pretrained`."""
    single = {}
    for name, tensor in weights.items():
        head, separator, kind = name.partition(".mlp.experts.")
        if not separator:
            single[name] = tensor
        for index, expert in enumerate(tensor if separator else ()):
            parts = {"gate_proj": expert[:16], "up_proj": expert[16:]} if kind == "gate_up_proj" else {kind: expert}
            single |= {f"{head}.mlp.experts.{index}.{part}.weight": rows for part, rows in parts.items()}
    return single


class MemorySource:
    """A checkpoint in a dict."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, object] | None = None) -> None:
        self.stored, self.values = dict(tensors), dict(objects or {})
        self.path = Path("memory")
        self.tensors = {
            name: TensorInfo(tuple(tensor.shape), tensor.dtype, (full_box(tensor.shape),))
            for name, tensor in tensors.items()
        }

    @property
    def objects(self) -> Sequence[str]:
        return tuple(self.values)

    def read(self, requests: Sequence[Wanted]) -> None:
        for want in requests:
            box = self.stored[want.name]
            for dim, (offset, size) in enumerate(zip(*want.chunk, strict=True)):
                box = box.narrow(dim, offset, size)
            want.into.copy_(box)

    def read_object(self, name: str) -> object:
        return self.values[name]


def full_box(shape: Sequence[int]) -> Chunk:
    return Chunk((0,) * len(shape), tuple(shape))


def in_memory(source: Source) -> MemorySource:
    """A checkpoint as one in memory."""
    return MemorySource(read_all(source), {name: source.read_object(name) for name in source.objects})


def read_all(source: Source) -> dict[str, torch.Tensor]:
    """Every tensor of a source."""
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([Wanted(name, full_box(into.shape), into) for name, into in tensors.items()])
    return tensors


def translated(source: Source, rules: Rules, to: Literal["left", "right"]) -> Translated:
    """A checkpoint under the names of the other side."""
    correspondences = rules.match(parameter_shapes(source), "left" if to == "right" else "right")
    return translate(source, correspondences, to=to)


def to_megatron(weights: Mapping[str, torch.Tensor], rules: Rules) -> dict[str, torch.Tensor]:
    return _moved(weights, rules, "right")


def to_hugging_face(tensors: Mapping[str, torch.Tensor], rules: Rules) -> dict[str, torch.Tensor]:
    return _moved(tensors, rules, "left")


def _moved(weights: Mapping[str, torch.Tensor], rules: Rules, to: Literal["left", "right"]) -> dict[str, torch.Tensor]:
    """A model's tensors by their names on the other side; all tensors, without a loss."""
    source = translated(MemorySource({f"model.{name}": tensor for name, tensor in weights.items()}), rules, to)
    tensors = read_all(source)
    assert not source.left_over and not source.inexact
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
