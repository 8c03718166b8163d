"""Layers compiled by torch's inductor: the models compiled by default, and the machine's compilers."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from lamella._model.activations import RecomputedForward
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._settings.sections import ParallelConfig
from lamella_transformers import ModelSpec

COMPILED_TYPES: Final = ("llama", "qwen3")
"""The model types whose compiled layers were measured."""

_FEWEST_STEPS: Final = 1000
"""The first step takes some ten seconds longer. Layers 2,048 wide give the seconds back in some hundred steps, and the
small models of short runs, whose steps wait for the host, in none."""

_RECOMPUTES_AUTOGRAD_FUNCTIONS: Final = torch.__version__ >= "2.13"
"""Whether torch's compiler runs autograd functions inside a checkpoint again. That of torch 2.11 saves their outputs
for backward, as if there were no checkpoint: 20 GiB of a step of 7.2 billion weights in float8."""


def compile_units(units: Sequence[nn.Module], *, has_fixed_shapes: bool, has_autograd_functions: bool = False) -> None:
    """Compile each unit at its next forward.

    Args:
        units: The units.
        has_fixed_shapes: Compile for each shape by itself. Otherwise torch compiles the second shape of a run, which is
            training's after a validation, for sizes unknown to its kernels.
        has_autograd_functions: The units' layers are autograd functions, such as products in float8. A unit that runs
            all of its forward again is then compiled inside its checkpoint where torch would save their outputs.
    """
    dynamic = False if has_fixed_shapes else None
    saves_outputs = has_autograd_functions and not _RECOMPUTES_AUTOGRAD_FUNCTIONS
    for unit in units:
        forward: object = unit.forward
        if saves_outputs and isinstance(forward, RecomputedForward) and forward.saves_inputs_alone:
            forward.compile(dynamic=dynamic)
        else:
            unit.compile(dynamic=dynamic)


def has_fixed_shapes(config: Config, spec: ModelSpec, *, has_one_length: bool) -> bool:
    """Return whether layers see a few shapes in a whole run.

    Past torch's limit of shapes, eight, layers would run eagerly. Not fixed are the numbers of tokens that an expert
    is given, the lengths of documents in flash attention, and the tokens before a sample's next.

    Args:
        config: The run's settings.
        spec: The config of the model.
        has_one_length: All batches of the run's text have as many tokens a sequence.
    """
    attention = str(getattr(spec, "_attn_implementation", None))
    return has_one_length and spec.model_type in COMPILED_TYPES and "flash" not in attention and not config.run.sample


def compiles_by_default(config: Config, model_type: str, packing: str) -> bool:
    """Return whether a run compiles its layers without --compile and --no-compile: if measured to be faster.

    Args:
        config: The run's settings, placed on this machine.
        model_type: The type of the model's config.
        packing: How tokens become sequences, as `is_long_to_compile` takes it.
    """
    parallel = config.parallel
    return (
        parallel.compile is None and is_long_to_compile(config, model_type, packing) and _missing_for(parallel) is None
    )


def is_long_to_compile(config: Config, model_type: str, packing: str) -> bool:
    """Return whether a run that chooses nothing compiles its layers where the machine has the compilers.

    Args:
        config: The run's settings, with a device.
        model_type: The type of the model's config.
        packing: How tokens become sequences; the rows of "none" have many lengths, and each length compiles anew.
    """
    parallel = config.parallel
    return (
        parallel.device == "cuda"
        and model_type in COMPILED_TYPES
        and config.optim.steps >= _FEWEST_STEPS
        and packing != "none"
        and parallel.num_neighbours == 1
        and config.model.attention in ("auto", "documents")
        and (config.model.kernels, parallel.float8) == ("none", "no")
        and not (config.run.deterministic or config.run.sample or parallel.offload_activations)
    )


def check_compiler(parallel: ParallelConfig) -> None:
    """Refuse --compile where torch would find no compiler after the run has started.

    Raises:
        ConfigError: Names the missing compiler.
    """
    if parallel.compile and (missing := _missing_for(parallel)) is not None:
        raise ConfigError(missing)


def _missing_for(parallel: ParallelConfig) -> str | None:
    """Return an error about a compiler of inductor's that the machine lacks; None if nothing is missing."""
    if parallel.device == "cuda":
        variable, names = "CC", ["gcc", "clang"]
        if importlib.util.find_spec("triton") is None:
            return "Expected Triton for --compile on GPUs, got none. Install it, or pass --no-compile."
    else:
        variable, names = "CXX", ["clang++"] if sys.platform == "darwin" else ["g++"]
    compilers = [os.environ[variable]] if variable in os.environ else names
    if any(map(shutil.which, compilers)):
        return None
    return (
        f"Expected a compiler for --compile on {parallel.device} ({variable}, or {' or '.join(names)} on PATH), "
        f"got none of {', '.join(compilers)}. Install one, or pass --no-compile."
    )
