"""The weights of a model with adapters, as sources of tensors: fresh adapters, merged weights, and peft's names."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import nn

from lamella_checkpoint import Correspondence, Source, TensorInfo, Wanted
from lamella_convert import translate
from lamella_files import Over
from lamella_layout import Chunk
from lamella_transformers._fresh import seed_of
from lamella_transformers._lora import LoraSettings

_A: Final = "lora_A.default.weight"
_B: Final = "lora_B.default.weight"
_MAGNITUDE: Final = "lora_magnitude_vector.default.weight"
_BASE: Final = "base_layer"


class _LoraLayer(NamedTuple):
    """A layer with adapters, by its name in a source, and the names of its tensors."""

    name: str

    @property
    def weight(self) -> str:
        return f"{self.name}.weight"

    @property
    def base(self) -> str:
        return f"{self.name}.{_BASE}.weight"

    @property
    def a(self) -> str:
        return f"{self.name}.{_A}"

    @property
    def b(self) -> str:
        return f"{self.name}.{_B}"

    @property
    def magnitude(self) -> str:
        return f"{self.name}.{_MAGNITUDE}"


class FreshLora(Over):
    """The weights of a model with fresh adapters, over the weights of the model without adapters.

    Adapters begin as peft's: A is drawn (Kaiming, uniform), B is zero, and a magnitude is the norm of the weight's row.
    Equal requests get equal numbers on any rank: each A has a seed of its own, from the run's seed and its name.

    Args:
        source: The weights under the names of modules, each after `prefix`.
        layers: The names of the layers with adapters.
        settings: The sizes of the adapters.
        seed: The seed of all adapters.
        prefix: The start of all names in the source.
    """

    def __init__(
        self, source: Source, layers: Iterable[str], settings: LoraSettings, seed: int, prefix: str = ""
    ) -> None:
        self._seed, self._prefix = seed, prefix
        self._stored: dict[str, str] = {}
        self._fills: dict[str, Callable[[Wanted], None]] = {}
        adapters: dict[str, TensorInfo] = {}
        for layer in (_LoraLayer(f"{prefix}{name}") for name in layers):
            if layer.weight in source.tensors:
                adapters |= self._adapters(layer, source.tensors[layer.weight], settings)
                for kind in ("weight", "bias"):
                    self._stored[f"{layer.name}.{kind}"] = f"{layer.name}.{_BASE}.{kind}"
        base = {self._stored.get(name, name): info for name, info in source.tensors.items()}
        self._origins = {renamed: name for name, renamed in self._stored.items()}
        super().__init__(source, base | adapters)

    def read(self, requests: Sequence[Wanted]) -> None:
        """As `Source.read`. Effects: draws one matrix A, or reads the rows of one magnitude, at a time."""
        self.source.read(
            [
                request._replace(name=self._origins.get(request.name, request.name))
                for request in requests
                if request.name not in self._fills
            ]
        )
        for request in requests:
            if request.name in self._fills:
                self._fills[request.name](request)

    def _adapters(self, layer: _LoraLayer, weight: TensorInfo, settings: LoraSettings) -> dict[str, TensorInfo]:
        """Return the tensors of a layer's adapter, and note how each is filled."""
        num_outputs, num_inputs = weight.shape
        self._fills[layer.a] = partial(self._draw, shape=(settings.rank, num_inputs))
        self._fills[layer.b] = _fill_with_zeros
        shapes: dict[str, tuple[int, ...]] = {
            layer.a: (settings.rank, num_inputs),
            layer.b: (num_outputs, settings.rank),
        }
        if settings.dora:
            self._fills[layer.magnitude] = partial(self._norms, weight=layer.weight, num_inputs=num_inputs)
            shapes[layer.magnitude] = (num_outputs,)
        return {name: _info(shape) for name, shape in shapes.items()}

    def _draw(self, request: Wanted, shape: tuple[int, int]) -> None:
        generator = torch.Generator().manual_seed(seed_of(self._seed, request.name.removeprefix(self._prefix)))
        matrix = nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)
        _give(request, matrix[_slices(request.chunk)])

    def _norms(self, request: Wanted, weight: str, num_inputs: int) -> None:
        rows = _rows(self.source, weight, request.chunk, num_inputs)
        _give(request, torch.linalg.norm(rows, dim=1))


