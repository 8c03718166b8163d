"""Checkpoints of tiny models of the family that are dicts of tensors."""

from pathlib import Path

import torch

from lamella_checkpoint import TensorInfo, Wanted
from lamella_convert import parameter_shapes, translate
from lamella_layout import Chunk
from lamella_testing.qwen import make_config, make_model, make_mtp


def config_of(kind):
    """What `config.json` says."""
    return make_config(kind).to_dict()


def weights_of(model):
    """A model's tensors by name, a tied one once, in bf16 values: what a published checkpoint holds."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    persistent = model.state_dict()
    return {name: tensor.detach().bfloat16().float() for name, tensor in named.items() if name in persistent}


def mtp_of(kind, *, packed):
    """Weights of the layer that predicts further tokens, for a model of this kind."""
    mtp = make_mtp(weights_of(make_model(kind)))
    return mtp if packed else one_by_one(mtp)


def one_by_one(weights):
    """The experts as `save_pretrained` writes them."""
    single = {}
    for name, tensor in weights.items():
        head, found, kind = name.partition(".mlp.experts.")
        if not found:
            single[name] = tensor
        for index, expert in enumerate(tensor if found else ()):
            parts = {"gate_proj": expert[:16], "up_proj": expert[16:]} if kind == "gate_up_proj" else {kind: expert}
            single |= {f"{head}.mlp.experts.{index}.{part}.weight": rows for part, rows in parts.items()}
    return single


class MemorySource:
    """A checkpoint that is a dict."""

    def __init__(self, tensors, objects=()):
        self.held, self.values = dict(tensors), dict(objects)
        self.path = Path("memory")
        self.tensors = {
            name: TensorInfo(tuple(tensor.shape), tensor.dtype, (whole(tensor.shape),))
            for name, tensor in tensors.items()
        }

    @property
    def objects(self):
        return tuple(self.values)

    def read(self, wanted):
        for want in wanted:
            box = self.held[want.name]
            for dim, (offset, size) in enumerate(zip(*want.chunk, strict=True)):
                box = box.narrow(dim, offset, size)
            want.into.copy_(box)

    def read_object(self, name):
        return self.values[name]


def whole(shape):
    return Chunk((0,) * len(shape), tuple(shape))


def held(source):
    """A checkpoint as one in memory."""
    return MemorySource(read_all(source), {name: source.read_object(name) for name in source.objects})


def read_all(source):
    """Every tensor of a source."""
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([Wanted(name, whole(into.shape), into) for name, into in tensors.items()])
    return tensors


def translated(source, rules, to):
    """A checkpoint under the names of the other side."""
    found = rules.match(parameter_shapes(source), "left" if to == "right" else "right")
    return translate(source, found, to=to)


def to_megatron(weights, rules):
    return _moved(weights, rules, "right")


def to_hugging_face(tensors, rules):
    return _moved(tensors, rules, "left")


def _moved(weights, rules, to):
    """A model's tensors by their names on the other side; all of them, and nothing lost."""
    source = translated(MemorySource({f"model.{name}": tensor for name, tensor in weights.items()}), rules, to)
    tensors = read_all(source)
    assert not source.left_over and not source.inexact
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
