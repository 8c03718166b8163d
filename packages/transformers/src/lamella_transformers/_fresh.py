"""Fresh weights of a model, drawn one parameter at a time by transformers' initialisation.

Note [One parameter at a time]
    transformers initialises module by module: `_init_weights(module)` of the nearest `PreTrainedModel` writes the
    parameters of a module, and of modules inside (a residual projection is drawn anew by the block around it). A
    model drawn whole needs the memory of all its weights on every rank. Here the functions run on a model on the meta
    device, in transformers' order, once to see which module's function writes which parameter, and once more for each
    parameter, which alone has memory then: writes to the others are writes to no memory. A parameter's seed comes from
    the run's seed and the parameter's name: its values depend on no other parameter, and a rank without a share of the
    parameter draws nothing.

    A parameter without a writing function has the values of its module's constructor. The model is then constructed
    again, with memory for a few of these parameters.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lamella_checkpoint import TensorInfo, Wanted
from lamella_layout import Chunk
from lamella_transformers._construction import ModelSpec, constructed
from lamella_transformers._errors import ModelError, in_short


class _ParameterSlot(NamedTuple):
    """An attribute of a module with a parameter."""

    module: nn.Module
    name: str


class _Initialiser(NamedTuple):
    """A module, and the model whose `_init_weights` initialises the module."""

    module: nn.Module
    model: nn.Module

    def run(self) -> None:
        with torch.no_grad():
            cast(Any, self.model)._init_weights(self.module)


class FreshWeights:
    """The weights of a config's model under a seed, as a `Source` of tensors for `lamella_checkpoint.fill`.

    Equal requests get equal values, on any rank and in any order. See Note [One parameter at a time].

    Args:
        spec: The config of the model.
        device: The drawing device; another kind of device draws other values.
        seed: The seed of all parameters.

    Raises:
        ModelError: transformers cannot initialise the model.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, seed: int) -> None:
        self._spec, self._device, self._seed = spec, device, seed
        # Untied: transformers draws both parameters of a tie, and then takes one.
        self._model, self._registered = constructed(spec, torch.device("meta"), is_finished=False)
        self._ties = cast(Mapping[str, str], getattr(self._model, "all_tied_weights_keys", {}))
        self._on_meta = dict(self._model.named_parameters(remove_duplicate=False))
        # A parameter with several names goes by the first, the only name in `named_parameters`.
        self._names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._slots = _slots(self._model)
        self._initialisers = _initialisers_by_parameter(self._model)
        self._constructed_groups = self._group_constructed()
        self.tensors: Mapping[str, TensorInfo] = {name: _info(p) for name, p in self._on_meta.items()}
        self.objects: Sequence[str] = ()

    @property
    def path(self) -> Path:
        """No file: the model type, for messages."""
        return Path(self._spec.model_type)

    def read(self, requests: Sequence[Wanted]) -> None:
        """Draw the parameters of all requests, one after another, and fill the given memory with their boxes.

        Effects: no collective. Allocates one parameter at a time; of parameters initialised by constructors, up to
            the largest parameter's bytes at once. The random state stays.
        """
        by_name: dict[str, list[Wanted]] = {}
        for request in requests:
            by_name.setdefault(self._drawn_name(request.name), []).append(request)
        drawn_names = [name for name in by_name if id(self._on_meta[name]) in self._initialisers]
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            for name in drawn_names:
                _copy(self._drawn(name), by_name.pop(name))
            for group in self._constructed_groups:
                if not by_name.keys().isdisjoint(group):
                    for name, tensor in self._constructed(group).items():
                        _copy(tensor, by_name.pop(name, []))

    def read_object(self, name: str) -> object:
        """Raise: a model has no objects."""
        raise KeyError(name)

    def _drawn_name(self, name: str) -> str:
        """Return the name of the parameter with the values of a tie, as the model names the parameter."""
        while name in self._ties:
            name = self._ties[name]
        return self._names[id(self._on_meta[name])]

    def _drawn(self, name: str) -> torch.Tensor:
        parameter = self._on_meta[name]
        try:
            return self._initialised(name, [parameter])
        except RuntimeError:  # A function reads another parameter of the module, RWKV's for the device alone.
            modules = [initialiser.module for initialiser in self._initialisers[id(parameter)]]
            siblings = [p for module in modules for p in module.parameters(recurse=False) if p is not parameter]
            return self._initialised(name, [parameter, *siblings])

    def _initialised(self, name: str, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Draw the first of some parameters, whose memory lasts for the call."""
        with ExitStack() as contexts:
            tensors = [torch.empty_like(parameter, device=self._device) for parameter in parameters]
            for parameter, tensor in zip(parameters, tensors, strict=True):
                contexts.enter_context(
                    _with_parameter(self._slots[id(parameter)], nn.Parameter(tensor, requires_grad=False))
                )
            contexts.enter_context(self._device)
            torch.manual_seed(seed_of(self._seed, name))
            for initialiser in self._initialisers[id(parameters[0])]:
                initialiser.run()
        return tensors[0]

    def _group_constructed(self) -> list[list[str]]:
        """Group the parameters without an initialising function; no group is larger than the largest parameter."""
        limit = max((parameter.numel() for parameter in self._on_meta.values()), default=0)
        groups: list[list[str]] = [[]]
        numel = 0
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in self._initialisers:
                numel += parameter.numel()
                if numel > limit:
                    groups.append([])
                    numel = parameter.numel()
                groups[-1].append(name)
        return groups

    def _constructed(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return parameters by name with the values of their modules' constructors."""
        indices = {id(parameter): index for index, parameter in enumerate(self._registered)}
        by_index = {indices[id(self._on_meta[name])]: name for name in names}
        torch.manual_seed(seed_of(self._seed, names[0]))
        _, registered = constructed(self._spec, self._device, is_finished=False, with_memory=frozenset(by_index))
        return {name: registered[index].detach() for index, name in by_index.items()}


def _info(parameter: nn.Parameter) -> TensorInfo:
    shape = tuple(parameter.shape)
    return TensorInfo(shape, parameter.dtype, (Chunk((0,) * len(shape), shape),))


def seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1


def _copy(tensor: torch.Tensor, requests: Sequence[Wanted]) -> None:
    for request in requests:
        box = request.chunk
        request.into.copy_(tensor[tuple(map(slice, box.offsets, map(sum, zip(box.offsets, box.sizes, strict=True))))])


def _slots(model: nn.Module) -> dict[int, list[_ParameterSlot]]:
    """Return the attributes of each parameter, by the parameter's id."""
    slots: dict[int, list[_ParameterSlot]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slots.setdefault(id(parameter), []).append(_ParameterSlot(module, name))
    return slots


@contextmanager
def _with_parameter(slots: Sequence[_ParameterSlot], parameter: nn.Parameter) -> Iterator[None]:
    """Put a parameter into another parameter's attributes, for the time of the block."""
    originals = [slot.module._parameters[slot.name] for slot in slots]
    for slot in slots:
        slot.module._parameters[slot.name] = parameter
    try:
        yield
    finally:
        for slot, original in zip(slots, originals, strict=True):
            slot.module._parameters[slot.name] = original


def _initialisers_by_parameter(model: nn.Module) -> dict[int, list[_Initialiser]]:
    """Return the modules whose initialisation writes a parameter, in transformers' order, by the parameter's id.

    Raises:
        ModelError: transformers cannot initialise a module.
    """
    parameters = {parameter.untyped_storage()._cdata: parameter for parameter in model.parameters()}
    initialisers: dict[int, list[_Initialiser]] = {}
    for initialiser in _in_order(model, model):
        with _WrittenStorages() as written, _noted_functions(written.storages):
            try:
                initialiser.run()
            except Exception as error:
                class_name = type(initialiser.module).__name__
                raise ModelError(
                    f"Expected weights that transformers draws a parameter at a time, got for {class_name}: "
                    f"{in_short(error)} Save fresh weights with transformers' save_pretrained, and pass their folder."
                ) from error
        for storage in written.storages & parameters.keys():
            initialisers.setdefault(id(parameters[storage]), []).append(initialiser)
    return initialisers


def _in_order(module: nn.Module, model: nn.Module) -> Iterator[_Initialiser]:
    """Yield a module's initialisers in the order of `PreTrainedModel.initialize_weights`: inner modules first."""
    for child in module.children():
        yield from _in_order(child, child if hasattr(child, "_init_weights") else model)
    yield _Initialiser(module, model)


@contextmanager
def _noted_functions(storages: set[int]) -> Iterator[None]:
    """Note the storages passed to torch's functions for initial values: some functions leave meta tensors alone."""
    from transformers import initialization

    functions = initialization.TORCH_INIT_FUNCTIONS
    originals = dict(functions)

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def note(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            storages.add(tensor.untyped_storage()._cdata)
            return function(tensor, *args, **options)

        return note

    functions.update({name: noting(cast(Any, function)) for name, function in originals.items()})
    try:
        with initialization.guard_torch_init_functions():  # torch.nn.init's own names lead to the table too.
            yield
    finally:
        functions.update(originals)


class _WrittenStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages written by operations; storages on the meta device have identities too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        for argument, schema in zip(args, func._schema.arguments, strict=False):
            is_written = schema.alias_info is not None and schema.alias_info.is_write
            if is_written and isinstance(argument, torch.Tensor):
                self.storages.add(argument.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))
