"""`--deterministic`: functions of a model whose kernels are chosen by their time in each process."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CellType
from typing import Any, Final

from torch import nn

from lamella._settings.options import ConfigError
from lamella._settings.sections import RunConfig

# Packages by the names of their imports. mamba-ssm and causal-conv1d follow torch's switch of determinism.
_TUNED: Final = {"fla": "flash-linear-attention"}
_DEEPEST_WRAPPER: Final = 3


def check_tuned_functions(run: RunConfig, model: nn.Module) -> None:
    """Refuse `--deterministic` for a model that computes by functions which each process tunes.

    transformers takes such functions wherever their package is installed, and torch's switch of determinism does not
    reach them: another choice adds in another order.

    Args:
        run: The run's settings.
        model: On any device.

    Raises:
        ConfigError: Names the package and the module of the model.
    """
    if not run.deterministic:
        return
    for name, module in model.named_modules():
        for package in _packages(module):
            if (distribution := _TUNED.get(package)) is not None:
                raise ConfigError(
                    f"Expected a model of deterministic operations for --deterministic, got functions of "
                    f"{distribution} in {name!r}, whose kernels each process chooses by their time. Uninstall "
                    f"{distribution}, so that transformers takes torch's operations, or leave --deterministic out."
                )


def _packages(module: nn.Module) -> Iterator[str]:
    """The packages of a module's class, of its attributes, and of the functions beside the class."""
    namespace = vars(sys.modules[type(module).__module__]) if type(module).__module__ in sys.modules else {}
    for value in (type(module), *vars(module).values(), *namespace.values()):
        for function in _functions(value, _DEEPEST_WRAPPER) if callable(value) else ():
            yield (getattr(function, "__module__", None) or "").partition(".")[0]


def _functions(function: Callable[..., Any], num_wrappers: int) -> Iterator[Callable[..., Any]]:
    """A function, and the functions that it wraps: in transformers a wrapper holds the installed package's."""
    if isinstance(function, nn.Module):  # the `kernels` library's wrapper of a function
        function = type(function).forward
    yield function
    if num_wrappers and inspect.isfunction(function):
        for content in map(_content, function.__closure__ or ()):
            if callable(content):
                yield from _functions(content, num_wrappers - 1)


def _content(cell: CellType) -> object:
    with suppress(ValueError):  # A variable without a value yet.
        return cell.cell_contents
    return None
