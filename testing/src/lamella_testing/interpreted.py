"""Triton's kernels of a module, run in Python on the CPU."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from typing import Any
from unittest.mock import patch


def interpreted_copy(module: ModuleType) -> Any:
    """A copy of a module whose kernels Triton's interpreter runs: other tests on a GPU need compiled ones."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"interpreted_{module.__name__.rpartition('.')[2]}", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy: Any = importlib.util.module_from_spec(spec)
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):  # read where kernels are decorated
        spec.loader.exec_module(copy)
    return copy
