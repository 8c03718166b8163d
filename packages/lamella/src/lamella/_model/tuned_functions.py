"""`--deterministic`: functions of a model whose kernels are chosen by their time in each process."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import CellType
from typing import Final

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
        ConfigError: Names the package and the class of the model.
    """
    if not run.deterministic:
        return
    files: set[str] = set()  # of classes before
    for module in model.modules():
        file = type(module).__module__
        beside = vars(sys.modules[file]).values() if file in sys.modules and file not in files else ()
        files.add(file)
        for package in map(_package, (type(module), *vars(module).values(), *beside)):
            if package is not None:
                raise ConfigError(
                    f"Expected a model of deterministic operations for --deterministic, got functions of {package} in "
                    f"{type(module).__name__}, whose kernels each process chooses by their time. Uninstall {package}, "
                    "so that transformers takes torch's operations, or leave --deterministic out."
                )


def _package(value: object) -> str | None:
    """The package of tuned functions of a class, or of a function or a function that it wraps; None for others."""
    names = (getattr(function, "__module__", None) or "" for function in _functions(value, _DEEPEST_WRAPPER))
    return next((_TUNED[root] for name in names if (root := name.partition(".")[0]) in _TUNED), None)


def _functions(value: object, num_wrappers: int) -> Iterator[object]:
    """A class or function, and the functions that it wraps: in transformers a wrapper holds the package's function."""
    if isinstance(value, nn.Module):  # the `kernels` library's wrapper of a function
        value = type(value).forward
    if callable(value):
        yield value
    if num_wrappers and inspect.isfunction(value):
        for content in map(_content, value.__closure__ or ()):
            yield from _functions(content, num_wrappers - 1)


def _content(cell: CellType) -> object:
    with suppress(ValueError):  # A variable without a value yet.
        return cell.cell_contents
    return None
