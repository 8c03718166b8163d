"""Optimizers by import path: the class, its arguments, and the trial that an update is elementwise.

Note [Elementwise]
    A rank holds rows of a parameter. An optimizer whose update of an element depends on other elements (Adafactor,
    Muon, LAMB) would compute another update on each number of ranks, without an error. Names do not tell: the trial
    steps a small matrix as one and in two halves, with the same gradients.
"""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from lamella._model.matrices import MUON
from lamella._settings.options import ConfigError, in_short, shown
from lamella._settings.sections import OptimConfig

ADAMW: Final = "adamw"
_NUM_TRIAL_STEPS: Final = 3
_TRIAL_SHAPE: Final = (8, 6)
_IN_TORCH: Final = {
    "sgd": "SGD",
    "adam": "Adam",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "nadam": "NAdam",
    "radam": "RAdam",
}
_WAY_OUT: Final = "Pass --optimizer adamw or muon, or the import path of an elementwise one, such as torch.optim:SGD."


@dataclass(frozen=True, kw_only=True)
class OptimizerClass:
    """An optimizer's class with its arguments.

    Attributes:
        name: The user's import path.
        build: The class, or a function from param groups to an optimizer.
        lr: The learning rate.
        options: The user's arguments.
    """

    name: str
    build: Callable[..., torch.optim.Optimizer]
    lr: float
    options: Mapping[str, object]

    @classmethod
    def of(cls, optim: OptimConfig) -> "OptimizerClass":
        """Import the class of the settings.

        Raises:
            ConfigError: The path leads to no callable, or `--optimizer-options` are no arguments by name.
        """
        return cls(
            name=optim.optimizer,
            build=_imported(optim.optimizer),
            lr=optim.lr,
            options=_options(optim),
        )

    def make(self, groups: Sequence[Mapping[str, object]]) -> torch.optim.Optimizer:
        """Make an optimizer of param groups, without the groups' weight decay if the class takes none."""
        takes_decay = "weight_decay" in inspect.signature(self.build).parameters
        groups = [
            {name: setting for name, setting in group.items() if takes_decay or name != "weight_decay"}
            for group in groups
        ]
        return self.build(groups, lr=self.lr, **self.options)

    def check_elementwise(self, device: torch.device) -> None:
        """Refuse an optimizer whose update of an element depends on other elements; see Note [Elementwise].

        Raises:
            ConfigError: The optimizer is not elementwise, or cannot be made or stepped.
        """
        try:
            united, separate = (self._trial(num_parts, device) for num_parts in (1, 2))
        except Exception as error:  # The class is foreign code.
            raise ConfigError(
                f"Expected --optimizer {self.name} to step parameters on {device.type}, got {type(error).__name__}: "
                f"{in_short(error)} Pass its arguments as --optimizer-options, or another --optimizer."
            ) from error
        if not torch.equal(united, separate):
            raise ConfigError(
                f"Expected an --optimizer that updates each element by itself, since ranks hold parts of parameters, "
                f"got {self.name}, whose step on a matrix differs from its steps on the matrix's halves. {_WAY_OUT}"
            )

    def check_state(self, stored: "OptimizerClass") -> None:
        """Refuse options whose steps need more state than the class has under the stored options.

        Raises:
            ConfigError: A stored option is absent: the checkpoint's param groups would bring its value back. Or the
                step of a small matrix fails on the state of a step under the stored options.
        """
        _check_options_named(stored.options, self.options)
        matrix = torch.nn.Parameter(torch.ones(_TRIAL_SHAPE))
        matrix.grad = torch.ones_like(matrix)
        groups = [{"params": [matrix]}]
        try:
            before = stored.make(groups)
            before.step()
            self.make(groups).step()
        except Exception:  # noqa: BLE001  A class of GPU kernels cannot be tried on the CPU.
            return
        try:
            now = self.make(groups)
            now.state.update(before.state)
            now.step()
        except Exception as error:  # The class is foreign code.
            options = " ".join(f"{name}={json.dumps(option)}" for name, option in stored.options.items()) or "none"
            raise ConfigError(
                f"Expected --optimizer-options with which {self.name} goes on from the state of the run to be resumed, "
                f"got {type(error).__name__}: {in_short(error)} Pass the former options ({options}), or another "
                "--run-dir."
            ) from error

    def _trial(self, num_parts: int, device: torch.device) -> torch.Tensor:
        """Return a small matrix after a few steps on its parts."""
        generator = torch.Generator().manual_seed(0)
        matrix, *gradients = (torch.randn(_TRIAL_SHAPE, generator=generator) for _ in range(1 + _NUM_TRIAL_STEPS))
        parts = [torch.nn.Parameter(part.clone().to(device)) for part in matrix.chunk(num_parts)]
        optimizer = self.make([{"params": parts, "weight_decay": 0.1}])
        for scale, gradient in enumerate(gradients, start=1):
            for part, part_gradient in zip(parts, (gradient * scale).chunk(num_parts), strict=True):
                part.grad = part_gradient.to(device)
            optimizer.step()
        return torch.cat([part.detach() for part in parts])


