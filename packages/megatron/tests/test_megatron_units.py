"""What the adapter says where megatron-core, or a model of it, is missing."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
from torch import nn

from lamella_megatron import fully_shard_model, sharding_units


@pytest.mark.parametrize("function", [sharding_units, fully_shard_model])
def test_without_megatron_core_one_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[nn.Module], object]
) -> None:
    for name in ["megatron", *(name for name in sys.modules if name.startswith("megatron."))]:
        monkeypatch.setitem(sys.modules, name, None)  # As Python marks what cannot be imported.
    with pytest.raises(ImportError, match=r"Expected megatron-core .* uv pip install './packages/megatron\[mcore\]'"):
        function(nn.Linear(2, 2))


@pytest.mark.parametrize("function", [sharding_units, partial(fully_shard_model, unit_classes=[nn.Linear])])
def test_an_older_megatron_core_is_refused_at_first_use(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[nn.Module], object]
) -> None:
    monkeypatch.setattr("lamella_precision._vendor_versions._installed", {"megatron-core": "0.19.1"}.get)
    message = r"Expected megatron-core 0\.19\.2 or newer, as lamella-megatron\[mcore\] needs, got 0\.19\.1\."
    with pytest.raises(ImportError, match=message):
        function(nn.Sequential(nn.Linear(2, 2)))


def test_importing_the_adapter_does_not_import_megatron_core() -> None:
    code = "import sys, lamella_megatron; sys.exit(any(name.split('.')[0] == 'megatron' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