class MergedLora(Over):
    """The weights of a model whose adapters are merged into its layers, over a checkpoint with adapters.

    Args:
        source: A checkpoint of a model with adapters: names are `model.<name>`.
        settings: The sizes of the adapters.
    """

    def __init__(self, source: Source, settings: LoraSettings) -> None:
        layers = [_LoraLayer(name.removesuffix(f".{_A}")) for name in source.tensors if name.endswith(f".{_A}")]
        self._settings = settings
        self._layers = {layer.weight: layer for layer in layers}
        adapters = {name for layer in layers for name in (layer.a, layer.b, layer.magnitude)}
        self._origins = {
            name.replace(f".{_BASE}.", "."): name
            for name in source.tensors
            if name.startswith("model.") and name not in adapters
        }
        tensors = {name: source.tensors[origin] for name, origin in self._origins.items()}
        # Sums, and not numbers of the frozen weight's dtype: a reader with the dtype of the source would round them.
        tensors |= {name: tensors[name]._replace(dtype=torch.float32) for name in self._layers}
        super().__init__(source, tensors)

    @property
    def objects(self) -> Sequence[str]:
        """None: the state of an optimizer is of the adapters."""
        return ()

    def read(self, requests: Sequence[Wanted]) -> None:
        """As `Source.read`, computed in fp32. Effects: reads the rows of one weight, with its adapter, at a time."""
        self.source.read(
            [
                request._replace(name=self._origins[request.name])
                for request in requests
                if request.name not in self._layers
            ]
        )
        for request in requests:
            if request.name in self._layers:
                self._merge(request, self._layers[request.name])

    def _merge(self, request: Wanted, layer: _LoraLayer) -> None:
        shapes = {name: self.source.tensors[name].shape for name in (layer.a, layer.b)}
        (rank, num_inputs), rows = shapes[layer.a], request.chunk
        a = _rows(self.source, layer.a, Chunk((0,), (rank,)), num_inputs)
        b = _rows(self.source, layer.b, rows, rank)
        merged = _rows(self.source, layer.base, rows, num_inputs) + self._settings.scaling * (b @ a)
        if self._settings.dora:
            magnitude = torch.empty(rows.sizes[0])
            self.source.read([Wanted(layer.magnitude, Chunk(rows.offsets[:1], rows.sizes[:1]), magnitude)])
            merged *= (magnitude / torch.linalg.norm(merged, dim=1))[:, None]
        _give(request, merged[(slice(None), *_slices(rows)[1:])])


def as_peft(source: Source) -> Source:
    """Return the adapters of a checkpoint alone, under the names in peft's files, each after `model.`."""
    names = [name.removeprefix("model.") for name in source.tensors if _is_adapter(name)]
    renamed = [
        Correspondence.rename(name, f"base_model.model.{_in_file(name)}", source.tensors[f"model.{name}"].shape)
        for name in names
    ]
    return translate(source, renamed, to="right", rest="drop")


def _is_adapter(name: str) -> bool:
    return name.startswith("model.") and name.endswith((f".{_A}", f".{_B}", f".{_MAGNITUDE}"))


def _in_file(name: str) -> str:
    """Return the name without the adapter's own, which files lack, and peft's short name of a magnitude."""
    return name.replace(_MAGNITUDE, "lora_magnitude_vector").replace(".default.", ".")


def _fill_with_zeros(request: Wanted) -> None:
    request.into.detach().zero_()


def _give(request: Wanted, numbers: torch.Tensor) -> None:
    """Copy numbers to where they are wanted: the memory of a parameter, which autograd would refuse to write to."""
    request.into.detach().copy_(numbers)


def _info(shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(shape, torch.float32, (Chunk((0,) * len(shape), shape),))


def _slices(box: Chunk) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))


def _rows(source: Source, name: str, rows: Chunk, num_columns: int) -> torch.Tensor:
    """Return whole rows of a matrix in fp32, those in the first dim of a box."""
    matrix = torch.empty(rows.sizes[0], num_columns)
    source.read([Wanted(name, Chunk((rows.offsets[0], 0), (rows.sizes[0], num_columns)), matrix)])
    return matrix
