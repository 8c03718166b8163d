"""`--deterministic`: kernels that add in one order. A run repeats bit for bit on equal devices."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, NamedTuple, cast

from lamella._settings.options import ConfigError, in_short
from lamella._settings.sections import RunConfig

_VARIABLES: Final[Mapping[str, str]] = {
    # Without a workspace of fixed size, cuBLAS chooses kernels by the memory shared by chance between streams.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL documents no order for sums inside the switch.
    "NCCL_NVLS_ENABLE": "0",
}
_WORKSPACES: Final = (":4096:8", ":16:8")
_REFUSAL: Final = "does not have a deterministic implementation"


def deterministic_lines(run: RunConfig) -> list[str]:
    """Return the line of the start on determinism; none without `--deterministic`."""
    line = "deterministic: a run of the same settings on as many equal devices repeats bit for bit, resumed or not"
    return [line] if run.deterministic else []


@contextmanager
def deterministic(run: RunConfig) -> Iterator[None]:
    """Let torch, cuDNN, cuBLAS and NCCL take deterministic kernels alone in the block, if `run` asks for them.

    Entered before this process uses CUDA: cuBLAS and NCCL read their variables once.

    Raises:
        ConfigError: The model has an operation without a deterministic kernel, or the environment contradicts.

    Effects: changes the environment and torch's settings of the process until the block ends.
    """
    if not run.deterministic:
        yield
        return
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
    if workspace not in _WORKSPACES:
        raise ConfigError(
            f"Expected CUBLAS_WORKSPACE_CONFIG to be {' or '.join(_WORKSPACES)} for --deterministic, got "
            f"{workspace!r}. Unset the variable, or leave --deterministic out."
        )
    with _variables(), _torch_settings():
        try:
            yield
        except RuntimeError as error:
            if _REFUSAL not in str(error):
                raise
            raise ConfigError(
                f"Expected a model of deterministic operations for --deterministic, got: {in_short(error)} Leave "
                "--deterministic out."
            ) from error


@contextmanager
def _variables() -> Iterator[None]:
    """Set the variables that the environment lacks."""
    absent = [name for name in _VARIABLES if name not in os.environ]
    os.environ.update({name: _VARIABLES[name] for name in absent})
    try:
        yield
    finally:
        for name in absent:
            os.environ.pop(name, None)


class _Switches(NamedTuple):
    """Torch's switches of determinism."""

    is_deterministic: bool
    only_warns: bool
    fills_memory: bool
    cudnn_is_deterministic: bool
    cudnn_tries_kernels: bool
    cudnn_attends: bool


_DETERMINISTIC: Final = _Switches(
    is_deterministic=True,
    only_warns=False,
    # The engine writes its storages before any read: filling them would cost a pass over memory for nothing.
    fills_memory=False,
    cudnn_is_deterministic=True,
    cudnn_tries_kernels=False,
    # Flash and memory-efficient attention add in one order in backward then; cuDNN's does not.
    cudnn_attends=False,
)


@contextmanager
def _torch_settings() -> Iterator[None]:
    import torch

    memory: Any = import_module("torch.utils.deterministic")
    cuda, cudnn = cast(Any, torch.backends.cuda), cast(Any, torch.backends.cudnn)

    def switch(switches: _Switches) -> None:
        torch.use_deterministic_algorithms(switches.is_deterministic, warn_only=switches.only_warns)
        memory.fill_uninitialized_memory = switches.fills_memory
        cudnn.deterministic, cudnn.benchmark = switches.cudnn_is_deterministic, switches.cudnn_tries_kernels
        cuda.enable_cudnn_sdp(switches.cudnn_attends)

    before = _Switches(
        is_deterministic=torch.are_deterministic_algorithms_enabled(),
        only_warns=torch.is_deterministic_algorithms_warn_only_enabled(),
        fills_memory=memory.fill_uninitialized_memory,
        cudnn_is_deterministic=cudnn.deterministic,
        cudnn_tries_kernels=cudnn.benchmark,
        cudnn_attends=cuda.cudnn_sdp_enabled(),
    )
    try:
        switch(_DETERMINISTIC)
        yield
    finally:
        switch(before)
