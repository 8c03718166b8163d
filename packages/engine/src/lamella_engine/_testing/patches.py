"""Replaces a constant or step of the engine, for tests of small models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from lamella_engine._parameters import flat_packing, reduction
from lamella_engine._parameters.group import ParameterGroup, Reduced
from lamella_engine._parameters.payload_form import PayloadForm


@contextmanager
def flat_alignment(numel: int) -> Iterator[None]:
    """Cut parameters of the flat layout at multiples of `numel` elements.

    At the engine's alignment (256 bytes) a parameter of a test's small model lies whole on one rank, so no code for
    parameters on several ranks would run.

    Args:
        numel: The alignment, in elements; units made inside the context have it.
    """
    # In the module that reads the name when it packs, not in modules that imported a copy.
    with patch.object(flat_packing, "ALIGNMENT", numel):
        yield


@contextmanager
def reductions_in(dtype: torch.dtype) -> Iterator[None]:
    """Send the gradients of every reduction in `dtype`: the oracle of reductions whose sum is wider than their wire."""
    with patch.object(reduction, "wire_dtype", lambda _: dtype):
        yield


@contextmanager
def gradient_installs_watched(watch: Callable[[ParameterGroup], object]) -> Iterator[None]:
    """Call `watch` before reduced gradients are installed on the parameters of a group.

    Args:
        watch: Gets the group; called on the host, with the stream of the installing kernels current.
    """
    # Taken before the patch: inside, the name is the watching function's.
    install_gradients = reduction.install_gradients

    def install(group: ParameterGroup, reduced: Reduced, **options: Any) -> None:
        watch(group)
        install_gradients(group, reduced, **options)

    with patch.object(reduction, "install_gradients", install):
        yield


@contextmanager
def gather_preparations_watched(watch: Callable[[], object]) -> Iterator[None]:
    """Call `watch` before the payloads of a gather are made from the shards.

    Args:
        watch: Called on the host, with the stream of the payloads' kernels current.
    """
    prepare_gather = PayloadForm.prepare_gather

    def prepare(form: PayloadForm, *args: Any) -> Any:
        watch()
        return prepare_gather(form, *args)

    with patch.object(PayloadForm, "prepare_gather", prepare):
        yield