def check_optimizer(optim: OptimConfig, device: str) -> None:
    """Refuse an optimizer that a run cannot step on shards.

    Args:
        optim: The run's settings.
        device: The device of the ranks: "cpu" or "cuda".

    Raises:
        ConfigError: The class does not exist or is not elementwise, or `--optimizer-options` are not for the class.
    """
    if optim.states != "fp32" and optim.optimizer != ADAMW:
        raise ConfigError(
            f"Expected --states {optim.states} with --optimizer adamw, got {optim.optimizer}. Leave one of them out."
        )
    if optim.optimizer == MUON:
        _check_muon(optim)
        return
    if optim.optimizer == ADAMW:
        if optim.optimizer_options:
            raise ConfigError(
                "Expected --optimizer-options with muon or an --optimizer by import path, got "
                f"{optim.optimizer_options[0]!r} with adamw. Pass --beta1, --beta2, --eps or --weight-decay."
            )
        return
    _refuse_options_of_adamw(optim)
    optimizer_class = OptimizerClass.of(optim)
    if device == "cpu":  # A class of GPU kernels can be tried by the ranks alone.
        optimizer_class.check_elementwise(torch.device("cpu"))


def _refuse_options_of_adamw(optim: OptimConfig) -> None:
    for name in ("beta1", "beta2", "eps"):
        if (value := getattr(optim, name)) != getattr(OptimConfig, name):
            raise ConfigError(
                f"Expected --{name} with --optimizer adamw or muon, got {value} with {optim.optimizer}. Leave it out, "
                "and pass the optimizer's arguments as --optimizer-options, such as betas=[0.9,0.99]."
            )


def check_muon_options(stored: OptimConfig, optim: OptimConfig) -> None:
    """Refuse options of Muon without an option of the run to be resumed, as `OptimizerClass.check_state`.

    Raises:
        ConfigError: A stored option is absent.
    """
    _check_options_named(_options(stored), _options(optim))


def _check_options_named(stored: Mapping[str, object], options: Mapping[str, object]) -> None:
    if absent := sorted(stored.keys() - options.keys()):
        raise ConfigError(
            f"Expected {absent[0]} in --optimizer-options, as in the run to be resumed, got no value. Pass "
            f"{absent[0]}={json.dumps(stored[absent[0]])}, or another value, or another --run-dir."
        )


def muon_options(optim: OptimConfig) -> dict[str, Any]:
    """Return the arguments of torch's Muon except the run's learning rate and weight decay.

    The default scale of updates is AdamW's: one `--lr` then fits matrices and all other parameters.
    """
    return {"adjust_lr_fn": "match_rms_adamw", **_options(optim)}


def _check_muon(optim: OptimConfig) -> None:
    """Refuse arguments unknown to torch's Muon."""
    options = muon_options(optim)
    try:
        torch.optim.Muon([torch.nn.Parameter(torch.empty(1, 1))], **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Expected --optimizer-options of torch.optim.Muon (momentum, nesterov, ns_steps, adjust_lr_fn) with "
            f"--optimizer muon, got {in_short(error)}"
        ) from error


def _imported(path: str) -> Callable[..., torch.optim.Optimizer]:
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        in_torch = _IN_TORCH.get(path.lower())
        way_out = f"Pass --optimizer torch.optim:{in_torch}." if in_torch else _WAY_OUT
        raise ConfigError(
            f"Expected --optimizer to be adamw, muon or an import path package:Class, got {path!r}. {way_out}"
        )
    try:
        with _current_folder_importable():
            build: Any = importlib.import_module(module_name)
        for attribute in name.split("."):
            build = getattr(build, attribute)
    except Exception as error:  # The module is foreign code.
        raise ConfigError(f"Expected --optimizer {path} to be importable, got {in_short(error)} {_WAY_OUT}") from error
    if not callable(build):
        raise ConfigError(f"Expected --optimizer {path} to be a class, got {shown(build)}. {_WAY_OUT}")
    return build  # type: ignore[no-any-return]


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Search the current folder too, last: the `lamella` command and its workers do not."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _options(optim: OptimConfig) -> dict[str, object]:
    """Return the arguments of `--optimizer-options` by name, without names that have options of their own."""
    options = dict(map(_option, optim.optimizer_options))
    if len(options) < len(optim.optimizer_options):
        raise ConfigError(f"Expected each name once in --optimizer-options, got {shown(optim.optimizer_options)}.")
    if reserved := options.keys() & {"lr", "weight_decay"}:
        flag = f"--{min(reserved).replace('_', '-')}"
        raise ConfigError(
            f"Expected --optimizer-options without options of lamella, got {min(reserved)}, which is {flag}. "
            f"Pass {flag}."
        )
    return options


def _option(text: str) -> tuple[str, object]:
    """Return the name and value of NAME=X; X is JSON, or else a text."""
    name, equals, argument = text.partition("=")
    if not (name.isidentifier() and equals):
        raise ConfigError(f"Expected --optimizer-options as NAME=X, such as momentum=0.9, got {text!r}.")
    try:
        return name, json.loads(argument)
    except ValueError:
        return name, argument
