"""The constructor of a model of transformers, with or without memory for its parameters."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn


class ModelSpec(Protocol):
    """The attributes and methods used of a transformers config."""

    model_type: str
    vocab_size: int

    def to_dict(self) -> dict[str, object]: ...
    def to_json_file(self, json_file_path: Path, use_diff: bool) -> None: ...


def constructed(
    spec: ModelSpec, device: torch.device, *, is_finished: bool = True, with_memory: AbstractSet[int] = frozenset()
) -> tuple[nn.Module, list[nn.Parameter]]:
    """Construct the causal language model of a config, fp32, whose parameters are on the meta device.

    Buffers are as constructed on the device: `torch.device("meta")` alone would lose rotary tables, absent from
    checkpoints.

    Args:
        spec: The config.
        device: The device of buffers, and of each parameter up to its registration.
        is_finished: Initialise buffers, and tie the config's tied parameters; False leaves all tensors as
            constructors make them.
        with_memory: Indices, in the order of registration, of parameters with their memory and their constructed
            values.

    Returns:
        The model in training mode, and the parameters in the order of registration; replaced parameters too.
    """
    from transformers import AutoModelForCausalLM

    with _registrations(with_memory) as registered, ExitStack() as contexts:
        for method in () if is_finished else ("initialize_weights", "tie_weights"):
            contexts.enter_context(_replaced(method))
        contexts.enter_context(device)
        model = AutoModelForCausalLM.from_config(spec)  # type: ignore[no-untyped-call]
        return cast(nn.Module, model).train(), registered


@contextmanager
def _registrations(with_memory: AbstractSet[int]) -> Iterator[list[nn.Parameter]]:
    register = nn.Module.register_parameter
    registered: list[nn.Parameter] = []

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            if not parameter.is_meta and len(registered) not in with_memory:
                parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            registered.append(parameter)
        register(module, name, parameter)

    setattr(nn.Module, "register_parameter", register_on_meta)  # noqa: B010  Types do not let methods be assigned.
    try:
        yield registered
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


@contextmanager
def _replaced(method: str) -> Iterator[None]:
    """Let a method of `PreTrainedModel` do nothing, for the time of the block."""
    from transformers import PreTrainedModel

    original = getattr(PreTrainedModel, method)
    setattr(PreTrainedModel, method, lambda *args, **options: None)
    try:
        yield
    finally:
        setattr(PreTrainedModel, method, original)
