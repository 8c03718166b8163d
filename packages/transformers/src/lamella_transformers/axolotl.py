"""axolotl's plugin: a run of axolotl over FSDP2, sharded by lamella.

    plugins:
      - lamella_transformers.axolotl.LamellaPlugin
    lamella_keep_budget: 2147483648

This module imports axolotl.
"""

from __future__ import annotations

import inspect
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import create_model

import lamella_engine
import lamella_optim
from lamella_transformers.trainer import ShardedTraining

_PREFIX = "lamella_"
_SETTINGS = inspect.signature(ShardedTraining, eval_str=True).parameters

_FIELDS: dict[str, Any] = {
    f"{_PREFIX}{name}": (setting.annotation, setting.default) for name, setting in _SETTINGS.items()
}

LamellaArgs: Any = create_model("LamellaArgs", **_FIELDS)
"""The plugin's settings in axolotl's YAML: the parameters of `ShardedTraining`, each with `lamella_` before it."""


class LamellaPlugin(BasePlugin):  # type: ignore[misc]
    """Puts lamella in FSDP2's place before axolotl loads the model, and gives axolotl's trainer the callback."""

    def get_input_args(self) -> str:
        """Return the import path of the settings."""
        return f"{__name__}.LamellaArgs"

    def pre_model_load(self, cfg: Any) -> None:
        """Install lamella. Effects: `lamella_engine.install` and `lamella_optim.install`, for the process."""
        lamella_engine.install()
        lamella_optim.install()

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return the callback, with the settings of the YAML."""
        settings = {name: cfg.get(f"{_PREFIX}{name}") for name in _SETTINGS}
        return [ShardedTraining(**{name: setting for name, setting in settings.items() if setting is not None})]
